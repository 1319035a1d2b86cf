"""Batched matrix products on a CPU in which a row's bits depend on that row alone. A row is one of
a matrix; the rows of a batch of text are called sequences here.

A CPU library chooses its code by the number of rows, so a row may get other bits beside others. If
the rows are padded to a multiple of some number, it does not. The number depends on the CPU and the
library promises none, so `row_multiple` tries it out, as `layers.cpu_product` does for products
with weights.
"""

from __future__ import annotations

import functools
import itertools

import torch
from torch import Tensor

_MOST_ROWS = 64
"""The most rows of a matrix in one product; more are computed in pieces."""
LEAST_MULTIPLE = 4
"""The smallest multiple. Attention also uses it where no multiple keeps the bits."""
_MULTIPLES = (LEAST_MULTIPLE, 16)
"""The multiples that are tried, the smallest first."""


def row_batches(a: Tensor, b: Tensor) -> Tensor:
    """Multiply a [B, R, K] by b [B, K, N], in products of at most `_MOST_ROWS` rows of each matrix.
    Return [B, R, N]."""
    if a.shape[1] <= _MOST_ROWS:
        return torch.bmm(a, b)
    return torch.cat([torch.bmm(piece, b) for piece in a.split(_MOST_ROWS, dim=1)], dim=1)


@functools.cache
def row_multiple(kv_heads: int, chunk: int, head_dim: int, limit: int, threads: int) -> int | None:
    """Find the least multiple to which the queries of attention must be padded, so that a query's
    scores and sums have the same bits at any number of queries and in any batch of matrices.

    This multiplies matrices, which takes a few hundredths of a second, once for each shape.

    Args:
        kv_heads, head_dim: the shape of the keys and values.
        chunk: the context tokens of one product.
        limit: the most sequences of a batch.
        threads: torch's number of threads, on which the library's code depends.

    Returns:
        The multiple, or None if none of `_MULTIPLES` keeps the bits.
    """
    for multiple in _MULTIPLES:
        if attention_keeps_bits(kv_heads, chunk, head_dim, limit, multiple):
            return multiple
    return None


def attention_keeps_bits(
    kv_heads: int, chunk: int, head_dim: int, limit: int, multiple: int
) -> bool:
    """Return whether rows have the same bits in all products whose number of rows is a multiple of
    `multiple`. The other arguments are those of `row_multiple`.

    All row counts up to `_MOST_ROWS` are tried for small batches, and a few for large ones.
    """
    small_batches, large_batches = (1, 2, 3), (5, 8, 16, limit)  # numbers of sequences
    for batches, most_rows in ((small_batches, _MOST_ROWS), (large_batches, 3 * multiple)):
        counts = [kv_heads * min(batch, limit) for batch in batches]  # matrices of a product
        queries = _numbers(max(counts), most_rows + multiple, head_dim)
        keys = _numbers(max(counts), chunk, head_dim).transpose(1, 2)
        weights = _numbers(max(counts), most_rows + multiple, chunk)
        values = _numbers(max(counts), chunk, head_dim)
        for a, b in ((queries, keys), (weights, values)):
            # The expected bits are those of the smallest products.
            alone = [torch.bmm(piece, b) for piece in a.split(multiple, dim=1)]
            expected = torch.cat(alone, dim=1)
            for count, rows in itertools.product(counts, range(multiple, most_rows + 1, multiple)):
                # Rows and matrices stand in other places than in the small products: `shift` is
                # from 1 to multiple - 1, so no row keeps its place.
                shift = 1 + rows // multiple % (multiple - 1)
                where = slice(len(a) - count, len(a)), slice(shift, shift + rows)
                if not torch.equal(torch.bmm(a[where].clone(), b[where[0]]), expected[where]):
                    return False
    return True


def _numbers(*shape: int) -> Tensor:
    """Return pseudorandom float32 numbers in (−0.5, 0.5), whose sums are rounded. (Sums of simple
    numbers would be exact, and so equal in any order.) 65521 is prime, and 40503 is odd."""
    number = torch.arange(torch.Size(shape).numel()).view(shape) % 65521
    return (number * number * 40503 % 65521).float() / 65521 - 0.5
