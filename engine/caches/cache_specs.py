"""Declarations of what the layers of a model keep between forwards.

Each layer declares its spec, the memory plan sums them, and `ModelCaches` allocates them.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple, TypeGuard

import numpy as np
import torch
from torch import Tensor

from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.fp8.fp8_weight import FP8


class LatentCache(NamedTuple):
    """The latents and keys of one layer of latent attention, see `kernels.mla.latent_prepare`."""

    plane: Tensor  # [num_blocks, block_size, head_dim]
    scales: Tensor | None  # [num_blocks, block_size] float32, of FP8


_SCALE = torch.float32
"""The dtype of the scales of keys and values."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """Keys and values of every token, in the blocks of the paged cache (grouped-query
    attention)."""

    num_heads: int  # the number of query heads that read them. Attention chooses its tiles by it.
    num_kv_heads: int  # the number of key heads, which is also that of value heads
    head_dim: int  # the number of values in one head
    # A query sees this many tokens, its own and those just before it; of a `ChunkWindow` those of
    # its chunk; None: all of its row. Layers with a window keep tokens in blocks of their own, as
    # long as some later token could see them in a window that slides.
    window: int | None = None
    in_fp8: bool = False  # whether keys and values are in FP8, with a scale of each head of a token

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes in a cache of a model of this dtype."""
        if self.in_fp8:
            return 2 * self.num_kv_heads * (self.head_dim * FP8.itemsize + _SCALE.itemsize)
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Allocate keys and values of zeros: [num_kv_heads, num_blocks, block_size, head_dim]."""
        slots = self.num_kv_heads, num_blocks, block_size
        key, value = zeros((2, *slots, self.head_dim), FP8 if self.in_fp8 else dtype, device)
        return KVCache(key, value, zeros((*slots, 2), _SCALE, device) if self.in_fp8 else None)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """A latent of every token and a key that all heads share, in the blocks of the paged cache
    (multi-head latent attention). To the queries of all heads they are the key of one head, of
    whose values the latent is a part."""

    num_heads: int  # the number of query heads that read them. Attention chooses its tiles by it.
    latent_size: int  # the number of values in a latent
    rotated_size: int  # the number of values in the shared key, which are rotated by position
    in_fp8: bool = False  # whether both are in FP8, with a scale of each token

    @property
    def num_kv_heads(self) -> int:
        """The number of key heads that the queries see."""
        return 1

    @property
    def head_dim(self) -> int:
        """The number of values that are kept of a token."""
        return self.latent_size + self.rotated_size

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes in a cache of a model of this dtype."""
        if self.in_fp8:
            return self.head_dim * FP8.itemsize + _SCALE.itemsize
        return self.head_dim * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        """Allocate latents and keys of zeros: [num_blocks, block_size, head_dim]."""
        slots = num_blocks, block_size
        plane = zeros((*slots, self.head_dim), FP8 if self.in_fp8 else dtype, device)
        return LatentCache(plane, zeros(slots, _SCALE, device) if self.in_fp8 else None)


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """One array of values for every token, in the blocks of the paged cache. It holds the value of
    a column of context scope, for example."""

    shape: tuple[int, ...]  # the shape of one token's values
    dtype: torch.dtype | None = None  # the dtype of the values; None means the dtype of the model

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes that one token takes; the model's dtype counts if the spec has none."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the plane of zeros, [num_blocks, block_size, *shape]."""
        return zeros((num_blocks, block_size, *self.shape), self.dtype or dtype, device)


class StateTensor(NamedTuple):
    """The shape and dtype of one part of a row's state; the dtype does not follow the model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes of this part of one row's state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """State of a fixed size for every row, which a recurrent layer carries from token to token. A
    decode step of W tokens must be able to take back the tokens that are not accepted. So it does
    not change the state, but keeps *records* of what its tokens do to it. Later steps *fold* the
    records of the accepted tokens into the state before they use it. `RowMetadata` says how."""

    state: Mapping[str, StateTensor]  # maps a name to a part of the state that is kept for each row
    # Maps a name to what is kept for each token of a decode step, until it is folded.
    records: Mapping[str, StateTensor] = field(default_factory=dict)
    # A prefill is cut only where the number of tokens before the cut is a multiple of this. So a
    # layer that computes chunks of this many tokens cuts a row at the same places however the row
    # is scheduled.
    chunk_multiple: int = 1

    @property
    def state_bytes(self) -> int:
        """The bytes of one row's state, in which each part starts at a multiple of 16 bytes."""
        return sum(_aligned(tensor.nbytes) for tensor in self.state.values())

    @property
    def record_bytes(self) -> int:
        """The bytes of one token's records."""
        return sum(tensor.nbytes for tensor in self.records.values())

    def views(self, pool: Tensor, start: int) -> dict[str, Tensor]:
        """Return this layer's parts of the states in a pool of S slots, as views [S, *shape].
        `pool` is [S, bytes] uint8, the states of all layers."""
        parts = {}
        for name, tensor in self.state.items():
            part = pool[:, start : start + tensor.nbytes].view(tensor.dtype)
            parts[name] = part.view(len(pool), *tensor.shape)
            start += _aligned(tensor.nbytes)
        return parts


AttentionSpec = KVSpec | LatentSpec
"""What layers of attention keep."""
CacheSpec = KVSpec | LatentSpec | PlaneSpec | StateSpec
"""What one layer keeps between forwards."""


def has_window(spec: CacheSpec | None) -> TypeGuard[KVSpec]:
    """Whether a layer sees the last tokens of a row only."""
    return isinstance(spec, KVSpec) and spec.window is not None


def longest_window(specs: Iterable[CacheSpec | None]) -> int | None:
    """Return the largest window of any layer; None if no layer has one."""
    return max((spec.window or 0 for spec in specs if has_window(spec)), default=None)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros; on a CPU its pages take up memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def _aligned(nbytes: int) -> int:
    """Round up to a multiple of 16."""
    return -(-nbytes // 16) * 16
