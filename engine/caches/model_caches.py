"""The caches of one model: allocates what its layers declare, and counts the bytes.

The layers declare specs (`cache_specs.py`). The memory plan uses the functions that count bytes to
decide how large the caches may be.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import CacheSpec, PlaneSpec, StateSpec, has_window
from batchgen.engine.caches.forward_context import LayerCache
from batchgen.engine.caches.page_layout import PageLayout
from batchgen.engine.caches.page_memory import PageMemory
from batchgen.engine.caches.row_states import RowStates, ring_length
from batchgen.engine.interface.outputs import OutputColumn


@dataclass(frozen=True, slots=True)
class CacheSizes:
    """The sizes of the caches, which are the same for every model of an engine."""

    # The number of blocks in the paged cache. The first is the scratch block: padding tokens are
    # written there, and nothing reads it.
    num_blocks: int
    block_size: int  # the number of tokens in one block
    num_rows: int  # the most rows that can be in flight
    num_snapshots: int = 0  # the most snapshots of states that are kept for the prefix cache
    fold: int = 1  # see `StateCache`
    # How layers with a window share memory with the others; None: every layer has `num_blocks`
    # blocks of its own.
    layout: PageLayout | None = None


@dataclass(frozen=True, slots=True)
class ModelCaches:
    """Everything that one model keeps between forwards."""

    block_size: int  # the number of tokens in one block of the paged cache
    # The cache of each layer, in the order of the layers; None for a layer that keeps nothing.
    layers: Sequence[LayerCache | None]
    # Maps the name of a column of context scope to its plane in the paged cache, [num_blocks,
    # block_size, *tail].
    columns: Mapping[str, Tensor]
    states: RowStates | None  # the states of the rows; None for a model without recurrent layers

    @classmethod
    def allocate(
        cls,
        specs: Sequence[CacheSpec | None],
        columns: Sequence[OutputColumn],
        sizes: CacheSizes,
        *,
        width: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> ModelCaches:
        """Allocate the caches of a model on `device`, filled with zeros. `width` is the most tokens
        of a row in a decode forward."""
        paged = sizes.num_blocks, sizes.block_size, dtype, device
        windowed, shared = paged, {}
        if sizes.layout is not None:
            windowed = sizes.layout.num_window_blocks, sizes.block_size, dtype, device
            memory = PageMemory.of(specs, sizes.layout, sizes.block_size, dtype)
            shared = memory.caches(device)
        recurrent = [spec for spec in specs if isinstance(spec, StateSpec)]
        states = None
        if recurrent:
            states = RowStates(
                recurrent,
                sizes.num_rows,
                sizes.num_snapshots,
                width,
                sizes.fold,
                device,
            )
        state_caches = iter(states.layers if states is not None else ())
        layers: list[LayerCache | None] = []
        for index, spec in enumerate(specs):
            if index in shared:
                layers.append(shared[index])
            elif isinstance(spec, StateSpec):
                layers.append(next(state_caches))
            elif has_window(spec):
                layers.append(spec.allocate(*windowed))
            else:
                layers.append(None if spec is None else spec.allocate(*paged))
        planes = {column.name: column_plane(column).allocate(*paged) for column in columns}
        return cls(sizes.block_size, layers, planes, states)


def column_plane(column: OutputColumn) -> PlaneSpec:
    """Return the spec of the paged-cache plane that holds a column of context scope."""
    assert column.scope == "context"
    dtype = torch.from_numpy(np.empty(0, column.dtype)).dtype
    return PlaneSpec(column.tail_shape, dtype)


def paged_token_bytes(
    specs: Sequence[CacheSpec | None], columns: Sequence[OutputColumn], dtype: torch.dtype
) -> int:
    """Return the bytes per token in the paged cache, over all columns and all layers without a
    window."""
    paged = [s for s in specs if s is not None and not isinstance(s, StateSpec)]
    paged = [*(s for s in paged if not has_window(s)), *map(column_plane, columns)]
    return sum(spec.token_bytes(dtype) for spec in paged)


def model_page_bytes(
    specs: Sequence[CacheSpec | None],
    columns: Sequence[OutputColumn],
    layout: PageLayout,
    block_size: int,
    dtype: torch.dtype,
) -> int:
    """Return the bytes of one page over all layers and columns of a model of this dtype."""
    memory = PageMemory.of(specs, layout, block_size, dtype)
    rest = [None if index in memory.layers else spec for index, spec in enumerate(specs)]
    windows = layout.window_blocks * window_token_bytes(rest, dtype)
    full = layout.full_blocks * paged_token_bytes(rest, columns, dtype)
    return memory.bytes + (windows + full) * block_size


def window_token_bytes(specs: Sequence[CacheSpec | None], dtype: torch.dtype) -> int:
    """Return the bytes per token over all layers with a window; 0 without such layers."""
    return sum(spec.token_bytes(dtype) for spec in specs if has_window(spec))


def state_bytes(specs: Sequence[CacheSpec | None]) -> int:
    """Return the bytes of one row's state over all layers; 0 without recurrent layers."""
    return sum(spec.state_bytes for spec in specs if isinstance(spec, StateSpec))


def row_bytes(specs: Sequence[CacheSpec | None], width: int, fold: int) -> int:
    """Return the bytes of one row's state and records over all layers; 0 without recurrent layers.

    Args:
        fold: see `StateCache`.
    """
    records = sum(spec.record_bytes for spec in specs if isinstance(spec, StateSpec))
    return state_bytes(specs) + ring_length(width, fold) * records
