"""Makes the row index of a job, which says for each row of the job from which row of the data set
it comes.

A job needs one if its row steps (`rows`) drop, split or add rows. The data set is read in
*stretches*, runs of consecutive rows: if it grows while the job runs, each further stretch adds
files to the index. `chain.py` runs the steps, and `index_files.py` has the format of the files.
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
"""The least time between two messages about the progress."""


@dataclass
class _Making:
    """One pass through the rows of a stretch: what the steps have made and what is not written
    yet."""

    chain: Chain
    running: ChainPass
    folder: IndexFolder
    rows: Iterator[Row]
    read: int  # rows of the data set before the next one
    total: int  # rows of the data set up to the stretch's end
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
        if not self.read % 256 and (now := time.monotonic()) - self.reported_at > _SHOWN_SECONDS:
            self.reported_at = now
            print(f"batchgen: steps of rows: {self.read:,} of {self.total:,} rows", file=sys.stderr)


class IndexGrowth:
    """Extends an index with the rows of each further stretch, in files of its own. So a file is the
    same whichever process made it, and two processes may make it at the same time. Memory does not
    grow with the rows, except for what steps remember.

    Attributes:
        facts: the summary of the index, as the caller should write it to rows.json.
    """

    def __init__(
        self, chain: Chain, source: Source, tokenizer: Any, folder: IndexFolder, facts: IndexFacts
    ) -> None:
        """Continue the index that `facts` describes. If steps remember rows, they go through the
        rows that the index covers once more."""
        self._chain, self._source, self._folder = chain, source, folder
        self._running = chain.start(tokenizer)
        self.facts = facts
        _catch_up(chain, self._running, source, facts)

    def add(self, stop: int) -> None:
        """Extend the index to the rows of the source before `stop`, in new parts."""
        facts, start = self.facts, self.facts.data_rows
        rows = islice(self._source.rows(start), stop - start) if start < stop else iter(())
        making = _Making(self._chain, self._running, self._folder, rows, facts.read_rows, stop)
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
        """Release what the steps hold in memory or on disk."""
        self._running.close()


def _catch_up(chain: Chain, running: ChainPass, source: Source, facts: IndexFacts) -> None:
    """Bring the steps into the state that they had after the rows of an index."""
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
    """Write the next part: about PART_ROWS rows, and those that were dropped meanwhile."""
    folder, running = making.folder, making.running
    kept = folder.writing(folder.part(number), folder.schema)
    gone = folder.writing(folder.dropped(number), DROPPED)
    while not making.is_over and kept.rows < PART_ROWS and gone.rows < PART_ROWS:
        making.advance()
        if len(running.dropped) >= GROUP or (making.is_over and running.dropped):
            gone.add(folder.dropped_table(running.dropped, making.chain.names))
            running.dropped.clear()
        while len(making.pending) >= GROUP or (making.is_over and making.pending):
            rows, making.pending = making.pending[:GROUP], making.pending[GROUP:]
            making.error_rows += sum(row.failure is not None for row in rows)
            kept.add(folder.rows_table(rows, list(making.chain.stored)))
    kept.publish()
    gone.publish()
    return IndexPart(kept.rows, gone.rows)
