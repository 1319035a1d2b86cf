"""Which rows an operation of linear attention reads, and where their states are.

The operations keep a state per row in *state slots*. Slot 0 is scratch: rows that pad a batch have
it, and whatever is written there is never read.
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

    A step does not change the state beyond the tokens that were accepted before it. What those do
    to the state stands in the slot's records, a ring of N: the pending ones from `first[slot]` on,
    the oldest first. The step folds them into the state as it reads it, runs its W tokens from
    there, and writes their records behind the pending ones, which needs pending + W ≤ N. It writes
    the folded state back only if more than `most_pending` records are pending, since a state is as
    large as many records.

    Attributes:
        slots: [B] int64, the rows' state slots.
        pending: [R] int32, the number of accepted records of each slot that its state lacks. It is
            read on the device. A number outside 0 … N counts as the nearest of these.
        first: [R] int32, the place of the oldest of them in the ring.
        width: W. With 0 the step folds and does nothing else.
        most_pending: the state is written back when more records than this are pending. The caller
            must then count those as folded.
    """

    slots: Tensor
    pending: Tensor
    first: Tensor
    width: int
    most_pending: int

    def places(self, ring: int) -> tuple[Tensor, Tensor, Tensor]:
        """Find the records of the B rows.

        Args:
            ring: N, the records that a slot has.

        Returns:
            [B], the numbers of pending records; [B, N], all places of the ring, from that of the
            oldest pending record on; [B, W], those of the W new records. All are int64.
        """
        pending = self.pending[self.slots].long().clamp(0, ring)
        first = self.first[self.slots].long()[:, None]
        order = torch.arange(ring, device=self.slots.device)
        new = (first + pending[:, None] + order[: self.width]) % ring
        return pending, (first + order) % ring, new


class PrefillRows(NamedTuple):
    """The B rows of a prefill, whose T tokens stand one row behind the other.

    A row whose first token has position 0 starts from a state of zeros, as its slot may hold
    anything. Any other row starts from the state in its slot, whose records must have been folded.
    The state after the row's last token is written to its slot.

    Attributes:
        slots: [B] int64, the rows' state slots.
        positions: [T] int64, the absolute position of each token in its row. Only those of the
            rows' first tokens are read; the others follow from them.
        starts: [B + 1] int32 on the device, where each row's tokens begin; the last entry is where
            the last row ends. A row may have no tokens, and its slot is left as it is. Tokens after
            the last row may hold anything.
        snapshots: [B, N, 2] int64, copies of the state that each row leaves: after how many of its
            tokens, and in which slot. Entries with 0 tokens are unused. The number must end a chunk
            of 64, counted from position 0, or the row. None if no row leaves any.
        query_lens: the number of tokens of each row on the host; None if only the device knows it.
    """

    slots: Tensor
    positions: Tensor
    starts: Tensor
    snapshots: Tensor | None
    query_lens: tuple[int, ...] | None

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
        found: dict[int, list[int]] = {}
        if self.snapshots is not None:
            for tokens, slot in self.snapshots[row].tolist():
                if tokens:
                    found.setdefault(tokens, []).append(slot)
        return found
