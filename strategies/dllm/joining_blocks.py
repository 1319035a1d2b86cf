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
    begin. The known tokens that are left begin the block, and its other positions are masked."""
    begins = rows.context_lens
    last_begins = np.array([(seq.max_tokens - 1) // length * length for seq in rows.seqs])
    num_known = np.array([seq.num_tokens for seq in rows.seqs]) - begins
    token_ids = np.zeros((len(rows.seqs), length), np.int64)
    for ids, seq, begin, count in zip(token_ids, rows.seqs, begins, num_known, strict=True):
        ids[:count] = seq.token_ids[begin:]
    num_steps = np.array([steps_so_far(seq) for seq in rows.seqs])
    starts, last_starts, known, steps, first_starts = upload(
        np.stack([begins, last_begins, num_known, num_steps, firsts]), torch.int64, device
    )
    masked = torch.arange(length, device=device) >= known.unsqueeze(1)
    return BlockRows(
        starts=starts,
        first_starts=first_starts,
        last_starts=last_starts,
        token_ids=upload(token_ids, torch.int64, device),
        masked=masked,
        prompt_tokens=known,
        denoised=torch.zeros_like(starts),
        steps=steps.int(),
        complete=~masked.any(1),
        edit_steps=torch.zeros_like(starts),
    )
