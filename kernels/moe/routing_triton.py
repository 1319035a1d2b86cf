"""Which experts a token goes to, in Triton: softmax and top-k in one launch."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_TILE = 512
"""Logits per program: a program takes several tokens if there are fewer experts than this."""


def route_triton(logits: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
    """`routing.route` in one launch.

    Args:
        logits: [T, E], the last axis contiguous.
        k: experts of a token, from 1 to E.
        renormalise: divide the k probabilities by their sum.

    Returns:
        The ids [T, k] int32 of the experts, the most probable first and the lower id first among
        equals, and their weights [T, k] float32. A token whose softmax is not finite gets the
        experts 0 to k - 1 and NaN as weights.
    """
    tokens, experts = logits.shape
    assert 1 <= k <= experts and logits.stride(1) == 1
    ids = torch.empty((tokens, k), dtype=torch.int32, device=logits.device)
    weights = torch.empty((tokens, k), dtype=torch.float32, device=logits.device)
    if not tokens:
        return ids, weights
    block = triton.next_power_of_2(experts)
    rows = max(1, _TILE // block)
    _route[(triton.cdiv(tokens, rows),)](
        logits, ids, weights, logits.stride(0), tokens, experts,
        K=k, RENORMALISE=renormalise, ROWS=rows, BLOCK=block,
        BLOCK_K=triton.next_power_of_2(k), num_warps=4 if rows > 1 else 1,
    )  # fmt: skip
    return ids, weights


@triton.jit(do_not_specialize=["tokens"])
def _route(
    logits_ptr, ids_ptr, weights_ptr, stride, tokens, experts,
    K: tl.constexpr, RENORMALISE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Each program routes ROWS tokens: it takes the most probable expert K times."""
    token = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    expert = tl.arange(0, BLOCK)[None, :]
    slot = tl.arange(0, BLOCK_K)[None, :]
    exists = expert < experts
    source = logits_ptr + token[:, None] * stride + expert
    inside = (token < tokens)[:, None]
    logit = tl.load(source, mask=inside & exists, other=-float("inf")).to(tl.float32)
    mass = tl.exp(logit - tl.max(logit, axis=1)[:, None])
    total = tl.sum(mass, axis=1)
    # NaN and infinite logits, and rows of -inf alone, make a sum that is NaN.
    finite = (total > 0) & (total < float("inf"))
    # Below every probability: experts that do not exist, and those that were taken.
    left = tl.where(finite[:, None], mass / total[:, None], 0.0)
    left = tl.where(exists, left, -1.0)
    ids = tl.zeros([ROWS, BLOCK_K], tl.int32)
    weights = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for taken in tl.static_range(K):
        best = tl.max(left, axis=1)
        chosen = tl.min(tl.where(left == best[:, None], expert, BLOCK), axis=1)
        left = tl.where(expert == chosen[:, None], -1.0, left)
        ids = tl.where(slot == taken, chosen[:, None], ids)
        weights = tl.where(slot == taken, best[:, None], weights)
    if RENORMALISE:
        weights = weights / tl.sum(weights, axis=1)[:, None]
    weights = tl.where(finite[:, None], weights, float("nan"))
    place = token[:, None] * K + slot
    tl.store(ids_ptr + place, ids, mask=inside & (slot < K))
    tl.store(weights_ptr + place, weights, mask=inside & (slot < K))
