"""Routing: which experts each token goes to, and with what weights, from the logits of a router."""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.layers.elementwise import sigmoid
from batchgen.kernels.moe.router.router_form import SOFTMAX, RouterForm
from batchgen.kernels.moe.router.routing_triton import route_triton


def route(
    logits: Tensor,  # [T, E]
    k: int,
    *,
    renormalise: bool,  # divide the k weights by their sum
    form: RouterForm = SOFTMAX,
    bias: Tensor | None = None,  # [E] float32
    scales: Tensor | None = None,  # [E] float32
) -> tuple[Tensor, Tensor]:
    """Choose k experts of each token by their scores (Shazeer et al. 2017).

    `form` says what scores and weights are; scores are float32. If there is a `bias` (Wang et al.
    2024, arXiv 2408.15664), it is added to the scores for the choice, but not for the weights. Of
    equal scores the expert with the lower id is chosen first. The kept groups must have at least k
    experts.

    Returns ids [T, k] int32 in the order of choice, and weights [T, k] float32, which are
    multiplied by `form.scale` and by the chosen experts' `scales`. A token with a logit that is not
    finite has NaN weights, and still ids in [0, E); other tokens are not affected.
    """
    run = route_triton if logits.is_cuda else route_reference
    return run(logits, k, renormalise=renormalise, form=form, bias=bias, scales=scales)


def route_reference(
    logits: Tensor,
    k: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `route` in PyTorch."""
    logits = logits.float()
    if form.softmax_after_top_k:
        scores = logits
    else:
        scores = sigmoid(logits) if form.sigmoid else logits.softmax(-1)
    # A softmax over all experts becomes NaN by itself. Otherwise an infinite logit could give
    # finite weights.
    if form.sigmoid or form.softmax_after_top_k:
        scores = scores.where(logits.isfinite().all(-1, keepdim=True), float("nan"))
    choice = scores if bias is None else scores + bias
    if form.kept_groups < form.groups:
        in_groups = choice.unflatten(1, (form.groups, -1))
        best = in_groups.sort(-1, descending=True).values
        group_scores = best[..., 0] if form.group_best == 1 else best[..., 0] + best[..., 1]
        kept = torch.zeros_like(group_scores, dtype=torch.bool)
        kept.scatter_(1, _largest(group_scores, form.kept_groups), value=True)
        choice = in_groups.masked_fill(~kept.unsqueeze(2), float("-inf")).flatten(1)
    ids = _largest(choice, k)
    weights = scores.gather(1, ids)
    if form.softmax_after_top_k:
        weights = weights.softmax(-1)
    if renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + form.least_sum)
    weights = weights * form.scale
    return ids.int(), weights if scales is None else weights * scales[ids]


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the indices [T, k] of the k largest values [T, N] float32. Of equal ones the first is
    taken, which torch.topk does not promise."""
    count = values.shape[1]
    # As integers the bits of floats that are not negative have their order, and bits of negative
    # ones the opposite order. NaN is above or below all. Adding 0 makes 0 of -0.
    bits = (values + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    # One integer has the value and, for equal values, the index in descending order.
    order = bits.long() * count
    order += torch.arange(count - 1, -1, -1, device=values.device)
    return count - 1 - order.topk(k).values % count
