"""Reads single rows of an older job, in the form in which the engine would return them.
`row_reuse.py` copies them into a new job."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batchgen.config.groups.job_config import PARSED
from batchgen.engine.interface.outputs import OutputColumn, RequestOutput
from batchgen.engine.interface.trajectory import answer_ids
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.reuse.key_index import RowLocation
from batchgen.jobs.reuse.key_log import tokens_crc
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.folder.read_shard import BATCH
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES
from batchgen.storage.shards.enough import ENOUGH_COLUMNS
from batchgen.storage.shards.output_fields import (
    ANSWER_TOKEN_IDS,
    PROMPT_TOKEN_IDS,
    REPLAY_EXACT,
    SATISFIED,
    TEXT,
)
from batchgen.storage.shards.output_schema import OutputSchema, SplitOutput
from batchgen.storage.shards.row_order import row_keys
from batchgen.util.request_id import RequestId

_OPEN_SHARDS, _KEPT_BATCHES = 4, 4
"""The maximum number of shards in memory, and of batches of each."""
_BACK = 64
"""The number of earlier rows that are read together with a row, if rows are asked for backwards."""
_NOT_COPIED = {
    *("row_id", "row_index", "sample_index", "error", "num_prompt_tokens", "num_generated_tokens"),
    *(PROMPT_TOKEN_IDS, PROMPT_IMAGES, ANSWER_TOKEN_IDS, PARSED),
    *(name for name, *_ in ENOUGH_COLUMNS),
}
"""Columns that are computed from the request, from other columns, or from the row's other
samples."""


class OlderRows:
    """The rows of one older job."""

    def __init__(self, reader: JobFolderReader, schema: OutputSchema) -> None:
        """Read rows of a folder for a job with this `schema`."""
        self._reader, self._schema = reader, schema
        self._text = reader.text_column
        self._names = _read_names(schema, self._text)
        self._shards: OrderedDict[int, _ShardRows] = OrderedDict()

    def lacking(self) -> str | None:
        """The name of a column that the new job needs and the folder does not have with the same
        type; None if the folder has all columns."""
        older, new = self._reader.schema, self._schema
        if older is None:
            return None
        for name in self._names:
            new_name = new.text_column if name == self._text else name
            if name not in older.names or older.field(name).type != new.arrow.field(new_name).type:
                return new_name
        return None

    def output(
        self, location: RowLocation, request_id: RequestId, request: RowRequest
    ) -> SplitOutput | None:
        """The row at a location, as the output of a request.

        Returns:
            None if the row is not there, or if its tokens are not those that the location was
            recorded for.

        Raises:
            JobError: the file is damaged.
        """
        shard = self._shards.pop(location.shard, None)
        if shard is None:
            shard = _ShardRows(self._reader, location.shard, self._names)
        self._shards[location.shard] = shard
        if len(self._shards) > _OPEN_SHARDS:
            self._shards.popitem(last=False)
        row = shard.row(location.row_index, location.sample_index)
        if row is None:
            return None
        ids, reason = row["token_ids"][0].as_py(), row["finish_reason"][0].as_py()
        if reason == "error" or tokens_crc(ids, reason) != location.tokens:
            return None
        schema, names = self._schema, row.schema.names
        text = row[self._text][0].as_py()
        output = RequestOutput(
            request_id=request_id,
            prompt_token_ids=request.prompt,
            token_ids=ids,
            text=text or "",
            finish_reason=reason,
            stop=row["stop"][0].as_py(),
            columns={column.name: _values(row, column) for column in schema.columns},
            counts={name: row[name][0].as_py() for name in schema.counts},
            constraint_satisfied=row[SATISFIED][0].as_py() if SATISFIED in names else None,
            replay_exact=row[REPLAY_EXACT][0].as_py() if REPLAY_EXACT in names else None,
            answer_token_ids=None if request.answer is None else answer_ids(request.answer),
        )
        extras = {name: row[name][0].as_py() for name in schema.extra}
        return SplitOutput(output, extras | ({TEXT: None} if text is None else {}))


def _read_names(schema: OutputSchema, text_column: str) -> list[str]:
    """The columns of an older job that are copied; the column of the text under the older job's
    name."""
    unread = _NOT_COPIED | set(schema.passthrough)
    names = [name for name in schema.arrow.names if name not in unread]
    return [text_column if name == schema.text_column else name for name in names]


class _ShardRows:
    """Reads single rows of a shard; fast if rows are asked for in order, or backwards."""

    def __init__(self, reader: JobFolderReader, number: int, names: Sequence[str]) -> None:
        self._reader, self._number = reader, number
        self._names = ["row_index", "sample_index", *names]
        self._kept: deque[tuple[npt.NDArray[np.int64], pa.RecordBatch]] = deque(
            maxlen=_KEPT_BATCHES
        )
        self._rest: Iterator[pa.RecordBatch] = iter(())
        self._next = -1  # the least key of the rows that `_rest` still yields

    def row(self, row_index: int, sample: int) -> pa.RecordBatch | None:
        """One row; None if it is not there."""
        key = (row_index << 31) | sample  # as `row_keys` computes it
        if (row := self._kept_row(key)) is not None:
            return row
        if not 0 <= self._next <= key:  # nothing was read yet, or the row is behind
            first = max(0, row_index - _BACK) if key < self._next else row_index
            shard = self._reader.shard(self._number)
            self._rest = shard.batches(self._names, first, BATCH)
            self._kept.clear()
            self._next = first << 31
        while self._next <= key and (batch := next(self._rest, None)) is not None:
            if batch.num_rows:
                keys = row_keys(batch)
                self._kept.append((keys, batch))
                self._next = int(keys[-1]) + 1
        return self._kept_row(key)

    def _kept_row(self, key: int) -> pa.RecordBatch | None:
        for keys, batch in self._kept:
            at = int(np.searchsorted(keys, key))
            if at < len(keys) and keys[at] == key:
                return batch.slice(at, 1)
        return None


def _values(row: pa.RecordBatch, column: OutputColumn) -> npt.NDArray[Any]:
    """[N, *tail] The values of a row in a column with a value per token."""
    values = row[column.name][0].values
    while pa.types.is_fixed_size_list(values.type):
        values = values.flatten()
    flat = values.to_numpy(zero_copy_only=False)
    return np.asarray(flat, column.dtype).reshape(-1, *column.tail_shape)
