"""The blocks of rows that join a batch of denoise steps after their prefill."""

from __future__ import annotations

import numpy as np
import torch

from batchgen.engine.device.transfer import upload
from batchgen.engine.step_inputs import JoiningRows
from batchgen.strategies.blocks import steps_so_far
from batchgen.strategies.dllm.block_rows import BlockRows


def joining_blocks(
    rows: JoiningRows, firsts: list[int], length: int, device: torch.device
) -> BlockRows:
    """Make the block of `length` positions that each joining row denoises first. The whole blocks
    before it are in the cache. `firsts` are the positions where the rows' first blocks begin."""
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
