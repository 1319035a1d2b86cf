"""Forwards of decoding rows as CUDA graphs: one launch for all kernels of all layers."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.transfer import upload
from batchgen.kernels.attention_prefill import cut_tiles

CHUNK_ROWS = 8
"""Rows of a mixed batch's prefill, at most."""
_MIXED_ROWS = 32
"""Mixed batches are captured for multiples of so many decoding rows: beside a chunk of prefill,
the rows that fill up cost little."""


@dataclass(frozen=True, slots=True)
class Part:
    """Consecutive tokens of a forward whose attention is computed together.

    Attributes:
        rows: [T] int32, the row of each token; None if all rows have the same number of them.
        tiles: of the attention, where the rows' numbers of tokens are not known at capture.
    """

    inputs: ModelInputs
    rows: Tensor | None = None
    tiles: Tensor | None = None


def row_buckets(max_rows: int) -> list[int]:
    """Numbers of rows that a graph is captured for, ascending; other batches are filled up."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows, 16)]
    return [*(size for size in sizes if size < max_rows), max_rows]


def mixed_row_buckets(max_rows: int) -> list[int]:
    """As `row_buckets`, for batches that prefill too."""
    return [*range(_MIXED_ROWS, max_rows, _MIXED_ROWS), max_rows]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class ForwardGraphs:
    """A forward over fixed tensors, captured once per number of rows.

    The graphs share their memory, which is safe because they run one after another in one stream;
    only their outputs are apart.

    Args:
        forward: hidden states of all tokens of the parts; it may neither wait for the device nor
            look at its data.
        max_rows: decoding rows of a batch, of one token each.
        max_blocks: of a row.
        chunk_tokens: prefill tokens of a mixed batch, at most; 0 if there are none.
        tile: tokens of a tile of prefill attention.
    """

    def __init__(
        self,
        forward: Callable[[Sequence[Part]], Tensor],
        max_rows: int,
        max_blocks: int,
        chunk_tokens: int,
        tile: int,
        device: torch.device,
    ) -> None:
        self._decode = _zero_inputs(max_rows, np.ones(max_rows, np.int64), max_blocks, device)
        # One row more, without blocks, for the tokens that fill up.
        lens = np.array([*[0] * CHUNK_ROWS, chunk_tokens])
        num_tiles = -(-chunk_tokens // tile) + CHUNK_ROWS
        self._chunk = Part(
            _zero_inputs(chunk_tokens, lens, max_blocks, device),
            torch.zeros(chunk_tokens, dtype=torch.int32, device=device),
            torch.zeros((num_tiles, 3), dtype=torch.int32, device=device),
        )
        self._chunk_tokens = chunk_tokens
        self._tile = tile
        self._sizes = row_buckets(max_rows)
        self._mixed_sizes = mixed_row_buckets(max_rows) if chunk_tokens else []
        self._graphs: dict[tuple[int, bool], _Graph] = {}
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        # Compiles kernels, which a capture cannot: few rows have other ones than many.
        for rows in (max_rows, 1):
            forward(self._parts(rows, mixed=False))
        if chunk_tokens:
            forward(self._parts(max_rows, mixed=True))
        gc.collect()  # graphs of an engine that is gone cannot be freed during a capture
        torch.cuda.synchronize(device)
        # The largest first: the others fit into its memory.
        wanted = [(size, True) for size in reversed(self._mixed_sizes)]
        wanted += [(size, False) for size in reversed(self._sizes)]
        with torch.cuda.stream(stream):
            for size, mixed in wanted:
                graph = torch.cuda.CUDAGraph()
                parts = self._parts(size, mixed)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                hidden = forward(parts)
                graph.capture_end()
                self._graphs[size, mixed] = _Graph(graph, hidden)
        torch.cuda.current_stream(device).wait_stream(stream)

    def _parts(self, rows: int, mixed: bool) -> list[Part]:
        whole = self._decode
        decode = ModelInputs(
            whole.input_ids[:rows],
            whole.positions[:rows],
            whole.block_tables[:rows],
            whole.query_lens[:rows],
            whole.context_lens[:rows],
        )
        return [Part(decode), self._chunk] if mixed else [Part(decode)]

    def decode(self, inputs: ModelInputs) -> Tensor:
        """[B, hidden_size] of B decoding rows, valid until the next run."""
        size = _bucket(self._sizes, inputs.num_rows)
        self._fill_decode(inputs, size)
        return self._replay(size, mixed=False)[: inputs.num_rows]

    def takes(self, prefill: ModelInputs) -> bool:
        """It fits a mixed batch."""
        tokens, rows = len(prefill.input_ids), prefill.num_rows
        return 0 < tokens <= self._chunk_tokens and rows <= CHUNK_ROWS

    def mixed(self, decode: ModelInputs, prefill: ModelInputs) -> tuple[Tensor, Tensor]:
        """Hidden states of the B decoding rows and of the prefill's tokens, valid until the next
        run: [B, hidden_size] and [chunk_tokens, hidden_size], undefined past the prefill's.
        """
        size = _bucket(self._mixed_sizes, decode.num_rows)
        self._fill_decode(decode, size)
        self._fill_chunk(prefill)
        hidden = self._replay(size, mixed=True)
        return hidden[: decode.num_rows], hidden[size:]

    def _replay(self, size: int, mixed: bool) -> Tensor:
        captured = self._graphs[size, mixed]
        captured.graph.replay()
        return captured.hidden

    def _fill_decode(self, inputs: ModelInputs, size: int) -> None:
        rows, fixed = inputs.num_rows, self._decode
        fixed.input_ids[:rows].copy_(inputs.input_ids)
        fixed.positions[:rows].copy_(inputs.positions)
        _fill_tables(fixed.block_tables, inputs.block_tables)
        if rows < size:
            # Rows that fill up read and write the scratch block alone.
            fixed.positions[rows:size].zero_()
            fixed.block_tables[rows:size, 0].zero_()

    def _fill_chunk(self, inputs: ModelInputs) -> None:
        fixed, count = self._chunk.inputs, len(inputs.input_ids)
        assert self._chunk.rows is not None and self._chunk.tiles is not None
        fixed.input_ids[:count].copy_(inputs.input_ids)
        fixed.positions[:count].copy_(inputs.positions)
        fixed.positions[count:].zero_()
        _fill_tables(fixed.block_tables, inputs.block_tables)
        device = fixed.positions.device
        rows = np.full(self._chunk_tokens, CHUNK_ROWS, np.int32)
        rows[:count] = np.repeat(np.arange(inputs.num_rows), inputs.query_lens)
        self._chunk.rows.copy_(upload(rows, torch.int32, device))
        tiles = np.zeros(self._chunk.tiles.shape, np.int32)
        cut = cut_tiles(inputs.query_lens.tolist(), self._tile, inputs.context_lens.tolist())
        tiles[: len(cut)] = cut.numpy()
        self._chunk.tiles.copy_(upload(tiles, torch.int32, device))


def _bucket(sizes: Sequence[int], rows: int) -> int:
    return sizes[int(np.searchsorted(sizes, rows))]


def _fill_tables(fixed: Tensor, tables: Tensor) -> None:
    """Tables grow ahead of need, so they may be wider than any row."""
    rows, blocks = tables.shape
    blocks = min(blocks, fixed.shape[1])
    fixed[:rows, :blocks].copy_(tables[:, :blocks])


def _zero_inputs(
    tokens: int, query_lens: np.typing.NDArray[np.int64], max_blocks: int, device: torch.device
) -> ModelInputs:
    """Tokens that read and write the scratch block alone."""
    rows = len(query_lens)
    return ModelInputs(
        torch.zeros(tokens, dtype=torch.int64, device=device),
        torch.zeros(tokens, dtype=torch.int64, device=device),
        torch.zeros((rows, max_blocks), dtype=torch.int64, device=device),
        query_lens,
        np.ones(rows, np.int64),
    )
