"""The column `edit_log`: which tokens a rule that edits has replaced after they were unmasked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.interface.outputs import OutputColumn
from batchgen.strategies.dllm.block_rows import BlockRows, Writes

EDIT_LOG = OutputColumn("edit_log", np.dtype(np.int32), (4,), scope="edits")
"""Each token that was replaced: its position in the output, the step, the old and the new id."""
MOST_EDITS = 256
"""The most edits of a token that a log has room for."""


def edit_log(old: Tensor | None, blocks: BlockRows, writes: Writes, limit: int) -> Tensor:
    """The edits of each position after a step, [B, L, K, 3] int32: step, old and new id of each,
    the newest first; 0 where there are none.

    Args:
        old: the same before the step; None before the first.
        limit: K, how often a token can be replaced.
    """
    rows, length = blocks.token_ids.shape
    log = blocks.token_ids.new_zeros((rows, length, limit, 3), dtype=torch.int32)
    if writes.edited is None:
        return log
    steps = (blocks.steps + 1).unsqueeze(1).expand(-1, length)
    newest = torch.stack((steps.long(), blocks.token_ids, writes.token_ids), -1).int()
    if old is not None:
        kept = min(limit - 1, old.shape[2])
        log[:, :, 1 : 1 + kept] = old[:, :, :kept]
    log[:, :, 0] = newest
    return log * writes.edited[:, :, None, None]
