"""The row step `Join` adds columns of another table to the rows with the same key."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from batchgen.inputs.steps.side_table import ROW_ID, SideTable, of_table
from batchgen.inputs.steps.table_step import BadRow, Dropped, Pass, StepRow, TableStep, Taken, Tools
from batchgen.inputs.steps.values import (
    columns_of,
    digest,
    feature_of,
    field_of,
    key_text,
    value_repr,
)
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa
    from datasets import Features


_BATCH = 1000
"""Rows of the other table that are read at a time."""
_MOST_NAMED = 3
"""The maximum number of repeated keys in an error."""


_KINDS = {
    "string": "text",
    "large_string": "text",
    "int": "whole numbers",
    "uint": "whole numbers",
    "float": "fractions",
    "binary": "bytes",
    "large_binary": "bytes",
    "date": "dates",
    "timestamp": "times",
    "time": "times of day",
    "duration": "durations",
}
"""What columns hold, by the beginnings of their types. Other types are equal only to themselves."""


@dataclass(frozen=True, kw_only=True)
class Join(TableStep):
    """Adds columns from another table. The values for a row are those of the table's row with the
    same key.

    The keys of the other table and these columns are held in memory.

    Attributes:
        path: the other table: files, a job's folder or the name of a data set on the hub.
        on: the key: the column, or a list of columns, that both have; `{ours: theirs}` where the
            names differ. `row_id` is the row's id if there is no column of this name. The other
            table may have each key only once.
            In a job's folder, `row_id` is the id of the row that was answered, and `answer_id` that
            of the answer, such as q17#3: `{row_id: answer_id}` joins the answers of two jobs.
        columns: the columns to add; `{theirs: ours}` for other names.
        missing: what happens if the other table has no row with the key. `error` makes an error
            row, `null` sets the new columns to null, `drop` takes the row out.
        name: the configuration of the other data set, if it has several.
        split: the split of the other data set, if it has several.
    """

    stable = True

    path: str
    on: Mapping[str, str] | tuple[str, ...]
    columns: Mapping[str, str] | tuple[str, ...]
    missing: Literal["error", "null", "drop"] = "error"
    name: str | None = None
    split: str | None = None

    def __post_init__(self) -> None:
        for key in ("on", "columns"):
            columns = getattr(self, key)
            if not isinstance(columns, Mapping):
                columns = {name: name for name in columns_of(columns)}
                object.__setattr__(self, key, columns)
            if not columns or len(set(columns.values())) != len(columns):
                raise ConfigError(f"{key} must be a column or several different ones")
        if self.missing not in ("error", "null", "drop"):
            raise ConfigError(f"missing must be error, null or drop, got {self.missing!r}")

    @property
    def _on(self) -> Mapping[str, str]:
        assert isinstance(self.on, Mapping)
        return self.on

    @property
    def _columns(self) -> Mapping[str, str]:
        assert isinstance(self.columns, Mapping)
        return self.columns

    @property
    def field_names(self) -> Sequence[str]:
        """The columns that a row must have."""
        return tuple(name for name in self._on if name != ROW_ID)

    def fingerprints(self) -> Mapping[str, str]:
        """Return a digest of the other table."""
        return {"path": self._table.fingerprint}

    def made(self, features: Features) -> Features:
        """Return the columns of the other table. Raises ConfigError for keys of different types,
        which are never equal."""
        from datasets import Features

        their_features = self._table.features(self._needed)
        for ours, theirs in self._on.items():
            is_id = ours == ROW_ID and ours not in features
            own_kind = "text" if is_id else _kind(feature_of(features, ours))
            kinds = own_kind, _kind(feature_of(their_features, theirs))
            if None not in kinds and kinds[0] != kinds[1]:
                raise ConfigError(
                    f"on: column {ours!r} holds {kinds[0]}, and {theirs!r} of {self.path} holds "
                    f"{kinds[1]}, so they are never equal: write both with one type"
                )
        return Features(
            {ours: feature_of(their_features, name) for name, ours in self._columns.items()}
        )

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row."""
        return _Join(self, tools)

    @cached_property
    def _table(self) -> SideTable:
        return SideTable(self.path, self.name, self.split)

    def rows(self) -> Iterator[Mapping[str, Any]]:
        """Yield the rows of the other table."""
        return self._table.rows(self._needed)

    @property
    def _needed(self) -> Sequence[str]:
        """The columns of the other table that are read."""
        return (*self._on.values(), *self._columns)


