"""The columns of rows that are made of answers of other jobs. `JobSource` uses `AnswerColumns`."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
from datasets import Features
from datasets.features import List

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.evals.grades.visible_columns import GRADES
from batchgen.inputs.dataset.stored_json import stored_feature
from batchgen.inputs.upstream.chosen_answers import Ints
from batchgen.inputs.upstream.job_columns import SOURCE, SOURCE_FIELD, JobColumns
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

ROW_ID = " id"
"""The column with the id of the row in the reading job. Its space avoids a clash with other
columns."""
_TEXT_MEANING = "the text of the answer of another job that the row was made from"


class AnswerColumns:
    """Converts columns of the jobs to columns of rows. If a row is made of one answer, they stay as
    they are. With `dataset.rows=rows` they become lists with an item per sample, except the columns
    that all samples of a row share."""

    def __init__(self, columns: JobColumns, config: DatasetConfig) -> None:
        self._columns, self._config = columns, config
        self._lists = config.rows == "rows"

    def copied(self) -> pa.Schema:
        """Return the columns that are copied to the output. Raises ConfigError if one is unknown or
        has a reserved name."""
        known, config = self._columns, self._config
        names = list(known.passthrough)
        if config.text_as is not None:
            names.append(config.text_as)
        for name in config.columns or ():
            if name not in known.seen.names:
                near = some_names(known.seen.names, name)
                raise ConfigError(f"dataset.columns: no column {name!r}: choose among {near}")
        names = names if config.columns is None else list(config.columns)
        if SOURCE in names:
            raise ConfigError(
                f"dataset: the column {SOURCE!r} has the name of the column that says which "
                f"answer a row was made from: rename it with 'dataset.rename={{{SOURCE}: NAME}}'"
            )
        return pa.schema([*map(self._field, names), SOURCE_FIELD])

    def _field(self, name: str) -> pa.Field:
        """Return a column as it is copied, with only those metadata that describe its content."""
        if name == GRADES and self._columns.grades:
            fields = [(grade, self._type(grade, f)) for grade, f in self._columns.grades.items()]
            return pa.field(name, pa.struct(fields), metadata={"meaning": "the grades there"})
        known = self._columns.flat[name]
        if name == self._columns.text:
            return pa.field(name, self._type(name, known), metadata={"meaning": _TEXT_MEANING})
        stored_metadata = known.metadata or {}
        metadata = {
            key: stored_metadata[key] for key in (b"meaning", b"feature") if key in stored_metadata
        }
        return pa.field(name, self._type(name, known), metadata=metadata)

    def _type(self, name: str, field: pa.Field) -> pa.DataType:
        """Return the Arrow type of a column."""
        is_list = self._lists and name not in self._columns.passthrough
        return pa.list_(field.type) if is_list else field.type

    def features(self) -> Features:
        """Return the types of all visible columns, as datasets describes them."""
        known = self._columns

        def feature(name: str, of: pa.Field) -> Any:
            features = stored_feature(of)
            return List(features) if self._lists and name not in known.passthrough else features

        features = {name: feature(name, of) for name, of in known.flat.items()}
        if known.grades:
            features[GRADES] = {name: feature(name, of) for name, of in known.grades.items()}
        return Features(features)

    def in_lists(self, table: pa.Table, sizes: Ints) -> pa.Table:
        """Return rows as a table with lists.

        Args:
            table: a row per answer.
            sizes: [R] the number of answers of each row. Columns that the answers of a row share
                keep one value per row.
        """
        bounds = np.concatenate([[0], np.cumsum(sizes)])  # [R + 1], where rows begin and end
        first_answers, offsets = pa.array(bounds[:-1]), pa.array(bounds, pa.int32())
        shared = {*self._columns.passthrough, ROW_ID, "row_id"}
        lists = {}
        for name in table.column_names:
            column = table[name].combine_chunks()
            if isinstance(column, pa.ChunkedArray):
                column = pa.concat_arrays(column.chunks)
            if name in shared:
                lists[name] = column.take(first_answers)
            elif name == GRADES and self._columns.grades:
                names = [f.name for f in column.type]
                inner = [pa.ListArray.from_arrays(offsets, c) for c in column.flatten()]
                lists[name] = pa.StructArray.from_arrays(inner, names)
            else:
                lists[name] = pa.ListArray.from_arrays(offsets, column)
        return pa.table(lists)
