"""The constrained rows of one batch, and the masks that keep them to their constraints.

A constrained row has a matcher (`constraint/matcher.py`), which knows which tokens its grammar
allows next. A `Guide` collects the matchers of a batch's rows and turns them into a mask over the
logits, which the sampler applies. `RunningBatch` makes a guide for each batch that the scheduler
plans; the strategies ask it for masks.
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
    """The rows of a batch that have a constraint, and so a matcher that tells which tokens may come
    next. A matcher stands behind the newest token that the host has read. The masks of a step can
    be filled only when the step before it was read; the device runs the forward meanwhile."""

    num_rows: int  # B, the number of rows of the batch
    seqs: dict[int, Sequence]  # the constrained rows, by their index in the batch

    @classmethod
    def of(cls, seqs: Collection[Sequence]) -> Guide | None:
        """The guide of a batch of these rows, in their order; None if no row has a constraint."""
        rows = {row: seq for row, seq in enumerate(seqs) if seq.matcher is not None}
        return cls(len(seqs), rows) if rows else None

    @property
    def matchers(self) -> Iterator[tuple[int, Matcher]]:
        """The index in the batch and the matcher of each constrained row that has not ended since
        the guide was made."""
        for row, seq in self.seqs.items():
            if seq.matcher is not None:
                yield row, seq.matcher

    def mask(self, logits: Tensor) -> TokenMask:
        """The mask of what each row may take next. `logits` is [B, V], the logits that the mask is
        for. Their values are not read."""
        masks = MaskBuilder(logits)
        rows = dict(self.matchers)
        masks.allow(list(rows), list(rows.values()))
        return masks.build()

    def mask_drafts(
        self, logits: Tensor, drafts: npt.NDArray[np.int64], counts: npt.NDArray[np.int32]
    ) -> TokenMask:
        """The mask of what each row may take after each run of its drafts: after none of them,
        after the first, and so on. Nothing is excluded after a draft that is itself not allowed,
        because nobody reads the logits there.

        Each matcher is left behind the drafts that it took tentatively. What is committed of them
        need not be checked again.

        Args:
            logits: [B · (k + 1), V], the logits that the mask is for. Their values are not read.
            drafts: [B, k], the drafted tokens.
            counts: [B], how many of its drafts each row has.
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
        """The tokens that must come next because the constraint leaves no choice, at most `limit`
        for each row. Matchers are left as they stood after the last commit. Returns [B, n], where n
        is the most that any row has: in each row its forced tokens and then -1. None if no row has
        any."""
        tokens = np.full((self.num_rows, limit), -1, np.int64)
        for row, matcher in self.matchers:
            forced = matcher.forced(limit)
            matcher.rewind(matcher.num_committed)
            tokens[row, : len(forced)] = forced
        return tokens if (tokens >= 0).any() else None


class MaskBuilder:
    """Collects into one mask what several rows of logits may take. It writes to pinned memory,
    which a GPU copies from while the host goes on. Rows that are never named may take anything.

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
        """Let the rows `rows[i]` of the logits take what `matchers[i]` allows now."""
        fill_all(matchers, self._more(rows), range(len(rows)))

    def allow_only(self, token_ids: Mapping[int, int]) -> None:
        """Let rows of the logits take a single token each."""
        bits = self._more(list(token_ids)).zero_().numpy().view(np.uint32)
        ids = np.array(list(token_ids.values()), np.uint32)
        bits[np.arange(len(ids)), ids // 32] = np.uint32(1) << ids % 32

    def _more(self, rows: list[int]) -> Tensor:
        """New lines of the mask for these rows of the logits, int32 [len(rows), ceil(V / 32)]."""
        shape = (len(rows), self._num_words)
        bits = torch.empty(shape, dtype=torch.int32, pin_memory=self._device.type == "cuda")
        self._parts.append(bits)
        self._lines[rows] = range(self._count, self._count + len(rows))
        self._count += len(rows)
        return bits

    def build(self) -> TokenMask:
        """The mask, on the device of the logits. At least one call must have allowed something."""
        parts = [part.to(self._device, non_blocking=True) for part in self._parts]
        return TokenMask(
            parts[0] if len(parts) == 1 else torch.cat(parts),
            upload(self._lines, torch.int32, self._device),
        )
