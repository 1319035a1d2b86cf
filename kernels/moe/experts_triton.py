"""Experts as grouped matrix products, in Triton.

A *slot* is one of the k experts that a token chose: slot t·k + j is choice j of token t. The steps:
sort the slots by expert (`moe_align`), compute two matrix products, and sum each token's slots.
Each sum has a fixed order and nothing is added atomically: equal tokens give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.partial_sums_triton import sum_parts
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.moe_align_triton import Alignment, moe_align

_CHUNK = 1024
"""Columns of a token that a program adds up."""


class ExpertWeights(Protocol):
    """The weights of experts in one format: how it cuts and computes their two products."""

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, the number of experts on this rank, H and I."""

    def tiles(self, num_slots: int) -> Any:
        """Look up the tiles of both products for this many slots. The result has an attribute
        `block_m`, the slots of a tile; the rest is the format's own."""

    def multiply(
        self,
        x: Tensor,  # [T, H]
        alignment: Alignment,  # of the T·k slots
        tiles: Any,
        weights: Tensor,  # [T, k] float32
        epilogues: Epilogues,
        parts: Tensor,  # [T·k, H], contiguous
    ) -> None:
        """Compute both products on a GPU, and write each slot's result times its weight to `parts`,
        in the order of slots. Tensors are contiguous, x in its last axis."""

    def on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, epilogues: Epilogues) -> Tensor:
        """Compute `grouped_mlp` on a CPU, without a residual and a shared expert."""


def grouped_mlp_triton(
    x: Tensor,
    experts: ExpertWeights,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    epilogues: Epilogues = PLAIN,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,
    tiles: Any = None,
) -> Tensor:
    """Compute `experts.grouped_mlp` in four launches, or six if there are many tokens. Quantising
    tokens or dequantising weights takes more.

    That ids are in range is not checked. `tiles` are the tiles of both products, in the type of
    `ExpertWeights.tiles`; None chooses them there.
    """
    parts = partial(
        grouped_parts_triton,
        x,
        experts,
        ids,
        weights,
        epilogues=epilogues,
        num_routed=num_routed,
        tiles=tiles,
    )
    return sum_of_slots(parts, x, residual, ids, experts.sizes[0], num_routed, shared)


def grouped_parts_triton(
    x: Tensor,
    experts: ExpertWeights,
    ids: Tensor,
    weights: Tensor,
    *,
    epilogues: Epilogues = PLAIN,
    num_routed: int | None = None,
    tiles: Any = None,
) -> Tensor:
    """Compute the parts that `grouped_mlp_triton` adds up: each slot's result times its weight,
    [T·k, H], dtype of x. T must be above 0. Parts of experts on other ranks are not written."""
    rank_experts, hidden, _ = experts.sizes
    assert x.shape[1] == hidden and x.stride(1) == 1
    assert weights.shape == ids.shape and len(ids) == len(x) and weights.is_contiguous()
    num_routed = num_routed or rank_experts
    tiles = tiles or experts.tiles(ids.numel() * rank_experts // num_routed)
    alignment = moe_align(
        ids, rank_experts, tiles.block_m, some_elsewhere=num_routed > rank_experts
    )
    parts = torch.empty((ids.numel(), hidden), dtype=x.dtype, device=x.device)
    experts.multiply(x, alignment, tiles, weights, epilogues, parts)
    return parts


def new_or_residual(x: Tensor, residual: Tensor | None) -> Tensor:
    """Return where the result for x [T, H] is written, contiguous: the residual or a new tensor."""
    if residual is None:
        return torch.empty(x.shape, dtype=x.dtype, device=x.device)
    assert residual.shape == x.shape and residual.is_contiguous()
    return residual


def sum_of_slots(
    make_parts: Callable[[], Tensor],  # computes [T·k, H], and is called where there are tokens
    x: Tensor,  # [T, H]
    residual: Tensor | None,
    ids: Tensor,  # [T, k]
    num_experts: int,  # on this rank
    num_routed: int | None,  # on all ranks
    shared: Callable[[], SharedPart] | None,  # called last
) -> Tensor:
    """Compute the parts, and sum each token's parts whose expert is on this rank. The sum is added
    to `residual` in place, or written to a new tensor like x. Return the result [T, H]."""
    out = new_or_residual(x, residual)
    if len(x):
        parts = make_parts()
        here = (ids, num_experts) if (num_routed or num_experts) > num_experts else None
        shared_part = None if shared is None else shared()
        moe_combine(parts, out, here, shared_part, add=residual is not None)
    return out


def moe_combine(
    parts: Tensor,  # [T·k, H], contiguous
    out: Tensor,  # [T, H], contiguous
    here: tuple[Tensor, int] | None = None,  # (ids [T, k], E): leave out slots of ids ≥ E
    shared: SharedPart | None = None,  # added to the sum
    *,
    add: bool,  # to what `out` holds
) -> None:
    """Sum the k parts of each token in their order, in float32, and round once into `out`."""
    tokens, hidden = out.shape
    values, gate = shared or (None, None)
    if shared is not None:
        shared.check(tokens, hidden)
    chunks = triton.cdiv(hidden, _CHUNK)
    ids, experts = (None, 0) if here is None else here
    _sum_slots[(tokens * chunks,)](
        parts, out, ids, values, gate, hidden, chunks, experts,
        K=len(parts) // tokens, ADD=add,
        BLOCK=min(_CHUNK, triton.next_power_of_2(hidden)), num_warps=4,
    )  # fmt: skip


@triton.jit
def _sum_slots(
    parts_ptr, out_ptr, ids_ptr, shared_ptr, gate_ptr, hidden, chunks, experts,
    K: tl.constexpr, ADD: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program sums one chunk of BLOCK columns of one token, in the order of its slots."""
    token = (tl.program_id(0) // chunks).to(tl.int64)
    column = tl.program_id(0) % chunks * BLOCK + tl.arange(0, BLOCK)
    mask = column < hidden
    total = sum_parts(
        parts_ptr, hidden, K * hidden, ids_ptr, experts, shared_ptr, gate_ptr, token, None, column,
        mask, hidden, K,
    )  # fmt: skip
    target = out_ptr + token * hidden + column
    if ADD:
        total += tl.load(target, mask=mask, other=0.0).to(tl.float32)
    tl.store(target, total.to(out_ptr.dtype.element_ty), mask=mask)
