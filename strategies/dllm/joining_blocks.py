"""Makes the first blocks of rows that join a batch of denoise steps after their prefill."""

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
    """Return the block, of `length` positions, that each joining row denoises first. All whole
    blocks before it were prefilled. `firsts` are the positions where the rows' very first blocks
    begin."""
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
