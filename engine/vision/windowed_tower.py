"""The vision tower of Qwen2.5-VL: `WindowedTower`. In most of its blocks a patch sees only its
window of the image."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.vision_config import WindowedConfig
from batchgen.engine.vision.vision_positions import WindowPositions, window_positions
from batchgen.engine.vision.vision_tower import (
    EPS,
    PatchEmbedding,
    PatchPlaces,
    VisionAttention,
    VisionBlock,
    VisionTower,
)
from batchgen.kernels.layers.activation import silu_and_mul
from batchgen.kernels.layers.elementwise import gelu


class GatedVisionMLP(nn.Module):
    """The gated MLP down(silu(gate(x)) · up(x)) of patches [N, width], with biases."""

    def __init__(self, config: WindowedConfig, *, where: Placement) -> None:
        super().__init__()
        parts = {"gate_proj": config.mlp_size, "up_proj": config.mlp_size}
        self.gate_up_proj = MergedLinear(
            config.width, parts, bias=True, unquantised=parts, where=where
        )
        self.down_proj = Linear(
            config.mlp_size, config.width, bias=True, quantisable=False, where=where
        )

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.down_proj(silu_and_mul(self.gate_up_proj(x)))
        return result


class WindowedMerger(nn.Module):
    """An MLP that turns each square of merge_size² patches into one vector of the decoder's hidden
    size."""

    def __init__(self, config: WindowedConfig, *, where: Placement) -> None:
        super().__init__()
        self._size = config.width * config.merge_size**2
        make = partial(Linear, bias=True, quantisable=False, where=where)
        self.ln_q = RMSNorm(config.width, EPS, where=where)
        # Checkpoints number the layers 0 to 2; number 1 is the activation.
        first, last = make(self._size, self._size), make(self._size, config.out_size)
        self.mlp = nn.ModuleDict({"0": first, "2": last})

    def forward(self, x: Tensor) -> Tensor:
        """Compute [N / merge², out_size] from patches [N, width]."""
        squares = self.ln_q(x).view(-1, self._size)
        merged: Tensor = self.mlp["2"](gelu(self.mlp["0"](squares)))
        return merged


class WindowedTower(VisionTower):
    """The vision transformer of Qwen2.5-VL (Bai et al. 2025, arXiv 2502.13923).

    Patches are ordered by window, so that each window is a segment of consecutive patches. The
    tokens' features are put back into image order at the end.
    """

    config: WindowedConfig

    def __init__(self, config: WindowedConfig, *, where: Placement) -> None:
        super().__init__(config, PatchEmbedding(config, bias=False, where=where), where=where)
        self.blocks = nn.ModuleList(_block(config, where) for _ in range(config.depth))
        self.merger = WindowedMerger(config, where=where)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute features as described at `VisionTower.forward`."""
        positions = [self._positions(image) for image in images]
        orders, num_tokens = [], 0
        for position in positions:
            orders.append(position.order + num_tokens)
            num_tokens += len(position.order)
        order = self.uploaded(orders)
        # Patches are sorted in units of the merge² patches of one token.
        x = self.embedded(images).unflatten(0, (num_tokens, -1))[order].flatten(0, 1)
        cos_sin = self.uploaded([position.cos_sin for position in positions])
        slots = torch.arange(len(x), device=self.device)
        whole = self.segments([sum(position.lengths) for position in positions])
        windows = self.segments([size for position in positions for size in position.lengths])
        in_windows = PatchPlaces(windows, cos_sin, slots)
        in_images = in_windows._replace(segments=whole)
        for index, block in enumerate(self.blocks):
            x = block(x, in_images if index in self.config.full_blocks else in_windows)
        merged = self.merger(x)
        return torch.empty_like(merged).index_copy_(0, order, merged).unsqueeze(0)

    def _positions(self, image: Tensor) -> WindowPositions:
        config = self.config
        return window_positions(
            *self.grid(image),
            window=config.window_side,
            head_dim=config.head_dim,
            theta=config.rope_theta,
        )


def _block(config: WindowedConfig, where: Placement) -> VisionBlock:
    norms = RMSNorm(config.width, EPS, where=where), RMSNorm(config.width, EPS, where=where)
    return VisionBlock(
        norms, VisionAttention(config, where=where), GatedVisionMLP(config, where=where)
    )
