"""Reads the rows of a job's data set in order, from files or the hub. `open_dataset` returns a
`RowSource`, the main implementation of `Source`."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from datasets import Dataset, Features
from datasets.features import Json

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.engine.constraint.json_schema.json_text import has_lone_surrogate
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_columns import column_path, feature_at, renamed, value_at
from batchgen.inputs.dataset.dataset_files import LoadedDataset, load_split, quiet
from batchgen.inputs.dataset.feature_types import holds_bytes, is_image, is_plain
from batchgen.inputs.dataset.row_fields import ArrowFields, JsonFields, RowFields
from batchgen.inputs.dataset.row_ids import IdSet, check_unique, duplicate_error
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.dataset.stored_json import stored_field
from batchgen.inputs.tables.json_values import has_json, json_encoder, storage_type
from batchgen.inputs.tables.read_errors import READ_ERRORS, unreadable_table
from batchgen.inputs.tables.table_formats import check_width, reason
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.shorten import some_names

BATCH = 256  # the number of rows that are read at a time
IMAGE_BATCH = 16  # the same for rows with images
FIRST_ROWS = 1000  # the types of an untyped stream are inferred from these


def open_dataset(config: DatasetConfig, images: Collection[str] = ()) -> RowSource:
    """Open the data set that the configuration names, and check all that can be checked without
    reading a whole stream.

    Args:
        images: the columns of images that prompts read. They are not copied to the output; other
            columns of images are not read.

    Raises:
        ConfigError: the data does not exist, cannot be read, lacks the split or a column, has no
            rows, or has an id twice.
    """
    return RowSource(load_split(config), config, images)


class RowSource(Source):
    """The rows of one split, at most `dataset.limit` of them, read in constant memory.

    Data is either map-style, which is memory-mapped and can be read from any row on, or a stream,
    which is read from its start for every call of `rows`. While rows are read, a file that cannot
    be read further raises ConfigError, and a network or a disk that fails JobError.

    Attributes:
        columns: the names of all columns that `Row.fields` has.
        features: the types of the columns, as `datasets` describes them. A stream that has none
            gets those of its first 1000 rows; a later row that does not fit becomes an error row
            (bad_row).
        schema: the Arrow schema of the columns that are copied to the output. A column with JSON
            values of several types is stored as JSON text; one with integers and floats is stored
            as floats, if no float is whole and no integer over 2**53.
        num_rows: the number of rows, None for a stream.
        fingerprint: a text that is equal for equal rows on every machine; for data of the hub it is
            made from its commit.
    """

    num_rows: int | None = None
    fingerprint: str = ""

    def __init__(
        self, loaded: LoadedDataset, config: DatasetConfig, images: Collection[str] = ()
    ) -> None:
        self._config, self._files = config, loaded.files
        self.fingerprint = loaded.fingerprint
        data, json = loaded.data, loaded.json
        features = data.features if json is None else json.features
        self._has_loose_types = features is None
        # Whether a value may fail to fit the type of its column, or hold half of a UTF-16 pair.
        self._checked = self._has_loose_types or (json is not None and json.has_halves)
        if features is None:
            with self._reading("its first rows"):
                features = _features_of(list(data.take(FIRST_ROWS)))
        check_width(len(features), config.shown)
        names = renamed(config.rename or {}, features)
        if config.rename and json is None:
            data = data.rename_columns(dict(config.rename))
        features = Features({names[name]: feature for name, feature in features.items()})
        unread = [
            name
            for name, feature in features.items()
            if not is_plain(feature) and not (name in images and is_image(feature))
        ]
        image_columns = [n for n, f in features.items() if n in images and holds_bytes(f)]
        self._batch_size = IMAGE_BATCH if image_columns else BATCH
        self.columns = tuple(name for name in features if name not in unread)
        self._check_columns(features, unread, image_columns)
        self._id_path = self._find_id({name: features[name] for name in self.columns})
        self._data = data.select_columns(list(self.columns)) if unread else data
        self.features = Features({name: features[name] for name in self.columns})
        # Converts stored rows to the fields of `Row`.
        self._row_fields: RowFields = ArrowFields(self.features)
        stored = self.features.arrow_schema
        if json is not None:
            self._row_fields = JsonFields(json, {new: name for name, new in names.items()})
            stored = pa.schema([field.with_name(names[field.name]) for field in json.schema])
        copied = config.columns
        if copied is None:
            copied = tuple(name for name in self.columns if name not in image_columns)
        self.schema = pa.schema([self._field(stored.field(name)) for name in copied])
        self._copied = tuple(copied)
        self._encoders = {
            field.name: encode
            for field in self.schema
            if (encode := json_encoder(self.features[field.name], field.type)) is not None
        }
        if isinstance(data, Dataset):
            self.num_rows = min(len(data), config.limit or len(data))
        if self.num_rows == 0 or next(self.rows(), None) is None:
            raise ConfigError(f"dataset.path: {config.path} has no rows")
        if self.num_rows is not None and config.id_column is not None:
            check_unique(self._ids, config.id_column)

    def rows(self, start: int = 0) -> Iterator[Row]:
        """Yield the rows from index `start` on. A stream is read from its beginning, and its ids
        are checked as they come: a missing or repeated id raises ConfigError."""
        seen = IdSet() if self.num_rows is None and self._id_path else None
        first = 0 if self.num_rows is None else start
        for index, fields in enumerate(self._fields(first), first):
            row_id = self._id(index, fields)
            if seen is not None and not seen.add(row_id):
                self._check_earlier(index, row_id)
            if index >= start:
                yield Row(index, row_id, fields)

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        """Yield the rows with these indices, in this order, reading only these. Map-style data
        only."""
        assert isinstance(self._data, Dataset)
        data = self._data.select(indices).with_format("arrow")
        next_index = iter(indices)
        with self._reading("its rows"):
            for batch in data.iter(batch_size=self._batch_size):
                for fields in self._row_fields.of_table(batch):
                    index = next(next_index)
                    yield Row(index, self._id(index, fields), fields)

    def passthrough(self, row: Row) -> dict[str, Any]:
        """Return the values of the columns that are copied to the output, by column. Raises
        RequestError (`bad_row`) if a value does not fit its column."""
        values = {name: row.fields.get(name) for name in self._copied}
        for name, encode in self._encoders.items():
            values[name] = encode(values[name])
        if self._checked:
            for field in self.schema:
                try:
                    pa.array([values[field.name]], type=field.type)
                except UnicodeEncodeError:
                    raise RequestError(
                        "bad_row",
                        f"column {field.name!r} has half of a UTF-16 pair (such as \\ud83d), which "
                        "no file can hold: cut texts between characters, or leave the column out "
                        "of dataset.columns",
                    ) from None
                except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
                    raise RequestError(
                        "bad_row", f"column {field.name!r} is not {field.type}: {reason(error)}"
                    ) from None
        return values

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        """Yield the rows before index `stop` as Arrow tables of at most `size` rows. Map-style data
        only."""
        assert isinstance(self._data, Dataset)
        data = self._data.select(range(stop)).with_format("arrow")
        with self._reading("its rows"):
            yield from map(self._row_fields.typed, data.iter(batch_size=size))

    def _field(self, stored: pa.Field) -> pa.Field:
        """Return the output field of a column, given its field in the stored data."""
        name, kind = stored.name, storage_type(stored.type)
        if has_json(self.features[name]):
            return stored_field(name, self.features[name], kind)
        return pa.field(name, kind)

    def _fields(self, start: int) -> Iterator[dict[str, Any]]:
        """Yield the fields of the rows from index `start` on, up to `dataset.limit`."""
        batches, index, limit = self._batches(start), start, self._config.limit
        while limit is None or index < limit:
            with self._reading(f"row {index} or the rows after it"):
                batch = next(batches, None)
            if batch is None:
                return
            yield from batch if limit is None else batch[: limit - index]
            index += len(batch)

    def _batches(self, start: int) -> Iterator[list[dict[str, Any]]]:
        """Yield the fields of rows in batches. A stream ignores `start`."""
        data = self._data
        if self._has_loose_types:  # rows may differ in type, so they do not fit into an Arrow batch
            assert isinstance(self._row_fields, ArrowFields)
            return (self._row_fields.of_rows([row]) for row in data)
        if isinstance(data, Dataset):
            if start >= len(data):
                return iter(())  # `select` refuses to start at the end
            data = data.select(range(start, len(data)))
        return map(
            self._row_fields.of_table, data.with_format("arrow").iter(batch_size=self._batch_size)
        )

    def _ids(self) -> Iterator[str]:
        """Yield the ids of all rows, reading only the id column if possible. Map-style data
        only."""
        assert isinstance(self._data, Dataset)
        data, row_fields = self._data.select(range(self.num_rows or 0)), self._row_fields
        if isinstance(row_fields, ArrowFields):
            column = self._id_path[0]
            data = data.select_columns([column])
            row_fields = ArrowFields(Features({column: self.features[column]}))
        index = 0
        for batch in data.with_format("arrow").iter(batch_size=10 * BATCH):
            for fields in row_fields.of_table(batch):
                yield self._id(index, fields)
                index += 1

    def _id(self, index: int, fields: dict[str, Any]) -> str:
        """Return the id of a row. Raises ConfigError if it is null, or neither a string nor an
        integer."""
        if not self._id_path:
            return str(index)
        value = value_at(fields, self._id_path)
        if value is None:
            raise ConfigError(
                f"dataset.id_column: row {index} has no {self._config.id_column!r}: choose a "
                "column without nulls, or null to number the rows"
            )
        if type(value) not in (str, int):
            raise ConfigError(
                f"dataset.id_column: row {index} holds {value!r:.50} in "
                f"{self._config.id_column!r}: ids must be strings or integers"
            )
        if self._checked and has_lone_surrogate(str(value)):
            raise ConfigError(
                f"dataset.id_column: the id {value!a} of row {index} has half of a UTF-16 pair, "
                "which no file can hold: choose another column, or null to number the rows"
            )
        return str(value)

    def _find_id(self, features: dict[str, Any]) -> tuple[str, ...]:
        """Return the path of the id in a row's fields; empty if rows are numbered. Raises
        ConfigError if there is no such column, or it cannot hold ids."""
        column = self._config.id_column
        if column is None:
            return ()
        path = column_path(column, features)
        if path is None:
            known = some_names(features, column)
            raise ConfigError(f"dataset.id_column: no column {column!r}: choose among {known}")
        feature = feature_at(features, path)
        kind = Features({column: feature}).arrow_schema.field(column).type
        if not (isinstance(feature, Json) or _is_text(kind) or pa.types.is_integer(kind)):
            raise ConfigError(
                f"dataset.id_column: column {column!r} holds {kind}: ids must be strings or "
                "integers"
            )
        return path

    def _check_earlier(self, index: int, row_id: str) -> None:
        """Raise ConfigError if an earlier row has this id. `IdSet` found the same hash, but
        different ids can have the same hash."""
        column = self._config.id_column
        assert column is not None
        for earlier, fields in zip(range(index), self._fields(0), strict=False):
            if self._id(earlier, fields) == row_id:
                raise duplicate_error(column, {row_id: [earlier, index]})

    def _check_columns(
        self, features: Features, unread: Sequence[str], image_columns: Sequence[str]
    ) -> None:
        """Raise ConfigError if a column to copy to the output does not exist, or cannot be copied.

        Args:
            unread: columns that are not read, such as audio.
            image_columns: columns of images that are read.
        """
        known = some_names([name for name in self.columns if name not in image_columns])
        others = [name for name in unread if not is_image(features[name])]
        if self._config.columns is None and others:
            kind = type(features[others[0]]).__name__
            raise ConfigError(
                f"dataset.columns: column {others[0]!r} ({kind}) cannot be "
                f"copied to the output: choose the columns to copy among {known}"
            )
        refused = {*unread, *image_columns}
        for name in self._config.columns or ():
            if name in refused:
                kind = type(features[name]).__name__
                raise ConfigError(
                    f"dataset.columns: column {name!r} ({kind}) cannot be copied to the output: "
                    f"choose among {known}"
                )
            if name not in self.columns:
                near = some_names(self.columns, name)
                raise ConfigError(f"dataset.columns: no column {name!r}: choose among {near}")

    @contextmanager
    def _reading(self, what: str) -> Iterator[None]:
        """Convert errors that occur while reading `what` to ConfigError, or to JobError if running
        the job again may help."""
        try:
            with quiet():
                yield
        except READ_ERRORS as error:
            if self._files:
                raise unreadable_table(error, self._files) from None
            text = f"dataset.path: {self._config.path}: cannot read {what}: {reason(error)}"
            if isinstance(error, OSError):
                raise JobError(f"{text}; run the same command to resume") from None
            raise ConfigError(text) from None


def _features_of(rows: list[dict[str, Any]]) -> Features:
    """Infer the types of columns from rows, which need not all have the same columns."""
    names = dict.fromkeys(name for row in rows for name in row)
    table = pa.table({name: [row.get(name) for row in rows] for name in names})
    return Features.from_arrow_schema(table.schema)


def _is_text(kind: pa.DataType) -> bool:
    return bool(pa.types.is_string(kind) or pa.types.is_large_string(kind))
