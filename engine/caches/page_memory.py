"""The memory of pages: which layers share it, how many bytes a page has, and the layers' caches.

Keys, values and scales each have memory of their own, so that what a page held before is a value
where values are read (`KVCache` says why that matters).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import (
    SCALE_DTYPE,
    CacheSpec,
    KVSpec,
    has_window,
    zeros,
)
from batchgen.engine.caches.page_layout import PageLayout
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.fp8.fp8_weight import FP8


@dataclass(frozen=True)
class PageMemory:
    """The layers of a model whose keys and values share the memory of pages."""

    layout: PageLayout
    block_size: int  # the number of tokens in a block
    dtype: torch.dtype  # of keys and values
    # The layers with a window and those without: their specs, by index.
    windows: Mapping[int, KVSpec]
    full: Mapping[int, KVSpec]

    @classmethod
    def of(
        cls,
        specs: Sequence[CacheSpec | None],
        layout: PageLayout,
        block_size: int,
        dtype: torch.dtype,
    ) -> PageMemory:
        """Choose the layers of a model of this dtype that share memory. Layers of other shapes
        than the first layer with a window and the first one without have their own."""
        windows: dict[int, KVSpec] = {}
        full: dict[int, KVSpec] = {}
        for index, spec in enumerate(specs):
            if isinstance(spec, KVSpec):
                chosen = windows if has_window(spec) else full
                first = next(iter(chosen.values()), spec)
                if (spec.head_dim, spec.in_fp8) == (first.head_dim, first.in_fp8):
                    chosen[index] = spec
        in_fp8 = {spec.in_fp8 for spec in (*windows.values(), *full.values())}
        if len(in_fp8) > 1:
            full = {}
        return cls(layout, block_size, FP8 if True in in_fp8 else dtype, windows, full)

    @property
    def layers(self) -> Mapping[int, KVSpec]:
        """The specs of all these layers, by index; those with a window come first."""
        return {**self.windows, **self.full}

    @property
    def in_fp8(self) -> bool:
        """Whether keys and values are FP8, with scales."""
        return self.dtype == FP8

    @property
    def bytes(self) -> int:
        """The bytes of one page over these layers."""
        scales = self._bytes(_scale_size, SCALE_DTYPE) if self.in_fp8 else 0
        return 2 * self._bytes(_head_size, self.dtype) + scales

    def caches(self, device: torch.device) -> dict[int, KVCache]:
        """Allocate the caches of these layers, filled with zeros, by index."""
        key, value = (self._planes(_head_size, self.dtype, device) for _ in range(2))
        scales: Sequence[Tensor | None] = [None] * len(key)
        if self.in_fp8:
            scales = self._planes(_scale_size, SCALE_DTYPE, device)
        planes = zip(key, value, scales, strict=True)
        return {
            index: KVCache(*tensors) for index, tensors in zip(self.layers, planes, strict=True)
        }

    def _sizes(self, size: Callable[[KVSpec], int], dtype: torch.dtype) -> tuple[int, int, bool]:
        """Return the bytes of a page that layers with a window take for `size` values of a token
        and head, those that the others take, and whether both are the same memory."""
        of_block = self.block_size * dtype.itemsize
        layout, windows, full = self.layout, [*self.windows.values()], [*self.full.values()]
        shared = bool(windows and full) and layout.joins(size(windows[0]), size(full[0]))
        of_windows = sum(spec.num_kv_heads * size(spec) for spec in windows) * of_block
        of_full = sum(spec.num_kv_heads * size(spec) for spec in full) * of_block
        return of_windows * layout.window_blocks, of_full * layout.full_blocks, shared

    def _bytes(self, size: Callable[[KVSpec], int], dtype: torch.dtype) -> int:
        """Return the bytes of a page for `size` values of a token and head."""
        windows, full, shared = self._sizes(size, dtype)
        return max(windows, full) if shared else windows + full

    def _planes(
        self, size: Callable[[KVSpec], int], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """Allocate `size` values of each token and head [num_kv_heads, num_blocks, block_size,
        size] for layers with a window, then for the others."""
        windows, _, shared = self._sizes(size, dtype)
        pages, layout = self.layout.num_pages, self.layout
        memory = zeros((pages * self._bytes(size, dtype),), torch.uint8, device).view(dtype)
        planes = []
        for specs, blocks, start in (
            (self.windows, layout.num_window_blocks, 0),
            (self.full, layout.num_blocks, 0 if shared else pages * windows // dtype.itemsize),
        ):
            for spec in specs.values():
                shape = spec.num_kv_heads, blocks, self.block_size, size(spec)
                end = start + torch.Size(shape).numel()
                planes.append(memory[start:end].view(shape))
                start = end
        return planes


def _head_size(spec: KVSpec) -> int:
    return spec.head_dim


def _scale_size(spec: KVSpec) -> int:
    return 2  # the scale of the key, and that of the value
