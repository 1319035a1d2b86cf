"""`BitRules`: the choices of kernels and layers that decide the bits of a row on a GPU.

A floating-point sum depends on its order. Matrix instructions add along K in one order whatever the
tile, so tile sizes do not matter. These choices do:

- where a query's context is cut into splits (`Splits`), and how many queries a program of decode
  attention has;
- whether a token is computed by the prefill's or the decode step's form of an operation. A prefill
  uses the prefill's form even if each of its rows has one token. Whether generated tokens that are
  computed again use the form that computed them first is a rule (`BitRules.replay`);
- whether latent attention expands the latents of a prompt;
- prefills never end inside an image whose tokens attend to each other, and each of these tokens
  reads the same keys wherever its part of the prefill begins;
- chunks of recurrent layers begin at absolute multiples of 64, and their states are written back
  every `FOLDED` tokens after the prompt, in any batch;
- where cuBLAS (`kernels/library.py`) and the products of weights in FP8 and 4 bits
  (`BitRules.cut_sums`) cut a sum. Adapters' products cut it by the layer's input features alone and
  add the parts in their order, under any rule;
- whether 4-bit weights are dequantised for a step of many tokens. Both forms multiply by the same
  values, except for NVFP4, which is exact in products and rounded where it is dequantised. So NVFP4
  experts are never dequantised, and NVFP4 linear layers are not under `BY_ROW`.

`BY_BATCH` chooses what is fastest for a batch. Under `BY_ROW` a choice depends on the row and on
the shapes of the model alone, so a row has the same bits in every batch.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

VERSION = 2
"""The version of the bits under `BY_ROW`. Raise it with every change of a rule below, or of a
kernel, that changes them."""

FOLDED = 8
"""Pending records that a recurrent layer's step folds into the state at once on a GPU. A state is
as large as some eighty records, so reading it in every step but writing it in every eighth saves
most of the writes."""

MOST_SPLITS = 32
"""The most splits of a row under any rule."""
_SHORT_SPLIT, _LONG_SPLIT = 512, 2048
"""Tokens of a split in batches of few rows, and in others."""
_ENOUGH_PROGRAMS = 128
"""Pairs of a row and a KV head that fill a GPU."""
_EQUAL_QUERIES = 32
"""The number of queries (tokens times heads of a group) up to which a query has the same bits in
any program of decode attention."""


_LEAST_STEPS = 4
"""Steps of a sum's part below which cutting costs more than it saves."""
_MOST_PARTS = 8
"""The most parts of a sum."""


def num_parts(tiles: int, steps: int, programs: int) -> int:
    """Return the number of parts into which a product of `tiles` tiles cuts its sums of `steps`
    steps, so that at most `programs` programs run."""
    return max(1, min(programs // tiles, steps // _LEAST_STEPS, _MOST_PARTS))


class Splits(NamedTuple):
    """How decode attention cuts the context of a row: into splits of `tokens` tokens, or, if that
    would be more than `max_splits`, into `max_splits` equal ones."""

    tokens: int
    max_splits: int


@dataclass(frozen=True, slots=True)
class BitRules:
    """How far the choices of an operation may depend on the batch."""

    # Batches of few rows have short splits, which fill the GPU but must be combined.
    short_splits: bool
    # The most splits of a row with one query. Latent attention (`kernels/mla`), whose partial
    # results are larger, has limits of its own: (for batches of few rows, for others).
    most_splits: int
    most_latent_splits: tuple[int, int]
    splits_by_width: bool  # rows of several queries have fewer splits, to save memory
    # Several queries of a row are divided among programs, such that each has the bits that it has
    # alone. Latents, and sliding windows, which begin elsewhere, are read again for each piece.
    divide_queries: bool
    # Whether a prompt's latents are always expanded, or only where that is faster.
    expand_all_latents: bool
    wide_latent_tiles: bool  # latent decode attention has larger tiles for some numbers of rows
    # Tokens after a row's prompt are always computed in the form of a decode step, also when they
    # are computed again: after a preemption, and for scoring.
    replay: bool
    # Sums of products of FP8 and 4-bit weights are cut where there are few tiles. Uncut sums in FP8
    # have the bits of the library's product, which rounds before the addition to a residual. If
    # sums are not cut, 4-bit weights are not dequantised for the library either.
    cut_sums: bool

    def splits(self, rows: int, kv_heads: int, width: int) -> Splits:
        """Choose how contexts are cut in a step of `rows` rows of `width` queries."""
        few = self._are_few(rows, kv_heads)
        limit = self.most_splits
        if self.splits_by_width and not few:
            limit = max(limit // width, 2)
        return Splits(_SHORT_SPLIT if few else _LONG_SPLIT, limit)

    def has_splits(self, room: int) -> bool:
        """Return whether contexts of at most `room` tokens may have several splits."""
        return room > (_SHORT_SPLIT if self.short_splits else _LONG_SPLIT)

    def latent_splits(self, rows: int, width: int) -> Splits:
        """Choose how latent attention cuts contexts in a step of `rows` rows of `width` queries."""
        few = self._are_few(rows, 1)
        limit = self.most_latent_splits[0 if few else 1]
        if self.splits_by_width:
            limit = max(limit // width, 2)
        return Splits(_SHORT_SPLIT if few else _LONG_SPLIT, limit)

    def takes_wide_tiles(self, items: int, programs: int) -> bool:
        """Return whether latent decode attention takes the wide tiles, which are faster if each of
        `programs` programs has one or two items. An item is a pair of a row and a group of
        heads."""
        return self.wide_latent_tiles and _ENOUGH_PROGRAMS <= items <= programs

    def pieces(self, width: int, group: int, room: int, *, window: bool) -> int:
        """Return into how many pieces the `width` causal queries of a row are divided, where
        `group` heads read the same keys, of at most `room` tokens."""
        if not self.divide_queries:
            return 1
        # Windows, and the equal splits of a long context, are cut for one query of a piece. Another
        # query of the piece would have other splits than alone.
        one_query = window or room > self.most_splits * _LONG_SPLIT
        limit = 1 if one_query else max(1, _EQUAL_QUERIES // group)
        # A piece has as many queries as divide `width` evenly, up to `limit`.
        return width // max(n for n in range(1, width + 1) if not width % n and n <= limit)

    def latent_pieces(self, width: int) -> int:
        """Return the number of pieces for latent attention, as `pieces` does."""
        return width if self.divide_queries else 1

    def _are_few(self, rows: int, kv_heads: int) -> bool:
        """Return whether a batch has so few rows that it needs short splits to fill the GPU."""
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
