"""Converts values of columns to and from Arrow: JSON of several types is stored as text."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import Features

from batchgen.inputs.tables.json_values import json_encoder, storage_type
from batchgen.util.text.row_json import value_reader


class Storing:
    """Writes and reads the values of some columns; `schema` has their types in Arrow."""

    def __init__(self, features: Features) -> None:
        kinds = features.arrow_schema
        self.schema = pa.schema([(name, storage_type(kinds.field(name).type)) for name in features])
        self._encoders = {
            name: encode
            for name, feature in features.items()
            if (encode := json_encoder(feature, self.schema.field(name).type)) is not None
        }
        self._readers = {
            name: read
            for name, described in features.to_dict().items()
            if (read := value_reader(described)) is not None
        }

    def encoded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values as an Arrow table takes them."""
        return {**values, **_applied(self._encoders, values)}

    def decoded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values that an Arrow table gave."""
        return {**values, **_applied(self._readers, values)}

    def table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Rows as a table."""
        return pa.Table.from_pylist([dict(self.encoded(row)) for row in rows], self.schema)

    def value(self, table: pa.Table, row: int) -> Mapping[str, Any]:
        """A row of such a table."""
        return self.decoded(table.slice(row, 1).to_pylist()[0])


def _applied(each: Mapping[str, Callable[[Any], Any]], values: Mapping[str, Any]) -> dict[str, Any]:
    return {name: make(values[name]) for name, make in each.items() if name in values}
