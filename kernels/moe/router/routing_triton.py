"""`routing.route` in Triton: which experts each token goes to. Scores, groups and the choice of the
k largest are one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.moe.router.router_form import SOFTMAX, RouterForm

_TILE = 512
"""Logits per program: a program takes several tokens if there are fewer experts than this."""


def route_triton(
    logits: Tensor,
    k: int,
    *,
    renormalise: bool,
    form: RouterForm = SOFTMAX,
    bias: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Compute `routing.route` in one launch; the last axis of `logits` is contiguous."""
    tokens, experts = logits.shape
    assert 1 <= k <= experts and logits.stride(1) == 1
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    if not tokens:
        return ids, weights
    block = triton.next_power_of_2(experts)
    rows = max(1, _TILE // block)
    _route[(triton.cdiv(tokens, rows),)](
        logits, logits if bias is None else bias, scales, ids, weights, logits.stride(0), tokens,
        experts, form.scale, form.least_sum, K=k, RENORMALISE=renormalise, SIGMOID=form.sigmoid,
        CHOOSE_FIRST=form.choose_first, BIASED=bias is not None,
        GROUPS=form.groups if form.kept_groups < form.groups else 1, KEPT=form.kept_groups,
        PAIRS=form.group_best == 2, ROWS=rows, BLOCK=block, BLOCK_K=triton.next_power_of_2(k),
        num_warps=4 if rows > 1 else 1,
    )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits_ptr, bias_ptr, scales_ptr, ids_ptr, weights_ptr, stride, tokens, experts, scale,
    least_sum,
    K: tl.constexpr, RENORMALISE: tl.constexpr, SIGMOID: tl.constexpr, CHOOSE_FIRST: tl.constexpr,
    BIASED: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program routes ROWS tokens: it takes the expert with the largest score K times.

    Experts past the last (BLOCK is a power of two) have the logit -inf and are never chosen. Tokens
    past the last are computed and not stored.
    """
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    exists = expert < experts
    source = logits_ptr + token[:, None] * stride + expert
    inside = (token < tokens)[:, None]
    logit = tl.load(source, mask=inside & exists, other=-float("inf")).to(tl.float32)
    if SIGMOID or CHOOSE_FIRST:
        score = logit if CHOOSE_FIRST else 1.0 / (1.0 + tl.exp(-logit))
        whole = (tl.abs(logit) < float("inf")) | (exists == 0)
        finite = tl.min(whole.to(tl.int32), axis=1) > 0
    else:
        mass = tl.exp(logit - tl.max(logit, axis=1)[:, None])
        total = tl.sum(mass, axis=1)
        # NaN and infinite logits, and rows of -inf alone, make a sum that is NaN.
        finite = (total > 0) & (total < float("inf"))
        score = mass / total[:, None]
    score = tl.where(finite[:, None], score, 0.0)
    left = score
    if BIASED:
        left += tl.load(bias_ptr + expert, mask=exists, other=0.0)
    # Below every score: experts that do not exist, those that were taken, and groups left out.
    left = tl.where(exists, left, -float("inf"))
    if GROUPS > 1:
        left = _keep_groups(left, expert, experts // GROUPS, GROUPS, KEPT, PAIRS, ROWS, BLOCK)
    ids = tl.zeros([ROWS, BLOCK_K], tl.int32)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for choice in tl.static_range(K):
        best = tl.max(left, axis=1)
        chosen = tl.min(tl.where(left == best[:, None], expert, BLOCK), axis=1)
        is_chosen = expert == chosen[:, None]
        left = tl.where(is_chosen, -float("inf"), left)
        weight = best
        if BIASED:
            weight = tl.sum(tl.where(is_chosen, score, 0.0), axis=1)
        ids = tl.where(slot == choice, chosen[:, None], ids)
        weights = tl.where(slot == choice, weight[:, None], weights)
    if CHOOSE_FIRST:
        top = tl.max(tl.where(slot < K, weights, -float("inf")), axis=1)
        weights = tl.where(slot < K, tl.exp(weights - top[:, None]), 0.0)
        weights = weights / tl.sum(weights, axis=1)[:, None]
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=1) + least_sum)[:, None]
    weights = weights * scale
    if scales_ptr is not None:
        weights *= tl.load(scales_ptr + ids)
    weights = tl.where(finite[:, None], weights, float("nan"))
    index = token[:, None] * K + slot
    tl.store(ids_ptr + index, ids, mask=inside & (slot < K))
    tl.store(weights_ptr + index, weights, mask=inside & (slot < K))


@triton.jit
def _keep_groups(
    choice, expert, size, GROUPS: tl.constexpr, KEPT: tl.constexpr, PAIRS: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Replace `choice` [ROWS, BLOCK] by -inf outside the KEPT best groups of `size` experts."""
    # Every expert gets the score of its group, so that groups are chosen as experts are.
    group_score = tl.full([ROWS, BLOCK], -float("inf"), tl.float32)
    for group in tl.static_range(GROUPS):
        member = expert // size == group
        inside = tl.where(member, choice, -float("inf"))
        best = tl.max(inside, axis=1)
        if PAIRS:
            first = tl.min(tl.where(inside == best[:, None], expert, BLOCK), axis=1)
            others = tl.where(expert == first[:, None], -float("inf"), inside)
            best += tl.max(others, axis=1)
        group_score = tl.where(member, best[:, None], group_score)
    kept = tl.zeros([ROWS, BLOCK], tl.int32)
    for _ in tl.static_range(KEPT):
        best = tl.max(group_score, axis=1)
        first = tl.min(tl.where(group_score == best[:, None], expert, BLOCK), axis=1)
        in_group = expert // size == (first // size)[:, None]
        kept = tl.where(in_group, 1, kept)
        group_score = tl.where(in_group, -float("inf"), group_score)
    return tl.where(kept > 0, choice, -float("inf"))
