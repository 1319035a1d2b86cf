"""`FourBitExperts`: the weights of an MoE layer's experts in 4 bits, and their products.

Small batches are multiplied in 4 bits by the Triton kernels of `grouped_product_triton.py`. For
large batches the weights are dequantised and multiplied in 16 bits. `kernels.moe.experts` calls
this. A *slot* is one of the experts that a token chose, and a row of the products.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels
from batchgen.kernels.four_bit.grouped_product_triton import four_bit_down, four_bit_gate_up
from batchgen.kernels.four_bit.layouts import dequantise_reference
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.kernels.four_bit.tiles import FourBitTiles, four_bit_tiles
from batchgen.kernels.moe.epilogues import Epilogues
from batchgen.kernels.moe.experts import grouped_mlp_reference
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import Alignment
from batchgen.kernels.moe.moe_tiles import MoETiles, tiles_of_panels


class FourBitExperts(NamedTuple):
    """The `ExpertWeights` whose values have 4 bits. Results are those of the dequantised weights,
    in the dtype of the panels."""

    gate_up: FourBitPanels  # [E, 2·I, H]
    down: FourBitPanels  # [E, H, I]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """The number of experts E, the hidden size H and the inner size I."""
        return self.down.sizes

    def tiles(self, num_slots: int) -> FourBitTiles | MoETiles:
        """Look up how to cut the products of this many slots into tiles. `MoETiles` mean that the
        weights are dequantised before the product."""
        experts, layout = self.sizes[0], self.down.layout
        return four_bit_tiles(num_slots, experts, layout) or tiles_of_panels(num_slots, experts)

    def multiply(
        self,
        x: Tensor,
        alignment: Alignment,
        tiles: FourBitTiles | MoETiles,
        weights: Tensor,
        epilogues: Epilogues,
        parts: Tensor,
    ) -> None:
        """Compute both products into `parts`, as described at `ExpertWeights.multiply`."""
        gate_up, down = self
        (experts, hidden, inner), k = self.sizes, weights.shape[1]
        assert gate_up.sizes == (experts, 2 * inner, hidden)
        assert x.dtype == gate_up.dtype == down.dtype
        activated = torch.empty((len(parts), inner), dtype=x.dtype, device=x.device)
        bias, adapters = epilogues.down_bias, epilogues.sorted_adapters(alignment)
        added = None if adapters is None else adapters.gate_up(x, 2 * inner)
        if isinstance(tiles, FourBitTiles):
            four_bit_gate_up(x, gate_up, alignment, tiles.gate_up, k, activated, epilogues, added)
            four_bit_down(activated, down, weights, alignment, tiles.down, parts, bias)
        else:
            # The first matrix is freed before the second one needs memory.
            gate_up_product(
                x, dequantise_panels(gate_up), alignment, tiles.gate_up, k, activated, epilogues,
                added,
            )  # fmt: skip
            down_product(
                activated, dequantise_panels(down), weights, alignment, tiles.down, parts, bias
            )
        if adapters is not None:
            adapters.add_down_(parts, activated, weights)

    def on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, epilogues: Epilogues) -> Tensor:
        """Compute `grouped_mlp` in PyTorch with dequantised weights."""
        gate_up, down = (dequantise_reference(panels).to(x.dtype) for panels in self)
        return grouped_mlp_reference(x, gate_up, down, ids, weights, epilogues)
