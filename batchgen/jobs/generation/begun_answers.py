"""Records what running rows have generated, so that a job which was stopped continues in the middle
of its answers.

`Generation` calls `BegunAnswers`, which decides which rows to record and when.
`storage/shards/begun_rows.py` stores the records.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Hashable, Iterator

from batchgen.engine.interface.outputs import Begun
from batchgen.inputs.model.job_engine import Engine
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.storage.shards.begun_rows import BegunRow
from batchgen.storage.shards.output_writer import OutputWriter
from batchgen.util.errors import FolderLost, JobError
from batchgen.util.request_id import RequestId

STOP_SECONDS = 5.0
"""Seconds that recording may take when a job is stopped. Rows that are not recorded in this time
continue from their last record."""
_SHARE = 0.01
"""The share of the running time that writing records may take."""
_BATCH_BYTES = 4 * 2**20  # the size of records that are written at once


class BegunAnswers:
    """Records the running rows of a worker at intervals and at a stop, and finds the records of
    rows when they begin.

    Recording takes `_SHARE` of the running time at most, and `STOP_SECONDS` at a stop. The rows
    with the most unrecorded tokens are recorded first; rows for which there is no time are not
    recorded.
    """

    def __init__(self, engine: Engine, writer: OutputWriter, keys: RowKeys, every: float) -> None:
        """Prepare to record rows every `every` seconds, or never if `every` is 0."""
        self._engine, self._writer, self._keys, self._every = engine, writer, keys, every
        self._last = time.monotonic()
        self._recorded_here: dict[Hashable, int] = {}  # request → tokens that this worker recorded
        self._recorded: dict[Hashable, int] = {}  # request → tokens that any worker recorded

    def find(self, request_id: RequestId, request: RowRequest) -> Begun | None:
        """The record of a request that begins; None if there is no record, or if the record's
        request differs from this one."""
        if not self._every:
            return None
        row, sample = request_id.row, request_id.sample
        begun = self._writer.begun(row, sample, lambda: self._keys.key(request))
        if begun is not None:
            self._recorded[request_id] = len(begun.token_ids)
        return begun

    def forget(self, request_id: Hashable) -> None:
        """Note that a request has ended, so that it is recorded no more."""
        self._recorded_here.pop(request_id, None)
        self._recorded.pop(request_id, None)

    def due(self) -> bool:
        """Whether it is time to record rows."""
        return bool(self._every) and time.monotonic() - self._last >= self._every

    def save(
        self, request_of: Callable[[RequestId], RowRequest], seconds: float | None = None
    ) -> int:
        """Record the tokens that requests in the engine have generated since their last records.

        Args:
            request_of: returns the request of an id.
            seconds: the time that recording may take; None allows `_SHARE` of the time.

        Returns:
            The number of running requests that have a record.
        """
        if not self._every:
            return 0
        self._last = time.monotonic()
        ends = self._last + (self._every * _SHARE if seconds is None else seconds)
        lengths = self._engine.begun_lengths()
        new_tokens = {id: length - self._recorded.get(id, 0) for id, length in lengths.items()}
        # The last ones, which are taken first, have the most tokens.
        todo = sorted((id for id, new in new_tokens.items() if new > 0), key=new_tokens.__getitem__)
        try:
            while todo:
                self._writer.write_begun(list(self._batch(todo, request_of)))
                if time.monotonic() >= ends:
                    break
        except FolderLost:
            raise
        except JobError as error:
            # A torn record at the end of the file would hide any record after it.
            self._every = 0.0
            print(
                f"batchgen: warning: unfinished answers are no longer recorded ({error}): after "
                "a stop they start again",
                file=sys.stderr,
            )
        return len(self._recorded)

    def _batch(
        self, todo: list[RequestId], request_of: Callable[[RequestId], RowRequest]
    ) -> Iterator[BegunRow]:
        """Take requests from the end of `todo` and yield their records, until these have about
        `_BATCH_BYTES`."""
        size = 0
        while todo and size < _BATCH_BYTES:
            request_id = todo.pop()
            start = self._recorded_here.get(request_id, 0)
            if (begun := self._engine.begun(request_id, start)) is None:
                continue
            self._recorded_here[request_id] = self._recorded[request_id] = start + len(
                begun.token_ids
            )
            size += 4 * len(begun.token_ids) + sum(v.nbytes for v in begun.columns.values())
            key = self._keys.key(request_of(request_id))
            yield BegunRow(request_id.row, request_id.sample, key, start, begun)
