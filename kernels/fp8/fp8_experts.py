"""Experts whose weights are in FP8: tokens are quantised before the first product, which quantises
its own result for the second."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from batchgen.kernels.fp8.fp8_grouped_product_triton import fp8_down, fp8_gate_up
from batchgen.kernels.fp8.fp8_linear import fp8_linear_reference
from batchgen.kernels.fp8.fp8_tiles import ExpertTiles, expert_tiles
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.fp8.quantise_triton import quantise_rows_triton
from batchgen.kernels.layers.activation import silu_and_mul_reference
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues
from batchgen.kernels.moe.moe_align_triton import Alignment
from batchgen.kernels.moe.tiled_layout import matrix_sizes


class FP8Experts(NamedTuple):
    """`ExpertWeights` in FP8, without other epilogues than SwiGLU and adapters.

    x and what is between the two products are quantised in groups of 128 values. If 128 rows of a
    weight share a scale, I is a multiple of 128.
    """

    gate_up: FP8Weight  # [E, 2·I, H]
    down: FP8Weight  # [E, H, I]
    powers_of_two: bool = False  # the scales of activations are powers of two
    rows: FP8Rows | None = None  # x if it is quantised already

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H and I."""
        return matrix_sizes(self.down.values)

    def tiles(self, num_slots: int) -> ExpertTiles:
        """Look up how to cut the products of this many slots."""
        return expert_tiles(num_slots, self.sizes[0])

    def multiply(
        self,
        x: Tensor,
        alignment: Alignment,
        tiles: ExpertTiles,
        weights: Tensor,
        epilogues: Epilogues,
        parts: Tensor,
    ) -> None:
        """Compute both products, as `ExpertWeights.multiply` says."""
        gate_up, down, powers, rows = self
        (experts, hidden, inner), slots = self.sizes, len(parts)
        assert epilogues._replace(adapters=None) == PLAIN
        assert matrix_sizes(gate_up.values) == (experts, 2 * inner, hidden)
        assert gate_up.scale_rows == 1 or inner % BLOCK == 0
        values, scales = quantise_rows_triton(x, powers) if rows is None else rows[:2]
        activated = torch.empty((slots, inner), dtype=FP8, device=parts.device)
        of_groups = torch.empty((triton.cdiv(inner, BLOCK), slots), device=parts.device)
        k, pairs = weights.shape[1], epilogues.sorted_adapters(alignment)
        added = None if pairs is None else pairs.gate_up(x, 2 * inner)
        # Adapters read what is between the products as it was before it was rounded to FP8.
        plain = None if pairs is None else torch.empty_like(activated, dtype=parts.dtype)
        fp8_gate_up(
            values, scales, gate_up, alignment, tiles, k, activated, of_groups, powers, added, plain
        )
        fp8_down(activated, of_groups, down, weights, alignment, tiles, parts)
        if pairs is not None and plain is not None:
            pairs.add_down_(parts, plain, weights)

    def on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, epilogues: Epilogues) -> Tensor:
        """Compute `grouped_mlp` in PyTorch, as plainly as it can be written."""
        adapters = epilogues.adapters
        assert epilogues._replace(adapters=None) == PLAIN
        gate_up, down, powers, _ = self
        of_slots = torch.zeros((*ids.shape, x.shape[1]), device=x.device)
        for expert in ids[ids < len(gate_up.values)].unique().tolist():
            token, slot = (ids == expert).nonzero(as_tuple=True)
            wide, narrow = (FP8Weight(w.values[expert], w.scales[expert]) for w in (gate_up, down))
            tokens = quantise_rows(x[token], powers_of_two=powers)
            products, slots = fp8_linear_reference(tokens, wide), token * ids.shape[1] + slot
            if adapters is not None:
                adapters.add_gate_up_(products, x[token], slots)
            inner = silu_and_mul_reference(products)
            inner_rows = quantise_rows(inner, powers_of_two=powers)
            yielded = fp8_linear_reference(inner_rows, narrow)
            if adapters is not None:
                adapters.add_down_(yielded, inner, slots)
            of_slots[token, slot] = yielded
        return (of_slots * weights.unsqueeze(-1)).sum(1).to(x.dtype)
