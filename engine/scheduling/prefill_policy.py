"""Decides when prompts are read, and how many of their tokens at once.

A prefill either has a forward of its own or shares one with the decoding rows (a mixed step). The
scheduler calls `choose_prefill` in every step.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.engine.rows.running_batch import Mask, RunningBatch
from batchgen.engine.rows.sequence import Sequence

_URGENT_CHUNKS = 8
"""If the prompts that can start now fill this many chunks, they are prefilled in one large batch
instead of chunk by chunk together with the decoding rows."""
_WORTHWHILE_TOKENS = 2048
"""The fewest tokens that justify a prefill in its own forward. A smaller prefill takes nearly as
long, because it launches as many kernels: 35 ms for 28 layers on an H100, as long as several decode
steps."""
_WORTHWHILE_SHARE = 8
"""If at least one in this many of the engine's rows is free, rows are started even if their prompts
have few tokens."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The sizes that bound batches."""

    max_num_seqs: int  # the most rows that are prefilled or decode at once
    # The most tokens of a prefill batch, including those of decoding rows in the same forward.
    max_batched_tokens: int
    # The most prompt tokens of a chunk: a small prefill in one forward with decoding rows, used
    # when few rows can start. With 0, a prefill never shares its forward.
    chunk_tokens: int
    chunk_rows: int  # the most rows of a chunk
    # The most tokens of a prefill that a CUDA graph replays. Such a prefill does not share its
    # forward with decoding rows, unless it is a chunk.
    alone_tokens: int


class Candidates(NamedTuple):
    """The rows that can start now if the cache has room: first the row whose prefill was cut, if
    there is one, then the first waiting rows."""

    rows: list[Sequence]
    is_cut: bool  # whether the first row is the one whose prefill was cut
    are_all: bool  # whether every waiting row is among `rows`

    @property
    def num_waiting(self) -> int:
        return len(self.rows) - self.is_cut

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row still has to read."""
        return [seq.num_tokens - seq.num_computed_tokens for seq in self.rows]


class PrefillRoom(NamedTuple):
    """The most tokens and rows of the next prefill, and whether it shares its forward with the
    decoding rows."""

    tokens: int
    rows: int
    with_decode: bool


def choose_prefill(
    limits: BatchLimits,
    candidates: Candidates,
    running: RunningBatch,
    staying: Mask,
    width: int,
) -> PrefillRoom | None:
    """Choose the size of the next prefill; None if the step should only decode.

    If few rows can start, their prompts are read in small chunks, in one forward with the decoding
    rows. If many can, their prompts are read in batches as large as allowed; these share the
    forward with the decoding rows if the batch is too large for a CUDA graph.

    Args:
        staying: [B] bool, which rows of `running.order` have to decode on.
        width: the number of tokens of each decoding row in a step; more than 1 with drafts.
    """
    decoding = int(staying.sum())
    # A step with drafts already has so many tokens that prompt tokens would make it slower.
    chunk_tokens = limits.chunk_tokens if width == 1 else 0
    mixed_tokens = limits.max_batched_tokens - decoding
    if _is_urgent(limits, candidates, running, staying, chunk_tokens):
        if chunk_tokens and decoding:
            tokens = min(sum(candidates.lengths), mixed_tokens)
            # Such a prefill is larger than a chunk, and too large for a CUDA graph.
            if tokens > max(limits.alone_tokens, limits.chunk_tokens):
                return PrefillRoom(mixed_tokens, limits.max_num_seqs, with_decode=True)
        return PrefillRoom(limits.max_batched_tokens, limits.max_num_seqs, with_decode=False)
    if chunk_tokens and _is_worthwhile(limits, candidates, chunk_tokens // 2):
        return PrefillRoom(chunk_tokens, limits.chunk_rows, with_decode=True)
    return None


def _is_urgent(
    limits: BatchLimits,
    candidates: Candidates,
    running: RunningBatch,
    staying: Mask,
    chunk_tokens: int,
) -> bool:
    """Return whether to run a prefill as large as allowed: because no row decodes, or because the
    prompts of the rows that can start would take many chunks."""
    if not staying.any():
        return True
    if not chunk_tokens:
        return _is_worthwhile(limits, candidates, _WORTHWHILE_TOKENS)
    if is_last_wave(candidates, running) and _fits_chunks(limits, candidates, running, staying):
        return False
    return sum(candidates.lengths) >= _URGENT_CHUNKS * chunk_tokens


def _fits_chunks(
    limits: BatchLimits, candidates: Candidates, running: RunningBatch, staying: Mask
) -> bool:
    """Return whether all waiting rows, prefilled chunk by chunk, would still end no later than the
    last of the rows that decode now."""
    slots = running.order[staying]
    left = running.max_tokens[slots] - running.num_tokens[slots] - running.launched[slots]
    rows = candidates.rows
    tokens = np.cumsum(candidates.lengths)
    # In which step each row's prefill is complete: chunks are limited in tokens and in rows.
    starts = tokens // limits.chunk_tokens + np.arange(len(rows)) // limits.chunk_rows
    ends = starts + [seq.num_remaining for seq in rows]
    return bool(ends.max() <= left.max())


def _is_worthwhile(limits: BatchLimits, candidates: Candidates, tokens: int) -> bool:
    """Return whether a prefill should run now: because at least `tokens` tokens can start, all
    waiting rows can start, a cut row waits to continue, or many rows of the engine are free."""
    count = candidates.num_waiting
    if candidates.is_cut or (count and candidates.are_all):
        return True
    if not count or count * _WORTHWHILE_SHARE >= limits.max_num_seqs:
        return bool(count)
    return sum(candidates.lengths) >= tokens


def is_last_wave(candidates: Candidates, running: RunningBatch) -> bool:
    """Return whether the waiting rows are the last wave of a run whose end is known: every waiting
    row can start now, and every row's length is known in advance."""
    if not (candidates.rows and candidates.are_all):
        return False
    exact = running.exact[running.occupied].all()
    return bool(exact and all(seq.stop.exact_length for seq in candidates.rows))


