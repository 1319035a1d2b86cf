"""Makes the row index of a job, which says for each row of the job from which row of the data set
it was made.

A job needs an index if its row steps (`rows`) drop, split or add rows. The data set is read in
*stretches*, runs of consecutive rows: if it grows while the job runs, each further stretch adds
files to the index. `chain.py` runs the steps, and `index_files.py` defines the format of the files.
`IndexedSource` uses `IndexGrowth`.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.row_index.chain import Chain, ChainPass, IndexRow
from batchgen.inputs.row_index.index_files import DROPPED, GROUP, PART_ROWS, IndexFolder
from batchgen.storage.folder.row_funnel import IndexFacts, IndexPart
from batchgen.util.errors import JobError

_SHOWN_SECONDS = 10.0
"""The minimum time between two progress messages."""


@dataclass
class _Making:
    """The state of a pass through the rows of a stretch.

    Attributes:
        running: the pass of the steps, which also holds the dropped rows that are not written yet.
        rows: the rows of the data set that are left.
        read: the rows of the data set up to and including the last one that was taken.
        total: the rows of the data set up to the stretch's end.
        pending: rows of the job that are not written yet.
        is_over: whether no row is left.
        error_rows: how many rows that were written are error rows.
        reported_at: the time of the last progress message, in seconds.
    """

    chain: Chain
    running: ChainPass
    folder: IndexFolder
    rows: Iterator[Row]
    read: int
    total: int
    pending: list[IndexRow] = field(default_factory=list)
    is_over: bool = False
    error_rows: int = 0
    reported_at: float = field(default_factory=time.monotonic)

    def advance(self) -> None:
        """Take rows until there is a group to write, or no row is left."""
        running = self.running
        while len(self.pending) < GROUP and len(running.dropped) < GROUP:
            row = None if running.full else next(self.rows, None)
            if row is None:
                self.is_over = True
                return
            self.read = row.index + 1
            self.pending += running.take(row)
            self.tell()

    def tell(self) -> None:
        """Print a progress message if the last one was long enough ago."""
        # The clock is read at every 256th row only.
        if not self.read % 256 and (now := time.monotonic()) - self.reported_at > _SHOWN_SECONDS:
            self.reported_at = now
            print(f"batchgen: steps of rows: {self.read:,} of {self.total:,} rows", file=sys.stderr)


class IndexGrowth:
    """Extends an index, stretch by stretch, in new files.

    So the files are the same whichever process makes them, and two processes may make them at the
    same time. Memory does not grow with the rows, except for what steps remember.

    Attributes:
        facts: the summary of the index, which the caller should write to rows.json.
    """

    def __init__(
        self, chain: Chain, source: Source, tokenizer: Any, folder: IndexFolder, facts: IndexFacts
    ) -> None:
        """Continue the index that `facts` describes. Steps that remember rows are run again on the
        rows that the index covers."""
        self._chain, self._source, self._folder = chain, source, folder
        self._running = chain.start(tokenizer)
        self.facts = facts
        _catch_up(chain, self._running, source, facts)

    def add(self, stop: int) -> None:
        """Extend the index to the rows of the source before `stop`, in new parts."""
        facts, start = self.facts, self.facts.data_rows
        rows = islice(self._source.rows(start), stop - start) if start < stop else iter(())
        making = _Making(
            self._chain, self._running, self._folder, rows, read=facts.read_rows, total=stop
        )
        parts = list(facts.parts)
        while not making.is_over:
            part = _write_part(making, len(parts))
            if part.rows or part.dropped:
                parts.append(part)
        self.facts = replace(
            facts,
            dataset=self._source.fingerprint,
            data_rows=stop,
            read_rows=making.read,
            rows=sum(part.rows for part in parts),
            error_rows=facts.error_rows + making.error_rows,
            steps=[replace(s, examples=list(s.examples)) for s in self._running.counts],
            parts=parts,
        )

    def close(self) -> None:
        """Free the resources of the steps."""
        self._running.close()


def _catch_up(chain: Chain, running: ChainPass, source: Source, facts: IndexFacts) -> None:
    """Bring the steps into the state after the rows that an index covers. Raises JobError if the
    steps now make another number of rows of them."""
    if not chain.has_state:
        running.counts = [replace(count, examples=list(count.examples)) for count in facts.steps]
        return
    total = 0
    for row in islice(source.rows(), facts.read_rows):
        total += len(running.take(row))
        running.dropped.clear()
    if total != facts.rows:
        raise JobError(
            f"rows: the steps make {total:,} rows of the first {facts.read_rows:,} of the data "
            f"set, and made {facts.rows:,} before: a step depends on more than the rows up to its "
            "own. Use another output.dir"
        )


def _write_part(making: _Making, number: int) -> IndexPart:
    """Write the next part: about PART_ROWS rows, and the rows that were dropped meanwhile."""
    folder, running = making.folder, making.running
    kept_file = folder.writing(folder.part(number), folder.schema)
    dropped_file = folder.writing(folder.dropped(number), DROPPED)
    while not making.is_over and max(kept_file.rows, dropped_file.rows) < PART_ROWS:
        making.advance()
        if len(running.dropped) >= GROUP or (making.is_over and running.dropped):
            dropped_file.add(folder.dropped_table(running.dropped, making.chain.names))
            running.dropped.clear()
        while len(making.pending) >= GROUP or (making.is_over and making.pending):
            rows, making.pending = making.pending[:GROUP], making.pending[GROUP:]
            making.error_rows += sum(row.failure is not None for row in rows)
            kept_file.add(folder.rows_table(rows, list(making.chain.stored)))
    kept_file.publish()
    dropped_file.publish()
    return IndexPart(kept_file.rows, dropped_file.rows)
