"""The newest committed tokens of the running rows, with their columns.

They are kept in arrays with one line for each batch slot, and moved to the lists of their
`Sequence` only now and then. So a step writes the tokens of all rows at once. `RunningBatch` owns
the logs.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import HostOutput
from batchgen.engine.rows.sequence import Sequence

_LOG_TOKENS = 64
"""The most tokens in a row's log."""


class TokenLogs:
    """One log for each of C batch slots."""

    def __init__(self, capacity: int) -> None:
        self._lengths = np.zeros(capacity, np.int64)
        self._tokens = np.zeros((capacity, _LOG_TOKENS), np.int64)
        self._columns: dict[str, npt.NDArray[Any]] = {}

    def append(
        self,
        seqs: Rows[Sequence | None],
        slots: npt.NDArray[np.int64],
        index: npt.NDArray[np.int64],
        counts: npt.NDArray[np.int64],
        step: HostOutput,
    ) -> None:
        """Append the first `counts` [R] tokens of R rows of a step, with their columns.

        Args:
            seqs: the rows by batch slot.
            slots: [R], the batch slots of the rows.
            index: [R], the rows' indices in the step.
        """
        for name, values in step.columns.items():
            self._fit(name, values)
        # A step may yield more tokens of a row than a log holds.
        for start in range(0, step.token_ids.shape[1], _LOG_TOKENS):
            new = np.clip(counts - start, 0, _LOG_TOKENS)
            for slot in slots[self._lengths[slots] + new > _LOG_TOKENS].tolist():
                self.flush(slot, seqs[slot])
            rows, offsets = np.nonzero(np.arange(_LOG_TOKENS) < new[:, None])
            into, source = slots[rows], index[rows]
            offset = self._lengths[into] + offsets
            self._tokens[into, offset] = step.token_ids[source, start + offsets]
            for name, values in step.columns.items():
                # The log may be wider than the column of this batch.
                tail = (slice(size) for size in values.shape[2:])
                index_of: tuple[Any, ...] = (into, offset, *tail)
                self._columns[name][index_of] = values[source, start + offsets]
            self._lengths[slots] += new

    def flush(self, slot: int, seq: Sequence | None) -> None:
        """Move the log of a slot to the `Sequence` of the row in the slot."""
        assert seq is not None
        count = int(self._lengths[slot])
        if count:
            columns = {name: self._columns[name][slot, :count] for name in seq.columns}
            seq.append(self._tokens[slot, :count].tolist(), columns)
            self._lengths[slot] = 0

    def _fit(self, name: str, values: npt.NDArray[Any]) -> None:
        """Allocate or widen the log of a column so that it holds values [B, W, *tail]."""
        log, tail = self._columns.get(name), values.shape[2:]
        if log is None:
            self._columns[name] = np.zeros((*self._tokens.shape, *tail), values.dtype)
            return
        missing = [max(0, need - have) for have, need in zip(log.shape[2:], tail, strict=True)]
        if any(missing):
            self._columns[name] = np.pad(log, [(0, 0), (0, 0), *((0, n) for n in missing)])
