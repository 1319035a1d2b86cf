"""The batches that the scheduler plans: what one step runs."""

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


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """B rows that each read a chunk of their known tokens, either for the first time or again after
    a preemption.

    Attributes:
        starts: for each row, the position of the first token of its chunk.
        lengths: for each row, the number of tokens of its chunk.
        completing: the indices in `seqs` of the rows whose prefill ends with this chunk. They join
            the decoding rows in this order.
        batch_slots: int64, of those completing rows whose prefill yields a token.
        epochs: int64, the epochs of these slots.
        keep: int64, which of the rows that the strategy's `StepInputs` hold stay, as ascending
            indices among them. None if all stay, or if no row completes.
        snapshots: what this prefill leaves for the prefix cache, with recurrent layers.
    """

    seqs: list[Sequence]
    starts: list[int]
    lengths: list[int]
    completing: list[int]
    batch_slots: BatchSlots
    epochs: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64] | None
    snapshots: list[Snapshot] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The B rows that decode in this step, in the order in which they joined.

    Attributes:
        batch_slots: [B], their slots in the `RunningBatch`.
        epochs: [B], the epochs of these slots.
        keep: [B], where each of them stands among the rows that the strategy's `StepInputs` hold,
            ascending; the others are dropped. None if all stay.
        new_blocks: (row, index in its block table, block number) for each block of the paged cache
            that was reserved for this step.
        width: W, the number of tokens of each row in the forward.
        context_lens: [B], the number of tokens of each row in the paged cache after the forward, or
            a bound above that.
        guide: the guide of the constrained rows; None if there are none.
    """

    batch_slots: BatchSlots
    epochs: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64] | None
    new_blocks: list[tuple[int, int, int]]
    width: int
    context_lens: npt.NDArray[np.int64]
    guide: Guide | None = None

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
