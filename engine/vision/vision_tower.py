"""The base class of vision towers, which compute the features of images for a decoder, and the
layers that several towers share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from batchgen.engine.device.transfer import upload
from batchgen.engine.layers.linear import Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.vision.vision_config import VisionConfig
from batchgen.engine.vision.vision_positions import normalised_values, patches
from batchgen.kernels.attention.full_attention import Segments, full_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.attention.qkv import prepare_qkv
from batchgen.kernels.layers.elementwise import gelu_tanh

EPS = 1e-6
"""The constant that norms of towers add to variances."""


class LayerNorm(nn.Module):
    """(x - mean(x)) / sqrt(var(x) + eps) · weight + bias, over the last axis (Ba et al. 2016)."""

    def __init__(self, size: int, *, where: Placement) -> None:
        super().__init__()
        self.weight = empty_parameter(size, device=where.device, dtype=where.dtype)
        self.bias = empty_parameter(size, device=where.device, dtype=where.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, EPS)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of weight and bias, 1 and 0 in a model without a checkpoint."""
        yield WeightSlot.plain(f"{path}.weight", self.weight, dummy=1.0)
        yield WeightSlot.plain(f"{path}.bias", self.bias, dummy=0.0)


class GELULinear(Linear):
    """gelu(x Wᵀ + b), with the approximation of GELU by tanh. A GPU applies it before the product
    is written."""

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]  # the tower has no FP8
        """Compute [T, out_features] from [T, in_features]."""
        if not x.is_cuda:
            return gelu_tanh(super().forward(x))
        assert self.bias is not None
        return torch._addmm_activation(self.bias, x, self.weight.t(), use_gelu=True)


class VisionMLP(nn.Module):
    """fc2(gelu(fc1(x)))."""

    def __init__(self, config: VisionConfig, *, where: Placement) -> None:
        super().__init__()
        sizes = config.width, config.mlp_size
        self.linear_fc1 = GELULinear(*sizes, bias=True, quantisable=False, where=where)
        self.linear_fc2 = Linear(*sizes[::-1], bias=True, quantisable=False, where=where)

    def forward(self, x: Tensor) -> Tensor:
        result: Tensor = self.linear_fc2(self.linear_fc1(x))
        return result


class PatchEmbedding(Linear):
    """The linear layer that embeds patches.

    Checkpoints store its weight under `name`, in the shape of a convolution: [width, 3, frames,
    patch, patch], or without the axis of frames.
    """

    def __init__(
        self, config: VisionConfig, *, bias: bool, where: Placement, name: str = "proj"
    ) -> None:
        super().__init__(
            config.patch_values, config.width, bias=bias, quantisable=False, where=where
        )
        self._name = name

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the weight, flattened to [width, values of a patch], and of the
        bias."""
        name = f"{path}.{self._name}.weight"
        yield WeightSlot(self.weight, (name,), (name,), lambda weights: self.flat(weights[name]))
        if self.bias is not None:
            yield WeightSlot.plain(f"{path}.{self._name}.bias", self.bias)

    def flat(self, weight: Tensor) -> Tensor:
        """Flatten a checkpoint's weight to [width, 3 · frames · patch²]."""
        return weight.flatten(1)


class PatchPlaces(NamedTuple):
    """The arguments of attention for the N patches of all images."""

    segments: Segments  # runs of patches that see each other
    cos_sin: Tensor  # [N, D] float32, as in `PatchPositions`
    slots: Tensor  # [N] int64, 0 to N - 1: the KV slots of the patches


