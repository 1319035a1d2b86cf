"""The thin products of low-rank adapters beside a linear layer: y += B·(A·x) (Hu et al. 2021).

Tokens of one forward may have different adapters, or none.
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
    """The output features of a linear layer that have an adapter of their own: all of them, or
    those of one projection of a merged layer."""

    start: int  # the first feature
    size: int  # how many there are


class StackedFactors(NamedTuple):
    """The factors of all adapters of one linear layer with P parts. Adapters of a lower rank than
    R, and those that leave a part alone, have zeros."""

    down: Tensor  # A, [slots, P · R, in_features]
    up: Tensor  # B times the adapter's scale, [slots, out_features, R]
    # [blocks, 3] int32: the output features in blocks of at most BLOCK_N of one part, each with its
    # first feature, the one behind its last, and where the part's ranks begin.
    blocks: Tensor
    multiple: int = 1  # divides the first two, and is at most 8: 16 bytes of outputs of 16 bits


def output_blocks(parts: Sequence[LoRAPart], rank: int, device: torch.device) -> tuple[Tensor, int]:
    """Return the `blocks` and the `multiple` of `StackedFactors` with this rank R."""
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
    in_features], and return it.

    `products` are those of each slot, which a CPU computes with: there a token's bits depend on
    the token and its adapter alone, if those of the products do.
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
    """Add B times column ids [T] int64 of A of each token's adapter to `out` [T, out_features] in
    place, and return it: what `add_lora_` does for x that has a one there, and zeros."""
    down, up, blocks, multiple = stacked
    # Tokens without an adapter read that of the last slot, and nothing is added to them.
    hidden = down[tokens.slots - 1, :, ids].float()
    if tokens.alignment is not None:
        hidden = hidden.unsqueeze(0)
        return add_hidden_triton_(out, hidden, tokens.alignment, up, blocks, multiple)
    for first, end, at in blocks.tolist():
        factors = up[tokens.slots - 1, first:end].float()
        added = torch.einsum("tnr,tr->tn", factors, hidden[:, at : at + up.shape[2]])
        total = (out[:, first:end].float() + added).to(out.dtype)
        out[:, first:end] = torch.where(tokens.slots[:, None] == 0, out[:, first:end], total)
    return out


def add_lora_reference_(out: Tensor, x: Tensor, slots: Tensor, stacked: StackedFactors) -> Tensor:
    """Compute what `add_lora_` does from the stacked factors, with sums in float32."""
    down, up, blocks, _ = stacked
    rank = up.shape[2]
    for token, slot in enumerate(slots.tolist()):
        if not slot:
            continue
        hidden = (down[slot - 1].float() @ x[token].float()).to(x.dtype).float()
        for first, end, at in blocks.tolist():
            added = up[slot - 1, first:end].float() @ hidden[at : at + rank]
            out[token, first:end] = (out[token, first:end].float() + added).to(out.dtype)
    return out
