"""What attention needs to know of the rows of a forward, and the forms in which it reads them.

A prefill and a decode step add up in other orders. Where a row must keep its bits, tokens that a
decode step reads first take that form whenever they are read again: each of them, or each of their
blocks of positions, is then a row of a decode step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from batchgen.kernels.attention.kv_gather import upload_tensor
from batchgen.kernels.row_indices import row_indices
from batchgen.kernels.rules import BY_BATCH, BitRules

MOST_ROWS = 256
"""The most rows of a decode step in which tokens are read again, so that its partial results take
no more memory than those of other decode steps."""
RUN = 8
"""Tokens of a row that are read again as one row of a decode step, where a query has the same bits
beside others. Kernels divide such rows where it has not."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which cached tokens the queries of B rows may read; all layers of a forward share it.

    A query at position p reads its row's positions below (p // L + 1) · L, where L is the block
    length, and none past the row's last query of this part. Tokens of a block that are to see each
    other must therefore be in one part. In layers that look ahead a query reads its row up to
    `last_seen` instead.
    """

    positions: Tensor  # [T] int64, ascending within a row; equal ones are allowed
    query_lens: tuple[int, ...]  # [B]; the rows' queries stand one after another
    context_lens: tuple[int, ...]  # [B] cached tokens, the queries' own included, or more
    block_tables: Tensor  # [B, N] int64
    # Tokens of a tile → tiles of prefill attention, one entry for each shape that is computed: a
    # captured graph reads them at its replay. None cuts them from query_lens.
    tiles: Mapping[int, Tensor] | None = None
    # W of a decode step on a GPU, where every row has W queries then. Each W is compiled at first
    # use. None: a prefill.
    decode_width: int | None = None
    block_length: int = 1  # L; 1 is causal attention
    # [B, N] int64, the blocks of layers with a window, by the same indices. None: `block_tables`.
    window_tables: Tensor | None = None
    # [T] int64, not descending within a row and at least `positions`; with a block length of 1.
    # None: the queries' own positions.
    last_seen: Tensor | None = None
    # [B], how many of each row's last queries take the form of a decode step of L tokens, in a
    # prefill on a GPU; None if none do.
    replayed: tuple[int, ...] | None = None
    rules: BitRules = BY_BATCH
    # By how many tokens windows are longer in this part: that of a canvas, whose queries have the
    # position of its last token here, and see as far back as its first token does.
    widened: int = 0
    plans: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False, repr=False)

    def reach(self, window: int | None) -> int | None:
        """Return the window of layers that have this one, in this part."""
        return window if window is None or not self.widened else window + self.widened

    def tables(self, window: int | None) -> Tensor:
        """Return the block tables [B, N] of layers with this window."""
        if window is None or self.window_tables is None:
            return self.block_tables
        return self.window_tables


_CAUSAL = (1,)
"""Where a part's plans hold the part as layers read it that do not look ahead."""


def causal_part(meta: AttentionMetadata) -> AttentionMetadata:
    """Return a part in which no query sees what is behind it; layers share the result."""
    if meta.last_seen is None:
        return meta
    if _CAUSAL not in meta.plans:
        meta.plans[_CAUSAL] = replace(meta, last_seen=None)
    part: AttentionMetadata = meta.plans[_CAUSAL]
    return part


Form = tuple[Tensor | None, AttentionMetadata]
"""The indices [n] int64 of tokens, None for all, and the part that they are."""


def are_replayed(query_lens: Sequence[int], replayed: Sequence[int]) -> Tensor:
    """[T] bool on the host, which tokens of rows of `query_lens` [B] tokens are among the last
    `replayed` [B] of their rows."""
    again = torch.tensor(replayed)
    counts = torch.stack((torch.tensor(query_lens) - again, again), 1).flatten()
    return row_indices(counts) % 2 == 1


def in_forms(meta: AttentionMetadata, block_size: int) -> list[Form]:
    """Divide a part by the forms that its tokens take; the layers of a forward share the result."""
    if meta.replayed is None:
        return [(None, meta)]
    if () not in meta.plans:
        meta.plans[()] = _divided(meta, meta.replayed, block_size)
    forms: list[Form] = meta.plans[()]
    return forms


def _divided(meta: AttentionMetadata, replayed: tuple[int, ...], block_size: int) -> list[Form]:
    assert meta.decode_width is None and meta.tiles is None
    again = torch.tensor(replayed)
    lens, contexts = torch.tensor(meta.query_lens), torch.tensor(meta.context_lens)
    is_again, length = are_replayed(meta.query_lens, replayed), meta.block_length
    assert not (again % length).any(), "blocks are read as a whole"
    forms: list[Form] = []
    if (lens > again).any():
        rows = (lens > again).nonzero().flatten()
        tokens = (~is_again).nonzero().flatten()
        forms.append(_part(meta, tokens, rows, lens - again, contexts - again, None))
    run = RUN if length == 1 and meta.rules.divide_queries else length
    whole, tokens = again // run * run, is_again.nonzero().flatten()
    is_run = are_replayed(replayed, whole.tolist())
    # Runs in which a row has no splits have no partial results, so more of them fit.
    has_splits = meta.rules.has_splits(meta.block_tables.shape[1] * block_size)
    most_runs = MOST_ROWS // (run // length) if has_splits else MOST_ROWS
    steps = (run, whole, is_run, most_runs), (length, again - whole, ~is_run, MOST_ROWS)
    for width, counts, are_read, max_runs in steps:
        rows, read_tokens = row_indices(counts // width), tokens[are_read]
        widths = torch.full_like(again, width)
        for start in range(0, len(rows), max_runs):
            some = rows[start : start + max_runs]
            indices = read_tokens[start * width : (start + max_runs) * width]
            forms.append(_part(meta, indices, some, widths, contexts, width))
    return forms


def _part(
    meta: AttentionMetadata,
    tokens: Tensor,
    rows: Tensor,
    lens: Tensor,
    contexts: Tensor,
    width: int | None,
) -> Form:
    """Make the part of the tokens with these indices [n] and of these rows [R], which may be there
    more than once. `lens` and `contexts` [B] are those of all rows; all are int64 on the host."""
    device, windows = meta.positions.device, meta.window_tables
    index = upload_tensor(tokens, device)
    device_rows = upload_tensor(rows, device)
    return index, replace(
        meta,
        positions=meta.positions[index],
        last_seen=None if meta.last_seen is None else meta.last_seen[index],
        query_lens=tuple(lens[rows].tolist()),
        context_lens=tuple(contexts[rows].tolist()),
        block_tables=meta.block_tables[device_rows],
        window_tables=None if windows is None else windows[device_rows],
        decode_width=width,
        replayed=None,
    )
