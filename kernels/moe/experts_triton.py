"""Experts as grouped matrix products, in Triton: sort the slots, two products, sum over slots.

Each sum has a fixed order and nothing is added atomically: equal tokens give equal bits.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.partial_sums_triton import sum_parts
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import moe_align
from batchgen.kernels.moe.moe_tiles import MoETiles, choose_moe_tiles
from batchgen.kernels.moe.tiled_layout import are_panels, matrix_sizes

_CHUNK = 1024
"""Columns of a token that a program adds up."""


def grouped_mlp_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    residual: Tensor | None = None,
    *,
    epilogues: Epilogues = PLAIN,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,
    tiles: MoETiles | None = None,
) -> Tensor:
    """Compute `experts.grouped_mlp` in four launches, six if there are many tokens.

    Tensors are contiguous, x in its last axis. That ids are in range is not checked on a GPU.
    `tiles` says how the products are cut; None chooses from the table.
    """
    parts = partial(
        grouped_parts_triton,
        x,
        gate_up,
        down,
        ids,
        weights,
        epilogues=epilogues,
        num_routed=num_routed,
        tiles=tiles,
    )
    return sum_of_slots(parts, x, residual, ids, len(gate_up), num_routed, shared)


def grouped_parts_triton(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    *,
    epilogues: Epilogues = PLAIN,
    num_routed: int | None = None,
    tiles: MoETiles | None = None,
) -> Tensor:
    """Compute what `grouped_mlp_triton` adds up: [T·k, H], dtype of x, the slots' results times
    their weights. There must be tokens. Nothing is written for slots whose expert is elsewhere."""
    tokens, hidden = x.shape
    (experts, _, inner), k = matrix_sizes(down), ids.shape[1]
    assert matrix_sizes(gate_up) == (experts, epilogues.parts * inner, hidden)
    assert gate_up.is_contiguous()
    assert matrix_sizes(down) == (experts, hidden, inner) and down.is_contiguous()
    assert are_panels(gate_up) == are_panels(down)
    assert x.dtype == gate_up.dtype == down.dtype and x.stride(1) == 1
    assert weights.shape == ids.shape == (tokens, k) and weights.is_contiguous()
    num_routed = num_routed or experts
    tiles = tiles or choose_moe_tiles(ids.numel() * experts // num_routed, gate_up)
    alignment = moe_align(ids, experts, tiles.block_m, some_elsewhere=num_routed > experts)
    activated = torch.empty((tokens * k, inner), dtype=x.dtype, device=x.device)
    gate_up_product(x, gate_up, alignment, tiles.gate_up, k, activated, epilogues)
    parts = torch.empty((tokens * k, hidden), dtype=x.dtype, device=x.device)
    down_product(activated, down, weights, alignment, tiles.down, parts, epilogues.down_bias)
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
    """Compute the parts and sum each token's slots whose expert is here: into `residual`, which is
    added, or a new tensor like x."""
    out = new_or_residual(x, residual)
    if len(x):
        parts = make_parts()
        here = (ids, num_experts) if (num_routed or num_experts) > num_experts else None
        moe_combine(parts, out, here, shared and shared(), add=residual is not None)
    return out


def moe_combine(
    parts: Tensor,  # [T·k, H], contiguous
    out: Tensor,  # [T, H], contiguous
    here: tuple[Tensor, int] | None = None,  # (ids [T, k], E): leave out slots of ids ≥ E
    shared: SharedPart | None = None,  # added to the sum
    *,
    add: bool,  # to what `out` holds
) -> None:
    """Sum the k slots of each token in their order, in float32, and round once into `out`."""
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
    """Each program adds up one chunk of columns of one token, in the order of its slots."""
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
