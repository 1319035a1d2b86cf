"""The vision tower of Gemma 4. The size of an image depends on its aspect ratio and on a token
budget.

`AxialTower` is the tower; the other classes are its layers. *Axial*: each patch has a row and a
column, and learned and rotary positions treat the two axes separately.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.vision_config import AxialConfig
from batchgen.engine.vision.vision_positions import AxialPositions, axial_positions
from batchgen.engine.vision.vision_tower import PatchEmbedding, PatchPlaces, VisionTower
from batchgen.kernels.attention.full_attention import full_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.qkv import prepare_qkv
from batchgen.kernels.layers.activation import gelu_and_mul
from batchgen.kernels.layers.rms_norm import rms_norm


class AxialEmbedding(PatchEmbedding):
    """The linear layer that embeds patches, and the learned positions: one vector per column and
    one per row, whose sum is added to a patch's embedding.

    In checkpoints the three colours of a pixel are adjacent in the weight; here each colour is
    contiguous.
    """

    def __init__(self, config: AxialConfig, *, where: Placement) -> None:
        super().__init__(config, bias=False, where=where, name="input_proj")
        self.positions = empty_parameter(
            2, config.table_size, config.width, device=where.device, dtype=where.dtype
        )
        self._patch_size = config.patch_size

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the linear layer's weight and of the positions."""
        yield from super().weight_slots(path)
        yield WeightSlot.plain(f"{path}.position_embedding_table", self.positions)

    def flat(self, weight: Tensor) -> Tensor:
        """Reorder a checkpoint's weight [width, patch² · 3] to [width, 3 · patch²]."""
        values: Tensor = weight.unflatten(1, (-1, 3))
        return values.transpose(1, 2).flatten(1)

    def at(self, rows: Tensor, columns: Tensor) -> Tensor:
        """Return the learned positions [N, width] of N patches, given their rows and columns
        [N]."""
        return self.positions[0][columns] + self.positions[1][rows]


class ClippedLinear(Linear):
    """A linear layer without a bias. With `clips`, its input and its output are clamped to bounds
    from the checkpoint.

    Args:
        clips: whether the checkpoint has bounds.
        arrange: reorders the rows of a checkpoint's weight; None keeps their order.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        clips: bool,
        arrange: Callable[[Tensor], Tensor] | None = None,
        where: Placement,
    ) -> None:
        super().__init__(in_features, out_features, bias=False, quantisable=False, where=where)
        self._arrange = arrange
        make = partial(empty_parameter, device=where.device, dtype=where.dtype)
        # [4]: the bounds of the input and of the output, in the order of `weight_slots`.
        self.bounds = make(4) if clips else None

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the tower has no FP8
        """Compute [T, out_features] from [T, in_features]."""
        if self.bounds is None:
            return super().forward(x)
        in_low, in_high, out_low, out_high = self.bounds
        return super().forward(x.clamp(in_low, in_high)).clamp(out_low, out_high)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the weight and of the bounds. Without a checkpoint the bounds are
        infinite."""
        name, arrange = f"{path}.weight", self._arrange
        combine = None if arrange is None else (lambda weights: arrange(weights[name]))
        yield WeightSlot(self.weight, (name,), (name,), combine)
        if self.bounds is not None:
            for index, bound in enumerate(("input_min", "input_max", "output_min", "output_max")):
                infinity = float("inf") if index % 2 else -float("inf")
                yield WeightSlot.plain(f"{path}.{bound}", self.bounds[index], dummy=infinity)


