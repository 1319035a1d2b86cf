"""The memory plan: divides the device's memory between weights, caches and activations.

`EngineParts` calls `plan_memory` once, when an engine starts, after the weights were loaded.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from batchgen.engine.caches.model_caches import (
    row_bytes,
    state_bytes,
)
from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.device.host_limits import available_memory
from batchgen.engine.interface.engine_config import ResolvedConfig
from batchgen.engine.memory.largest_steps import activation_bytes
from batchgen.engine.memory.model_use import (
    ModelUse,
    cache_token_bytes,
    page_bytes,
    weight_bytes,
)
from batchgen.engine.memory.window_plan import window_needs, window_pages

CPU_SHARE = 0.3
"""The share of a CPU's available memory that the caches may take."""
_SNAPSHOT_SHARE = 0.1
"""The largest share of the caches' memory for state snapshots, unless the user sets their
number."""
_SNAPSHOTS_PER_ROW = 4
"""The most state snapshots per row in flight, unless the user sets their number."""


_STORED_STEPS = 3
"""How many times the image tokens of a step are stored, at most: those of the image in which a row
was cut, those of the step, and one image that a step may have in excess."""


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """How the engine uses its memory, in bytes. The names are those of metrics.json."""

    weights: int  # the parameters of all models
    # The activations of the largest prefill and of the largest sampling step, and the CUDA graphs.
    # It is 0 on a CPU, where this memory is not reserved.
    work_space: int
    # The paged cache of all models, including the planes of columns of context scope.
    kv_cache: int
    num_blocks: int  # the number of blocks in the paged cache, including scratch blocks
    kv_tokens: int  # the most tokens of a row that has the whole paged cache
    total: int | None  # the whole memory of the GPU; None for a CPU
    # The states of the rows in flight and their records, for models with recurrent layers.
    row_states: int = 0
    checkpoints: int = 0  # the state snapshots for prefix reuse
    num_checkpoints: int = 0  # the number of state snapshots for prefix reuse
    images: int = 0  # the vision tower's features of images that rows have yet to read
    # How the paged cache is divided into pages, for models with sliding windows.
    pages: PageNeeds | None = None

    def fitting_rows(self, tokens: float) -> int:
        """Return how many rows of this mean length the paged cache holds at once."""
        if self.pages is None:
            return int(self.kv_tokens / tokens)
        return self.pages.usable // self.pages.of_row(math.ceil(tokens))

    def window_tokens(self, tokens: float) -> tuple[int, int]:
        """Return how many tokens of layers without a window fit into the whole paged cache, and how
        many into the memory that the windows of a row of this length take."""
        if self.pages is None:
            return self.kv_tokens, 0
        page = self.pages.layout.full_blocks * self.pages.block_size
        return self.pages.usable * page, self.pages.windows(math.ceil(tokens)) * page

    def __str__(self) -> str:
        parts = [f"weights {_gib(self.weights)}"]
        if self.work_space:
            parts.append(f"work space and CUDA graphs {_gib(self.work_space)}")
        held = f"{self.kv_tokens:,} tokens"
        if self.pages is not None:
            held += f" of one row, or the windows of {self.pages.usable // self.pages.row_pages:,}"
        parts.append(f"KV cache {_gib(self.kv_cache)} ({held})")
        if self.row_states:
            parts.append(f"row states {_gib(self.row_states)}")
        if self.checkpoints:
            parts.append(f"state snapshots {_gib(self.checkpoints)} ({self.num_checkpoints:,})")
        if self.images:
            parts.append(f"images {_gib(self.images)}")
        return ", ".join(parts) + ("" if self.total is None else f" of {_gib(self.total)}")


def plan_memory(uses: Sequence[ModelUse], config: ResolvedConfig) -> MemoryPlan:
    """Decide how many blocks and snapshots the caches have: the user's numbers, or else as many as
    fit into the free memory, but no more than all rows in flight can fill at full length. The
    models share one device and one numbering of blocks.

    Raises:
        ValueError: there is not enough memory for the states of all rows in flight, for the
            snapshots or the cache that the user asked for, for one block, or for one row of
            `max_model_len` tokens if the user set that length.
    """
    device, parallel = uses[0].model.device, uses[0].model.parallel
    if device.type == "cpu":
        # The ranks share the machine's memory.
        room = int(available_memory() * CPU_SHARE) // parallel.size
        return divide_memory(uses, config, Room(parallel.least(room)))
    total = torch.cuda.get_device_properties(device).total_memory
    activations = sum(activation_bytes(use, config) for use in uses)
    room = _free_cuda_bytes(device, config) - activations
    return divide_memory(uses, config, Room(parallel.least(room), activations, total))


class Room(NamedTuple):
    """The memory that is available for caches, in bytes."""

    caches: int  # what the caches may take
    activations: int = 0  # `MemoryPlan.work_space`
    total: int | None = None  # the whole memory of the GPU; None for a CPU


