"""Plans how a prefill reads generated tokens again in the way in which decode steps read them, for
layers with a state per row.

A decode step writes each token as a *record* beside the state, and adds records to the state `fold`
at a time. So its results are rounded differently from those of a prefill, which adds all tokens of
its chunk at once. When a row has lost its state, by a preemption, its generated tokens are
therefore *replayed*: computed from the state after a multiple of `fold` generated tokens and from
the records since, so that the results have the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload


class ReplaySizes(NamedTuple):
    """The sizes of what a layer keeps of decode steps, see `StateCache`."""

    slots: int  # R
    ring: int
    fold: int


class ReplayStep(NamedTuple):
    """A decode step of some rows of a prefill; with a width of 0 it folds and does no more."""

    tokens: Tensor  # [B · W] int64, the indices of its tokens among those of the part
    slots: Tensor  # [B] int64, the rows' state slots
    pending: Tensor  # [R] int32, see `StateCache`, which these steps do not read
    first: Tensor  # [R] int32
    width: int  # W


def replay_steps(
    slots: Tensor,
    query_lens: npt.NDArray[np.int64],
    replayed: npt.NDArray[np.int64],
    before: npt.NDArray[np.int64],
    sizes: ReplaySizes,
) -> list[ReplayStep]:
    """Cut the last `replayed` [B] of the rows' `query_lens` [B] tokens into steps that end where
    states are written back. The rows have read `before` [B] such tokens in earlier prefills. What
    is behind the last multiple of `fold` stays pending, as `RowStates.begin` counts it. `slots` [B]
    int64 are on the device."""
    left, done = replayed.copy(), before.copy()
    ends = query_lens.cumsum()
    steps = []
    while left.any():
        widths = np.minimum(sizes.fold - done % sizes.fold, left)
        for width in np.unique(widths[left > 0]).tolist():
            rows = np.flatnonzero((left > 0) & (widths == width))
            pending = done[rows] % sizes.fold
            first = (done[rows] - pending) % sizes.ring
            tokens = (ends[rows] - left[rows])[:, None] + np.arange(width)
            steps.append(_step(slots, rows, tokens.ravel(), pending, first, width, sizes.slots))
            whole = pending + width == sizes.fold
            if whole.any():
                some = rows[whole]
                waiting = np.full(len(some), sizes.fold)
                none = tokens[:0].ravel()
                steps.append(_step(slots, some, none, waiting, first[whole], 0, sizes.slots))
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
    values = upload(np.concatenate((tokens, rows, pending, first)), torch.int64, slots.device)
    count = len(rows)
    index, indices, waiting, oldest = values.split([len(tokens), count, count, count])
    state_slots = slots[indices]
    counts = torch.zeros((2, num_slots), dtype=torch.int32, device=slots.device)
    counts[0].index_copy_(0, state_slots, waiting.int())
    counts[1].index_copy_(0, state_slots, oldest.int())
    return ReplayStep(index, state_slots, counts[0], counts[1], width)
