"""Decides when prompts are read, and how many of their tokens at once.

A prefill runs in a forward of its own (alone), or in one with the rows that decode (mixed). The
scheduler asks `choose_prefill` at every step.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from batchgen.engine.rows.running_batch import Mask, RunningBatch
from batchgen.engine.rows.sequence import Sequence

_URGENT_CHUNKS = 8
"""If the prompts that can start now fill this many chunks, they are prefilled in one batch rather
than chunk by chunk together with the decoding rows."""
_WORTHWHILE_TOKENS = 2048
"""The least tokens for which a prefill alone is worth its time. One of fewer tokens takes nearly as
long, because it launches as many kernels: 35 ms for 28 layers on an H100, as long as several decode
steps."""
_WORTHWHILE_SHARE = 8
"""If at least one in this many of the engine's rows is free, rows are started however few tokens
their prompts have."""


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The sizes that bound batches."""

    max_num_seqs: int  # the most rows that are prefilled or decode at once
    # The most tokens of a prefill batch, with those of decoding rows that take part in it.
    max_batched_tokens: int
    # The most prompt tokens of a chunk: a small prefill in one forward with decoding rows, for when
    # few rows can start. With 0, prompts are only prefilled alone.
    chunk_tokens: int
    chunk_rows: int  # the most rows of a chunk
    # The most tokens of a prefill that a CUDA graph replays. Decoding rows take no part in such a
    # prefill, unless it is a chunk.
    alone_tokens: int


class Candidates(NamedTuple):
    """The rows that can start now, if the cache has room: first the one whose prefill was cut, if
    there is one, then the first waiting rows, up to the limit of rows."""

    rows: list[Sequence]
    is_cut: bool  # whether the first row is one whose prefill was cut
    are_all: bool  # whether every waiting row is among them

    @property
    def num_waiting(self) -> int:
        return len(self.rows) - self.is_cut

    @property
    def lengths(self) -> list[int]:
        """How many tokens each row still has to read."""
        return [seq.num_tokens - seq.num_computed_tokens for seq in self.rows]


class PrefillRoom(NamedTuple):
    """The most tokens and rows of the next prefill, and whether decoding rows take part in it."""

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
    """Choose the next prefill; None if rows only decode.

    If few rows can start, their prompts are read in small chunks together with the decoding rows.
    If many can, they are read in batches as large as allowed, in which decoding rows take part if
    the batch is too large for a CUDA graph.

    Args:
        staying: [B] bool, which rows of `running.order` have to decode on.
        width: the tokens of each decoding row in a step: 1, or more with drafts.
    """
    decoding = int(staying.sum())
    # A step with drafts has so many tokens already that those of prompts would make it slower.
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
    """Whether to run a prefill as large as allowed: because no row decodes, or because the prompts
    of the rows that can start would take many chunks."""
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
    """Whether all waiting rows, if their prompts are read chunk by chunk, still end no later than
    the last of the rows that decode now."""
    slots = running.order[staying]
    left = running.max_tokens[slots] - running.num_tokens[slots] - running.launched[slots]
    rows = candidates.rows
    tokens = np.cumsum(candidates.lengths)
    starts = tokens // limits.chunk_tokens + np.arange(len(rows)) // limits.chunk_rows
    ends = starts + [seq.num_remaining for seq in rows]
    return bool(ends.max() <= left.max())


def _is_worthwhile(limits: BatchLimits, candidates: Candidates, tokens: int) -> bool:
    """Whether a prefill should run now: at least `tokens` tokens can start, all waiting rows can, a
    cut row waits to go on, or many rows are free."""
    count = candidates.num_waiting
    if candidates.is_cut or (count and candidates.are_all):
        return True
    if not count or count * _WORTHWHILE_SHARE >= limits.max_num_seqs:
        return bool(count)
    return sum(candidates.lengths) >= tokens


def is_last_wave(candidates: Candidates, running: RunningBatch) -> bool:
    """Whether every waiting row can start now and every row's length is known beforehand, so that
    no row that ends will be replaced and it is known when each ends."""
    if not (candidates.rows and candidates.are_all):
        return False
    exact = running.exact[running.occupied].all()
    return bool(exact and all(seq.stop.exact_length for seq in candidates.rows))


def longest_first(waiting: abc.Iterable[Sequence]) -> list[Sequence]:
    """The waiting rows of a last wave, those with the most tokens to come first (Graham 1969, LPT),
    so that none is left to run alone at the end. Preempted rows stay before all others."""
    return sorted(
        waiting, key=lambda seq: (seq.num_preemptions > 0, seq.num_remaining), reverse=True
    )


def check_chunk_sizes(
    max_batched_tokens: int | None, chunk_tokens: int | None, multiple: int
) -> None:
    """Refuse sizes of prefills with which a row that is cut could never go on. Raises ValueError if
    a size is less than the multiple.

    Args:
        max_batched_tokens: the most tokens of a prefill; None if the user set no limit.
        chunk_tokens: the most prompt tokens in one forward with decoding rows; None if the user set
            no limit, 0 if prompts are only prefilled alone.
        multiple: every prefill but a prompt's last has a multiple of this many tokens.
    """
    sizes = {"max_batched_tokens": max_batched_tokens, "chunk_tokens": chunk_tokens}
    for name, tokens in sizes.items():
        if tokens and tokens < multiple:
            raise ValueError(
                f"{name} is {tokens}, but prompts of this model and strategy are read in "
                f"multiples of {multiple} tokens: set it to {multiple} or more"
            )
