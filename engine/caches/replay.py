"""Plans how a prefill computes generated tokens again with the rounding of decode steps, for
recurrent layers.

A decode step stores each token as a *record* and folds records into the state `fold` at a time, so
its results round differently from those of a prefill, which folds all tokens of a chunk at once.
When a row has lost its state in a preemption (its memory was given to another row for a while), its
generated tokens are therefore *replayed*: computed as decode steps from the state after a multiple
of `fold` generated tokens, so that the results have the same bits. `RowStates.replay` calls
`replay_steps`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload


class ReplaySizes(NamedTuple):
    """The sizes of a layer's records (see `StateCache`): R slots, `ring` records in each, folded
    `fold` at a time."""

    slots: int  # R
    ring: int
    fold: int


class ReplayStep(NamedTuple):
    """A decode step of B rows of a prefill. A step of width 0 only folds pending records."""

    tokens: Tensor  # [B · W] int64, the indices of the step's tokens among those of the part
    slots: Tensor  # [B] int64, the rows' state slots
    pending: Tensor  # [R] int32, used in this step instead of `StateCache.pending`
    first: Tensor  # [R] int32, used in this step instead of `StateCache.first`
    width: int  # W


def replay_steps(
    slots: Tensor,
    query_lens: npt.NDArray[np.int64],
    replayed: npt.NDArray[np.int64],
    before: npt.NDArray[np.int64],
    sizes: ReplaySizes,
) -> list[ReplayStep]:
    """Divide the replayed tokens of B rows into decode steps that end where states are written
    back.

    What is left after the last multiple of `fold` stays pending, as `RowStates.begin` counts it.

    Args:
        slots: [B] int64 on the device, the rows' state slots.
        query_lens: [B], the number of tokens of each row in the prefill.
        replayed: [B], how many of these, the last ones, are replayed.
        before: [B], how many tokens of the row earlier prefills have replayed.
    """
    left, done = replayed.copy(), before.copy()  # tokens that are still, and already, replayed
    ends = query_lens.cumsum()  # of each row's tokens among those of the part
    steps = []
    while left.any():
        # A step of a row ends when `fold` records are pending, or with the row's last token. Rows
        # with steps of the same width are computed together.
        widths = np.minimum(sizes.fold - done % sizes.fold, left)
        for width in np.unique(widths[left > 0]).tolist():
            rows = np.flatnonzero((left > 0) & (widths == width))
            pending = done[rows] % sizes.fold
            first = (done[rows] - pending) % sizes.ring
            tokens = (ends[rows] - left[rows])[:, None] + np.arange(width)
            steps.append(_step(slots, rows, tokens.ravel(), pending, first, width, sizes.slots))
            # Rows that have `fold` pending records now fold them, in a step without tokens.
            is_full = pending + width == sizes.fold
            if is_full.any():
                full_rows = rows[is_full]
                all_pending = np.full(len(full_rows), sizes.fold)
                none = tokens[:0].ravel()
                first = first[is_full]
                steps.append(_step(slots, full_rows, none, all_pending, first, 0, sizes.slots))
            left[rows] -= width
            done[rows] += width
    return steps


def _step(
    slots: Tensor,
    rows: npt.NDArray[np.int64],
    tokens: npt.NDArray[np.int64],
    pending: npt.NDArray[np.int64],
    first: npt.NDArray[np.int64],
    width: int,
    num_slots: int,
) -> ReplayStep:
    """Make one step of the rows with these indices. One upload brings all values to the device."""
    values = upload(np.concatenate((tokens, rows, pending, first)), torch.int64, slots.device)
    count = len(rows)
    index, indices, waiting, oldest = values.split([len(tokens), count, count, count])
    state_slots = slots[indices]
    counts = torch.zeros((2, num_slots), dtype=torch.int32, device=slots.device)
    counts[0].index_copy_(0, state_slots, waiting.int())
    counts[1].index_copy_(0, state_slots, oldest.int())
    return ReplayStep(index, state_slots, counts[0], counts[1], width)
