"""Drafts by looking up where a row's last tokens stood before: an n-gram index on the device.

Prompt-lookup decoding (Saxena 2023): text that repeats itself, or a prompt that is quoted, gives
drafts without any model. The index lives on the device and no operation waits for the host, so an
overlapped loop drafts from tokens that the host has not seen yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.kernels.speculation import ngram_triton

_LEAST_ENTRIES = 2**10
_MOST_ENTRIES = 2**24
_LARGEST_N = 8
_LOW31 = 2**31 - 1
"""Mask of what `>> 33` leaves of a word: int64 shifts copy the sign."""


@dataclass(frozen=True, eq=False)
class NgramIndex:
    """The tokens of S slots, H at most in each, and where the n-grams of them occurred.

    A hash table maps an n-gram to the place of its most recent occurrence: one entry per hash, no
    chains. What it tells is never trusted but compared with `tokens`, so entries of other n-grams
    and of a slot's former tokens need no removal; a draft always continues a true occurrence.

    Every result is a function of the calls so far, on any device: entries are written by an atomic
    maximum, whose order does not matter. All calls belong on one stream, and none waits for the
    host; tensors keep their addresses, for CUDA graphs.

    Attributes:
        tokens: [S, H] int32, by absolute position; undefined from the slot's length on.
        lengths: [S] int32, known tokens of each slot.
        entries: [size] int64, size a power of two; an entry is stamp, slot, position from the
            highest bit to the lowest, 0 where there is none. The position is that of the token
            after the n-gram, slot and position take as many bits as S and H need. The largest wins,
            so the most recent call and in it the last slot and position do. With 31 bits for slot
            and position (512 slots of 4M tokens), stamps last for 2³² calls of `append`; from then
            on all calls count as equally recent, and later places win.
        clock: [2] int64: calls of `append` so far; programs of the current one that have begun.
        min_n, max_n: lengths of n-grams, 1 ≤ min_n ≤ max_n ≤ 8.
        pool: whether a slot also finds what occurred in the others.
    """

    tokens: Tensor
    lengths: Tensor
    entries: Tensor
    clock: Tensor
    min_n: int
    max_n: int
    pool: bool

    @classmethod
    def allocate(
        cls,
        num_slots: int,
        max_len: int,
        min_n: int,
        max_n: int,
        pool: bool,
        device: torch.device | str,
        most_entries: int | None = None,
    ) -> NgramIndex:
        """An empty index.

        The table has two entries for each n-gram that full slots hold, at least 4 · S · H and 2¹⁰,
        at most 2²⁴ (128 MiB) or `most_entries`, a power of two. In a table that is too small,
        recent n-grams displace old ones.
        """
        assert 1 <= min_n <= max_n <= _LARGEST_N
        keys = (max_n - min_n + 1) * (1 + pool)
        wanted = 2 * max(keys, 2) * num_slots * max_len
        size = min(max(1 << (wanted - 1).bit_length(), _LEAST_ENTRIES), _MOST_ENTRIES)
        size = min(size, most_entries or size)
        return cls(
            tokens=torch.zeros(num_slots, max_len, dtype=torch.int32, device=device),
            lengths=torch.zeros(num_slots, dtype=torch.int32, device=device),
            entries=torch.zeros(size, dtype=torch.int64, device=device),
            clock=torch.zeros(2, dtype=torch.int64, device=device),
            min_n=min_n,
            max_n=max_n,
            pool=pool,
        )

    @property
    def position_bits(self) -> int:
        return (self.tokens.shape[1] - 1).bit_length()

    @property
    def slot_bits(self) -> int:
        return (self.tokens.shape[0] - 1).bit_length()

    @property
    def last_stamp(self) -> int:
        """The stamp of every call from this one on."""
        return int((1 << (63 - self.position_bits - self.slot_bits)) - 1)

    def reset(self, slots: Tensor) -> None:
        """Forget the tokens of slots [R] int64."""
        self.lengths.index_fill_(0, slots, 0)

    def append(self, slots: Tensor, starts: Tensor, token_ids: Tensor, counts: Tensor) -> None:
        """Store new tokens of R rows and index the n-grams before each of them.

        So a row's last n-gram is found only once the token after it is known. Tokens past max_len
        are dropped. A row of count 0 changes nothing (a padding row may name any slot).

        Args:
            slots: [R] int64, distinct among rows of a count above 0.
            starts: [R] int64, the position of each row's first new token: the slot's length, or
                less to replace its last tokens; not negative.
            token_ids: [R, W] int64 in [0, 2³¹); columns contiguous; anything past the counts.
            counts: [R] int32 or int64, new tokens of each row, at most W.
        """
        run = ngram_triton.append if self.tokens.is_cuda else append_reference
        run(self, slots, starts, token_ids, counts)

    def propose(self, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Drafts for the next k tokens of B rows.

        They continue the most recent occurrence that the table knows of the longest of the slot's
        last n-grams: for n from max_n down to min_n, its own, else, with `pool`, that of any slot.
        A continuation in the slot itself that reaches the slot's end goes on with the drafts: a
        text that repeats is drafted to repeat. In another slot it ends with what is known there.

        Args:
            slots: [B] int64.
            k: above 0.

        Returns:
            drafts [B, k] int64, past the count the slot's last token (0 if it has none), and
            num_drafts [B] int32.
        """
        run = ngram_triton.propose if self.tokens.is_cuda else propose_reference
        return run(self, slots, k)


