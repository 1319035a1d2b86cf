"""The states of rows on the device, for models with recurrent layers.

Each row in flight has a *state slot*, with one state for each recurrent layer, and the *records* of
the newest tokens, which are not added to the state yet (see `RowMetadata` in `forward_context.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import StateSpec, zeros
from batchgen.engine.caches.replay import ReplaySizes, ReplayStep, replay_steps


class StateCache(NamedTuple):
    """What one recurrent layer keeps, by state slot. Slot 0 is scratch, for rows that pad a
    batch."""

    # Maps the name of each part of the state to [S, *shape], its value in all S slots.
    state: Mapping[str, Tensor]
    # Maps the name of each record to [R, N, *shape], a ring of N records for each slot: what the
    # tokens of decode steps do to the state. Only the first R slots, which rows can have, keep
    # records.
    records: Mapping[str, Tensor]
    # [R] int32, the number of records of each slot that belong to accepted tokens and that the
    # slot's state lacks.
    pending: Tensor
    first: Tensor  # [R] int32, the place of the oldest of them in the ring
    # A decode step folds so many pending records at once into the state, and writes that back.
    fold: int


def ring_length(width: int, fold: int) -> int:
    """Return the number of records that a slot needs. A step of `width` tokens finds at most
    `fold - 1 + width` pending records, and adds its own."""
    return fold - 1 + 2 * width


class RowStates:
    """The states of all rows of one model, over all its layers, by state slot.

    One slot's state is contiguous over all layers, so one operation copies it. The number of
    pending records stays on the device, because the host learns how many tokens were accepted only
    after it has launched the next step.

    Slot 0 is scratch, `num_rows` slots are for rows, and `num_snapshots` behind those hold
    snapshots for the prefix cache. `layers` has what each recurrent layer of `specs` keeps.
    """

    def __init__(
        self,
        specs: Sequence[StateSpec],
        num_rows: int,
        num_snapshots: int,
        width: int,
        fold: int,
        device: torch.device,
    ) -> None:
        size = sum(spec.state_bytes for spec in specs)
        self._pool = zeros((1 + num_rows + num_snapshots, size), torch.uint8, device)
        self._pending = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self._first = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self._ring, self._fold = ring_length(width, fold), fold
        self.layers: list[StateCache] = []
        start = 0
        for spec in specs:
            records = {
                name: torch.zeros(
                    (1 + num_rows, self._ring, *tensor.shape), dtype=tensor.dtype, device=device
                )
                for name, tensor in spec.records.items()
            }
            state = spec.views(self._pool, start)
            self.layers.append(StateCache(state, records, self._pending, self._first, self._fold))
            start += spec.state_bytes

    @property
    def fold(self) -> int:
        """The number of records that a step folds at once."""
        return self._fold

    def begin(self, slots: Tensor, replayed: Tensor) -> None:
        """Drop the records of these slots [B] int64, whose rows are prefilled next, but for those
        that the prefill leaves: of the last of the tokens [B] int32 that it and the prefills before
        it have read as decode steps (`replay_steps`)."""
        pending = replayed % self._fold
        self._pending.index_copy_(0, slots, pending)
        self._first.index_copy_(0, slots, (replayed - pending) % self._ring)

    def replay(
        self,
        slots: Tensor,
        query_lens: npt.NDArray[np.int64],
        replayed: npt.NDArray[np.int64],
        before: npt.NDArray[np.int64],
    ) -> list[ReplayStep]:
        """Plan how a prefill reads tokens as decode steps do, see `replay_steps`."""
        sizes = ReplaySizes(len(self._pending), self._ring, self._fold)
        return replay_steps(slots, query_lens, replayed, before, sizes)

    def advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        """Keep the records of the tokens that were accepted in the decode step just decided.

        `slots` [B] int64 are the state slots of the step's rows. The number of tokens [B] that it
        produced equals the number of read tokens that stay: the newest and the accepted drafts.
        """
        pending, first = self._pending[slots], self._first[slots]
        kept = pending % self._fold  # the others were folded by that step
        self._first.index_copy_(0, slots, (first + pending - kept) % self._ring)
        self._pending.index_copy_(0, slots, kept + num_tokens.int())

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy whole states from the slots `sources` [N] to `targets` [N], none of which may be
        among the sources, for all layers at once."""
        # One by one, because an indexed copy of all would need as much memory again.
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._pool[target].copy_(self._pool[source])
