"""Blocks that join a batch: of rows whose prefill is over, and complete ones beside those that are
denoised."""

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
"""Which of the row's denoise steps wrote the token, counted from 1."""


def joining_blocks(
    rows: JoiningRows, firsts: list[int], length: int, device: torch.device
) -> BlockRows:
    """The first blocks of `length` positions that rows denoise, whose whole blocks before these
    were read. `firsts` are where the rows' very first blocks begin."""
    count = len(rows.seqs)
    starts = rows.context_lens
    last_starts = np.array([(seq.max_tokens - 1) // length * length for seq in rows.seqs])
    lengths = np.array([seq.num_tokens for seq in rows.seqs]) - starts
    token_ids = np.zeros((count, length), np.int64)
    for ids, seq, start, known in zip(token_ids, rows.seqs, starts, lengths, strict=True):
        ids[:known] = seq.token_ids[start:]
    steps = np.array([steps_so_far(seq) for seq in rows.seqs])
    there = upload(np.stack([starts, last_starts, lengths, steps, firsts]), torch.int64, device)
    masked = torch.arange(length, device=device) >= there[2].unsqueeze(1)
    return BlockRows(
        starts=there[0],
        first_starts=there[4],
        last_starts=there[1],
        token_ids=upload(token_ids, torch.int64, device),
        masked=masked,
        prompt_tokens=there[2],
        denoised=torch.zeros_like(there[0]),
        steps=there[3].int(),
        complete=~masked.any(1),
        edit_steps=torch.zeros_like(there[0]),
    )


def steps_so_far(seq: Sequence) -> int:
    """How many steps of a preempted row have unmasked a position, as its column `step_map` tells. 0
    for a new row, and for one that does not ask for the column and so does not need the number."""
    column = seq.columns.get(STEP_MAP.name)
    values = None if column is None else column.array()
    return int(values.max()) if values is not None and len(values) else 0


def commit_inputs(
    token_ids: Tensor, positions: Tensor, newest: ModelInputs, indices: Tensor, room: int
) -> ModelInputs:
    """What the forward reads of complete blocks, of tokens [B, L] at positions [B, L], that commit
    in it beside others, as `room` rows. `indices` [B] says which of these is each row's, and `room`
    that it has none."""
    count, device = newest.num_rows, indices.device
    chosen = torch.full((room + 1,), count, device=device)
    chosen.scatter_(0, indices, torch.arange(count, device=device))
    rows = chosen[:room]
    none = (rows == count).unsqueeze(1)
    rows = rows.clamp(max=count - 1)
    windows = newest.window_tables
    return ModelInputs(
        input_ids=token_ids[rows].flatten(),
        positions=positions[rows].masked_fill(none, 0).flatten(),
        block_tables=newest.block_tables[rows].masked_fill(none, 0),
        window_tables=None if windows is None else windows[rows].masked_fill(none, 0),
        query_lens=np.full(room, positions.shape[1]),
        context_lens=np.full(room, newest.context_lens.max()),
        lora_slots=None if newest.lora_slots is None else newest.lora_slots[rows],
    )
