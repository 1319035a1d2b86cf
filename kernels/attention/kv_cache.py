"""The paged KV cache of one layer, the slots of tokens in it, and the write of new tokens.

A row's block table lists in order the KV blocks of `block_size` tokens that hold its tokens. A slot
is a token's index in the whole cache: block · block_size + offset in the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8, LARGEST, LEAST

MOST_VALUE = 114_000.0
"""In FP8 a larger value counts as infinite: attention multiplies weights by a value's scale in
float16, times `split_combine.SCALED_BY`."""
_TOKENS = 256
"""Tokens that one program of the slot mapping kernel computes."""


class KVCache(NamedTuple):
    """The keys and values of one layer.

    Heads come first, so that (head, block) is one contiguous tile of a flat [H·N, block_size·D]
    table. Block 0 is scratch: padding tokens write and read it, and no row does.

    Stored values are always finite. A head's key or value that holds an infinity or a NaN is stored
    as a key of all NaN and a value of all 0. So a query that sees the token becomes NaN, and one
    that does not is unharmed, though attention masks no values: its score is replaced by -inf, and
    0 is multiplied by something finite.

    In FP8 (e4m3) each head of a token has a scale for its key and one for its value, by which what
    is stored is multiplied: they depend on that key and value alone. What is not finite is stored
    as 0 then, with NaN as the key's scale and a finite one for the value; a value of more than
    `MOST_VALUE` counts as that.
    """

    key: Tensor  # [num_kv_heads, num_blocks, block_size, head_dim]
    value: Tensor  # the shape of key
    # Of FP8: [num_kv_heads, num_blocks, block_size, 2] float32, of the key and of the value.
    scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.key.shape[2]


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    """Store keys and values [T, num_kv_heads, head_dim] of new tokens at slots [T] int64 of the
    cache.

    Values are cast to the cache's dtype first; what is not finite then is stored as `KVCache` says.
    This is the reference of the write in `qkv.prepare_qkv`.
    """
    if cache.scales is None:
        key, value = key.to(cache.key.dtype), value.to(cache.value.dtype)
    bound = float("inf") if cache.scales is None else MOST_VALUE
    finite = key.isfinite() & value.isfinite() & (value.abs() <= bound)
    finite = finite.all(-1, keepdim=True)
    if cache.scales is None:
        key, value = key.where(finite, float("nan")), value.where(finite, 0.0)
    else:
        key, key_scale = quantise_vectors(key.where(finite, 0.0))
        value, value_scale = quantise_vectors(value.where(finite, 0.0))
        scales = torch.cat((key_scale.where(finite, float("nan")), value_scale), -1)
        _at(cache.scales, slots, scales)
    _at(cache.key, slots, key)
    _at(cache.value, slots, value)


def quantise_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors [..., D] to FP8, so that the largest value of each becomes 448: the values, and
    the scales [..., 1] float32."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST
    return (wide / scales).to(FP8), scales


def _at(table: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store [T, num_kv_heads, N] at slots of [num_kv_heads, num_blocks, block_size, N], by bytes,
    as torch cannot index FP8 everywhere."""
    flat = table.flatten(1, 2)
    if flat.dtype == FP8:
        flat, new = flat.view(torch.uint8), new.view(torch.uint8)
    flat[:, slots] = new.transpose(0, 1)


def slot_mapping(
    positions: Tensor, rows: Tensor | None, block_tables: Tensor, block_size: int
) -> Tensor:
    """Compute the slots [T] int64 of tokens at positions [T], each below N · block_size.

    `rows` [T] names each token's row; None means that each row has T / B tokens, one row after
    another. `block_tables` is [B, N].
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
