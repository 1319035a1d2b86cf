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
    # [E] float32, for the choice alone (Wang et al. 2024, arXiv 2408.15664)
    bias: Tensor | None = None,
    scales: Tensor | None = None,  # [E] float32, which multiply the weights at last
) -> tuple[Tensor, Tensor]:
    """Choose k experts of each token by their scores.

    Scores are a softmax over all experts (Shazeer et al. 2017, in the order of Qwen's models: first
    the softmax, then the choice) or sigmoids, in float32, or the logits themselves. Chosen are the
    largest scores, or sums of score and bias; of equal ones the lower id is first. Kept groups have
    at least k experts.

    Returns ids [T, k] int32, the first chosen in front, and weights [T, k] float32: scores without
    the bias, or a softmax over them if scores are logits, times `form.scale` and the chosen
    experts' `scales`. A row of logits that is not finite has NaN weights, and ids in [0, E) all the
    same; no other row is touched.
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
    """`route` in PyTorch."""
    logits = logits.float()
    if form.choose_first:
        scores = logits
    else:
        scores = sigmoid(logits) if form.sigmoid else logits.softmax(-1)
    if form.sigmoid or form.choose_first:  # an infinite logit may leave finite weights
        scores = scores.where(logits.isfinite().all(-1, keepdim=True), float("nan"))
    choice = scores if bias is None else scores + bias
    if form.kept_groups < form.groups:
        in_groups = choice.unflatten(1, (form.groups, -1))
        best = in_groups.sort(-1, descending=True).values
        of_group = best[..., 0] if form.group_best == 1 else best[..., 0] + best[..., 1]
        kept = torch.zeros_like(of_group, dtype=torch.bool)
        kept.scatter_(1, _largest(of_group, form.kept_groups), value=True)
        choice = in_groups.masked_fill(~kept.unsqueeze(2), float("-inf")).flatten(1)
    ids = _largest(choice, k)
    weights = scores.gather(1, ids)
    if form.choose_first:
        weights = weights.softmax(-1)
    if renormalise:
        total = weights.sum(-1, keepdim=True)
        weights = weights / (total + form.least_sum)
    weights = weights * form.scale
    return ids.int(), weights if scales is None else weights * scales[ids]


def _largest(values: Tensor, k: int) -> Tensor:
    """Return the indices [T, k] of the k largest, of equal ones the first, unlike torch.topk."""
    count = values.shape[1]
    # As integers the bits of floats that are not negative have their order, and bits of negative
    # ones the opposite order. NaN is above or below all. Adding 0 makes 0 of -0.
    bits = (values + 0.0).view(torch.int32)
    bits = torch.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    order = bits.long() * count
    order += torch.arange(count - 1, -1, -1, device=values.device)
    return count - 1 - order.topk(k).values % count
