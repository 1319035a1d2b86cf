"""Which rows an operation of linear attention reads, and where their states are.

The operations keep a state per row in *state slots*. Slot 0 is scratch: rows that pad a batch have
it, and what is written there is never read. A *record* is what one token of a decode step does to
the state. Records are kept in a ring beside it, and are *folded* into the state later, several at
once.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

CHUNK = 64
"""Tokens of a chunk. Chunks begin at absolute multiples of it, so that a prefill which is cut at
such a multiple has the bits of one that is not cut."""


class StepRows(NamedTuple):
    """The B rows of a decode step, each with W tokens that stand one behind the other.

    A step does not change the state beyond the tokens accepted before it. What those do to the
    state stands in the slot's records, a ring of N: the pending ones from `first[slot]` on, the
    oldest first. The step runs its W tokens, and writes their records behind, which needs pending +
    W ≤ N. Of the pending ones it folds the oldest into the state, `fold` at a time as long as that
    many are left, and writes the state back; the caller must then count them as folded. So a token
    is always computed from the state behind a multiple of `fold` tokens of decode steps and the
    records since, whatever the widths of the steps are."""

    slots: Tensor  # [B] int64, the rows' state slots
    pending: Tensor  # [R] int32, read on the device; clamped to 0 … N
    first: Tensor  # [R] int32: the index in the ring of the oldest pending one
    width: int  # W; with 0 the step folds and does nothing else
    fold: int

    def ring_entries(self, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find the B rows' records in rings of N, as int64.

        Returns the numbers of pending records [B], the indices of all records in the ring from the
        oldest pending one on [B, N], and those of the W new records [B, W].
        """
        pending = self.pending[self.slots].long().clamp(0, ring)
        first = self.first[self.slots].long()[:, None]
        order = torch.arange(ring, device=self.slots.device)
        new = (first + pending[:, None] + order[: self.width]) % ring
        return pending, (first + order) % ring, new


class PrefillRows(NamedTuple):
    """The B rows of a prefill, whose T tokens stand one row behind the other.

    A row whose first token has position 0 starts from zeros, whatever its slot holds. Any other row
    starts from the state in its slot, whose records must have been folded. The state after the
    row's last token is written to its slot. A row without tokens leaves its slot as it is.

    Snapshots are copies of the state that a row leaves: after how many of its tokens, and in which
    slot. That number must end a chunk of 64, counted from position 0, or the row; 0 is unused.
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
        """Return a bound on the chunks of all rows: each may have a part of one at both ends."""
        return len(self.positions) // CHUNK + 2 * len(self.slots)

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """Make a tensor for values of all tokens; zeros if some may belong to no row."""
        make = torch.zeros if self.query_lens is None else torch.empty
        return make(shape, dtype=dtype, device=self.positions.device)

    def wanted(self, row: int) -> dict[int, list[int]]:
        """Map numbers of tokens of this row to the slots that want the state after them."""
        slots: dict[int, list[int]] = {}
        if self.snapshots is not None:
            for tokens, slot in self.snapshots[row].tolist():
                if tokens:
                    slots.setdefault(tokens, []).append(slot)
        return slots
