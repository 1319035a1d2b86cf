"""The states of rows on the device, for models with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import StateSpec, zeros


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
    # A decode step that finds more pending records than this writes the state back with those
    # records folded in.
    most_pending: int


def ring_length(width: int, most_pending: int) -> int:
    """Return the number of records that a slot needs. A step of `width` tokens finds at most
    `most_pending + width` pending records, and adds its own."""
    return most_pending + 2 * width


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
        most_pending: int,
        device: torch.device,
    ) -> None:
        size = sum(spec.state_bytes for spec in specs)
        self._pool = zeros((1 + num_rows + num_snapshots, size), torch.uint8, device)
        self._pending = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self._first = torch.zeros(1 + num_rows, dtype=torch.int32, device=device)
        self._ring, self._most_pending = ring_length(width, most_pending), most_pending
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
            self.layers.append(
                StateCache(state, records, self._pending, self._first, self._most_pending)
            )
            start += spec.state_bytes

    def begin(self, slots: Tensor) -> None:
        """Drop the records of these slots [B] int64, whose rows are prefilled next."""
        self._pending.index_fill_(0, slots, 0)

    def advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        """Keep the records of the tokens that were accepted in the decode step just decided.

        `slots` [B] int64 are the state slots of the step's rows. The number of tokens [B] that it
        produced equals the number of read tokens that stay: the newest and the accepted drafts.
        """
        pending, first = self._pending[slots], self._first[slots]
        written = pending > self._most_pending  # by that step, with the state
        self._first.index_copy_(0, slots, torch.where(written, first + pending, first) % self._ring)
        kept = torch.where(written, 0, pending)
        self._pending.index_copy_(0, slots, kept + num_tokens.int())

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy whole states from the slots `sources` [N] to `targets` [N], none of which may be
        among the sources, for all layers at once."""
        # One by one, because an indexed copy of all would need as much memory again.
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._pool[target].copy_(self._pool[source])
