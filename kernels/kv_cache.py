"""The paged KV cache of one layer, and the write of new tokens into it."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor


class KVCache(NamedTuple):
    """key and value: [num_kv_heads, num_blocks, block_size, head_dim] each.

    Heads come first so that (head, block) is one contiguous tile of a flat [H·N, block_size·D]
    table: gathering a row's context is one indexed copy of long runs. Block 0 is scratch: padding
    tokens write it and nothing reads it.
    """

    key: Tensor
    value: Tensor

    @property
    def block_size(self) -> int:
        return self.key.shape[2]


def write_kv(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    """Store the T new tokens' key and value, [T, num_kv_heads, head_dim], at slots [T]."""
    num_heads, _, _, head_dim = cache.key.shape
    for new, table in ((key, cache.key), (value, cache.value)):
        flat = table.view(num_heads, -1, head_dim)
        flat[:, slots] = new.transpose(0, 1).to(flat.dtype)