def longest_first(waiting: abc.Iterable[Sequence]) -> list[Sequence]:
    """Sort the waiting rows of a last wave by decreasing number of remaining tokens (Graham 1969,
    LPT), so that no long row runs alone at the end. Preempted rows stay first."""
    return sorted(
        waiting, key=lambda seq: (seq.num_preemptions > 0, seq.num_remaining), reverse=True
    )


def cached_first(
    waiting: abc.Iterable[Sequence], is_cached: abc.Callable[[Sequence], bool], late: int
) -> list[Sequence]:
    """Sort waiting rows so that those come first whose prompts are mostly in the prefix cache,
    before the prompts of other rows replace them there. Preempted rows stay before all others.

    Args:
        is_cached: whether most of a row's prompt is in the prefix cache.
        late: rows whose `turn` is below this number have been overtaken too often; they precede the
            rows with cached prompts.
    """

    def key(seq: Sequence) -> tuple[int, int]:
        if seq.num_preemptions:
            return 0, 0
        return (1 if seq.turn < late else 2 if is_cached(seq) else 3), seq.turn

    return sorted(waiting, key=key)


def check_chunk_sizes(
    max_batched_tokens: int | None, chunk_tokens: int | None, multiple: int
) -> None:
    """Raise ValueError if a prefill is smaller than the smallest chunk of a row, so that a row that
    was cut could never continue.

    Args:
        max_batched_tokens: the most tokens of a prefill; None if the user set no limit.
        chunk_tokens: the most prompt tokens in one forward with decoding rows; None if the user set
            no limit, 0 if a prefill never shares its forward.
        multiple: every chunk but a prompt's last has a multiple of this many tokens.
    """
    sizes = {"max_batched_tokens": max_batched_tokens, "chunk_tokens": chunk_tokens}
    for name, tokens in sizes.items():
        if tokens and tokens < multiple:
            raise ValueError(
                f"{name} is {tokens}, but prompts of this model and strategy are read in "
                f"multiples of {multiple} tokens: set it to {multiple} or more"
            )
