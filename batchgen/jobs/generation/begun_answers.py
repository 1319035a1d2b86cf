"""Records what running rows have generated, so that a stopped job continues them where they were.

`storage/shards/begun_rows.py` keeps the records; this module decides when to write them and which.
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
"""Seconds that a stop may take to record rows. The others continue from their last record."""
_SHARE = 0.01
"""The share of the running time that writing records may take."""
_BATCH_BYTES = 4 * 2**20


class BegunAnswers:
    """Records the running rows of a worker, at intervals and at a stop, and finds records of rows
    that it begins.

    Records take `_SHARE` of the time at most, and those of a stop `STOP_SECONDS`. Rows with the
    most unrecorded tokens come first; what does not fit into the time is left out.
    """

    def __init__(self, engine: Engine, writer: OutputWriter, keys: RowKeys, every: float) -> None:
        """Begin with no records. There will be one every `every` seconds, or none if it is 0."""
        self._engine, self._writer, self._keys, self._every = engine, writer, keys, every
        self._last = time.monotonic()
        self._own: dict[Hashable, int] = {}  # tokens in records of this worker
        self._known: dict[Hashable, int] = {}  # tokens in any record

    def find(self, request_id: RequestId, request: RowRequest) -> Begun | None:
        """The record of a request that begins; None if there is none, or only one of a different
        request."""
        if not self._every:
            return None
        row, sample = request_id.row, request_id.sample
        begun = self._writer.begun(row, sample, lambda: self._keys.key(request))
        if begun is not None:
            self._known[request_id] = len(begun.token_ids)
        return begun

    def forget(self, request_id: Hashable) -> None:
        """Note that a request has ended."""
        self._own.pop(request_id, None)
        self._known.pop(request_id, None)

    def due(self) -> bool:
        """Whether it is time for a record."""
        return bool(self._every) and time.monotonic() - self._last >= self._every

    def save(
        self, request_of: Callable[[RequestId], RowRequest], seconds: float | None = None
    ) -> int:
        """Record what the requests in the engine have generated since their last records, within a
        number of seconds, or `_SHARE` of the time. `request_of` returns the request of an id.
        Returns the number of requests that have records then."""
        if not self._every:
            return 0
        self._last = time.monotonic()
        ends = self._last + (self._every * _SHARE if seconds is None else seconds)
        lengths = self._engine.begun_lengths()
        new = {one: length - self._known.get(one, 0) for one, length in lengths.items()}
        todo = sorted((one for one, tokens in new.items() if tokens > 0), key=new.__getitem__)
        try:
            while todo:
                self._writer.write_begun(list(self._batch(todo, request_of)))
                if time.monotonic() >= ends:
                    break
        except FolderLost:
            raise
        except JobError as error:
            # A torn end of a file would hide what came behind it.
            self._every = 0.0
            print(
                f"batchgen: warning: unfinished answers are no longer recorded ({error}): after "
                "a stop they start again",
                file=sys.stderr,
            )
        return len(self._known)

    def _batch(
        self, todo: list[RequestId], request_of: Callable[[RequestId], RowRequest]
    ) -> Iterator[BegunRow]:
        """The records of the last requests, which are taken out; about `_BATCH_BYTES`."""
        size = 0
        while todo and size < _BATCH_BYTES:
            request_id = todo.pop()
            start = self._own.get(request_id, 0)
            if (begun := self._engine.begun(request_id, start)) is None:
                continue
            self._own[request_id] = self._known[request_id] = start + len(begun.token_ids)
            size += 4 * len(begun.token_ids) + sum(v.nbytes for v in begun.columns.values())
            key = self._keys.key(request_of(request_id))
            yield BegunRow(request_id.row, request_id.sample, key, start, begun)
