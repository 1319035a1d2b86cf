"""What decides the bits of a row on a GPU: the rule book that kernels and layers read.

A sum in floating point depends on its order. Matrix instructions add along K in one order whatever
the tile is, so tiles decide nothing. These choices do:

- where the context of a query is cut into splits (`Splits`), and how many queries a program of
  decode attention has;
- which form of an operation reads a token: that of a prefill or that of a decode step. A prefill
  takes the prefill's form even if each of its rows has one token; whether tokens that were
  generated are read again in the form that read them first is a rule (`BitRules.replay`);
- whether latent attention expands the latents of a prompt;
- prefills end at no place inside an image whose tokens see each other, and each of these tokens
  reads the same keys wherever its part of the prefill begins;
- chunks of recurrent layers begin at absolute multiples of 64, and their states are written back
  each `FOLDED` tokens behind the prompt, in any batch;
- where the library (`kernels/library.py`) and products of weights in FP8 and 4 bits
  (`BitRules.cut_sums`) cut a sum. Products of adapters cut it by the layer's in features alone,
  and add the parts in their order, under any rule;
- whether weights in 4 bits are dequantised for a step of many tokens. What kernels multiply by has
  the same values, but for NVFP4, which is exact in products and rounded where it is dequantised:
  its experts never are, and its linear layers are not under `BY_ROW`.

`BY_BATCH` may choose what is fastest for a batch. Under `BY_ROW` a choice depends on the row and on
the shapes of the model alone, so a row has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

VERSION = 2
"""To be raised with every change of a rule below, or of a kernel, that changes bits under
`BY_ROW`."""

FOLDED = 8
"""Tokens that a recurrent layer's step folds into the state at once on a GPU, when as many wait. A
state is as large as some eighty records, and reading it in each step but writing it in every eighth
saves most of the writes."""

MOST_SPLITS = 32
"""The most splits of a row under any rule."""
_SHORT_SPLIT, _LONG_SPLIT = 512, 2048
_ENOUGH_PROGRAMS = 128
"""The number of (row, KV head) pairs that fill a GPU."""
_EQUAL_QUERIES = 32
"""Up to this number of queries, tokens times heads of a group, a query has the same bits in any
program of decode attention."""


_LEAST_STEPS = 4
"""Steps of a sum below which cutting it costs more than it brings."""
_MOST_PARTS = 8


def num_parts(tiles: int, steps: int, programs: int) -> int:
    """Choose in how many parts the sums of a product, of `steps` steps, are cut: for up to
    `programs` programs where there are few tiles."""
    return max(1, min(programs // tiles, steps // _LEAST_STEPS, _MOST_PARTS))


class Splits(NamedTuple):
    """How the context of a row is cut for decode attention: into splits of `tokens` tokens, or, of
    a long context, into `max_splits` equal ones."""

    tokens: int
    max_splits: int


@dataclass(frozen=True, slots=True)
class BitRules:
    """How freely an operation chooses by the batch that it is given."""

    # Batches of few rows have short splits, which fill the GPU and cost a combination.
    short_splits: bool
    # The most splits of a row with one query; and of latent attention, whose partial results are
    # larger, in batches of few rows and of many.
    most_splits: int
    most_latent_splits: tuple[int, int]
    splits_by_width: bool  # rows of several queries have fewer splits, to save memory
    # Several queries of a row are divided among programs in which each has the bits that it has
    # alone. Latents are read once more for each, and so are windows, which begin elsewhere.
    divide_queries: bool
    # Latents of a prompt are expanded always, or only where that is faster.
    expand_all_latents: bool
    wide_latent_tiles: bool  # latent decode attention has larger tiles for some numbers of rows
    # Tokens of a row behind its prompt are read in the form of a decode step whenever they are read
    # again: after a preemption, and to be scored.
    replay: bool
    # Sums of products of weights in FP8 and in 4 bits are cut where there are few tiles. In FP8
    # uncut ones have the bits of the library's, which rounds them before they are added to a
    # residual. Weights in 4 bits are not dequantised for the library if sums are not cut.
    cut_sums: bool

    def splits(self, rows: int, kv_heads: int, width: int) -> Splits:
        """Choose how contexts are cut for `rows` rows of `width` queries."""
        few = self._are_few(rows, kv_heads)
        limit = self.most_splits
        if self.splits_by_width and not few:
            limit = max(limit // width, 2)
        return Splits(_SHORT_SPLIT if few else _LONG_SPLIT, limit)

    def has_splits(self, room: int) -> bool:
        """Whether contexts of at most `room` tokens may have several splits."""
        return room > (_SHORT_SPLIT if self.short_splits else _LONG_SPLIT)

    def latent_splits(self, rows: int, width: int) -> Splits:
        """Choose how contexts are cut for latent attention."""
        few = self._are_few(rows, 1)
        limit = self.most_latent_splits[0 if few else 1]
        if self.splits_by_width:
            limit = max(limit // width, 2)
        return Splits(_SHORT_SPLIT if few else _LONG_SPLIT, limit)

    def takes_wide_tiles(self, items: int, programs: int) -> bool:
        """Whether latent decode attention of `items` pairs of a row and a group of heads takes the
        tiles that are faster if each of `programs` programs has one or two."""
        return self.wide_latent_tiles and _ENOUGH_PROGRAMS <= items <= programs

    def pieces(self, width: int, group: int, room: int, *, window: bool) -> int:
        """Choose into how many pieces the `width` causal queries of a row are divided, where
        `group` heads read the same keys, of at most `room` tokens."""
        if not self.divide_queries:
            return 1
        # Equal splits of a long context are cut for the last query of a piece.
        alone = window or room > self.most_splits * _LONG_SPLIT
        limit = 1 if alone else max(1, _EQUAL_QUERIES // group)
        return width // max(n for n in range(1, width + 1) if not width % n and n <= limit)

    def latent_pieces(self, width: int) -> int:
        """`pieces` for latent attention."""
        return width if self.divide_queries else 1

    def _are_few(self, rows: int, kv_heads: int) -> bool:
        return self.short_splits and rows * kv_heads < _ENOUGH_PROGRAMS


BY_BATCH = BitRules(
    short_splits=True,
    most_splits=MOST_SPLITS,
    most_latent_splits=(16, 8),
    splits_by_width=True,
    divide_queries=False,
    expand_all_latents=False,
    wide_latent_tiles=True,
    replay=False,
    cut_sums=True,
)
BY_ROW = BitRules(
    short_splits=False,
    most_splits=8,
    most_latent_splits=(8, 8),
    splits_by_width=False,
    divide_queries=True,
    expand_all_latents=True,
    wide_latent_tiles=False,
    replay=True,
    cut_sums=False,
)
