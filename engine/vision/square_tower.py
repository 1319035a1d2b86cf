"""The vision tower of Gemma 3, a SigLIP model: `SquareTower`. All images are squares of one size.

The `checkpoint_names` of a module map the names of its submodules to their names in checkpoints.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.merged_linear import MergedLinear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.vision_config import SquareConfig, VisionConfig
from batchgen.engine.vision.vision_positions import grid_places
from batchgen.engine.vision.vision_tower import (
    EPS,
    LayerNorm,
    PatchEmbedding,
    PatchPlaces,
    VisionAttention,
    VisionBlock,
    VisionMLP,
    VisionTower,
)


class SplitAttention(VisionAttention):
    """Attention whose query, key and value projections are separate weights in checkpoints."""

    checkpoint_names: Mapping[str, str] = {"proj": "out_proj"}

    def make_qkv(self, config: VisionConfig, where: Placement) -> Linear:
        parts = dict.fromkeys(("q_proj", "k_proj", "v_proj"), config.width)
        return MergedLinear(config.width, parts, bias=True, unquantised=parts, where=where)


class SquareMLP(VisionMLP):
    """The MLP of a block, with SigLIP's weight names."""

    checkpoint_names: Mapping[str, str] = {"linear_fc1": "fc1", "linear_fc2": "fc2"}


class SquareBlock(VisionBlock):
    """A block of the tower, with SigLIP's weight names."""

    checkpoint_names: Mapping[str, str] = {
        "norm1": "layer_norm1",
        "norm2": "layer_norm2",
        "attn": "self_attn",
    }

    def __init__(self, config: SquareConfig, *, where: Placement) -> None:
        norms = LayerNorm(config.width, where=where), LayerNorm(config.width, where=where)
        attention = SplitAttention(config, where=where)
        super().__init__(norms, attention, SquareMLP(config, where=where))


class SoftProjection(Linear):
    """The linear layer from the tower's width to the decoder's hidden size. (Gemma calls an image's
    tokens soft tokens.) Checkpoints store its weight transposed, as [in_features, out_features]."""

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the weight."""
        name = f"{path}.mm_input_projection_weight"
        yield WeightSlot(self.weight, (name,), (name,), lambda weights: weights[name].t())


class SquareTower(VisionTower):
    """The vision transformer SigLIP (Zhai et al. 2023, arXiv 2303.15343). After the blocks, each
    square of merge_size² patches is averaged into one token (Gemma 3, arXiv 2503.19786)."""

    config: SquareConfig
    checkpoint_names: Mapping[str, str] = {
        "patch_embed": "embeddings",
        "layers": "encoder.layers",
        "soft_norm": "multi_modal_projector.mm_soft_emb_norm",
        "projection": "multi_modal_projector",
    }

    def __init__(self, config: SquareConfig, *, where: Placement) -> None:
        patches = PatchEmbedding(config, bias=True, where=where, name="patch_embedding")
        super().__init__(config, patches, where=where)
        self.positions = empty_parameter(
            config.grid_side**2, config.width, device=where.device, dtype=where.dtype
        )
        self.layers = nn.ModuleList(SquareBlock(config, where=where) for _ in range(config.depth))
        self.post_layernorm = LayerNorm(config.width, where=where)
        self.soft_norm = RMSNorm(config.width, EPS, zero_centred=True, where=where)
        self.projection = SoftProjection(
            config.width, config.out_size, bias=False, quantisable=False, where=where
        )
        # The indices of the learned positions, in the order of the patches.
        sides = config.grid_side, config.grid_side
        self._places = torch.from_numpy(grid_places(*sides, config.merge_size)).to(where.device)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the learned positions; the submodules yield their own slots."""
        yield WeightSlot.plain(f"{path}.embeddings.position_embedding.weight", self.positions)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute features as described at `VisionTower.forward`."""
        x = self.embedded(images) + self.positions[self._places].repeat(len(images), 1)
        # [N, 0]: this tower has no rotary positions.
        angles = torch.empty((len(x), 0), device=self.device)
        segments = self.segments([len(self._places)] * len(images))
        layout = PatchPlaces(segments, angles, torch.arange(len(x), device=self.device))
        for block in self.layers:
            x = block(x, layout)
        squares = self.post_layernorm(x).unflatten(0, (-1, self.config.merge_size**2))
        pooled = self.soft_norm(squares.float().mean(1).to(x.dtype))
        features: Tensor = self.projection(pooled)
        return features.unsqueeze(0)
