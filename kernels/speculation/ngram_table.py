"""The tensors of an n-gram index and how its hash table is laid out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

EXTEND = 0x2545F4914F6CDD1D
"""Multiplier of the hash when an n-gram grows by a token. It is that of xorshift64*."""
FINISH = 0x369DEA0F31A53F85
"""Multiplier of the hash when an n-gram becomes a key. It is one of L'Ecuyer 1999. Both are odd and
below 2⁶³."""

_LEAST_ENTRIES = 2**10
_MOST_ENTRIES = 2**24
_LARGEST_N = 8


@dataclass(frozen=True, eq=False)
class NgramTable:
    """The tokens of up to S rows, H at most of each, and where the n-grams of them occurred.

    A row has a place from 0 to S - 1, which another row gets when it has ended. A hash table maps
    an n-gram to the position of its most recent occurrence. It has one entry per hash and no
    chains. What it says is never trusted but compared with `tokens`. So entries that belong to
    other n-grams, or to tokens that a place held before, need not be removed, and a draft always
    continues a true occurrence.

    All results are functions of the calls so far, on any device: entries are written by an atomic
    maximum, for which the order does not matter. All calls belong on one stream, and none waits for
    the host. The tensors keep their addresses, as CUDA graphs need.

    Attributes:
        tokens: [S, H] int32, the token at each position of each place. Undefined from the place's
            length on.
        lengths: [S] int32, how many tokens of each place are known.
        entries: [size] int64, where size is a power of two. An entry consists of a stamp, a place
            and a position, from the highest bit to the lowest, and is 0 if there is none. The
            position is that of the token after the n-gram. Place and position take as many bits as
            S and H need. Of two entries the larger stays: that of the later call, and within one
            call that of the larger place, then of the larger position. With 31 bits for place and
            position (512 places of 4M tokens), stamps last for 2³² calls of `append`. From then on
            all calls count as equally recent.
        clock: [2] int64, how many calls of `append` there were, and how many programs of the
            current call have begun.
        min_n, max_n: the lengths of n-grams, 1 ≤ min_n ≤ max_n ≤ 8.
        pool: whether a row also finds what occurred in other rows.
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
        num_places: int,
        max_len: int,
        min_n: int,
        max_n: int,
        pool: bool,
        device: torch.device | str,
        most_entries: int | None = None,
    ) -> Self:
        """An empty table.

        It has two entries for each n-gram that its places can hold when they are full: at least
        4 · S · H and at least 2¹⁰, and at most 2²⁴ (128 MiB) or `most_entries`. If that is too few,
        recent n-grams displace older ones.

        Args:
            num_places: S.
            max_len: H.
            min_n, max_n, pool: as the attributes.
            device: of the tensors.
            most_entries: a power of two.
        """
        assert 1 <= min_n <= max_n <= _LARGEST_N
        keys = (max_n - min_n + 1) * (1 + pool)
        wanted = 2 * max(keys, 2) * num_places * max_len
        size = min(max(1 << (wanted - 1).bit_length(), _LEAST_ENTRIES), _MOST_ENTRIES)
        size = min(size, most_entries or size)
        return cls(
            tokens=torch.zeros(num_places, max_len, dtype=torch.int32, device=device),
            lengths=torch.zeros(num_places, dtype=torch.int32, device=device),
            entries=torch.zeros(size, dtype=torch.int64, device=device),
            clock=torch.zeros(2, dtype=torch.int64, device=device),
            min_n=min_n,
            max_n=max_n,
            pool=pool,
        )

    @property
    def position_bits(self) -> int:
        """The bits of an entry that hold the position."""
        return (self.tokens.shape[1] - 1).bit_length()

    @property
    def place_bits(self) -> int:
        """The bits of an entry that hold the place."""
        return (self.tokens.shape[0] - 1).bit_length()

    @property
    def last_stamp(self) -> int:
        """The largest stamp that an entry can hold. All calls from this one on have it."""
        return int((1 << (63 - self.position_bits - self.place_bits)) - 1)
