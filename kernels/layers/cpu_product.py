"""Chooses, for each weight, a CPU matrix product that gives a row the same bits in any batch.

Libraries promise nothing here: the order of summation depends on the CPU, the dtype, the shape and
the number of threads. `linear` computes only a few shapes, so all of them can be tried when weights
are loaded (`choose_product`).

The trial uses sums that cancel. The second half of each row is its first half reversed, with the
opposite sign (`_opposite`), and the weight is symmetric (`_mirrored`), so the exact result is zero.
The computed result is rounding error alone, and another order of summation changes it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.layers.linear import MOST_ROWS, ROW_MULTIPLE, linear, pack_weight

_LARGE_WEIGHT = 2**23
"""Values of a weight from which on products of half as many rows keep every core busy, and take
half the time to try."""

_SMALL_WEIGHT = 2**17
"""Values of a weight up to which plain products are faster at any number of rows, because a oneDNN
product takes 30 microseconds before it begins (AMD EPYC, 1 and 2 threads)."""


class CPUProduct(NamedTuple):
    """How products with one weight are computed on a CPU."""

    packed: bool  # with the weight from `pack_weight`
    most_rows: int | None  # for `linear`; None: no way keeps bits, so the fastest is taken


def choose_product(weight: Tensor, bias: Tensor | None) -> CPUProduct:
    """Find the fastest way to compute x·Wᵀ + b in which a row's bits do not depend on other rows,
    with torch's present number of threads.

    If the fastest way qualifies, this takes the time of a product of 800 rows (350 with a large
    weight).
    """
    if weight.dtype != torch.float32:
        weight = _mirrored(weight)
    if bias is not None:
        bias = torch.zeros_like(bias)  # another bias would hide how the sums were rounded
    for packed, most_rows, laid_out in _ways(weight):

        def product(x: Tensor, laid_out: Tensor = laid_out, limit: int = most_rows) -> Tensor:
            return linear(x, laid_out, bias, limit)

        if product_keeps_bits(product, weight.shape[1], weight.dtype, most_rows):
            return CPUProduct(packed, most_rows)
    return CPUProduct(pack_weight(weight) is not weight, None)


def few_keep_bits(weight: Tensor, product: CPUProduct) -> bool:
    """Return whether a row of x·Wᵀ keeps its bits if batches of fewer than ROW_MULTIPLE rows are
    not padded to that multiple.

    This takes the time of a product of 300 rows.
    """
    if product.most_rows is None:
        return False
    if weight.dtype != torch.float32:
        weight = _mirrored(weight)
    if product.packed:
        weight = pack_weight(weight)
    x = _opposite(2 * ROW_MULTIPLE, weight.shape[1]).to(weight.dtype)
    full = linear(x, weight, None, product.most_rows)
    return all(
        torch.equal(
            linear(x[rows : 2 * rows].clone(), weight, None, product.most_rows, pad_few=False),
            full[rows : 2 * rows],
        )
        for rows in range(1, ROW_MULTIPLE)
    )


def _mirrored(weight: Tensor) -> Tensor:
    """Make a weight whose second half of columns mirrors the first; see the module's docstring."""
    out_features, in_features = weight.shape
    half = _numbers(64, -(-in_features // 2))
    rows = torch.cat((half, half[:, : in_features // 2].flip(1)), dim=1).to(weight.dtype)
    return rows.repeat(-(-out_features // 64), 1)[:out_features].contiguous()


def _ways(weight: Tensor) -> Iterator[tuple[bool, int, Tensor]]:
    """Yield the candidates (packed, most_rows, the weight in that layout), the fastest first."""
    packed, size = pack_weight(weight), weight.numel()
    layouts = [(False, weight)]
    if packed is not weight:
        layouts.insert(1 if size <= _SMALL_WEIGHT else 0, (True, packed))
    limit = MOST_ROWS if size < _LARGE_WEIGHT else MOST_ROWS // 2
    for most_rows in (limit, ROW_MULTIPLE):
        for is_packed, laid_out in layouts:
            yield is_packed, most_rows, laid_out


def product_keeps_bits(
    product: Callable[[Tensor], Tensor], in_features: int, dtype: torch.dtype, most_rows: int
) -> bool:
    """Return whether a row of the product [T, in_features] → [T, N] has the same bits at every
    batch size up to most_rows that is a multiple of ROW_MULTIPLE, and at every place in the
    batch."""
    x = _opposite(most_rows + ROW_MULTIPLE, in_features).to(dtype)
    # The expected bits are those of the smallest batches.
    expected = torch.cat([product(rows) for rows in x.split(ROW_MULTIPLE)])
    # Batches (first row, number of rows): the smallest size from several first rows, and each
    # larger size once.
    shifts = range(1, ROW_MULTIPLE, 2)
    batches = [(shift, ROW_MULTIPLE) for shift in shifts]
    batches += zip(itertools.cycle(shifts), range(2 * ROW_MULTIPLE, most_rows + 1, ROW_MULTIPLE))
    # Cloned, because the rows of a batch begin where an allocation does.
    return all(
        torch.equal(product(x[start : start + rows].clone()), expected[start : start + rows])
        for start, rows in batches
    )


def _opposite(rows: int, columns: int) -> Tensor:
    """Make rows whose second half of columns is the first one reversed, with the opposite sign."""
    half = _numbers(rows, columns // 2)
    middle = half.new_zeros((rows, columns % 2))
    return torch.cat((half, middle, -half.flip(1)), dim=1)


def _numbers(rows: int, columns: int) -> Tensor:
    """Make numbers [rows, columns] float32 in (−0.5, 0.5), without a pattern that would make sums
    exact."""
    number = torch.arange(rows * columns).view(rows, columns) % 65521
    return (number * number * 40503 % 65521).float() / 65521 - 0.5