class VisionAttention(nn.Module):
    """Multi-head attention, with rotary positions, among the patches of each segment."""

    def __init__(self, config: VisionConfig, *, where: Placement) -> None:
        super().__init__()
        self.qkv = self.make_qkv(config, where)
        self.proj = Linear(config.width, config.width, bias=True, quantisable=False, where=where)
        self._heads = config.num_heads

    def make_qkv(self, config: VisionConfig, where: Placement) -> Linear:
        """Make the layer that computes the queries, keys and values of patches."""
        return Linear(config.width, 3 * config.width, bias=True, quantisable=False, where=where)

    def forward(self, x: Tensor, layout: PatchPlaces) -> Tensor:
        """Compute [N, width] from the patches [N, width] of all images."""
        qkv, heads = self.qkv(x), self._heads
        # A paged cache of one block, for this forward only, so that one launch rotates and
        # stores keys. Key and value are [heads, 1 block, N slots, head_dim].
        cache = KVCache(*qkv.new_empty((2, heads, 1, len(x), qkv.shape[1] // (3 * heads))))
        # None, None: queries and keys have no norms.
        q = prepare_qkv(qkv, None, None, EPS, layout.cos_sin, cache, layout.slots, heads, heads)
        # [N, heads, head_dim], like q.
        k, v = (part.squeeze(1).transpose(0, 1) for part in (cache.key, cache.value))
        attended: Tensor = self.proj(full_attention(q, k, v, layout.segments).flatten(1))
        return attended


class VisionBlock(nn.Module):
    """A transformer block: attention and an MLP, each with a norm before it and a residual
    connection."""

    def __init__(
        self, norms: tuple[nn.Module, nn.Module], attention: VisionAttention, mlp: nn.Module
    ) -> None:
        super().__init__()
        self.norm1, self.norm2 = norms
        self.attn, self.mlp = attention, mlp

    def forward(self, x: Tensor, layout: PatchPlaces) -> Tensor:
        """Compute [N, width] from the patches [N, width] of all images."""
        x = x + self.attn(self.norm1(x), layout)
        result: Tensor = x + self.mlp(self.norm2(x))
        return result


class VisionTower(nn.Module, ABC):
    """A transformer over the patches of images.

    All linear layers are `Linear`, and attention computes each image separately. So on a CPU the
    bits of an image's features do not depend on the other images of a call.

    Args:
        config: the tower's configuration.
        patch_embed: the layer that embeds patches.
    """

    planes = 1
    """The number of feature vectors per token: one replaces the token's embedding, and each further
    one is added by one of the decoder's first layers."""

    def __init__(
        self, config: VisionConfig, patch_embed: PatchEmbedding, *, where: Placement
    ) -> None:
        super().__init__()
        self.config = config
        self.device, self.dtype = where.device, where.dtype
        self.patch_embed = patch_embed
        self._values = normalised_values(config.colours).to(where.device)

    @abstractmethod
    def forward(self, images: Sequence[Tensor]) -> Tensor:
        """Compute the features of images.

        Args:
            images: pixels [height, width, 3] uint8 on the device.

        Returns [planes, T, out_size] for the images' T tokens, one image after another.
        """

    def feature_bytes(self, num_tokens: int) -> int:
        """Return the bytes of the features of `num_tokens` image tokens."""
        return num_tokens * self.planes * self.config.out_size * self.dtype.itemsize

    def embedded(self, images: Sequence[Tensor]) -> Tensor:
        """Cut images into N patches and embed them, [N, width]."""
        config = self.config
        cut = (config.patch_size, config.merge_size, config.temporal_size)
        values = torch.cat([patches(image, self._values, *cut) for image in images])
        embedded: Tensor = self.patch_embed(values.to(self.dtype))
        return embedded

    def grid(self, image: Tensor) -> tuple[int, int, int]:
        """Return the rows and the columns of an image's grid of patches, and `merge_size`."""
        size, (height, width, _) = self.config.patch_size, image.shape
        return height // size, width // size, self.config.merge_size

    def segments(self, lengths: Sequence[int]) -> Segments:
        """Make consecutive segments with these numbers of patches."""
        starts = upload([0, *accumulate(lengths)], torch.int32, self.device)
        return Segments(tuple(lengths), starts)

    def uploaded(self, parts: Sequence[npt.NDArray[Any]]) -> Tensor:
        """Concatenate arrays, one per image, along their first axis, and copy the result to the
        device."""
        joined = np.concatenate(parts)
        return upload(joined, torch.from_numpy(joined).dtype, self.device)
