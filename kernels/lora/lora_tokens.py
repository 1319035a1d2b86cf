"""The adapter of each token of a forward, and the order of the tokens sorted by adapter. All layers
of a forward share it."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.moe.moe_align_triton import Alignment, moe_align

BLOCK_M = 16
"""Tokens of one adapter per program."""
_WIDE_BLOCK_M, _MANY_TOKENS = 64, 512
"""`BLOCK_M` in forwards of at least `_MANY_TOKENS` tokens, where smaller tiles would read the
factors too often."""


class LoRATokens(NamedTuple):
    """The adapters of the T tokens of a forward."""

    slots: Tensor  # [T] int64, the token's adapter slot; 0: the model without an adapter
    # The tokens that have an adapter, sorted by it; adapter slot s has the group s − 1. None on a
    # CPU.
    alignment: Alignment | None


def lora_tokens(slots: Tensor, num_slots: int) -> LoRATokens:
    """Sort tokens by their adapter slots [T] int64, which are 0 to `num_slots`.

    Nothing waits for the host, so a CUDA graph may contain this.
    """
    if slots.device.type == "cpu":
        return LoRATokens(slots, None)
    return LoRATokens(slots, sorted_tokens(slots, num_slots))


def sorted_tokens(slots: Tensor, num_slots: int) -> Alignment:
    """Return `LoRATokens.alignment`."""
    ids = torch.where(slots == 0, num_slots, slots - 1).to(torch.int32).unsqueeze(1)
    block_m = BLOCK_M if len(slots) < _MANY_TOKENS else _WIDE_BLOCK_M
    return moe_align(ids, num_slots, block_m, some_elsewhere=True)
