"""Finds the first difference between two rows, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchgen.inputs.dataset.row_digest import array_digest
from batchgen.storage.shards.row_order import KEYS
from batchgen.util.shorten import both_ends

_FIRST = "token_ids"
"""The column that is compared first: if the tokens differ, everything that follows from them does
too."""
_MOST = 60


def first_difference(again: pa.Table, stored: pa.Table, names: Sequence[str]) -> str | None:
    """Describe the first difference between a row that was computed again and the stored one, each
    a table of one row; None if all columns with these names are equal to the bit."""
    for name in _ordered(names):
        one, other = (pa.concat_arrays(table[name].chunks) for table in (again, stored))
        if one.type != other.type:
            return f"{name} is {one.type} here, and {other.type} there"
        if array_digest(one) != array_digest(other):
            return _difference_text(name, one, other)
    return None


def _ordered(names: Sequence[str]) -> Iterator[str]:
    if _FIRST in names:
        yield _FIRST
    yield from (name for name in names if name not in (_FIRST, KEYS[0]))


def _difference_text(name: str, one: pa.Array, other: pa.Array) -> str:
    """Describe the first entry in which two unequal values differ."""
    is_list = pa.types.is_list(one.type) or pa.types.is_large_list(one.type)
    if not is_list or not (one[0].is_valid and other[0].is_valid):
        return f"{name} is {_short(one[0])} here, and {_short(other[0])} there"
    values, others = one.flatten(), other.flatten()
    for index in range(min(len(values), len(others))):
        pair = values.slice(index, 1), others.slice(index, 1)
        if array_digest(pair[0]) != array_digest(pair[1]):
            here, there = (_short(part[0]) for part in pair)
            return f"{name}[{index}] is {here} here, and {there} there"
    return f"{name} has {len(values):,} entries here, and {len(others):,} there"


def _short(value: pa.Scalar) -> str:
    return both_ends(repr(value.as_py()), _MOST)
