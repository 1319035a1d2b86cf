"""The paged KV cache of one layer, the slots of tokens in it, and the write of new tokens.

The cache is divided into KV blocks of `block_size` tokens. A row is a sequence, and its block table
lists, in order, the blocks that hold its tokens. A slot is a token's index in the whole cache:
block · block_size + offset in the block.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.fp8.fp8_weight import FP8, LARGEST, LEAST

MOST_VALUE = 114_000.0
"""The largest element of a value vector in an FP8 cache; a larger one counts as infinite. Attention
computes weight · scale · `split_combine.WEIGHT_FACTOR` in float16, which ends at 65504, and
114,000 / 448 · 256 is just below that."""
_TOKENS = 256
"""Tokens that one program of the slot mapping kernel computes."""


class KVCache(NamedTuple):
    """The keys and values of one layer.

    Heads come first, so that the tokens of a block are contiguous for each head. Block 0 is
    scratch: padding tokens write and read it, and no row does.

    **Infinity and NaN.** A pair of a key and a value vector (one head of one token) is *broken* if
    either has an element that is not finite. A broken pair is stored as a key of all NaN and a
    value of all 0. So a query that sees the token becomes NaN. A query that may not see it is
    unharmed: its score is replaced by -inf, so its weight is 0, and attention multiplies the 0 by
    the value without a mask, which needs a finite value.

    **FP8.** If the cache is FP8 (e4m3), each key vector and each value vector has a float32 scale:
    the vector is the stored elements times its scale. The scale depends on that vector alone
    (`quantise_vectors`). Here a value with an element beyond ±`MOST_VALUE` is broken too. A broken
    pair is stored as zeros with NaN as the key's scale, and with a finite scale of the value, so
    the same holds for queries as without FP8.
    """

    key: Tensor  # [num_kv_heads, num_blocks, block_size, head_dim]
    value: Tensor  # the shape of key
    # [num_kv_heads, num_blocks, block_size, 2] float32: each token's scales of its key and of its
    # value. None: the cache is not FP8.
    scales: Tensor | None = None

    @property
    def block_size(self) -> int:
        """Tokens per KV block."""
        return self.key.shape[2]


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    """Store keys and values [T, num_kv_heads, head_dim] of new tokens at slots [T] int64 of the
    cache, in PyTorch.

    Both are cast to the cache's dtype, or quantised if it is FP8. Broken pairs are stored as
    `KVCache` says. The kernel of `qkv.prepare_qkv` stores the same bits on a GPU.
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
        _store(cache.scales, slots, scales)
    _store(cache.key, slots, key)
    _store(cache.value, slots, value)


def quantise_vectors(x: Tensor) -> tuple[Tensor, Tensor]:
    """Round vectors [..., D] to FP8. Each vector is divided by a scale that makes its largest
    magnitude 448, the largest of e4m3, and that is never 0. Return the quantised vectors and the
    scales [..., 1] float32."""
    wide = x.float()
    scales = wide.abs().amax(-1, keepdim=True).clamp(min=LEAST) / LARGEST
    return (wide / scales).to(FP8), scales


def _store(table: Tensor, slots: Tensor, new: Tensor) -> None:
    """Store `new` [T, num_kv_heads, N] at `slots` [T] of `table` [num_kv_heads, num_blocks,
    block_size, N]. FP8 is stored as bytes, because torch cannot index it on every device."""
    flat = table.flatten(1, 2)
    if flat.dtype == FP8:
        flat, new = flat.view(torch.uint8), new.view(torch.uint8)
    flat[:, slots] = new.transpose(0, 1)


def slot_mapping(
    positions: Tensor, rows: Tensor | None, block_tables: Tensor, block_size: int
) -> Tensor:
    """Compute the slots [T] int64 of tokens at positions [T], each below N · block_size.

    `rows` [T] is each token's row. None: each row has T / B tokens, and rows follow one another.
    `block_tables` is [B, N].
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
        # With `rows` the kernel does not read the width, and without them not the rows.
        positions, positions if rows is None else rows, block_tables, slots, num_tokens,
        1 if rows is not None else _tokens_per_row(positions, block_tables), block_tables.stride(0),
        HAS_ROWS=rows is not None, BLOCK_SIZE=block_size, BLOCK=_TOKENS, num_warps=4,
    )  # fmt: skip
    return slots


def _tokens_per_row(positions: Tensor, block_tables: Tensor) -> int:
    """Return T / B."""
    assert len(positions) % len(block_tables) == 0
    return len(positions) // len(block_tables)


@triton.jit(do_not_specialize=["num_tokens", "width", "table_stride"])
def _slot_mapping(
    positions_ptr, rows_ptr, tables_ptr, slots_ptr, num_tokens, width, table_stride,
    HAS_ROWS: tl.constexpr, BLOCK_SIZE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program computes the slots of BLOCK tokens, of which the last program masks those past
    `num_tokens`."""
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
