"""Batched products of a few rows each on a CPU, so that a row's bits depend on the row alone.

How many rows a matrix must be filled up to depends on the make of the CPU. The libraries promise
nothing, so it is tried, as `layers.cpu_product` does for products with weights.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

_MOST_ROWS = 64
"""The most rows of a matrix in one product; more are computed in pieces."""
LEAST_MULTIPLE = 4
_MULTIPLES = (LEAST_MULTIPLE, 16)


def row_batches(a: Tensor, b: Tensor) -> Tensor:
    """[B, R, K] · [B, K, N] → [B, R, N], in products of at most _MOST_ROWS rows of each matrix."""
    if a.shape[1] <= _MOST_ROWS:
        return torch.bmm(a, b)
    return torch.cat([torch.bmm(piece, b) for piece in a.split(_MOST_ROWS, dim=1)], dim=1)


@functools.cache
def row_multiple(kv_heads: int, chunk: int, head_dim: int, limit: int, threads: int) -> int | None:
    """Find the least number that the rows of a matrix of queries must be a multiple of, so that a
    row's scores and sums have the same bits at any number of rows and in any batch of matrices.

    A product takes `chunk` context tokens. All row counts up to _MOST_ROWS are tried for small
    batches, and some for up to `limit` rows of the engine. This takes a few hundredths of a second,
    once for each shape. None if no number does it.
    """
    return next(
        (m for m in _MULTIPLES if attention_keeps_bits(kv_heads, chunk, head_dim, limit, m)), None
    )


def attention_keeps_bits(
    kv_heads: int, chunk: int, head_dim: int, limit: int, multiple: int
) -> bool:
    few, many = (1, 2, 3), (5, 8, 16, limit)
    for batches, most_rows in ((few, _MOST_ROWS), (many, 3 * multiple)):
        counts = [kv_heads * min(batch, limit) for batch in batches]
        scores = _numbers(max(counts), most_rows + multiple, head_dim)
        keys = _numbers(max(counts), chunk, head_dim).transpose(1, 2)
        weights = _numbers(max(counts), most_rows + multiple, chunk)
        values = _numbers(max(counts), chunk, head_dim)
        for a, b in ((scores, keys), (weights, values)):
            alone = [torch.bmm(piece, b) for piece in a.split(multiple, dim=1)]
            expected = torch.cat(alone, dim=1)
            for count, rows in itertools.product(counts, range(multiple, most_rows + 1, multiple)):
                # Other places than in the small products, among the matrices too.
                shift = 1 + rows // multiple % (multiple - 1)
                where = slice(len(a) - count, len(a)), slice(shift, shift + rows)
                if not torch.equal(torch.bmm(a[where].clone(), b[where[0]]), expected[where]):
                    return False
    return True


def _numbers(*shape: int) -> Tensor:
    """float32 in (−0.5, 0.5) without a pattern that a sum could be exact for."""
    number = torch.arange(torch.Size(shape).numel()).view(shape) % 65521
    return (number * number * 40503 % 65521).float() / 65521 - 0.5
