"""What strategies that denoise share: the column of steps, and the forward that reads whole blocks
(`strategies/dllm`) or canvases (`strategies/canvas`) into the cache beside others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.rows.sequence import Sequence

STEP_MAP = OutputColumn("step_map", np.dtype(np.int32))
"""Which of the row's denoise steps wrote the token, counted from 1."""


def with_whole_numbers(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of a row with each whole float as an int: JSON may write 16 as 16.0."""
    return {
        name: int(value) if isinstance(value, float) and value.is_integer() else value
        for name, value in options.items()
    }


def steps_so_far(seq: Sequence) -> int:
    """Return the number of the last denoise step that wrote a token of a preempted row, from its
    column `step_map`. 0 for a new row, and for a row without the column, which needs no number."""
    column = seq.columns.get(STEP_MAP.name)
    values = None if column is None else column.array()
    return int(values.max()) if values is not None and len(values) else 0


def commit_inputs(
    token_ids: Tensor, positions: Tensor, newest: ModelInputs, indices: Tensor, room: int
) -> ModelInputs:
    """Make the inputs of a forward that writes complete blocks into the cache.

    The forward has a fixed number of places, so that a captured graph can run it. A place that no
    row takes reads position 0 and writes into cache block 0, which belongs to no row.

    Args:
        token_ids, positions: [B, L], of the blocks of all rows.
        newest: what the forward of the same rows reads otherwise.
        indices: [B], the place of each row; `room` for a row whose block is not complete.
        room: the number of places.
    """
    count, device = newest.num_rows, indices.device
    chosen = torch.full((room + 1,), count, device=device)
    chosen.scatter_(0, indices, torch.arange(count, device=device))
    rows = chosen[:room]
    is_empty = (rows == count).unsqueeze(1)
    rows = rows.clamp(max=count - 1)
    windows = newest.window_tables
    return ModelInputs(
        input_ids=token_ids[rows].flatten(),
        positions=positions[rows].masked_fill(is_empty, 0).flatten(),
        block_tables=newest.block_tables[rows].masked_fill(is_empty, 0),
        window_tables=None if windows is None else windows[rows].masked_fill(is_empty, 0),
        query_lens=np.full(room, positions.shape[1]),
        context_lens=np.full(room, newest.context_lens.max()),
        lora_slots=None if newest.lora_slots is None else newest.lora_slots[rows],
    )


def widened(old: Tensor | None, values: Tensor) -> Tensor:
    """Return a tensor in the shape of `values` that holds `old` where the shapes overlap, and 0
    elsewhere."""
    out = torch.zeros_like(values)
    if old is not None:
        tail = tuple(slice(min(a, b)) for a, b in zip(old.shape, values.shape, strict=True))
        out[tail] = old[tail]
    return out
