"""The batches that the scheduler plans: what one step runs.

A batch names its rows by their *batch slots* in the `RunningBatch`, and by the *epoch* of each
slot, a number that changes whenever a row leaves the slot. When a result arrives and the epoch has
changed, the row has left since the launch and the result is dropped. The scheduler makes these
batches, and `StepLauncher` turns them into forwards.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.running_batch import BatchSlots
from batchgen.engine.rows.sequence import Sequence


class Snapshot(NamedTuple):
    """A copy of a row's state after some of its tokens, which a prefill leaves in a state slot."""

    row: int  # its index in the batch
    length: int  # how many tokens of the row's chunk the state has taken in
    state_slot: int


class StateRow(NamedTuple):
    """The tokens of a row's chunk whose hidden states are wanted: each scores the next token of the
    answer, or is one from which columns are pooled."""

    row: int  # its index in the batch
    slot: int  # its batch slot
    epoch: int  # of that slot
    first: int  # the position in the row of the first of the tokens
    end: int  # the position behind the last of them


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """B rows that each read a chunk of their known tokens, either for the first time or again after
    a preemption."""

    seqs: list[Sequence]
    starts: list[int]  # for each row, the position of the first token of its chunk
    lengths: list[int]  # for each row, the number of tokens of its chunk
    # The indices in `seqs` of the rows whose prefill ends with this chunk. They join the decoding
    # rows in this order.
    completing: list[int]
    batch_slots: BatchSlots  # int64, of those completing rows whose prefill yields a token
    epochs: npt.NDArray[np.int64]  # int64, the epochs of these slots
    # int64, which of the rows that the strategy's `StepInputs` hold stay, as ascending indices
    # among them. None if all stay, or if no row completes.
    keep: npt.NDArray[np.int64] | None
    # What this prefill leaves for the prefix cache, with recurrent layers.
    snapshots: list[Snapshot] = field(default_factory=list)
    # The rows with wanted hidden states in their chunk. They never join the decoding rows.
    state_rows: list[StateRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """R hidden states of B rows that a step makes scores or pooled values of, one row after
    another."""

    batch_slots: BatchSlots  # [B], the rows' slots in the `RunningBatch`
    epochs: npt.NDArray[np.int64]  # [B], the epochs of these slots
    counts: npt.NDArray[np.int64]  # [B], how many of the states are of each row


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The B rows that decode in this step, in the order in which they joined."""

    batch_slots: BatchSlots  # [B], their slots in the `RunningBatch`
    epochs: npt.NDArray[np.int64]  # [B], the epochs of these slots
    # [B], where each of them stands among the rows that the strategy's `StepInputs` hold,
    # ascending; the others are dropped. None if all stay.
    keep: npt.NDArray[np.int64] | None
    # (row, index in its block table, block number) for each block of the paged cache that was
    # reserved for this step.
    new_blocks: list[tuple[int, int, int]]
    width: int  # W, the number of tokens of each row in the forward
    # [B], the number of tokens of each row in the paged cache after the forward, or a bound above
    # that.
    context_lens: npt.NDArray[np.int64]
    guide: Guide | None = None  # the guide of the constrained rows; None if there are none
    # The same as `new_blocks` for the window tables.
    new_window_blocks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.batch_slots)


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A decode batch and a prefill batch that share one forward."""

    decode: DecodeBatch
    prefill: PrefillBatch


ScheduledBatch = PrefillBatch | DecodeBatch | MixedBatch
"""Any batch that the scheduler can plan for a step."""
