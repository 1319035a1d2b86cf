"""The contexts of rows copied out of the pages of the KV cache, one behind another, in Triton.

The copy engine of a GPU reads whole tiles of a matrix without computing an address for each piece.
It can read the keys of a row so if they stand together, which those in pages of 16 tokens do not.
Copying them once costs little beside a prefill that reads them many times.
"""

# mypy: disable-error-code="untyped-decorator, no-untyped-def"

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache

PIECE = 64
"""Tokens of a row that one program copies, for one KV head."""
_LEAST_TOKENS = 1024
"""New tokens from which a copy pays, on an H200: below, its launch costs more than it saves."""
_MOST_CONTEXT = 4
"""Context tokens for each new token up to which a copy pays. With more, keys and values are read
too few times. So the copies are also smaller than what a layer's MLP keeps of the new tokens, and
the memory plan need not count them."""


@dataclass(frozen=True, slots=True)
class GatherPlan:
    """Where the contexts of B rows go; all layers of a forward share it.

    Attributes:
        pieces: [P, 4] int32, one line per piece of a row's context: the row, the piece's first
            position, its place among the copies, and its number of tokens, at most `PIECE`.
        places: [B] int32, where the context of each row begins among the copies.
        num_tokens: C, the context tokens of all rows.
    """

    pieces: Tensor
    places: Tensor
    num_tokens: int


def upload(values: Tensor, device: torch.device | str) -> Tensor:
    """Copy a tensor of the host to the device; the host does not wait for a GPU."""
    if torch.device(device).type != "cuda":
        return values
    return values.pin_memory().to(device, non_blocking=True)


def does_gathering_pay(
    query_lens: Sequence[int], context_lens: Sequence[int], head_dim: int
) -> bool:
    """Whether a prefill is faster if the contexts are copied first.

    Args:
        query_lens: [B] new tokens of each row.
        context_lens: [B] tokens of each row in the cache, the new ones included.
        head_dim: the size of a head; the copy engine's tiles have powers of two.
    """
    new = sum(query_lens)
    return (
        new >= _LEAST_TOKENS
        and sum(context_lens) <= _MOST_CONTEXT * new
        and head_dim == triton.next_power_of_2(head_dim)
    )


def plan_gather(context_lens: Sequence[int], device: torch.device | str) -> GatherPlan:
    """Cut the contexts of B rows into pieces.

    Args:
        context_lens: [B] tokens of each row in the cache.
        device: where the forward runs.
    """
    lens = torch.tensor(context_lens, dtype=torch.int64)
    places = lens.cumsum(0) - lens
    counts = (lens + PIECE - 1) // PIECE
    row = torch.repeat_interleave(counts)
    first = (torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]) * PIECE
    tokens = (lens[row] - first).clamp(max=PIECE)
    pieces = torch.stack((row, first, places[row] + first, tokens), 1)
    # One copy to the device for both.
    flat = upload(torch.cat((places, pieces.flatten())).to(torch.int32), device)
    return GatherPlan(flat[len(lens) :].view(-1, 4), flat[: len(lens)], int(lens.sum()))


def gather_context(cache: KVCache, block_tables: Tensor, plan: GatherPlan) -> tuple[Tensor, Tensor]:
    """Copy the keys and values of all rows' contexts.

    Args:
        cache: of one layer.
        block_tables: [B, N] int32 or int64, the last axis contiguous.
        plan: from `plan_gather` for these rows.

    Returns:
        Keys and values, each [kv_heads · C, head_dim]: those of head 0 first, in them those of
        row 0, by position.
    """
    kv_heads, _, block_size, head_dim = cache.key.shape
    shape = (kv_heads * plan.num_tokens, head_dim)
    keys, values = cache.key.new_empty(shape), cache.value.new_empty(shape)
    _gather_context[(len(plan.pieces), kv_heads)](
        cache.key, cache.value, keys, values, block_tables, plan.pieces,
        block_tables.stride(0), cache.key.stride(0), plan.num_tokens,
        BLOCK_SIZE=block_size, HEAD_DIM=head_dim, PIECE=PIECE, num_warps=4,
    )  # fmt: skip
    return keys, values


@triton.jit(do_not_specialize=["table_stride", "num_tokens"])
def _gather_context(
    key_ptr, value_ptr, keys_ptr, values_ptr, tables_ptr, pieces_ptr,
    table_stride, head_stride, num_tokens,
    BLOCK_SIZE: tl.constexpr, HEAD_DIM: tl.constexpr, PIECE: tl.constexpr,
):  # fmt: skip
    """Each program copies one piece of a row for one KV head."""
    piece = pieces_ptr + tl.program_id(0) * 4
    head = tl.program_id(1).to(tl.int64)
    row = tl.load(piece).to(tl.int64)
    n = tl.arange(0, PIECE)
    position = tl.load(piece + 1) + n
    place = head * num_tokens + tl.load(piece + 2) + n
    inside = n < tl.load(piece + 3)
    block = tl.load(tables_ptr + row * table_stride + position // BLOCK_SIZE, mask=inside, other=0)
    slot = block.to(tl.int64) * BLOCK_SIZE + position % BLOCK_SIZE
    dim = tl.arange(0, HEAD_DIM)[None, :]
    source = head * head_stride + slot[:, None] * HEAD_DIM + dim
    target = place[:, None] * HEAD_DIM + dim
    key = tl.load(key_ptr + source, mask=inside[:, None])
    value = tl.load(value_ptr + source, mask=inside[:, None])
    tl.store(keys_ptr + target, key, mask=inside[:, None])
    tl.store(values_ptr + target, value, mask=inside[:, None])
