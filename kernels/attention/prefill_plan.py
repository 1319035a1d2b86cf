"""Cuts the queries of rows into tiles for prefill attention.

A row is a sequence. A tile is as many of its new tokens as one program of the kernel takes. All
layers of a forward share one plan.
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

    A line of `tiles` is one tile: its row, the index of its first token among the T tokens, and the
    number of the row's tokens from there on. The tile has as many of these as `config` allows. A
    tile with 0 tokens is skipped, so that a captured graph may have room for more tiles.
    """

    tiles: Tensor  # [num_tiles, 3] int32
    num_tokens: int  # T, the new tokens of all rows
    num_rows: int  # B
    group: int  # query heads per KV head
    config: PrefillConfig  # the sizes that the tiles were cut for
    gather: GatherPlan | None = None  # None: keys and values are read from the KV blocks


def _config(head_dim: int, itemsize: int, group: int) -> PrefillConfig:
    """Choose sizes by the heads' shape alone: a token must have the same bits in any batch."""
    # float32 does not run on tensor cores, so the operands of its products need registers.
    # For 16 bits these were the fastest on an H200 (bench_kernels.py --tune, commit 48f452c).
    if itemsize == 4:
        config = PrefillConfig(block_m=32, block_n=16, num_warps=8, num_stages=2)
    elif head_dim <= 128:
        config = PrefillConfig(block_m=64, block_n=64, num_warps=4, num_stages=3)
    elif head_dim <= 256:
        config = PrefillConfig(block_m=128, block_n=64, num_warps=8, num_stages=2)
    else:  # larger tiles of such heads do not fit into shared memory
        config = PrefillConfig(block_m=64, block_n=32, num_warps=8, num_stages=2)
    # At least the heads of one token must fit into a tile.
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

    Args:
        gather: whether to copy contexts out of their KV blocks (`kv_gather`), which needs
            `context_lens` and a head_dim that is a power of two. None: if that is faster, and
            `tiles` is None (a captured graph has tiles, whose rows differ at each replay).

    Raises:
        ValueError: the heads of a group do not fit into a tile of `config`.
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
    """Return the most tokens of a tile, for queries and a cache of this shape."""
    group = num_heads // num_kv_heads
    return _tile_tokens(_config(head_dim, dtype.itemsize, group), group)


def _tile_tokens(config: PrefillConfig, group: int) -> int:
    """Return the most tokens of a tile of `config`, with `group` query heads per KV head."""
    if config.block_m < group:
        raise ValueError(f"block_m {config.block_m} is less than the {group} heads of a group")
    return config.block_m // group


def cut_tiles(
    query_lens: Sequence[int], size: int, context_lens: Sequence[int] | None = None
) -> Tensor:
    """Compute `PrefillPlan.tiles` on the host for rows of `query_lens` [B] new tokens.

    Tiles that read the most keys come first, so that no long one starts when the others are done.
    Only this order depends on `context_lens` [B], the cached tokens, the new ones included; None
    takes the new ones. `size` is the most tokens of a tile (`tile_tokens`).
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
    """Compute `PrefillPlan.tiles` of rows with `width` tokens each, in the order of rows.

    They are computed on the device. A copy from the host would put an address of host memory into
    a CUDA graph that is being captured.
    """
    per_row = triton.cdiv(width, size)
    tile = torch.arange(num_rows * per_row, dtype=torch.int32, device=device)
    row, offset = tile // per_row, tile % per_row * size
    return torch.stack((row, row * width + offset, width - offset), 1)
