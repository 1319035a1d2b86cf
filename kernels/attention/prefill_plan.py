"""Cuts the queries of rows into tiles for prefill attention.

A tile is as many new tokens of one row as one program of the kernel takes. All layers of a forward
share one plan (`AttentionMetadata.tiles`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import triton
from torch import Tensor

from batchgen.kernels.attention.kv_gather import (
    GatherPlan,
    does_gathering_pay,
    plan_gather,
    upload_tensor,
)
from batchgen.kernels.row_indices import row_indices


@dataclass(frozen=True, slots=True)
class PrefillConfig:
    """Sizes that the kernel is compiled with."""

    block_m: int  # rows of a tile of queries: tokens times query heads per KV head
    block_n: int  # cached tokens of a tile of keys
    num_warps: int
    num_stages: int


@dataclass(frozen=True, slots=True)
class PrefillPlan:
    """How the queries of B rows are cut into tiles; all layers of a forward share it.

    A tile is a line: its row, the index of its first token among the T tokens of the forward, and
    the tokens of the row from there on, of which it takes what `config` allows. Tiles with 0 are
    skipped.
    """

    tiles: Tensor  # [num_tiles, 3] int32
    num_tokens: int  # T, the new tokens of all rows
    num_rows: int  # B
    group: int  # query heads per KV head
    config: PrefillConfig  # the sizes that the tiles were cut for
    gather: GatherPlan | None = None  # None reads keys and values from the pages


def _config(head_dim: int, itemsize: int, group: int) -> PrefillConfig:
    """Choose sizes by the heads' shape alone: a token must have the same bits in any batch."""
    # float32 does not run on tensor cores, so the operands of its products need registers.
    # For 16 bits these were the fastest on an H200 (bench_kernels.py --tune, commit 48f452c).
    if itemsize == 4:
        config = PrefillConfig(32, 16, 8, 2)
    elif head_dim <= 128:
        config = PrefillConfig(64, 64, 4, 3)
    elif head_dim <= 256:
        config = PrefillConfig(128, 64, 8, 2)
    else:  # larger tiles of such heads do not fit into shared memory
        config = PrefillConfig(64, 32, 8, 2)
    return replace(config, block_m=max(config.block_m, triton.next_power_of_2(group)))


def plan_prefill(
    query_lens: Sequence[int],  # [B] new tokens of each row; 0 is allowed
    device: torch.device | str,
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    context_lens: Sequence[int] | None = None,  # as for `cut_tiles`
    tiles: Tensor | None = None,  # from `cut_tiles` or `cut_equal_tiles`; None cuts them here
    config: PrefillConfig | None = None,  # None chooses it by the shape
    gather: bool | None = None,
) -> PrefillPlan:
    """Cut the queries of B rows into tiles.

    Contexts are gathered where that is faster, or as `gather` says; it needs `context_lens`, a
    head_dim that is a power of two, and no given tiles, which may be written only when a captured
    graph is replayed. Raises ValueError if the heads of a group do not fit into a tile of `config`.
    """
    group = num_heads // num_kv_heads
    config = config or _config(head_dim, dtype.itemsize, group)
    if gather is None:
        gather = (
            torch.device(device).type == "cuda"
            and dtype.itemsize == 2
            and tiles is None
            and context_lens is not None
            and does_gathering_pay(query_lens, context_lens, head_dim)
        )
    gather_plan = None
    if gather:
        assert context_lens is not None
        gather_plan = plan_gather(context_lens, device)
    if tiles is None:
        tiles = upload_tensor(
            cut_tiles(query_lens, _tile_tokens(config, group), context_lens), device
        )
    return PrefillPlan(tiles, sum(query_lens), len(query_lens), group, config, gather_plan)


def tile_tokens(num_heads: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype) -> int:
    """Return how many tokens a tile of queries has, for queries and a cache of this shape."""
    group = num_heads // num_kv_heads
    return _tile_tokens(_config(head_dim, dtype.itemsize, group), group)


def _tile_tokens(config: PrefillConfig, group: int) -> int:
    if config.block_m < group:
        raise ValueError(f"block_m {config.block_m} is less than the {group} heads of a group")
    return config.block_m // group


def cut_tiles(
    query_lens: Sequence[int], size: int, context_lens: Sequence[int] | None = None
) -> Tensor:
    """Compute `PrefillPlan.tiles` on the host for rows of `query_lens` [B] new tokens.

    Tiles with the longest contexts come first, so that none starts when the others are done. `size`
    is the most tokens of a tile (`tile_tokens`). `context_lens` [B] counts cached tokens, the new
    ones included, for the order alone; None counts the new ones.
    """
    lens = torch.tensor(query_lens, dtype=torch.int64)
    contexts = lens if context_lens is None else torch.tensor(context_lens, dtype=torch.int64)
    counts = (lens + size - 1) // size
    row = row_indices(counts)
    offset = (torch.arange(len(row)) - (counts.cumsum(0) - counts)[row]) * size
    remaining = lens[row] - offset
    first = (lens.cumsum(0) - lens)[row] + offset
    ends = (contexts - lens)[row] + offset + remaining.clamp(max=size)
    order = ends.argsort(descending=True, stable=True)
    return torch.stack((row, first, remaining), 1)[order].to(torch.int32)


def cut_equal_tiles(num_rows: int, width: int, size: int, device: torch.device | str) -> Tensor:
    """Compute `PrefillPlan.tiles` of rows with `width` tokens each on the device, in the order of
    rows.

    A CUDA graph that is captured meanwhile then holds no address of host memory.
    """
    per_row = triton.cdiv(width, size)
    tile = torch.arange(num_rows * per_row, dtype=torch.int32, device=device)
    row, offset = tile // per_row, tile % per_row * size
    return torch.stack((row, row * width + offset, width - offset), 1)
