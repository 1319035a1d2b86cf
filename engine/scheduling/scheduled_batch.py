"""What one step runs, as the scheduler planned it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.engine.constraint.guide import Guide
from batchgen.engine.scheduling.row_table import Slots
from batchgen.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PrefillBatch:
    """Rows whose known tokens go through the model for the first time or again.

    Attributes:
        seqs: B rows.
        starts: first token of each row's chunk.
        lengths: tokens of each row's chunk.
        completing: indices of the rows whose last token to prefill is in the chunk. They join the
            decoding rows, in this order.
        slots, epochs: of those among them that yield a token.
        keep: where each of the rows that still decode stood among those of the previous steps, None
            if nothing moved.
    """

    seqs: list[Sequence]
    starts: list[int]
    lengths: list[int]
    completing: list[int]
    slots: Slots
    epochs: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64] | None


@dataclass(frozen=True, slots=True)
class DecodeBatch:
    """The decoding rows, in the order in which they joined.

    Attributes:
        slots, epochs: of B rows.
        keep: where each of them stood among the rows of the previous steps, None if nothing moved.
        new_blocks: (row, index in its block table, block) for each block reserved since.
        width: tokens of each row in the forward.
        guide: of its constrained rows; None if it has none.
        context_lens: [B], tokens of each row in the KV cache after the forward, at most.
    """

    slots: Slots
    epochs: npt.NDArray[np.int64]
    keep: npt.NDArray[np.int64] | None
    new_blocks: list[tuple[int, int, int]]
    width: int
    context_lens: npt.NDArray[np.int64]
    guide: Guide | None = None


@dataclass(frozen=True, slots=True)
class MixedBatch:
    """A decode batch, and a small prefill batch beside it."""

    decode: DecodeBatch
    prefill: PrefillBatch


ScheduledBatch = PrefillBatch | DecodeBatch | MixedBatch
