"""The low-rank products that adapters (LoRA, Hu et al. 2021) add to a linear layer: y += B·(A·x).

`add_lora_` is the entry point; linear layers call it. Tokens of one forward may have different
adapters, or none.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.lora.lora_tokens import LoRATokens
from batchgen.kernels.lora.lora_triton import BLOCK_N, add_hidden_triton_, add_lora_triton_

Product = Callable[[Tensor], Tensor]
"""Computes x·Wᵀ for x [T, K]."""


class LoRAPart(NamedTuple):
    """The output features of a linear layer that one pair of factors adds to: all of them, or those
    of one projection of a merged layer."""

    start: int  # the first feature
    size: int  # how many there are


class StackedFactors(NamedTuple):
    """The factors of all adapters of one linear layer with P parts, stacked by adapter slot.

    Adapters with a rank below R are padded with zeros, and so are parts without an adapter.
    """

    down: Tensor  # A, [slots, P · R, in_features]
    up: Tensor  # B times the adapter's scale, [slots, out_features, R]
    # [blocks, 3] int32: the output features in blocks of at most BLOCK_N of one part. A block has
    # its first feature, the one after its last, and the index of the part's first rank.
    blocks: Tensor
    # Divides the first two numbers of every block, and is at most 8: 16 bytes of 16-bit outputs.
    multiple: int = 1


def output_blocks(parts: Sequence[LoRAPart], rank: int, device: torch.device) -> tuple[Tensor, int]:
    """Return `blocks` and `multiple` of `StackedFactors` for the rank R."""
    blocks = [
        (first, min(first + BLOCK_N, part.start + part.size), index * rank)
        for index, part in enumerate(parts)
        for first in range(part.start, part.start + part.size, BLOCK_N)
    ]
    multiple = math.gcd(8, *(bound for block in blocks for bound in block[:2]))
    return torch.tensor(blocks, dtype=torch.int32, device=device), multiple


class LoRAProducts(NamedTuple):
    """The products of one adapter for one part of a layer, as a CPU computes them."""

    part: LoRAPart
    down: Product  # [T, in_features] → [T, rank]
    up: Product  # [T, rank] → [T, size]


def add_lora_(
    out: Tensor,
    x: Tensor,
    tokens: LoRATokens,
    stacked: StackedFactors,
    products: Sequence[Sequence[LoRAProducts]],
) -> Tensor:
    """Add B·(A·x) of each token's adapter to `out` [T, out_features] in place, for x [T,
    in_features], and return `out`.

    `products` has those of adapter slot s at s − 1; only a CPU uses them. On a CPU a token's bits
    depend on the token and its adapter alone, if the products' own results do.
    """
    if tokens.alignment is not None:
        return add_lora_triton_(out, x, tokens.alignment, *stacked)
    for slot in torch.unique(tokens.slots).tolist():
        index = (tokens.slots == slot).nonzero().squeeze(1)
        for part, down, up in products[slot - 1] if slot else ():
            rows = x.index_select(0, index)
            out[:, part.start : part.start + part.size].index_add_(0, index, up(down(rows)))
    return out


def add_lora_columns_(
    out: Tensor, ids: Tensor, tokens: LoRATokens, stacked: StackedFactors
) -> Tensor:
    """Add B · A[:, id] for each token's column id (`ids` [T] int64) and adapter to `out` [T,
    out_features] in place, and return `out`.

    This is `add_lora_` for one-hot rows x, as an embedding needs it.
    """
    down, up, blocks, multiple = stacked
    # Tokens without an adapter (slot 0) read the factors of the last slot; the result is masked
    # out.
    hidden = down[tokens.slots - 1, :, ids].float()
    if tokens.alignment is not None:
        hidden = hidden.unsqueeze(0)
        return add_hidden_triton_(out, hidden, tokens.alignment, up, blocks, multiple)
    for first, end, first_rank in blocks.tolist():
        factors = up[tokens.slots - 1, first:end].float()
        ranks = slice(first_rank, first_rank + up.shape[2])
        added = torch.einsum("tnr,tr->tn", factors, hidden[:, ranks])
        total = (out[:, first:end].float() + added).to(out.dtype)
        out[:, first:end] = torch.where(tokens.slots[:, None] == 0, out[:, first:end], total)
    return out


def add_lora_reference_(out: Tensor, x: Tensor, slots: Tensor, stacked: StackedFactors) -> Tensor:
    """Compute `add_lora_` from the stacked factors, with sums in float32, in PyTorch."""
    down, up, blocks, _ = stacked
    rank = up.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if not slot:
            continue
        hidden = (down[slot - 1].float() @ x[token].float()).to(x.dtype).float()
        for first, end, first_rank in blocks.tolist():
            added = up[slot - 1, first:end].float() @ hidden[first_rank : first_rank + rank]
            out[token, first:end] = (out[token, first:end].float() + added).to(out.dtype)
    return out
