"""The vision tower of Qwen3-VL and Qwen3.5: `DeepstackTower`, which `make_tower` makes.

A tower turns the pixels of images into feature vectors for the decoder, one set per image token.
DeepStack gives each image token several features. One replaces the token's embedding; the first
layers of the decoder add the others to their outputs.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.vision_config import DeepstackConfig
from batchgen.engine.vision.vision_positions import PatchPositions, patch_positions
from batchgen.engine.vision.vision_tower import (
    LayerNorm,
    PatchEmbedding,
    PatchPlaces,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    VisionTower,
)
from batchgen.kernels.layers.elementwise import gelu


class PatchMerger(nn.Module):
    """An MLP that turns each square of merge_size² patches into one vector of the decoder's hidden
    size.

    Args:
        joined: whether the norm is over all values of a square; otherwise it is over each patch.
    """

    def __init__(self, config: DeepstackConfig, *, joined: bool, where: Placement) -> None:
        super().__init__()
        self._size = config.width * config.merge_size**2
        make = partial(Linear, bias=True, quantisable=False, where=where)
        self.norm = LayerNorm(self._size if joined else config.width, where=where)
        self.linear_fc1 = make(self._size, self._size)
        self.linear_fc2 = make(self._size, config.out_size)
        self._joined = joined

    def forward(self, x: Tensor) -> Tensor:
        """Compute [N / merge², out_size] from patches [N, width]."""
        if self._joined:
            x = x.view(-1, self._size)
        squares = self.norm(x).view(-1, self._size)
        merged: Tensor = self.linear_fc2(gelu(self.linear_fc1(squares)))
        return merged


class DeepstackTower(VisionTower):
    """The vision transformer of Qwen3-VL (Bai et al. 2025, arXiv 2511.21631)."""

    config: DeepstackConfig

    def __init__(self, config: DeepstackConfig, *, where: Placement) -> None:
        super().__init__(config, PatchEmbedding(config, bias=True, where=where), where=where)
        self.pos_embed = PositionTable(config.table_side**2, config.width, where=where)
        self.blocks = nn.ModuleList(_block(config, where) for _ in range(config.depth))
        self.merger = PatchMerger(config, joined=False, where=where)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, joined=True, where=where) for _ in config.deepstack
        )
        self.planes = 1 + len(config.deepstack)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute features as described at `VisionTower.forward`."""
        config, x = self.config, self.embedded(images)
        positions = [self._positions(image) for image in images]
        taps, weights, cos_sin = (self.uploaded(parts) for parts in zip(*positions, strict=True))
        x = x + self.pos_embed(taps, weights).to(x.dtype)
        slots = torch.arange(len(x), device=self.device)
        segments = self.segments([len(position.taps) for position in positions])
        layout = PatchPlaces(segments, cos_sin, slots)
        features = []  # one per entry of config.deepstack, each [T, out_size]
        for index, block in enumerate(self.blocks):
            x = block(x, layout)
            if index in config.deepstack:
                features.append(self.deepstack_merger_list[config.deepstack.index(index)](x))
        return torch.stack([self.merger(x), *features])

    def _positions(self, image: Tensor) -> PatchPositions:
        config = self.config
        return patch_positions(
            *self.grid(image),  # rows, columns, merge
            side=config.table_side,
            head_dim=config.head_dim,
            theta=config.rope_theta,
        )


def _block(config: DeepstackConfig, where: Placement) -> VisionBlock:
    norms = LayerNorm(config.width, where=where), LayerNorm(config.width, where=where)
    return VisionBlock(norms, VisionAttention(config, where=where), VisionMLP(config, where=where))


class PositionTable(nn.Module):
    """A square grid of learned position vectors, which `DeepstackTower` interpolates to the grid of
    an image's patches. `size` is the number of vectors, `width` the length of each."""

    def __init__(self, size: int, width: int, *, where: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter(size, width, device=where.device, dtype=where.dtype)

    def forward(self, taps: Tensor, weights: Tensor) -> Tensor:
        """Return weighted sums [N, width] of position vectors.

        Args:
            taps: [N, 4] int64, the indices of the four vectors around each patch.
            weights: [N, 4], the weight of each vector.
        """
        return (self.weight[taps] * weights.unsqueeze(-1)).sum(1)
