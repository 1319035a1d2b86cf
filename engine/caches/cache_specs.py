"""Declarations of what the layers of a model keep between forwards, and how many bytes it takes.

The *paged cache* is memory in blocks of a fixed number of tokens; a row gets blocks as it grows.
Each layer declares a spec. The memory plan sums the specs' bytes, and `ModelCaches` allocates a
cache for each spec.
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
    """The cached latents and shared keys of one layer of multi-head latent attention, as
    `kernels.mla.latent_prepare` writes them."""

    plane: Tensor  # [num_blocks, block_size, head_dim]
    scales: Tensor | None  # [num_blocks, block_size] float32, one per token; only if `plane` is FP8


SCALE_DTYPE = torch.float32
"""The dtype of the scales of FP8 keys and values."""


@dataclass(frozen=True, slots=True)
class KVSpec:
    """A layer of grouped-query attention: keys and values of every token, in the blocks of the
    paged cache."""

    num_heads: int  # the number of query heads; attention chooses its tile sizes by it
    num_kv_heads: int  # the number of key heads, which is also the number of value heads
    head_dim: int  # the number of values in one head
    # How many tokens a query attends to, including its own token; None: all earlier tokens of its
    # row. A `ChunkWindow` limits a query to the tokens of its chunk instead. Layers with a window
    # have a separate pool of blocks; a block is kept as long as a later token could attend to it in
    # a sliding window.
    window: int | None = None
    in_fp8: bool = False  # whether keys and values are FP8, with one scale per token and head

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the cache's bytes per token for a model of this dtype."""
        if self.in_fp8:
            return 2 * self.num_kv_heads * (self.head_dim * FP8.itemsize + SCALE_DTYPE.itemsize)
        return 2 * self.num_kv_heads * self.head_dim * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> KVCache:
        """Allocate keys and values [num_kv_heads, num_blocks, block_size, head_dim], filled with
        zeros."""
        slots = self.num_kv_heads, num_blocks, block_size
        key, value = zeros((2, *slots, self.head_dim), FP8 if self.in_fp8 else dtype, device)
        return KVCache(key, value, zeros((*slots, 2), SCALE_DTYPE, device) if self.in_fp8 else None)


@dataclass(frozen=True, slots=True)
class LatentSpec:
    """A layer of multi-head latent attention: for every token a latent and a key that all heads
    share, in the blocks of the paged cache.

    Attention treats the concatenation of both as the only key head, and the latent as its value.
    """

    num_heads: int  # the number of query heads; attention chooses its tile sizes by it
    latent_size: int  # the number of values in a latent
    rotated_size: int  # the number of values in the shared key, to which RoPE was applied
    in_fp8: bool = False  # whether latents and keys are FP8, with one scale per token

    @property
    def num_kv_heads(self) -> int:
        """The number of key heads as the queries see it."""
        return 1

    @property
    def head_dim(self) -> int:
        """The number of values that are cached per token."""
        return self.latent_size + self.rotated_size

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the cache's bytes per token for a model of this dtype."""
        if self.in_fp8:
            return self.head_dim * FP8.itemsize + SCALE_DTYPE.itemsize
        return self.head_dim * dtype.itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> LatentCache:
        """Allocate latents and keys [num_blocks, block_size, head_dim], filled with zeros."""
        slots = num_blocks, block_size
        plane = zeros((*slots, self.head_dim), FP8 if self.in_fp8 else dtype, device)
        return LatentCache(plane, zeros(slots, SCALE_DTYPE, device) if self.in_fp8 else None)


@dataclass(frozen=True, slots=True)
class PlaneSpec:
    """A tensor with a value for every token, in the blocks of the paged cache: for example a column
    of context scope."""

    shape: tuple[int, ...]  # the shape of one token's values
    dtype: torch.dtype | None = None  # the dtype of the values; None means the dtype of the model

    def token_bytes(self, dtype: torch.dtype) -> int:
        """Return the cache's bytes per token. `dtype` is the model's, used if the spec has none."""
        return math.prod(self.shape) * (self.dtype or dtype).itemsize

    def allocate(
        self, num_blocks: int, block_size: int, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Allocate the plane [num_blocks, block_size, *shape], filled with zeros."""
        return zeros((num_blocks, block_size, *self.shape), self.dtype or dtype, device)


class StateTensor(NamedTuple):
    """The shape and dtype of one part of a row's state. The dtype does not depend on the
    model's."""

    shape: tuple[int, ...]
    dtype: torch.dtype = torch.float32

    @property
    def nbytes(self) -> int:
        """The bytes of this part of one row's state."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclass(frozen=True, slots=True)
class StateSpec:
    """A recurrent layer: a state of fixed size for every row, carried from token to token.

    A decode step of W tokens must be able to undo tokens that are not accepted. So the step does
    not change the state. It writes a *record* of each token's effect, and later steps *fold* the
    records of accepted tokens into the state. `RowMetadata` describes the procedure.
    """

    state: Mapping[str, StateTensor]  # the parts of a row's state, by name
    # The parts of a record, by name: what a decode step stores for each token until it is folded.
    records: Mapping[str, StateTensor] = field(default_factory=dict)
    # A prefill is cut only after a multiple of this many tokens. A layer that computes in chunks of
    # this size then cuts a row at the same positions in any schedule.
    chunk_multiple: int = 1

    @property
    def state_bytes(self) -> int:
        """The bytes of one row's state. Each part starts at a multiple of 16 bytes."""
        return sum(_aligned(tensor.nbytes) for tensor in self.state.values())

    @property
    def record_bytes(self) -> int:
        """The bytes of one token's records."""
        return sum(tensor.nbytes for tensor in self.records.values())

    def views(self, pool: Tensor, start: int) -> dict[str, Tensor]:
        """Return this layer's parts of all S states as views [S, *shape], by name.

        Args:
            pool: [S, bytes] uint8, the states of all layers by state slot.
            start: the first byte of this layer's state in a slot.
        """
        parts = {}
        for name, tensor in self.state.items():
            part = pool[:, start : start + tensor.nbytes].view(tensor.dtype)
            parts[name] = part.view(len(pool), *tensor.shape)
            start += _aligned(tensor.nbytes)
        return parts


AttentionSpec = KVSpec | LatentSpec
"""What an attention layer keeps."""
CacheSpec = KVSpec | LatentSpec | PlaneSpec | StateSpec
"""What one layer keeps between forwards."""


def has_window(spec: CacheSpec | None) -> TypeGuard[KVSpec]:
    """Return whether a layer has a sliding or chunked window."""
    return isinstance(spec, KVSpec) and spec.window is not None


def longest_window(specs: Iterable[CacheSpec | None]) -> int | None:
    """Return the largest window of all layers; None if no layer has one."""
    return max((spec.window or 0 for spec in specs if has_window(spec)), default=None)


def zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return a tensor of zeros. On a CPU its pages take memory only once they are written."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    data = np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(data).view(dtype).view(shape)


def _aligned(nbytes: int) -> int:
    """Round up to a multiple of 16."""
    return -(-nbytes // 16) * 16
