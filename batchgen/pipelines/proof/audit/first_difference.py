"""Finds the first difference between two rows, bit by bit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pyarrow as pa

from batchgen.inputs.dataset.row_digest import array_digest
from batchgen.storage.shards.row_order import ROW_COLUMN
from batchgen.util.shorten import both_ends

_FIRST = "token_ids"
"""The column that is compared first: if tokens differ, the columns that follow from them differ as
well."""
_MOST = 60  # characters that are shown of a value


def first_difference(again: pa.Table, stored: pa.Table, names: Sequence[str]) -> str | None:
    """Describe the first difference between a recomputed row and the stored one, each a table of
    one row. None if all columns with these names are equal to the bit."""
    for name in _ordered(names):
        here, there = (pa.concat_arrays(table[name].chunks) for table in (again, stored))
        if here.type != there.type:
            return f"{name} is {here.type} here, and {there.type} there"
        if array_digest(here) != array_digest(there):
            return _difference_text(name, here, there)
    return None


def _ordered(names: Sequence[str]) -> Iterator[str]:
    """Yield the columns to compare. `row_index` is not one, because recomputed rows are counted
    from 0."""
    if _FIRST in names:
        yield _FIRST
    yield from (name for name in names if name not in (_FIRST, ROW_COLUMN))


def _difference_text(name: str, computed: pa.Array, stored: pa.Array) -> str:
    """Describe the first entry in which two unequal values differ."""
    is_list = pa.types.is_list(computed.type) or pa.types.is_large_list(computed.type)
    if not is_list or not (computed[0].is_valid and stored[0].is_valid):
        return f"{name} is {_short(computed[0])} here, and {_short(stored[0])} there"
    values, others = computed.flatten(), stored.flatten()
    for index in range(min(len(values), len(others))):
        pair = values.slice(index, 1), others.slice(index, 1)
        if array_digest(pair[0]) != array_digest(pair[1]):
            here, there = (_short(part[0]) for part in pair)
            return f"{name}[{index}] is {here} here, and {there} there"
    return f"{name} has {len(values):,} entries here, and {len(others):,} there"


def _short(value: pa.Scalar) -> str:
    return both_ends(repr(value.as_py()), _MOST)
