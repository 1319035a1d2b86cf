"""The count of forwards per row, which several strategies report."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from batchgen.engine.interface.outputs import RowCount, StepOutput

NUM_FORWARDS = RowCount(
    "num_forwards", "forwards of the model that yielded token_ids or made their KV final"
)


def tokens_per_forward(counts: Mapping[str, int], num_tokens: int) -> list[tuple[str, str]]:
    """Return a line (name, value) for the table at the end of a job with the mean number of tokens
    per forward; none if no forward was run or no token was yielded."""
    forwards = counts[NUM_FORWARDS.name]
    if not forwards or not num_tokens:
        return []
    return [("tokens per forward", f"{num_tokens / forwards:.2f} of a row")]


def one_forward(step: StepOutput) -> Tensor:
    """Return the contribution of a step of one forward to `NUM_FORWARDS`: 1 for each row, [B]
    int32."""
    return torch.ones_like(step.num_tokens)
