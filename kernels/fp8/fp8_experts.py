"""Experts whose weights are in FP8. Tokens are quantised before the first product (gate and up),
and the kernel of the first product quantises its result for the second (down)."""

from __future__ import annotations

from functools import partial
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
from batchgen.kernels.moe.epilogues import Epilogues
from batchgen.kernels.moe.experts import mlp_of_products
from batchgen.kernels.moe.moe_align_triton import Alignment
from batchgen.kernels.moe.tiled_layout import matrix_sizes


class FP8Experts(NamedTuple):
    """The FP8 weights of E experts with a gate, from H inputs to I and back: an `ExpertWeights`.

    The inputs of both products are quantised in groups of 128 values. If 128 rows of a weight share
    a scale, I is a multiple of 128.
    """

    gate_up: FP8Weight  # [E, 2·I, H]: the I rows of gate, then of up
    down: FP8Weight  # [E, H, I]
    powers_of_two: bool = False  # whether the scales of activations are powers of two
    rows: FP8Rows | None = None  # the tokens x if they are quantised already; None: `multiply` does

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H and I."""
        return matrix_sizes(self.down.values)

    def tiles(self, num_slots: int) -> ExpertTiles:
        """Look up the tiles for this many slots (a slot is one of the experts of a token)."""
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
        """Compute both products of a GPU, as `ExpertWeights.multiply` says."""
        gate_up, down, powers_of_two, rows = self
        (experts, hidden, inner), slots = self.sizes, len(parts)
        assert epilogues.parts == 2
        assert matrix_sizes(gate_up.values) == (experts, 2 * inner, hidden)
        assert gate_up.scale_rows == 1 or inner % BLOCK == 0
        if rows is None:
            values, scales = quantise_rows_triton(x, powers_of_two)
        else:
            values, scales, _ = rows
        # The result of the first product: its values and the scales of its groups.
        activated = torch.empty((slots, inner), dtype=FP8, device=parts.device)
        group_scales = torch.empty((triton.cdiv(inner, BLOCK), slots), device=parts.device)
        adapters = epilogues.sorted_adapters(alignment)
        added = None if adapters is None else adapters.gate_up(x, 2 * inner)
        # Adapters read the first product's result before it was rounded to FP8.
        plain = None if adapters is None else torch.empty_like(activated, dtype=parts.dtype)
        fp8_gate_up(
            values, scales, gate_up, alignment, tiles, weights.shape[1], activated, group_scales,
            powers_of_two=powers_of_two, epilogues=epilogues, added=added, plain=plain,
        )  # fmt: skip
        bias = epilogues.down_bias
        fp8_down(activated, group_scales, down, weights, alignment, tiles, parts, bias)
        if adapters is not None and plain is not None:
            adapters.add_down_(parts, plain, weights)

    def on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, epilogues: Epilogues) -> Tensor:
        """Compute `grouped_mlp` in PyTorch, as plainly as it can be written."""
        gate_up, down = partial(self._product, self.gate_up), partial(self._product, self.down)
        return mlp_of_products(x, gate_up, down, self.sizes[0], ids, weights, epilogues)

    def _product(self, weight: FP8Weight, rows: Tensor, expert: int) -> Tensor:
        """Multiply rows [R, K] by the weight [N, K] of one expert, to [R, N] in float32."""
        quantised = quantise_rows(rows, powers_of_two=self.powers_of_two)
        expert_weight = FP8Weight(weight.values[expert], weight.scales[expert])
        return fp8_linear_reference(quantised, expert_weight)
