"""The output column `edit_log`: the tokens that an editing rule has replaced after they were
unmasked."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.interface.outputs import OutputColumn
from batchgen.strategies.dllm.block_rows import BlockRows, Writes

EDIT_LOG = OutputColumn("edit_log", np.dtype(np.int32), (4,), scope="edits")
"""One entry per replaced token: its position in the output, the step, the old id and the new id."""
MOST_EDITS = 256
"""The most edits of a position that a log can hold."""


def edit_log(old: Tensor | None, blocks: BlockRows, writes: Writes, limit: int) -> Tensor:
    """Return the edits of each position after a step, [B, L, K, 3] int32: step, old id and new id
    of each, the newest first; unused entries are 0. The engine adds the position, the first of the
    column's four values, when it reads a row's log.

    Args:
        old: the edits before the step, in the same layout; None before the first step.
        limit: K, the most edits of a position.
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
