"""The paged KV cache of one layer, where tokens stand in it, and the write of new tokens."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_TOKENS = 256


class KVCache(NamedTuple):
    """key and value: [num_kv_heads, num_blocks, block_size, head_dim] each.

    Heads come first so that (head, block) is one contiguous tile of a flat [H·N, block_size·D]
    table: gathering a row's context is one indexed copy of long runs. Block 0 is scratch: padding
    tokens write and read it, and no row does.

    Values are always finite. Where a token's key or value of a head is not, the key is stored as
    all NaN and the value as 0. So a query that sees the token gets NaN, by its score, and one that
    does not see it is unharmed: the score is replaced and its weight 0 meets no infinity or NaN, of
    which 0 · x would be NaN. Attention needs no mask on values.
    """

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        return self.key.shape[2]


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    """Store the T new tokens' key and value, [T, num_kv_heads, head_dim], at slots [T].

    Finiteness, as `KVCache` demands it, is judged after the cast to the cache's dtype. On a GPU
    `kernels.qkv` writes instead; this is its reference.
    """
    num_heads, _, _, head_dim = cache.key.shape
    key, value = key.to(cache.key.dtype), value.to(cache.value.dtype)
    finite = (key.isfinite().all(-1) & value.isfinite().all(-1)).unsqueeze(-1)
    stored = (key.where(finite, float("nan")), value.where(finite, 0.0))
    for new, table in zip(stored, cache, strict=True):
        table.view(num_heads, -1, head_dim)[:, slots] = new.transpose(0, 1)


def slot_mapping(
    positions: Tensor, rows: Tensor | None, block_tables: Tensor, block_size: int
) -> Tensor:
    """Where the KV of each token is written: block · block_size + place in the block.

    Args:
        positions: [T] int64, of each token in its row; below N · block_size.
        rows: [T] int64 or int32, the row of each token; None if every row has T / B tokens and
            rows stand one after another.
        block_tables: [B, N] int64 or int32, blocks of the rows in order.
        block_size: tokens per block.

    Returns:
        [T] int64.
    """
    run = slot_mapping_triton if positions.is_cuda else slot_mapping_reference
    return run(positions, rows, block_tables, block_size)


def slot_mapping_reference(
    positions: Tensor, rows: Tensor | None, block_tables: Tensor, block_size: int
) -> Tensor:
    """`slot_mapping` in PyTorch."""
    if rows is None:
        width = _tokens_per_row(positions, block_tables)
        rows = torch.arange(len(positions), device=positions.device) // width
    blocks = block_tables[rows, positions // block_size].long()
    return blocks * block_size + positions % block_size


def slot_mapping_triton(
    positions: Tensor, rows: Tensor | None, block_tables: Tensor, block_size: int
) -> Tensor:
    """`slot_mapping` in one launch."""
    assert positions.is_contiguous() and block_tables.stride(1) == 1
    assert rows is None or rows.is_contiguous()
    num_tokens = len(positions)
    slots = torch.empty(num_tokens, dtype=torch.int64, device=positions.device)
    _slot_mapping[(triton.cdiv(num_tokens, _TOKENS),)](
        positions, positions if rows is None else rows, block_tables, slots, num_tokens,
        1 if rows is not None else _tokens_per_row(positions, block_tables), block_tables.stride(0),
        HAS_ROWS=rows is not None, BLOCK_SIZE=block_size, BLOCK=_TOKENS, num_warps=4,
    )  # fmt: skip
    return slots


def _tokens_per_row(positions: Tensor, block_tables: Tensor) -> int:
    assert len(positions) % len(block_tables) == 0
    return len(positions) // len(block_tables)


@triton.jit(do_not_specialize=["num_tokens", "width", "table_stride"])
def _slot_mapping(
    positions_ptr, rows_ptr, tables_ptr, slots_ptr, num_tokens, width, table_stride,
    HAS_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = token < num_tokens
    position = tl.load(positions_ptr + token, mask=mask, other=0)
    if HAS_ROWS:
        row = tl.load(rows_ptr + token, mask=mask, other=0).to(tl.int64)
    else:
        row = (token // width).to(tl.int64)
    entry = tables_ptr + row * table_stride + position // BLOCK_SIZE
    block = tl.load(entry, mask=mask, other=0).to(tl.int64)
    tl.store(slots_ptr + token, block * BLOCK_SIZE + position % BLOCK_SIZE, mask=mask)