def divide_memory(uses: Sequence[ModelUse], config: ResolvedConfig, available: Room) -> MemoryPlan:
    """Divide the available memory among the caches, as `plan_memory` describes. The weights need
    not be loaded."""
    room, total = available.caches, available.total
    advice = "set kv_cache_gib"
    if total is not None:
        advice = "raise gpu_memory_utilization, lower max_batched_tokens or free the GPU"
    row_states = sum(_row_state_bytes(use, config) for use in uses)
    if row_states > room:
        raise ValueError(
            f"the states of {config.max_num_seqs} rows need {_gib(row_states)}, and {_gib(room)} "
            "are left: lower max_num_seqs"
        )
    images = sum(_image_bytes(use, config) for use in uses)
    if images > room - row_states:
        raise ValueError(
            f"images of {config.image_tokens:,} tokens in a step need {_gib(images)}, and "
            f"{_gib(room - row_states)} are left: lower image_tokens"
        )
    room -= row_states + images
    state = sum(state_bytes(use.model.cache_specs) for use in uses)
    num_snapshots = _num_snapshots(state, room, config)
    room -= num_snapshots * state
    if config.kv_cache_gib is not None:
        num_bytes, advice = int(config.kv_cache_gib * 2**30), "raise kv_cache_gib"
        if total is not None and num_bytes > room:
            raise ValueError(
                f"kv_cache_gib is {config.kv_cache_gib}, but {max(room, 0) / 2**30:.2f} GiB are "
                "left after weights and work space: lower it, or raise gpu_memory_utilization"
            )
        room = num_bytes
    needs = window_needs(uses, config)
    if needs is None:
        per_block = config.block_size * cache_token_bytes(uses)
        num_blocks = _num_blocks(per_block, room, config, advice)
        capacity, kv_cache = (num_blocks - 1) * config.block_size, num_blocks * per_block
    else:
        of_page = page_bytes(uses, needs.layout, config.block_size)
        needs = window_pages(needs, of_page, room, config, advice)
        all_tokens = config.max_num_seqs * config.row_blocks * config.block_size
        num_blocks, capacity = needs.layout.num_blocks, min(needs.capacity, all_tokens)
        kv_cache = needs.layout.num_pages * of_page
    return MemoryPlan(
        weights=weight_bytes(uses),
        work_space=available.activations,
        kv_cache=kv_cache,
        num_blocks=num_blocks,
        kv_tokens=capacity,
        total=total,
        row_states=row_states,
        checkpoints=num_snapshots * state,
        num_checkpoints=num_snapshots,
        images=images,
        pages=needs,
    )


def _image_bytes(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the most bytes that the features of images take."""
    tower = use.model.tower
    return 0 if tower is None else _STORED_STEPS * tower.feature_bytes(config.image_tokens)


def _row_state_bytes(use: ModelUse, config: ResolvedConfig) -> int:
    """Return the bytes of the states and records of all rows in flight and of the scratch slot."""
    specs = use.model.cache_specs
    per_row = row_bytes(specs, max(use.widths), config.fold)
    return (1 + config.max_num_seqs) * per_row


def _num_snapshots(state: int, room: int, config: ResolvedConfig) -> int:
    """Return how many snapshots of `state` bytes are kept for prefix reuse, given `room` bytes."""
    if not state or not config.prefix_caching:
        return 0
    if config.state_checkpoints is None:
        limit = _SNAPSHOTS_PER_ROW * config.max_num_seqs
        return min(int(room * _SNAPSHOT_SHARE) // state, limit)
    if config.state_checkpoints * state > room:
        raise ValueError(
            f"state_checkpoints is {config.state_checkpoints}, which need "
            f"{_gib(config.state_checkpoints * state)}, and {_gib(room)} are left: lower it"
        )
    return config.state_checkpoints


def _num_blocks(per_block: int, room: int, config: ResolvedConfig, advice: str) -> int:
    """Return how many blocks of `per_block` bytes fit into `room` bytes, including the scratch
    block."""
    limit = config.max_num_seqs * config.row_blocks + 1
    if not per_block:  # without attention, blocks are only counted and take no memory
        return limit
    num_blocks = min(room // per_block, limit)
    needed = config.row_blocks + 1 if config.is_len_asked_for else 2
    if num_blocks < needed:
        raise ValueError(
            f"the KV cache would have {max(room, 0) / 2**30:.3f} GiB, too little for "
            f"{(needed - 1) * config.block_size} tokens ({needed * per_block / 2**30:.3f} GiB): "
            f"{advice}, or lower max_model_len"
        )
    return num_blocks


def _gib(size: int) -> str:
    return f"{size / 2**30:.2f} GiB"


def _free_cuda_bytes(device: torch.device, config: ResolvedConfig) -> int:
    """Return the bytes that are free within `gpu_memory_utilization` of the GPU's memory."""
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info(device)
    return free - int(total * (1 - config.gpu_memory_utilization))
