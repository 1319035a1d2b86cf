"""The states of rows on the device, for models with recurrent layers.

Each row in flight has a *state slot*. The slot holds one state for each recurrent layer, and the
*records* of the newest tokens, which are not folded into the state yet (see `RowMetadata` in
`forward_context.py`). A decode step leaves a record of each of its tokens, and *folds* the oldest
ones: it applies their effects to the state. A prefill writes the state after its last token, and
leaves records only of *replayed* tokens: generated tokens that it computes as decode steps, so that
they have the same bits as when they were generated (`replay.py`).

`ModelCaches` owns the `RowStates` of a model.
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
    """The states and records of one recurrent layer, by state slot. Slot 0 is scratch, for padding
    rows."""

    # Maps the name of each part of the state to [S, *shape], its value in all S slots.
    state: Mapping[str, Tensor]
    # Maps the name of each part of a record to [R, N, *shape], a ring of N records for each of the
    # first R slots, which belong to rows. A record describes the effect of a decode step's token on
    # the state.
    records: Mapping[str, Tensor]
    # [R] int32, how many records of accepted tokens are not folded into the slot's state yet.
    pending: Tensor
    first: Tensor  # [R] int32, the index in the ring of the oldest pending record
    # A decode step folds pending records into the state this many at a time, while at least this
    # many are pending, and writes the state back.
    fold: int


def ring_length(width: int, fold: int) -> int:
    """Return the number of records in a slot's ring. A step of `width` tokens finds at most `fold -
    1 + width` pending records, and adds one for each of its own tokens."""
    return fold - 1 + 2 * width


class RowStates:
    """The states of all rows of one model, over all its layers, by state slot.

    One slot's state is contiguous over all layers, so that one operation copies it. The number of
    pending records stays on the device: the host learns how many tokens were accepted only after it
    has launched the next step.

    Slot 0 is scratch, the next `num_rows` slots are for rows, and the last `num_snapshots` slots
    are for snapshots of the prefix cache.

    Attributes:
        layers: the states and records of each recurrent layer of `specs`.
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
        """Reset the pending records of rows that are prefilled next.

        Only the records that the prefill itself leaves count as pending then: those of replayed
        tokens (`replay_steps`) after the last multiple of `fold`.

        Args:
            slots: [B] int64, the rows' state slots.
            replayed: [B] int32, how many tokens of the row this prefill and earlier ones have
                replayed.
        """
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
        """Plan the decode steps by which a prefill computes the replayed tokens of B rows; see
        `replay_steps`.

        Args:
            slots: [B] int64, the rows' state slots.
            query_lens: [B], the number of tokens of each row in the prefill.
            replayed: [B], how many of these, the last ones, are replayed.
            before: [B], how many tokens of the row earlier prefills have replayed.
        """
        sizes = ReplaySizes(len(self._pending), self._ring, self._fold)
        return replay_steps(slots, query_lens, replayed, before, sizes)

    def advance(self, slots: Tensor, num_tokens: Tensor) -> None:
        """Mark the records of the tokens that the last decode step accepted as pending.

        Args:
            slots: [B] int64, the state slots of the step's rows.
            num_tokens: [B], how many tokens the step produced. The step read the row's newest token
                and drafts; with a drafts accepted it produced a + 1 tokens, and the records of the
                a + 1 tokens that it read first stay.
        """
        pending, first = self._pending[slots], self._first[slots]
        kept = pending % self._fold  # that step has folded all whole groups of `fold` records
        self._first.index_copy_(0, slots, (first + pending - kept) % self._ring)
        self._pending.index_copy_(0, slots, kept + num_tokens.int())

    def copy(self, sources: npt.NDArray[np.int64], targets: npt.NDArray[np.int64]) -> None:
        """Copy the states of all layers from the slots `sources` [N], which are snapshots, to the
        slots `targets` [N] of rows. No target may be among the sources.

        Snapshots have no records, and `begin` resets those of the targets before their prefill.
        """
        # Copied one by one, because an indexed copy would need as much memory again.
        for source, target in zip(sources.tolist(), targets.tolist(), strict=True):
            self._pool[target].copy_(self._pool[source])
