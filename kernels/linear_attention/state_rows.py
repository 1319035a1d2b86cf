"""`StepRows` and `PrefillRows`: the rows that an operation of linear attention computes, and the
slots of their states.

The operations keep one state per row in *state slots*. Slot 0 is scratch: rows that pad a batch use
it, and nothing reads what is written there. A *record* is what one token of a decode step does to
the state. A slot keeps records in a ring, and a later step *folds* several of them into the state
at once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens per chunk. Chunks begin at absolute positions that are multiples of it, so a prefill that
is cut at such a position has the bits of one that is not cut."""


class StepRows(NamedTuple):
    """The B rows of a decode step, each with W consecutive tokens.

    A step does not know which of its own tokens will be accepted, so it never folds them. What
    earlier tokens did to the state is in the slot's records, a ring of N: the pending records from
    `first[slot]` on, the oldest first. The step runs its W tokens and writes their records after
    the pending ones, so pending + W ≤ N must hold.

    The step also folds the oldest pending records into the state, `fold` at a time while that many
    remain, and writes the state back. The caller must then count these records as folded. So a
    token is always computed from the state after a multiple of `fold` tokens of decode steps and
    from the records since, whatever the widths of the steps are.
    """

    slots: Tensor  # [B] int64, the rows' state slots
    pending: Tensor  # [R] int32, read on the device; clamped to 0 … N
    first: Tensor  # [R] int32: the index in the ring of the oldest pending one
    width: int  # W; with 0 the step folds and does nothing else
    fold: int

    def ring_entries(self, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """Return the B rows' places in rings of N records, as int64.

        Returns:
            The numbers of pending records [B]; the ring indices of all records from the oldest
                pending one on [B, N]; the ring indices of the W new records [B, W].
        """
        pending = self.pending[self.slots].long().clamp(0, ring)
        first = self.first[self.slots].long()[:, None]
        order = torch.arange(ring, device=self.slots.device)
        new = (first + pending[:, None] + order[: self.width]) % ring
        return pending, (first + order) % ring, new


class PrefillRows(NamedTuple):
    """The B rows of a prefill, whose T tokens are concatenated row by row.

    A row whose first token has position 0 starts from zeros, whatever its slot holds. Any other row
    starts from the state in its slot, whose records must have been folded. The state after the
    row's last token is written to its slot. A row without tokens leaves its slot unchanged.

    Snapshots are copies of a row's state: each is the number of the row's tokens after which to
    copy, and the slot to copy to. The tokens up to there must end at a multiple of 64 positions, or
    at the row's end. A number of 0 means no snapshot.
    """

    slots: Tensor  # [B] int64, the rows' state slots
    positions: Tensor  # [T] int64; only the first of each row is read
    starts: Tensor  # [B + 1] int32 on the device; tokens after the last row may hold anything
    snapshots: Tensor | None  # [B, N, 2] int64
    query_lens: tuple[int, ...] | None  # the rows' tokens; None: only the device knows

    def lengths(self) -> tuple[int, ...]:
        """Return the number of tokens of each row; this waits for the device if it must."""
        if self.query_lens is not None:
            return self.query_lens
        return tuple(self.starts.diff().tolist())

    def most_chunks(self) -> int:
        """Return a bound on the number of chunks of all rows: each row may have a partial chunk at
        both ends."""
        return len(self.positions) // CHUNK + 2 * len(self.slots)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Allocate a tensor for all tokens; it is zeros if some tokens may belong to no row."""
        make = torch.zeros if self.query_lens is None else torch.empty
        return make(shape, dtype=dtype, device=self.positions.device)

    def snapshot_slots(self, row: int) -> dict[int, list[int]]:
        """Return the snapshots of a row: {number of tokens after which to copy the state: the slots
        to copy it to}."""
        slots: dict[int, list[int]] = {}
        if self.snapshots is not None:
            for tokens, slot in self.snapshots[row].tolist():
                if tokens:
                    slots.setdefault(tokens, []).append(slot)
        return slots