def append_reference(
    index: NgramIndex, slots: Tensor, starts: Tensor, token_ids: Tensor, counts: Tensor
) -> None:
    """`NgramIndex.append` in PyTorch."""
    if not token_ids.numel():
        return
    device, width, max_len = token_ids.device, token_ids.shape[1], index.tokens.shape[1]
    counts = counts.long().minimum(max_len - starts)
    step = torch.arange(width, device=device)
    new = step < counts.unsqueeze(1)
    positions = starts.unsqueeze(1) + step

    older = starts.unsqueeze(1) + torch.arange(-index.max_n, 0, device=device)
    older = index.tokens[slots.unsqueeze(1), older.clamp(0, max_len - 1)].long()
    history = torch.cat((older, token_ids), 1).unfold(1, index.max_n, 1)[:, :width]
    buckets = _buckets(index, history.flip(-1), slots.unsqueeze(1))
    known = new & (positions >= _key_lengths(index, device).view(-1, 1, 1))
    stamp = index.clock[0].clamp(max=index.last_stamp) << (index.slot_bits + index.position_bits)
    packed = stamp | (slots.unsqueeze(1) << index.position_bits) | positions
    index.entries.scatter_reduce_(
        0, buckets.flatten(), torch.where(known, packed, 0).flatten(), "amax"
    )

    place = slots.unsqueeze(1) * max_len + positions
    index.tokens.view(-1)[place[new]] = token_ids[new].int()
    grown = counts > 0
    index.lengths[slots[grown]] = (starts + counts)[grown].int()
    index.clock[0] += 1


def propose_reference(index: NgramIndex, slots: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """`NgramIndex.propose` in PyTorch."""
    device = slots.device
    lengths = index.lengths[slots].long()
    back = torch.arange(1, index.max_n + 1, device=device)
    places = (lengths.unsqueeze(1) - back).clamp(min=0)
    recent = index.tokens[slots.unsqueeze(1), places].long()

    # Candidates [keys, B], the first that holds wins.
    key_lengths = _key_lengths(index, device).unsqueeze(1)
    entries = index.entries[_buckets(index, recent, slots)]
    positions = entries & ((1 << index.position_bits) - 1)
    sources = (entries >> index.position_bits) & ((1 << index.slot_bits) - 1)
    holds = (lengths >= key_lengths) & (positions >= key_lengths)
    holds &= positions < index.lengths[sources]
    own = sources == slots
    holds[:: 1 + index.pool] &= own[:: 1 + index.pool]
    places = (positions.unsqueeze(-1) - back).clamp(min=0)
    equal = index.tokens[sources.unsqueeze(-1), places] == recent
    holds &= (equal | (back > key_lengths.unsqueeze(-1))).all(-1)
    first = holds.byte().argmax(0, keepdim=True)

    source, position = sources.gather(0, first).squeeze(0), positions.gather(0, first).squeeze(0)
    period = (index.lengths[source] - position).clamp(min=1)
    num_drafts = torch.where(source == slots, k, period.clamp(max=k)) * holds.any(0)
    ahead = torch.arange(k, device=device)
    places = position.unsqueeze(1) + ahead % period.unsqueeze(1)
    last = torch.where(lengths > 0, recent[:, 0], 0).unsqueeze(1)
    drafted = ahead < num_drafts.unsqueeze(1)
    drafts = torch.where(drafted, index.tokens[source.unsqueeze(1), places].long(), last)
    return drafts, num_drafts.int()


def _key_lengths(index: NgramIndex, device: torch.device) -> Tensor:
    """n of each key under which an n-gram stands: long ones first, the slot's own before shared."""
    sizes = torch.arange(index.max_n, index.min_n - 1, -1, device=device)
    return sizes.repeat_interleave(1 + index.pool)


def _buckets(index: NgramIndex, recent: Tensor, slots: Tensor) -> Tensor:
    """[keys, *shape], the entry of each key, for the tokens before a position.

    Args:
        recent: [*shape, max_n] int64, the last token first.
        slots: int64, of as many axes as shape and broadcast to it.
    """
    tokens = recent + 1
    state = torch.zeros_like(tokens[..., 0])
    states = []
    for n in range(1, index.max_n + 1):
        state = (state + tokens[..., n - 1]) * ngram_triton.EXTEND
        state = state ^ ((state >> 33) & _LOW31)
        states.append(state)
    ngrams = torch.stack(states[index.min_n - 1 :][::-1])
    sizes = torch.arange(index.max_n, index.min_n - 1, -1, device=slots.device)
    shared = sizes.view(-1, *[1] * slots.dim())
    own = (slots + 1) * 16 + shared
    salts = torch.stack((own, shared.expand_as(own)) if index.pool else (own,), 1)
    keys = (ngrams.unsqueeze(1) + salts) * ngram_triton.FINISH
    keys = (keys ^ ((keys >> 33) & _LOW31)) & (len(index.entries) - 1)
    return keys.flatten(0, 1)
