"""Constrained rows of a batch: from the states of their matchers to masks over logits rows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Ids
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.constraint.matcher import Matcher, fill_all
from batchgen.engine.execution.transfer import upload
from batchgen.engine.sequence import Sequence
from batchgen.kernels.sampling.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class Guide:
    """The rows of a batch whose tokens a matcher checks.

    Their matchers stand at the newest token that the host has read, so masks are filled when the
    steps launched before are read; the device runs the forward meanwhile.

    Attributes:
        num_rows: B, of the batch.
        seqs: by their row in the batch.
    """

    num_rows: int
    seqs: dict[int, Sequence]

    @classmethod
    def of(cls, seqs: Ids[Sequence]) -> Guide | None:
        """Of a batch of these rows; None if no row has a constraint."""
        rows = {row: seq for row, seq in enumerate(seqs) if seq.matcher is not None}
        return cls(len(seqs), rows) if rows else None

    @property
    def matchers(self) -> Iterator[tuple[int, Matcher]]:
        """Of the rows that did not end meanwhile, with the row of each."""
        for row, seq in self.seqs.items():
            if seq.matcher is not None:
                yield row, seq.matcher

    def mask(self, logits: Tensor) -> TokenMask:
        """What each of the B rows may take next.

        Args:
            logits: [B, V], that it will be applied to.
        """
        masks = MaskBuilder(logits)
        rows = dict(self.matchers)
        masks.allow(list(rows), list(rows.values()))
        return masks.build()

    def mask_drafts(
        self, logits: Tensor, drafts: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> TokenMask:
        """What each row may take after each run of its drafts. Behind a draft that is not allowed
        nothing will be read, so nothing is excluded.

        The matchers are left behind the drafts that they took: what is committed of those need not
        be checked again.

        Args:
            logits: [B · (k + 1), V].
            drafts: [B, k].
            counts: [B], how many drafts of a row count.
        """
        width = 1 + drafts.shape[1]
        masks = MaskBuilder(logits)
        alive = dict(self.matchers)
        for place in range(width):
            masks.allow([row * width + place for row in alive], list(alive.values()))
            alive = {
                row: matcher
                for row, matcher in alive.items()
                if place < counts[row]
                and matcher.walk(drafts[row, place : place + 1].tolist())
                and not matcher.terminated
            }
        return masks.build()

    def forced(self, most: int) -> npt.NDArray[np.int64] | None:
        """[B, most]: the tokens that must come next, -1 behind them; None if there are none."""
        tokens = np.full((self.num_rows, most), -1, np.int64)
        for row, matcher in self.matchers:
            forced = matcher.forced(most)
            matcher.rewind(matcher.num_committed)
            tokens[row, : len(forced)] = forced
        return tokens if (tokens >= 0).any() else None


class MaskBuilder:
    """A mask under construction, in memory that the device can copy from.

    Args:
        logits: [R, V], that it will be applied to.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, vocab_size = logits.shape
        self._device = logits.device
        self._num_words = -(-vocab_size // 32)
        self._parts: list[Tensor] = []
        self._count = 0
        self._lines = np.full(rows, -1, np.int32)

    def allow(self, rows: Ids[int], matchers: Ids[Matcher]) -> None:
        """These logits rows may take what the matchers allow now."""
        fill_all(matchers, self._more(rows), range(len(rows)))

    def allow_only(self, token_ids: Mapping[int, int]) -> None:
        """Logits rows that must take a token: row → token."""
        bits = self._more(list(token_ids)).zero_().numpy().view(np.uint32)
        ids = np.array(list(token_ids.values()), np.uint32)
        bits[np.arange(len(ids)), ids // 32] = np.uint32(1) << ids % 32

    def _more(self, rows: Ids[int]) -> Tensor:
        """Lines for these logits rows, to be filled."""
        shape = (len(rows), self._num_words)
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._parts.append(bits)
        self._lines[list(rows)] = range(self._count, self._count + len(rows))
        self._count += len(rows)
        return bits

    def build(self) -> TokenMask:
        parts = [part.to(self._device, non_blocking=True) for part in self._parts]
        return TokenMask(
            parts[0] if len(parts) == 1 else torch.cat(parts),
            upload(self._lines, torch.int32, self._device),
        )
