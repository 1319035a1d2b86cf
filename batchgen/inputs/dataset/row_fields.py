"""Converts rows from stored Arrow tables to the fields that prompt templates and row steps see.
`RowSource` uses this.

Files of JSON lines are stored as one JSON text for each row (`JsonFields`), all other data as Arrow
columns (`ArrowFields`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import pyarrow as pa
from datasets import Features

from batchgen.inputs.tables.json_tables import ROW_TEXT, JsonColumns, parse_rows
from batchgen.inputs.tables.json_values import has_json
from batchgen.util.text.row_json import value_reader


class RowFields(Protocol):
    """The interface of a storage format of rows.

    Attributes:
        columns: the stored columns that the fields are read from.
    """

    @property
    def columns(self) -> Sequence[str]: ...

    def of_table(self, table: pa.Table) -> list[dict[str, Any]]:
        """Return the fields of each row of a table of the stored `columns`."""
        ...

    def typed(self, table: pa.Table) -> pa.Table:
        """Convert a table of the stored `columns` into one of the columns that users see."""
        ...


class ArrowFields:
    """Reads rows that are stored in Arrow columns.

    JSON text is parsed. Null fields of structs are left out, because in Arrow each struct of a
    column has the fields of all structs of the column.
    """

    def __init__(self, features: Features) -> None:
        self.columns = list(features)
        self._readers = {
            name: read
            for name, described in features.to_dict().items()
            if (read := value_reader(described)) is not None
        }
        self._json = {name for name, feature in features.items() if has_json(feature)}

    def of_table(self, table: pa.Table) -> list[dict[str, Any]]:
        """See `RowFields`."""
        readers = {
            name: read
            for name, read in self._readers.items()
            if name in self._json or any(map(_has_padding, table[name].chunks))
        }
        return _read(table.to_pylist(), readers)

    def of_rows(self, rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return the fields of rows that are already Python values."""
        return _read(rows, self._readers)

    def typed(self, table: pa.Table) -> pa.Table:
        """See `RowFields`."""
        return table


class JsonFields:
    """Reads rows that are stored as one JSON text each."""

    columns = (ROW_TEXT,)

    def __init__(self, columns: JsonColumns, names: Mapping[str, str]) -> None:
        """Create the reader.

        Args:
            columns: the columns in the files, with their types.
            names: maps the name of each column that users see to its name in the files.
        """
        self._json, self._names = columns, names
        # The columns of a row that needs no change; None if columns were renamed.
        self._same = tuple(names) if list(names) == list(names.values()) else None

    def of_table(self, table: pa.Table) -> list[dict[str, Any]]:
        """See `RowFields`."""
        same, names = self._same, self._names.items()
        return [
            row if tuple(row) == same else {new: row.get(name) for new, name in names}
            for row in parse_rows(table[ROW_TEXT].to_pylist())
        ]

    def typed(self, table: pa.Table) -> pa.Table:
        """See `RowFields`."""
        return self._json.table(table[ROW_TEXT].to_pylist()).rename_columns(list(self._names))


def _read(
    rows: list[dict[str, Any]], readers: Mapping[str, Callable[[Any], Any]]
) -> list[dict[str, Any]]:
    """Apply each column's reader to the fields of all rows, in place."""
    for fields in rows if readers else ():
        fields |= {name: read(fields[name]) for name, read in readers.items() if name in fields}
    return rows


def _has_padding(array: pa.Array) -> bool:
    """Whether some struct in an array may have a null field only because other structs have that
    field. This is decided by counting nulls."""
    kind = array.type
    if pa.types.is_struct(kind):
        parts = array.flatten()  # null where the struct is
        return any(part.null_count > array.null_count or _has_padding(part) for part in parts)
    if pa.types.is_nested(kind) and not pa.types.is_map(kind):
        return _has_padding(array.flatten())
    return False
