"""The batches that the scheduler plans; each is what one step runs.

A batch names its rows by their *batch slots* in the `RunningBatch`, and by the *epoch* of each
slot, a number that changes whenever a row leaves the slot. If the epoch has changed when a result
arrives, the row has left since the launch, and the result is dropped. `StepLauncher` turns batches
into forwards.

The strategy keeps the decoding rows in its `StepInputs`, in the order in which they joined. Each
batch says by `keep` which of them have not left since.
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
    """A copy of a row's state after some of its tokens, which a prefill writes to a state slot."""

    row: int  # the row's index in the batch
    length: int  # the number of tokens of the row's chunk before the snapshot
    state_slot: int  # the slot to write to


class StateRow(NamedTuple):
    """The tokens of a row's chunk whose hidden states are needed: to score the next token of an
    answer, or to be pooled."""

    row: int  # the row's index in the batch
    slot: int  # the row's batch slot
    epoch: int  # the epoch of that slot
    first: int  # the position in the row of the first of these tokens
    end: int  # the position after the last of these tokens


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """B rows that each read a chunk of their known tokens, for the first time or again after a
    preemption."""

    seqs: list[Sequence]
    starts: list[int]  # for each row, the position of the first token of its chunk
    lengths: list[int]  # for each row, the number of tokens of its chunk
    # The indices in `seqs` of the rows whose prefill ends with this chunk. They join the decoding
    # rows in this order.
    completing: list[int]
    # int64, the slots of completing rows whose prefill yields a token. In a preempted row it yields
    # none: the next token is known already.
    batch_slots: BatchSlots
    epochs: npt.NDArray[np.int64]  # int64, the epochs of these slots
    # int64, the ascending indices of the rows in the `StepInputs` that stay, before the completing
    # rows join them. None if all stay, or if no row completes.
    keep: npt.NDArray[np.int64] | None
    # The snapshots to take for the prefix cache, in models with recurrent layers.
    snapshots: list[Snapshot] = field(default_factory=list)
    # The tokens whose hidden states are needed. Their rows never join the decoding rows.
    state_rows: list[StateRow] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class StateBatch:
    """R hidden states of B rows from which a step computes scores or pooled values, row after row.
    The scheduler plans none: `StateReader` makes them of a prefill's `state_rows`."""

    batch_slots: BatchSlots  # [B], the rows' slots in the `RunningBatch`
    epochs: npt.NDArray[np.int64]  # [B], the epochs of these slots
    counts: npt.NDArray[np.int64]  # [B], the number of hidden states of each row


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """B rows that decode in this step, in the order in which they joined."""

    batch_slots: BatchSlots  # [B], their slots in the `RunningBatch`
    epochs: npt.NDArray[np.int64]  # [B], the epochs of these slots
    # [B] or None: the rows' indices, ascending, among the rows in the strategy's `StepInputs`;
    # other rows are dropped. None if all stay.
    keep: npt.NDArray[np.int64] | None
    # The blocks of the paged cache that were reserved for this step, each as (index of its row,
    # index in the row's block table, block number).
    new_blocks: list[tuple[int, int, int]]
    width: int  # W, the number of tokens of each row in the forward
    # [B], the number of tokens of each row in the paged cache after the forward, or an upper bound.
    context_lens: npt.NDArray[np.int64]
    guide: Guide | None = None  # makes the masks of the constrained rows; None without such rows
    # Like `new_blocks`, for the block tables of layers with a sliding window.
    new_window_blocks: list[tuple[int, int, int]] = field(default_factory=list)

    @property
    def num_rows(self) -> int:
        return len(self.batch_slots)


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A decode batch and a prefill batch that share one forward. The decode batch's `keep` applies
    first, and the prefill's counts the rows that are left."""

    decode: DecodeBatch
    prefill: PrefillBatch


ScheduledBatch = PrefillBatch | DecodeBatch | MixedBatch
"""Any batch that the scheduler can plan for a step."""
