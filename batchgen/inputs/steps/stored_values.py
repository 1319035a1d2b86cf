"""Converts values of columns to and from Arrow. JSON of mixed types is stored as text: in a column
with the values 1 and "a" these are stored as `1` and `"a"`. The row index and `Join` use
`Storing`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pyarrow as pa
from datasets import Features

from batchgen.inputs.tables.json_values import json_encoder, storage_type
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.text.row_json import value_reader


class Storing:
    """Writes and reads the values of some columns.

    Attributes:
        schema: the Arrow types of the stored values.
    """

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
        """Return values in the form that an Arrow table stores."""
        return {**values, **_applied(self._encoders, values)}

    def decoded(self, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return values from the form that an Arrow table stores."""
        return {**values, **_applied(self._readers, values)}

    def table(self, rows: Sequence[Mapping[str, Any]]) -> pa.Table:
        """Return rows as an Arrow table. Raises ConfigError for a text that Arrow cannot store."""
        try:
            return pa.Table.from_pylist([dict(self.encoded(row)) for row in rows], self.schema)
        except UnicodeEncodeError:
            raise ConfigError(
                f"a text in {some_names(self.schema.names)} has half of a UTF-16 pair (such as "
                "\\ud83d), which no file can hold: cut texts between characters"
            ) from None

    def value(self, table: pa.Table, row: int) -> Mapping[str, Any]:
        """Return row `row` of a table that `table` has made."""
        return self.decoded(table.slice(row, 1).to_pylist()[0])


def _applied(
    functions: Mapping[str, Callable[[Any], Any]], values: Mapping[str, Any]
) -> dict[str, Any]:
    """Apply each function to the value of its column, where there is one."""
    return {name: convert(values[name]) for name, convert in functions.items() if name in values}
