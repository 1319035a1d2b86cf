"""Values of columns as Arrow keeps them: JSON of several types is text there."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import Features

from batchgen.dataset.feature_types import has_json, storage_type


class Storing:
    """Writes and reads the values of some columns; `schema` has their types in Arrow."""

    def __init__(self, features: Features) -> None:
        self._json = Features({n: f for n, f in features.items() if has_json(f)})
        kinds = features.arrow_schema
        self.schema = pa.schema([(name, storage_type(kinds.field(name).type)) for name in features])

    def encoded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values as an Arrow table takes them."""
        if not self._json:
            return values
        json = {name: values[name] for name in self._json if values.get(name) is not None}
        encoded = Features({name: self._json[name] for name in json}).encode_example(json)
        return {**values, **encoded}

    def decoded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Values that an Arrow table gave."""
        if not self._json:
            return values
        json = {name: values[name] for name in self._json if values.get(name) is not None}
        decoded = Features({name: self._json[name] for name in json}).decode_example(json)
        return {**values, **decoded}

    def table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Rows as a table."""
        return pa.Table.from_pylist([dict(self.encoded(row)) for row in rows], self.schema)

    def value(self, table: pa.Table, row: int) -> Mapping[str, Any]:
        """A row of such a table."""
        return self.decoded(table.slice(row, 1).to_pylist()[0])
