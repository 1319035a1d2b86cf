"""Which experts a token goes to, and with what weights."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.moe.router.router_form import SOFTMAX, RouterForm
from batchgen.kernels.moe.router.routing_triton import route_triton


def route(
    logits: Tensor,
    k: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Choose k experts of each token by their scores.

    The scores are a softmax over all experts (Shazeer et al. 2017, in the order of Qwen's models:
    first the softmax, then the choice) or the sigmoid of each logit, computed in float32. Chosen
    are those with the largest score, or the largest sum of score and bias. Of equal ones the expert
    with the lower id comes first.

    Args:
        logits: [T, E], the router's result for each token.
        k: the number of experts of a token, at most E.
        renormalise: whether the k weights are divided by their sum.
        form: what else differs between routers; the groups that are kept have k experts at least.
        bias: [E] float32, added to the scores for the choice only (Wang et al. 2024, arXiv
            2408.15664); None adds nothing.

    Returns:
        ids: [T, k] int32, the experts of each token, the one that is chosen first in front.
        weights: [T, k] float32, their scores without the bias, times `form.scale`. A row of logits
            that is not finite has ids in [0, E) all the same; its weights are NaN, and no other
            row's are.
    """
    run = route_triton if logits.is_cuda else route_reference
    return run(logits, k, renormalise=renormalise, form=form, bias=bias)


def route_reference(
    logits: Tensor,
    k: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`route` in PyTorch."""
    logits = logits.float()
    scores = logits.sigmoid() if form.sigmoid else logits.softmax(-1)
    if form.sigmoid:  # whose result for an infinite logit is finite
        scores = scores.where(logits.isfinite().all(-1, keepdim=True), float("nan"))
    choice = scores if bias is None else scores + bias
    if form.kept_groups < form.groups:
        in_groups = choice.unflatten(1, (form.groups, -1))
        best = in_groups.sort(-1, descending=True).values
        of_group = best[..., 0] if form.group_best == 1 else best[..., 0] + best[..., 1]
        kept = torch.zeros_like(of_group, dtype=torch.bool)
        kept.scatter_(1, _largest(of_group, form.kept_groups), True)
        choice = in_groups.masked_fill(~kept.unsqueeze(2), float("-inf")).flatten(1)
    ids = _largest(choice, k)
    weights = scores.gather(1, ids)
    if renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + form.least_sum)
    return ids.int(), weights * form.scale


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the indices [T, k] of the k largest of values [T, E], of equal ones the first in
    front, which torch.topk does not promise."""
    count = values.shape[1]
    # As integers the bits of floats that are not negative have their order, and those of negative
    # ones the opposite order. NaN is above or below all. Adding 0 makes 0 of -0.
    bits = (values + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = bits.long() * count
    order += torch.arange(count - 1, -1, -1, device=values.device)
    return count - 1 - order.topk(k).values % count