class _Join:
    """A pass of `Join`. It holds the other table's columns, and digests of its keys in ascending
    order: `_highs` and `_lows` are the two halves of each, [N] uint64, and `_order` the number of
    its row in the table."""

    full = False

    def __init__(self, step: Join, tools: Tools) -> None:
        self._step, self._names = step, tuple(step._on)
        # Whether the key `row_id` means the row's id, not a column of this name.
        self._uses_row_id = ROW_ID in step._on and ROW_ID not in tools.features
        from batchgen.inputs.steps.stored_values import Storing  # it loads datasets

        self._storing = Storing(step.made(tools.features))
        theirs = tuple(step._on.values())
        keys, tables = bytearray(), []
        rows = step.rows()
        while read := list(islice(rows, _BATCH)):
            batch = [fields for fields in read if _has(fields, theirs)]
            keys += b"".join(digest(key_text(fields, theirs)) for fields in batch)
            with of_table(step.path):
                tables.append(self._storing.table(list(map(self._values, batch))))
        # A digest has two numbers of 64 bits.
        self._highs = np.frombuffer(bytes(keys), np.uint64)[::2]
        self._lows = np.frombuffer(bytes(keys), np.uint64)[1::2]
        self._order = np.lexsort((self._lows, self._highs))
        self._highs, self._lows = self._highs[self._order], self._lows[self._order]
        self._refuse_repeated()
        self._table = _joined(tables)
        self._missing = dict.fromkeys(step._columns.values())

    def _values(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        return {ours: field_of(fields, name) for name, ours in self._step._columns.items()}

    def _refuse_repeated(self) -> None:
        """Raise ConfigError if the other table has a key twice."""
        same = (self._highs[1:] == self._highs[:-1]) & (self._lows[1:] == self._lows[:-1])
        if not same.any():
            return
        step, theirs = self._step, tuple(self._step._on.values())
        at = np.flatnonzero(same)
        wanted = {(int(self._highs[i]), int(self._lows[i])) for i in at[:_MOST_NAMED]}
        named = dict[str, None]()
        for fields in step.rows():
            if _has(fields, theirs) and _numbers(digest(key_text(fields, theirs))) in wanted:
                named[", ".join(value_repr(field_of(fields, name)) for name in theirs)] = None
        more = f" and {len(at) - len(wanted):,} more" if len(at) > len(wanted) else ""
        raise ConfigError(
            f"on: {step.path} has several rows with the same {' and '.join(theirs)} "
            f"({'; '.join(named)}{more}): a row must have one partner; join on more columns"
        )

    def take(self, row: StepRow) -> Taken:
        fields = {**row.fields, ROW_ID: row.id} if self._uses_row_id else row.fields
        high, low = _numbers(digest(key_text(fields, self._names)))
        at = int(np.searchsorted(self._highs, np.uint64(high)))
        while at < len(self._highs) and self._highs[at] == high:
            if self._lows[at] == low:
                return [self._storing.value(self._table, int(self._order[at]))]
            at += 1
        if self._step.missing == "null":
            return [self._missing]
        key = ", ".join(value_repr(field_of(fields, name)) for name in self._names)
        if self._step.missing == "drop":
            return Dropped(f"no {key} in {self._step.path}")
        raise BadRow(
            f"{self._step.path} has no row with {key} in {', '.join(self._step._on.values())}"
        )

    def close(self) -> None:
        pass


def _numbers(data: bytes) -> tuple[int, int]:
    """Return the two halves of a digest as integers."""
    return int.from_bytes(data[:8], "little"), int.from_bytes(data[8:], "little")


def _has(fields: Mapping[str, Any], names: Sequence[str]) -> bool:
    """Return whether a row has a value in all these columns. A row with a null in its key has no
    partner."""
    return all(field_of(fields, name) is not None for name in names)


def _joined(tables: Sequence[pa.Table]) -> pa.Table:
    import pyarrow as pa

    return pa.concat_tables(tables).combine_chunks()


def _kind(feature: Any) -> str | None:
    """Return what a column holds, the same for types whose values can be equal; None for JSON,
    lists, structs and nulls."""
    dtype = getattr(feature, "dtype", None)
    if not isinstance(dtype, str) or dtype == "null":
        return None
    kind = next((kind for start, kind in _KINDS.items() if dtype.startswith(start)), dtype)
    zone = dtype.partition("tz=")[2].rstrip("]")
    return f"{kind} in {zone}" if zone else kind