class AxialAttention(nn.Module):
    """Multi-head attention among the patches of one image.

    Queries and keys are normalised and rotated: half of each head by the patch's column, half by
    its row. Values are normalised without a weight. Scores are not scaled.
    """

    def __init__(self, config: AxialConfig, *, where: Placement) -> None:
        super().__init__()
        self._heads, self._eps = config.num_heads, config.norm_eps
        size = config.num_heads * config.head_dim
        make = partial(ClippedLinear, clips=config.clips, where=where)
        # Checkpoints rotate each half of a head separately; our kernel pairs value i with value i +
        # head_dim/2 of the whole head. This order translates one into the other.
        first, second, third, last = torch.arange(config.head_dim, device="cpu").chunk(4)
        order = torch.cat((first, third, second, last))
        self.q_proj = make(config.width, size, arrange=partial(_ordered, order=order))
        self.k_proj = make(config.width, size, arrange=partial(_ordered, order=order))
        self.v_proj, self.o_proj = make(config.width, size), make(size, config.width)
        norm = partial(RMSNorm, config.head_dim, config.norm_eps, in_float=True, order=order)
        self.q_norm, self.k_norm = norm(where=where), norm(where=where)
        self._ones = torch.ones(config.head_dim, device=where.device)

    def forward(self, x: Tensor, layout: PatchPlaces) -> Tensor:
        """Compute [N, width] from the patches [N, width] of all images."""
        heads = self._heads
        qkv = torch.cat((self.q_proj(x), self.k_proj(x), self.v_proj(x)), 1)
        # A paged cache of one block, for this forward only, so that one launch normalises, rotates
        # and stores keys.
        cache = KVCache(*qkv.new_empty((2, heads, 1, len(x), qkv.shape[1] // (3 * heads))))
        q = prepare_qkv(
            qkv, self.q_norm.weight, self.k_norm.weight, self._eps, layout.cos_sin, cache,
            layout.slots, heads, heads, self._ones,
        )  # fmt: skip
        k, v = (part.squeeze(1).transpose(0, 1) for part in (cache.key, cache.value))
        attended: Tensor = self.o_proj(full_attention(q, k, v, layout.segments, 1.0).flatten(1))
        return attended


class AxialMLP(nn.Module):
    """The gated MLP down(gelu(gate(x)) · up(x)) of patches [N, width], with the tanh approximation
    of GELU."""

    def __init__(self, config: AxialConfig, *, where: Placement) -> None:
        super().__init__()
        make = partial(ClippedLinear, clips=config.clips, where=where)
        self.gate_proj = make(config.width, config.mlp_size)
        self.up_proj = make(config.width, config.mlp_size)
        self.down_proj = make(config.mlp_size, config.width)

    def forward(self, x: Tensor) -> Tensor:
        gate_up = torch.cat((self.gate_proj(x), self.up_proj(x)), 1)
        result: Tensor = self.down_proj(gelu_and_mul(gate_up))
        return result


class AxialBlock(nn.Module):
    """A transformer block: attention and an MLP, each with a norm before it and a norm after it,
    and a residual connection."""

    checkpoint_names: Mapping[str, str] = {
        "before_attention": "input_layernorm",
        "after_attention": "post_attention_layernorm",
        "before_mlp": "pre_feedforward_layernorm",
        "after_mlp": "post_feedforward_layernorm",
    }

    def __init__(self, config: AxialConfig, *, where: Placement) -> None:
        super().__init__()
        norm = partial(RMSNorm, config.width, config.norm_eps, in_float=True, where=where)
        self.before_attention, self.after_attention = norm(), norm()
        self.before_mlp, self.after_mlp = norm(), norm()
        self.self_attn = AxialAttention(config, where=where)
        self.mlp = AxialMLP(config, where=where)

    def forward(self, x: Tensor, layout: PatchPlaces) -> Tensor:
        """Compute [N, width] from the patches [N, width] of all images."""
        x = x + self.after_attention(self.self_attn(self.before_attention(x), layout))
        result: Tensor = x + self.after_mlp(self.mlp(self.before_mlp(x)))
        return result


class AxialTower(VisionTower):
    """The vision transformer of Gemma 4 (Google 2026). After the blocks, each square of merge_size²
    patches is averaged into one token."""

    config: AxialConfig
    patch_embed: AxialEmbedding
    checkpoint_names: Mapping[str, str] = {
        "patch_embed": "patch_embedder",
        "layers": "encoder.layers",
        "projection": "embed_vision.embedding_projection",
    }

    def __init__(self, config: AxialConfig, *, where: Placement) -> None:
        super().__init__(config, AxialEmbedding(config, where=where), where=where)
        self.layers = nn.ModuleList(AxialBlock(config, where=where) for _ in range(config.depth))
        make = partial(empty_parameter, config.width, device=where.device, dtype=where.dtype)
        self.std_bias = make() if config.standardises else None
        self.std_scale = make() if config.standardises else None
        sizes = config.width, config.out_size
        self.projection = Linear(*sizes, bias=False, quantisable=False, where=where)
        self._ones = torch.ones(config.width, device=where.device)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the features' shift and scale; the submodules yield their own
        slots."""
        if self.std_bias is not None and self.std_scale is not None:
            yield WeightSlot.plain(f"{path}.std_bias", self.std_bias, dummy=0.0)
            yield WeightSlot.plain(f"{path}.std_scale", self.std_scale, dummy=1.0)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute features as described at `VisionTower.forward`."""
        positions = [self._positions(image) for image in images]
        rows, columns, cos_sin = (self.uploaded(parts) for parts in zip(*positions, strict=True))
        x = self.embedded(images) + self.patch_embed.at(rows, columns)
        segments = self.segments([len(position.rows) for position in positions])
        layout = PatchPlaces(segments, cos_sin, torch.arange(len(x), device=self.device))
        for block in self.layers:
            x = block(x, layout)
        features: Tensor = self.projection(self._pooled(x))
        return features.unsqueeze(0)

    def _pooled(self, x: Tensor) -> Tensor:
        """Average patches [N, width] into tokens, and return their normalised features [T,
        width]."""
        squares = x.unflatten(0, (-1, self.config.merge_size**2)).float()
        pooled = squares.mean(1).to(x.dtype).float() * self.config.width**0.5
        if self.std_bias is not None and self.std_scale is not None:
            pooled = (pooled - self.std_bias.float()) * self.std_scale.float()
        return rms_norm(pooled.to(x.dtype), self._ones, self.config.norm_eps)

    def _positions(self, image: Tensor) -> AxialPositions:
        """Return the rows and columns of an image's patches, and their cosines and sines."""
        config = self.config
        sizes = {"head_dim": config.head_dim, "theta": config.rope_theta}
        return axial_positions(*self.grid(image), **sizes)


def _ordered(rows: Tensor, order: Tensor) -> Tensor:
    """Reorder the rows of each head in a weight [heads · head_dim, …] by `order` [head_dim]."""
    ordered: Tensor = rows.unflatten(0, (-1, len(order)))[:, order]
    return ordered.flatten(0, 1)
