"""The vision tower of Qwen3-VL and Qwen3.5, which makes features of images for a decoder."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.engine.device.transfer import upload
from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.vision_config import VisionConfig
from batchgen.engine.vision.vision_positions import (
    PatchPositions,
    normalised_values,
    patch_positions,
    patches,
)
from batchgen.kernels.attention.full_attention import Segments, full_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.qkv import prepare_qkv
from batchgen.kernels.layers.elementwise import gelu, gelu_tanh

_EPS = 1e-6


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last axis (Ba et al. 2016)."""

    def __init__(self, size: int, *, where: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter(size, device=where.device, dtype=where.dtype)
        self.bias = empty_parameter(size, device=where.device, dtype=where.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, _EPS)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of weight and bias, 1 and 0 in a model without a checkpoint."""
        yield WeightSlot.plain(f"{path}.weight", self.weight, dummy=1.0)
        yield WeightSlot.plain(f"{path}.bias", self.bias, dummy=0.0)


class PatchEmbedding(Linear):
    """The product that makes vectors of patches; checkpoints hold its weight as a convolution's."""

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the weight, of which every patch's values are one axis, and bias."""
        name = f"{path}.proj.weight"

        def flat(weights: Mapping[str, Tensor]) -> Tensor:
            return weights[name].flatten(1)

        yield WeightSlot(self.weight, (name,), (name,), flat)
        assert self.bias is not None
        yield WeightSlot.plain(f"{path}.proj.bias", self.bias)


class PatchPlaces(NamedTuple):
    """What attention needs to know about the N patches of all images."""

    images: Segments
    cos_sin: Tensor  # [N, D] float32, as `PatchPositions` has it
    slots: Tensor  # [N] int64, their numbers


class VisionAttention(nn.Module):
    """Multi-head attention of all patches of an image over each other, with rotary positions."""

    def __init__(self, config: VisionConfig, *, where: Placement) -> None:
        super().__init__()
        make = partial(Linear, bias=True, quantisable=False, where=where)
        self.qkv = make(config.width, 3 * config.width)
        self.proj = make(config.width, config.width)
        self._heads = config.num_heads

    def forward(self, x: Tensor, layout: PatchPlaces) -> Tensor:
        """Compute [N, width] from the patches [N, width] of all images."""
        qkv, heads = self.qkv(x), self._heads
        # A paged cache of one block, for this forward alone: one launch rotates and writes.
        cache = KVCache(*qkv.new_empty((2, heads, 1, len(x), qkv.shape[1] // (3 * heads))))
        q = prepare_qkv(qkv, None, None, _EPS, layout.cos_sin, cache, layout.slots, heads, heads)
        k, v = (part.squeeze(1).transpose(0, 1) for part in (cache.key, cache.value))
        attended: Tensor = self.proj(full_attention(q, k, v, layout.images).flatten(1))
        return attended


class VisionMLP(nn.Module):
    """fc2(gelu(fc1(x))), with the approximation of GELU by tanh."""

    def __init__(self, config: VisionConfig, *, where: Placement) -> None:
        super().__init__()
        make = partial(Linear, bias=True, quantisable=False, where=where)
        self.linear_fc1 = make(config.width, config.mlp_size)
        self.linear_fc2 = make(config.mlp_size, config.width)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_fc2(gelu_tanh(self.linear_fc1(x)))
        return result


class VisionBlock(nn.Module):
    """Attention and MLP, each behind a norm and added to what it reads."""

    def __init__(self, config: VisionConfig, *, where: Placement) -> None:
        super().__init__()
        self.norm1 = LayerNorm(config.width, where=where)
        self.norm2 = LayerNorm(config.width, where=where)
        self.attn = VisionAttention(config, where=where)
        self.mlp = VisionMLP(config, where=where)

    def forward(self, x: Tensor, layout: PatchPlaces) -> Tensor:
        x = x + self.attn(self.norm1(x), layout)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class PatchMerger(nn.Module):
    """Makes one vector of the decoder's size of each square of patches.

    The norm is over each patch, or with `joined` over all values of a square.
    """

    def __init__(self, config: VisionConfig, *, joined: bool, where: Placement) -> None:
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


class VisionTower(nn.Module):
    """A transformer over the patches of images (Qwen3-VL, Bai et al. 2025, arXiv 2511.21631).

    Every product goes through `Linear`, and attention takes each image by itself, so on a CPU an
    image's features have the same bits whatever other images are computed with it.
    """

    def __init__(self, config: VisionConfig, *, where: Placement) -> None:
        super().__init__()
        self.config = config
        self.device, self.dtype = where.device, where.dtype
        self.patch_embed = PatchEmbedding(
            config.patch_values, config.width, bias=True, quantisable=False, where=where
        )
        self.pos_embed = PositionTable(config.table_side**2, config.width, where=where)
        self.blocks = nn.ModuleList(VisionBlock(config, where=where) for _ in range(config.depth))
        self.merger = PatchMerger(config, joined=False, where=where)
        self.deepstack_merger_list = nn.ModuleList(
            PatchMerger(config, joined=True, where=where) for _ in config.deepstack
        )
        self._values = normalised_values().to(where.device)

    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute the features of images, whose pixels are [height, width, 3] uint8 on the device.

        Returns [1 + K, T, out_size] of the images' T tokens, one image after another: what stands
        in place of token embeddings, and what the first K layers of the decoder add.
        """
        config = self.config
        positions = [self._positions(image) for image in images]
        cut = (config.patch_size, config.merge_size, config.temporal_size)
        values = torch.cat([patches(image, self._values, *cut) for image in images])
        x = self.patch_embed(values.to(self.dtype))
        taps, weights, cos_sin = (self._uploaded(parts) for parts in zip(*positions, strict=True))
        x = x + self.pos_embed(taps, weights).to(x.dtype)
        lengths = [len(position.taps) for position in positions]
        starts = upload([0, *accumulate(lengths)], torch.int32, self.device)
        slots = torch.arange(len(x), device=self.device)
        layout = PatchPlaces(Segments(tuple(lengths), starts), cos_sin, slots)
        features = []
        for index, block in enumerate(self.blocks):
            x = block(x, layout)
            if index in config.deepstack:
                features.append(self.deepstack_merger_list[config.deepstack.index(index)](x))
        return torch.stack([self.merger(x), *features])

    @property
    def planes(self) -> int:
        """1 + K, how many vectors each token has."""
        return 1 + len(self.config.deepstack)

    def feature_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the features of images with a number of tokens."""
        return num_tokens * self.planes * self.config.out_size * self.dtype.itemsize

    def _positions(self, image: Tensor) -> PatchPositions:
        config = self.config
        height, width, _ = image.shape
        return patch_positions(
            height // config.patch_size,
            width // config.patch_size,
            config.merge_size,
            side=config.table_side,
            head_dim=config.width // config.num_heads,
            theta=config.rope_theta,
        )

    def _uploaded(self, parts: Sequence[Tensor]) -> Tensor:
        joined = torch.cat(list(parts))
        return upload(joined.numpy(), joined.dtype, self.device)


class PositionTable(nn.Module):
    """The learned positions, a square of vectors."""

    def __init__(self, layout: int, width: int, *, where: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter(layout, width, device=where.device, dtype=where.dtype)

    def forward(self, taps: Tensor, weights: Tensor) -> Tensor:
        """Return the sums [N, width] of the vectors at `taps` [N, 4], each times its weight."""
        return (self.weight[taps] * weights.unsqueeze(-1)).sum(1)
