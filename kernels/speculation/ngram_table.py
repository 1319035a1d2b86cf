"""The tensors of an n-gram index, and the layout of its hash table. `NgramIndex` (`ngram.py`) adds
the operations."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

EXTEND = 0x2545F4914F6CDD1D
"""Multiplier of the hash when a token is added to an n-gram; that of xorshift64*."""
FINISH = 0x369DEA0F31A53F85
"""Multiplier of the hash when an n-gram becomes a key; from L'Ecuyer 1999. Both multipliers are odd
and below 2⁶³."""

_LEAST_ENTRIES, _MOST_ENTRIES = 2**10, 2**24
"""The bounds of a table's size, whatever its rows could hold."""
_LARGEST_N = 8
"""The longest n-grams: the salt of a key has 4 bits for n (`ngram._buckets`)."""


@dataclass(frozen=True, eq=False)
class NgramTable:
    """The tokens of up to S rows, at most H of each, and where their n-grams occurred.

    A row has a *store row* from 0 to S - 1, which another row gets when it has ended. A hash table
    maps an n-gram to the position of its most recent occurrence, with one entry per hash and no
    chains. Every hit is compared with `tokens`, so stale entries need not be removed, and a draft
    always continues a true occurrence.

    An entry is, from the highest bit, a stamp, a store row and the position after the n-gram; 0 is
    empty. Of two entries the larger stays: that of the later call, then of the larger store row and
    position. With 31 bits for store row and position (512 rows of 4M tokens) stamps last for 2³²
    calls of `append`; from then on all calls count as equally recent.

    Results are a function of the calls so far, on any device, since entries are written by an
    atomic maximum. All calls must be on one stream, and none waits for the host. The tensors keep
    their addresses, as CUDA graphs need.
    """

    tokens: Tensor  # [S, H] int32; undefined from a row's length on
    lengths: Tensor  # [S] int32
    entries: Tensor  # [size] int64, size a power of two
    clock: Tensor  # [2] int64: calls of `append`, and begun programs of the present one
    min_n: int  # 1 ≤ min_n ≤ max_n ≤ 8
    max_n: int
    pool: bool  # whether a row also finds what occurred in other rows

    @classmethod
    def allocate(
        cls,
        num_rows: int,
        max_len: int,
        min_n: int,
        max_n: int,
        pool: bool,
        device: torch.device | str,
        most_entries: int | None = None,
    ) -> Self:
        """Allocate an empty table.

        It has two entries for each n-gram that its S rows can hold when they are full: at least 4 ·
        S · H and 2¹⁰, at most 2²⁴ (128 MiB) or `most_entries`, a power of two. If that is too few,
        recent n-grams replace older ones.
        """
        assert 1 <= min_n <= max_n <= _LARGEST_N
        keys = (max_n - min_n + 1) * (1 + pool)
        wanted = 2 * max(keys, 2) * num_rows * max_len
        size = min(max(1 << (wanted - 1).bit_length(), _LEAST_ENTRIES), _MOST_ENTRIES)
        size = min(size, most_entries or size)
        return cls(
            tokens=torch.zeros(num_rows, max_len, dtype=torch.int32, device=device),
            lengths=torch.zeros(num_rows, dtype=torch.int32, device=device),
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
    def row_bits(self) -> int:
        """The bits of an entry that hold the store row."""
        return (self.tokens.shape[0] - 1).bit_length()

    @property
    def last_stamp(self) -> int:
        """The largest stamp that an entry can hold. All calls from that one on share it."""
        return int((1 << (63 - self.position_bits - self.row_bits)) - 1)
