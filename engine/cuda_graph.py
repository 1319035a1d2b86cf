"""Decode forwards as CUDA graphs: one launch for all kernels of all layers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.model_inputs import ModelInputs


def row_buckets(max_rows: int) -> list[int]:
    """Numbers of rows that a graph is captured for, ascending; other batches are filled up."""
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, max_rows, 16)]
    return [*(size for size in sizes if size < max_rows), max_rows]


@dataclass(frozen=True, slots=True)
class _Graph:
    graph: torch.cuda.CUDAGraph
    hidden: Tensor


class DecodeGraphs:
    """A forward over fixed tensors, captured once per number of rows.

    The graphs share their memory, which is safe because they run one after another in one stream;
    only their outputs are apart.

    Args:
        forward: hidden states [T, hidden_size] of inputs with one token a row; it may neither wait
            for the device nor look at its data.
        max_rows: of a batch.
        max_blocks: of a row.
    """

    def __init__(
        self,
        forward: Callable[[ModelInputs], Tensor],
        max_rows: int,
        max_blocks: int,
        device: torch.device,
    ) -> None:
        self._inputs = ModelInputs(
            torch.zeros(max_rows, dtype=torch.int64, device=device),
            torch.zeros(max_rows, dtype=torch.int64, device=device),
            torch.zeros((max_rows, max_blocks), dtype=torch.int64, device=device),
            np.ones(max_rows, np.int64),
            np.ones(max_rows, np.int64),
        )
        self._sizes = row_buckets(max_rows)
        pool = torch.cuda.graph_pool_handle()
        stream = torch.cuda.Stream(device)
        self._graphs: dict[int, _Graph] = {}
        forward(self._first(max_rows))  # compiles kernels, which a capture cannot
        torch.cuda.synchronize(device)
        with torch.cuda.stream(stream):
            for size in reversed(self._sizes):  # the largest first: the others fit into its memory
                graph = torch.cuda.CUDAGraph()
                inputs = self._first(size)
                graph.capture_begin(pool=pool, capture_error_mode="thread_local")
                hidden = forward(inputs)
                graph.capture_end()
                self._graphs[size] = _Graph(graph, hidden)
        torch.cuda.current_stream(device).wait_stream(stream)

    def _first(self, rows: int) -> ModelInputs:
        whole = self._inputs
        return ModelInputs(
            whole.input_ids[:rows],
            whole.positions[:rows],
            whole.block_tables[:rows],
            whole.query_lens[:rows],
            whole.context_lens[:rows],
        )

    def run(self, inputs: ModelInputs) -> Tensor:
        """[T, hidden_size], valid until the next run."""
        rows, blocks = inputs.block_tables.shape
        size = self._sizes[int(np.searchsorted(self._sizes, rows))]
        whole = self._inputs
        whole.input_ids[:rows].copy_(inputs.input_ids)
        whole.positions[:rows].copy_(inputs.positions)
        blocks = min(blocks, whole.block_tables.shape[1])  # tables grow ahead of need
        whole.block_tables[:rows, :blocks].copy_(inputs.block_tables[:, :blocks])
        if rows < size:
            # Rows that fill up read and write the scratch block alone.
            whole.positions[rows:size].zero_()
            whole.block_tables[rows:size, 0].zero_()
        captured = self._graphs[size]
        captured.graph.replay()
        return captured.hidden[:rows]
