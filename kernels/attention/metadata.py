"""What attention needs to know of the rows of a forward, and how a part of it is divided in forms.

A *row* is a sequence. A *part* of a forward is consecutive tokens of the batch that are computed
together: the decode step of some rows, or the prefill of others. A prefill and a decode step add up
in different orders, so they give a token different bits.

Some tokens that a decode step computed are computed again in a prefill, for instance after a
preemption. If they must get the bits that they had (`BitRules.replay`), they are *replayed*: the
prefill is divided, and attention takes its replayed tokens in the *form* of decode steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.attention.kv_gather import upload_tensor
from batchgen.kernels.row_indices import row_indices
from batchgen.kernels.rules import BY_BATCH, BitRules

MOST_ROWS = 256
"""The most rows of a decode step that replays tokens, so that its partial results take no more
memory than those of other decode steps."""
RUN = 8
"""Replayed tokens of a sequence that are one row of a decode step, if a query has the same bits
alone and beside others (`BitRules.divide_queries`): fewer rows read the context fewer times."""


@dataclass(frozen=True, slots=True)
class AttentionMetadata:
    """Which cached tokens the queries of a part of B rows may read. All layers share it.

    The positions of a row are cut into blocks of L = `block_length`. A query at position p reads
    its row's positions below (p // L + 1) · L, the end of its block, but none past the row's last
    query in this part. So tokens of a block see each other only if they are in one part. Layers
    that look ahead (`paged_attention`) read up to `last_seen` instead.
    """

    positions: Tensor  # [T] int64, ascending within a row; equal ones are allowed
    query_lens: tuple[int, ...]  # [B], the queries of each row, which follow row by row
    context_lens: tuple[int, ...]  # [B], at least the cached tokens, the queries' own included
    block_tables: Tensor  # [B, N] int64, the KV blocks of each row (`kv_cache`)
    # The tiles of prefill attention (`PrefillPlan.tiles`), by the number of tokens of a tile. A
    # captured CUDA graph reads them at its replay. None: the plan cuts them from `query_lens`.
    tiles: Mapping[int, Tensor] | None = None
    # W if the part is a decode step on a GPU, in which every row has W queries. The kernel is
    # compiled anew for each W. None: a prefill.
    decode_width: int | None = None
    block_length: int = 1  # L; 1 is causal attention
    # [B, N] int64, like `block_tables` for layers with a window. Blocks that no query sees any more
    # are freed, and their entries arbitrary. None: these layers use `block_tables`.
    window_tables: Tensor | None = None
    # [T] int64, the last position that each query sees in layers that look ahead: not descending
    # within a row and at least `positions`. Needs L = 1. None: the queries' own positions.
    last_seen: Tensor | None = None
    # [B], how many of each row's last queries are replayed, as decode steps of L tokens. Only in a
    # prefill on a GPU. None: no queries.
    replayed: tuple[int, ...] | None = None
    rules: BitRules = BY_BATCH
    # By how many tokens windows are longer in this part. It is above 0 for a canvas (tokens that
    # are denoised together and all see each other). `positions` has the position of the canvas's
    # last token for all of them; with the longer window they see as far back as its first token.
    widened: int = 0
    # What layers compute from this part once and share: plans by the shape of the heads, the
    # division in forms at `_FORMS`, and the part without `last_seen` at `_CAUSAL`.
    plans: dict[tuple[int, ...], Any] = field(default_factory=dict, init=False, repr=False)

    def reach(self, window: int | None) -> int | None:
        """Return the window that a layer with `window` has in this part."""
        return window if window is None or not self.widened else window + self.widened

    def tables(self, window: int | None) -> Tensor:
        """Return the block tables [B, N] of layers with this window."""
        if window is None or self.window_tables is None:
            return self.block_tables
        return self.window_tables


class SoftmaxOptions(NamedTuple):
    """How a layer scores the tokens that a query sees."""

    scale: float  # the factor of q·kᵀ
    # A query sees only the last `window` tokens up to its own, or, if it is a `ChunkWindow`, only
    # those of its own chunk. None: all.
    window: int | None = None
    # [num_heads], attention sinks: a score in each head's softmax beside those of the tokens, for
    # which no value is added. None: no sinks.
    sinks: Tensor | None = None
    # A token's score s becomes cap · tanh(s / cap) (Gemma 2, arXiv 2408.00118). None: it stays.
    cap: float | None = None


_FORMS, _CAUSAL = (), (1,)
"""Keys of `AttentionMetadata.plans`, which are shorter than those of plans."""


def causal_part(meta: AttentionMetadata) -> AttentionMetadata:
    """Return the part without `last_seen`, so that no query sees tokens after its own. Layers share
    the result."""
    if meta.last_seen is None:
        return meta
    if _CAUSAL not in meta.plans:
        meta.plans[_CAUSAL] = replace(meta, last_seen=None)
    part: AttentionMetadata = meta.plans[_CAUSAL]
    return part


Form = tuple[Tensor | None, AttentionMetadata]
"""Tokens of a part that are computed together: their indices [n] int64 in the part, None for all
tokens, and their metadata."""


def are_replayed(query_lens: Sequence[int], replayed: Sequence[int]) -> Tensor:
    """Return which of the tokens [T] are among the last `replayed` [B] of their rows, bool on the
    host. Row b has `query_lens[b]` tokens."""
    num_replayed = torch.tensor(replayed)
    # The rows' tokens are runs: those before, those replayed, those before, ... The odd runs count.
    counts = torch.stack((torch.tensor(query_lens) - num_replayed, num_replayed), 1).flatten()
    return row_indices(counts) % 2 == 1


def in_forms(meta: AttentionMetadata, block_size: int) -> list[Form]:
    """Divide a part into the forms in which its tokens are computed: one prefill, and decode steps
    for replayed tokens. Without replayed tokens the part itself is the only form.

    Layers share the result. `block_size` is the number of tokens of a KV block.
    """
    if meta.replayed is None:
        return [(None, meta)]
    if _FORMS not in meta.plans:
        meta.plans[_FORMS] = _divided(meta, meta.replayed, block_size)
    forms: list[Form] = meta.plans[_FORMS]
    return forms


def _divided(meta: AttentionMetadata, replayed: tuple[int, ...], block_size: int) -> list[Form]:
    """Return the forms of a prefill whose rows have `replayed` [B] replayed tokens."""
    assert meta.decode_width is None and meta.tiles is None
    num_replayed, length = torch.tensor(replayed), meta.block_length
    lens, contexts = torch.tensor(meta.query_lens), torch.tensor(meta.context_lens)
    is_replayed = are_replayed(meta.query_lens, replayed)
    assert not (num_replayed % length).any(), "blocks are replayed as a whole"
    forms: list[Form] = []
    # The tokens before the replayed ones are a prefill.
    if (lens > num_replayed).any():
        rows = (lens > num_replayed).nonzero().flatten()
        tokens = (~is_replayed).nonzero().flatten()
        forms.append(_form(meta, tokens, rows, lens - num_replayed, contexts - num_replayed, None))
    # A row's replayed tokens end with as many whole runs as fit. The tokens before are single. Each
    # run and each single token is a row of a decode step. With L > 1 a run is a block, and none
    # are single.
    run = RUN if length == 1 and meta.rules.divide_queries else length
    in_runs = num_replayed // run * run  # [B], the tokens of each row that are in runs
    tokens = is_replayed.nonzero().flatten()  # [replayed tokens], indices in the part
    is_in_run = are_replayed(replayed, in_runs.tolist())  # [replayed tokens]
    # If no context is cut into splits, a step has no partial results, so it may have more rows.
    has_splits = meta.rules.has_splits(meta.block_tables.shape[1] * block_size)
    most_runs = MOST_ROWS // (run // length) if has_splits else MOST_ROWS
    # Queries per row of a decode step, tokens of each of the part's rows, which of the replayed
    # tokens these are, and the most rows of a step: for the runs and for the single tokens.
    for width, counts, are_taken, most_rows in (
        (run, in_runs, is_in_run, most_runs),
        (length, num_replayed - in_runs, ~is_in_run, MOST_ROWS),
    ):
        step_rows, step_tokens = row_indices(counts // width), tokens[are_taken]
        widths = torch.full_like(num_replayed, width)
        for start in range(0, len(step_rows), most_rows):
            rows = step_rows[start : start + most_rows]
            indices = step_tokens[start * width : (start + most_rows) * width]
            forms.append(_form(meta, indices, rows, widths, contexts, width))
    return forms


def _form(
    meta: AttentionMetadata,
    tokens: Tensor,
    rows: Tensor,
    lens: Tensor,
    contexts: Tensor,
    width: int | None,
) -> Form:
    """Return some tokens of a part as a form.

    Args:
        tokens: [n] int64, their indices in the part.
        rows: [R] int64, the part's row of each row of the form. A row may occur repeatedly.
        lens, contexts: [B] int64, the queries and the cached tokens of the part's rows, in this
            form. All tensors are on the host.
        width: `AttentionMetadata.decode_width` of the form.
    """
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
