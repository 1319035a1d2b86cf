"""The constrained rows of one batch, and the token masks that enforce their constraints.

The matcher of a constrained row (`constraint/matcher.py`) knows which tokens its grammar allows
next. A `Guide` collects the matchers of a batch's rows and turns them into a mask over the logits,
which the sampler applies. `RunningBatch` makes a guide for each batch that the scheduler plans; the
strategies call it for masks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.constraint.matcher import Matcher, fill_all
from batchgen.engine.device.transfer import upload
from batchgen.engine.rows.sequence import Sequence
from batchgen.kernels.sampling.token_mask import TokenMask


@dataclass(frozen=True, slots=True)
class Guide:
    """The rows of a batch that have a constraint, and so a matcher.

    A matcher has read all tokens that the host has read. So the masks of a step can be filled only
    after the step before it was read; meanwhile the device runs the forward.
    """

    num_rows: int  # B, the number of rows of the batch
    seqs: dict[int, Sequence]  # the constrained rows, by their index in the batch

    @classmethod
    def of(cls, seqs: Collection[Sequence]) -> Guide | None:
        """Return the guide of a batch of these rows; None if no row has a constraint."""
        rows = {row: seq for row, seq in enumerate(seqs) if seq.matcher is not None}
        return cls(len(seqs), rows) if rows else None

    @property
    def matchers(self) -> Iterator[tuple[int, Matcher]]:
        """The constrained rows that have not ended since the guide was made, each as its index in
        the batch and its matcher."""
        for row, seq in self.seqs.items():
            if seq.matcher is not None:
                yield row, seq.matcher

    def mask(self, logits: Tensor) -> TokenMask:
        """Return the mask of the tokens that each row may take next.

        Args:
            logits: [B, V], the logits that the mask is for. Only their shape and device are used.
        """
        masks = MaskBuilder(logits)
        rows = dict(self.matchers)
        masks.allow(list(rows), list(rows.values()))
        return masks.build()

    def mask_drafts(
        self, logits: Tensor, drafts: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> TokenMask:
        """Return the mask of the tokens that each row may take after each prefix of its drafts:
        after none of them, after the first, and so on. After a draft that is not allowed, nothing
        is excluded, because the logits there are not used.

        Each matcher stays advanced by the drafts that it accepted, so that committing them later
        need not check them again.

        Args:
            logits: [B · (k + 1), V], the logits that the mask is for. Only their shape and device
                are used.
            drafts: [B, k], the drafted tokens.
            counts: [B], how many drafts each row has.
        """
        width = 1 + drafts.shape[1]
        masks = MaskBuilder(logits)
        alive = dict(self.matchers)
        for j in range(width):
            masks.allow([row * width + j for row in alive], list(alive.values()))
            alive = {
                row: matcher
                for row, matcher in alive.items()
                if j < counts[row]
                and matcher.walk(drafts[row, j : j + 1].tolist())
                and not matcher.terminated
            }
        return masks.build()

    def forced(self, limit: int) -> npt.NDArray[np.int64] | None:
        """Return the tokens that must come next because the constraint leaves no choice, at most
        `limit` per row.

        Matchers are reset to their last commit.

        Returns:
            [B, n], each row's forced tokens followed by -1, where n is `limit`. None if no row has
                a forced token.
        """
        tokens = np.full((self.num_rows, limit), -1, np.int64)
        for row, matcher in self.matchers:
            forced = matcher.forced(limit)
            matcher.rewind(matcher.num_committed)
            tokens[row, : len(forced)] = forced
        return tokens if (tokens >= 0).any() else None


class MaskBuilder:
    """Collects which tokens rows of logits may take into one mask. Rows that were not named may
    take any token. The mask is written to pinned memory, from which a GPU copies while the host
    continues.

    Args:
        logits: [R, V], the logits that the mask is for. Only their shape and device are used.
    """

    def __init__(self, logits: Tensor) -> None:
        rows, vocab_size = logits.shape
        self._device = logits.device
        self._num_words = -(-vocab_size // 32)
        self._parts: list[Tensor] = []
        self._count = 0
        self._lines = np.full(rows, -1, np.int32)

    def allow(self, rows: list[int], matchers: list[Matcher]) -> None:
        """Let the rows `rows[i]` of the logits take the tokens that `matchers[i]` allows now."""
        fill_all(matchers, self._add_lines(rows), range(len(rows)))

    def allow_only(self, token_ids: Mapping[int, int]) -> None:
        """Let rows of the logits take only one token each. `token_ids` maps a row to its token."""
        bits = self._add_lines(list(token_ids)).zero_().numpy().view(np.uint32)
        ids = np.array(list(token_ids.values()), np.uint32)
        bits[np.arange(len(ids)), ids // 32] = np.uint32(1) << ids % 32

    def _add_lines(self, rows: list[int]) -> Tensor:
        """Add lines to the mask for these rows of the logits, int32 [len(rows), ceil(V / 32)]."""
        shape = (len(rows), self._num_words)
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._parts.append(bits)
        self._lines[rows] = range(self._count, self._count + len(rows))
        self._count += len(rows)
        return bits

    def build(self) -> TokenMask:
        """Return the mask on the device of the logits. At least one row must have been named."""
        parts = [part.to(self._device, non_blocking=True) for part in self._parts]
        return TokenMask(
            parts[0] if len(parts) == 1 else torch.cat(parts),
            upload(self._lines, torch.int32, self._device),
        )
