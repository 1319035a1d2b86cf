"""Copies the contexts of rows out of the blocks of the KV cache, one after another, in Triton.

A prefill reads a row's keys and values many times, once for each tile of queries. From blocks, it
must compute an address for each token. From a contiguous copy, TMA (the Hopper unit for copies of
tiles) loads whole tiles. So the prefill is faster although the contexts are first copied once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.row_indices import row_indices

PIECE = 64
"""Tokens of a row that one program copies, for one KV head."""
_LEAST_TOKENS = 1024
"""The least new tokens of a prefill for which a copy pays, on an H200. With fewer, its launch costs
more than it saves."""
_MOST_CONTEXT = 4
"""The most context tokens per new token for which a copy pays. With more, each key is read too few
times. Such copies are also smaller than the intermediate activations of an MLP, which are not
allocated at that time, so the memory plan need not count them."""


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where the contexts of B rows are copied to. All layers of a forward share it.

    Contexts are cut into pieces of at most `PIECE` tokens, which programs copy. A line of `pieces`
    is one piece: its row, its first position in the row, the index of its first token among the C
    copies, and its number of tokens.
    """

    pieces: Tensor  # [P, 4] int32: row, position, index among the copies, number of tokens
    row_starts: Tensor  # [B] int32: the index of each row's first token among the copies
    num_tokens: int  # C, the context tokens of all rows


def upload_tensor(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor from the host to the device. The host does not wait for the copy to a GPU."""
    if torch.device(device).type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def does_gathering_pay(
    query_lens: Sequence[int], context_lens: Sequence[int], head_dim: int
) -> bool:
    """Return whether a prefill of rows with these new tokens [B] and cached tokens [B] is faster if
    contexts are copied. TMA needs a head dimension that is a power of two."""
    new = sum(query_lens)
    return (
        new >= _LEAST_TOKENS
        and sum(context_lens) <= _MOST_CONTEXT * new
        and head_dim == triton.next_power_of_2(head_dim)
    )


def plan_gather(context_lens: Sequence[int], device: torch.device | str) -> GatherPlan:
    """Cut the contexts of B rows, `context_lens` cached tokens each, into pieces."""
    lens = torch.tensor(context_lens, dtype=torch.int64)
    row_starts = lens.cumsum(0) - lens
    counts = (lens + PIECE - 1) // PIECE
    row = row_indices(counts)
    first = (torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]) * PIECE
    tokens = (lens[row] - first).clamp(max=PIECE)
    pieces = torch.stack((row, first, row_starts[row] + first, tokens), 1)
    # One copy to the device for both.
    flat = upload_tensor(torch.cat((row_starts, pieces.flatten())).to(torch.int32), device)
    return GatherPlan(flat[len(lens) :].view(-1, 4), flat[: len(lens)], int(lens.sum()))


def gather_context(
    cache: KVCache, block_tables: Tensor, plan: GatherPlan, dtype: torch.dtype
) -> KVCache:
    """Copy the keys and values of all rows' contexts.

    `block_tables` is [B, N] int32 or int64, the last axis contiguous. Returns keys and values
    [kv_heads · C, head_dim] in `dtype`, ordered by head, row and position. FP8 elements are
    converted to `dtype`, which is exact, and still need their scales, [kv_heads · C, 2].
    """
    kv_heads, _, block_size, head_dim = cache.key.shape
    shape = (kv_heads * plan.num_tokens, head_dim)
    keys, values = torch.empty((2, *shape), dtype=dtype, device=cache.key.device)
    scales = None if cache.scales is None else cache.scales.new_empty((len(keys), 2))
    _gather_context[(len(plan.pieces), kv_heads)](
        cache.key, cache.value, cache.scales, keys, values, scales, block_tables, plan.pieces,
        block_tables.stride(0), cache.key.stride(0), plan.num_tokens,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    return KVCache(keys, values, scales)


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _gather_context(
    key_ptr, value_ptr, scale_ptr, keys_ptr, values_ptr, scales_ptr, tables_ptr, pieces_ptr,
    table_stride, head_stride, num_tokens,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Each program copies one piece for one KV head. Tokens past the piece's end are masked."""
    piece = pieces_ptr + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(piece).to(tl.int64)
    token = tl.arange(0, PIECE)
    position = tl.load(piece + 1) + token
    copy_index = head * num_tokens + tl.load(piece + 2) + token
    inside = token < tl.load(piece + 3)
    block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    dim = tl.arange(0, HEAD_DIM)[None, :]
    source = head * head_stride + slot[:, None] * HEAD_DIM + dim
    target = copy_index[:, None] * HEAD_DIM + dim
    key = tl.load(key_ptr + source, mask=inside[:, None])
    value = tl.load(value_ptr + source, mask=inside[:, None])
    if scale_ptr is not None:
        key = key.to(keys_ptr.dtype.element_ty)
        value = value.to(keys_ptr.dtype.element_ty)
        scale_pair = scale_ptr + (head * (head_stride // HEAD_DIM) + slot) * 2
        tl.store(scales_ptr + copy_index * 2, tl.load(scale_pair, mask=inside), mask=inside)
        tl.store(scales_ptr + copy_index * 2 + 1, tl.load(scale_pair + 1, mask=inside), mask=inside)
    tl.store(keys_ptr + target, key, mask=inside[:, None])
    tl.store(values_ptr + target, value, mask=inside[:, None])
