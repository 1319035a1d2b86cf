"""Blocks that join a forward: first blocks of rows whose prefill is complete, and complete blocks
that commit together with blocks that are denoised."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.step_inputs import JoiningRows
from batchgen.strategies.dllm.block_rows import BlockRows

STEP_MAP = OutputColumn("step_map", np.dtype(np.int32))
"""Which of the row's denoise steps wrote the token, starting at 1."""


def joining_blocks(
    rows: JoiningRows, firsts: list[int], length: int, device: torch.device
) -> BlockRows:
    """Return the first blocks, of `length` positions, that rows denoise. All whole blocks before
    these were prefilled.

    Args:
        firsts: the position of each row's very first block, counted from its prompt.
    """
    count = len(rows.seqs)
    starts = rows.context_lens
    last_starts = np.array([(seq.max_tokens - 1) // length * length for seq in rows.seqs])
    lengths = np.array([seq.num_tokens for seq in rows.seqs]) - starts
    token_ids = np.zeros((count, length), np.int64)
    for ids, seq, start, num_known in zip(token_ids, rows.seqs, starts, lengths, strict=True):
        ids[:num_known] = seq.token_ids[start:]
    steps = np.array([steps_so_far(seq) for seq in rows.seqs])
    numbers = upload(np.stack([starts, last_starts, lengths, steps, firsts]), torch.int64, device)
    masked = torch.arange(length, device=device) >= numbers[2].unsqueeze(1)
    return BlockRows(
        starts=numbers[0],
        first_starts=numbers[4],
        last_starts=numbers[1],
        token_ids=upload(token_ids, torch.int64, device),
        masked=masked,
        prompt_tokens=numbers[2],
        denoised=torch.zeros_like(numbers[0]),
        steps=numbers[3].int(),
        complete=~masked.any(1),
        edit_steps=torch.zeros_like(numbers[0]),
    )


def steps_so_far(seq: Sequence) -> int:
    """Return how many steps of a preempted row have unmasked a position, from its column
    `step_map`; 0 for a new row, and for rows without the column, which do not need the number."""
    column = seq.columns.get(STEP_MAP.name)
    values = None if column is None else column.array()
    return int(values.max()) if values is not None and len(values) else 0


def commit_inputs(
    token_ids: Tensor, positions: Tensor, newest: ModelInputs, indices: Tensor, room: int
) -> ModelInputs:
    """Return the inputs of complete blocks that commit in a forward, as `room` additional rows.

    Args:
        token_ids, positions: [B, L], the blocks' tokens and positions.
        indices: [B], which of the additional rows each row's block takes; `room` means none.
    """
    count, device = newest.num_rows, indices.device
    row_of_slot = torch.full((room + 1,), count, device=device)
    row_of_slot.scatter_(0, indices, torch.arange(count, device=device))
    rows = row_of_slot[:room]
    is_unused = (rows == count).unsqueeze(1)
    rows = rows.clamp(max=count - 1)
    windows = newest.window_tables
    return ModelInputs(
        input_ids=token_ids[rows].flatten(),
        positions=positions[rows].masked_fill(is_unused, 0).flatten(),
        block_tables=newest.block_tables[rows].masked_fill(is_unused, 0),
        window_tables=None if windows is None else windows[rows].masked_fill(is_unused, 0),
        query_lens=np.full(room, positions.shape[1]),
        context_lens=np.full(room, newest.context_lens.max()),
        lora_slots=None if newest.lora_slots is None else newest.lora_slots[rows],
    )
