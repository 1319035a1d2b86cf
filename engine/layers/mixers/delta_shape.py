"""The sizes of a gated delta network, with the projections and the state that follow from them.

Configurations of hybrid models make a `DeltaShape`; the layer `GatedDeltaNet` is built from it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import StateSpec, StateTensor
from batchgen.kernels.linear_attention.state_rows import CHUNK


@dataclass(frozen=True, slots=True, kw_only=True)
class DeltaShape:
    """The shape of a gated delta network."""

    num_key_heads: int
    num_value_heads: int  # a multiple of num_key_heads; consecutive heads share a key head
    key_dim: int  # the size of a query head and of a key head
    value_dim: int  # the size of a value head
    conv_width: int  # the number of tokens in the convolution's window, the current one included

    def __post_init__(self) -> None:
        for name, size in (
            ("linear_num_key_heads", self.num_key_heads),
            ("linear_num_value_heads", self.num_value_heads),
            ("linear_key_head_dim", self.key_dim),
            ("linear_value_head_dim", self.value_dim),
        ):
            if size < 1:
                raise ValueError(f"the model's {name} is {size}; it must be positive")
        if self.num_value_heads % self.num_key_heads:
            raise ValueError(
                f"linear_num_value_heads {self.num_value_heads} is not a multiple of "
                f"linear_num_key_heads {self.num_key_heads}"
            )
        if self.conv_width < 2:
            raise ValueError(f"linear_conv_kernel_dim is {self.conv_width}; it must be at least 2")

    @property
    def keys(self) -> int:
        """The number of values in all key heads of a token; all query heads have equally many."""
        return self.num_key_heads * self.key_dim

    @property
    def values(self) -> int:
        """The number of values in all value heads of a token."""
        return self.num_value_heads * self.value_dim

    @property
    def channels(self) -> int:
        """The number of values per token in the convolution: queries, keys and values."""
        return 2 * self.keys + self.values


def input_projections(
    shape: DeltaShape, interleaved: bool
) -> tuple[dict[str, int], tuple[str, ...], dict[str, Callable[[Tensor], Tensor]]]:
    """Return the arguments `parts`, `unquantised` and `arrange` of `MergedLinear` for the input
    projections. `interleaved` is as for `GatedDeltaNet`."""
    heads = shape.num_value_heads
    if not interleaved:
        parts = {
            "in_proj_qkv": shape.channels,
            "in_proj_z": shape.values,
            "in_proj_b": heads,
            "in_proj_a": heads,
        }
        return parts, ("in_proj_b", "in_proj_a"), {}
    share = heads // shape.num_key_heads  # value heads per key head
    values = share * shape.value_dim
    sizes = [shape.key_dim, shape.key_dim, values, values]
    return (
        {"in_proj_qkvz": shape.channels + shape.values, "in_proj_ba": 2 * heads},
        ("in_proj_ba",),
        {
            "in_proj_qkvz": partial(_kind_by_kind, sizes=sizes),
            "in_proj_ba": partial(_kind_by_kind, sizes=[share, share]),
        },
    )


def state_spec(shape: DeltaShape, dtype: torch.dtype) -> StateSpec:
    """Return the spec of the state of a layer of this shape. `dtype` is the convolution
    window's."""
    heads = shape.num_value_heads
    return StateSpec(
        state={
            # The last inputs of the convolution, and S.
            "window": StateTensor((shape.conv_width - 1, shape.channels), dtype),
            "matrix": StateTensor((heads, shape.value_dim, shape.key_dim)),
        },
        # Of each newest token that is not in the state yet: S becomes decay · S + update·keyᵀ.
        records={
            "inputs": StateTensor((shape.channels,), dtype),
            "update": StateTensor((heads, shape.value_dim)),
            "key": StateTensor((shape.num_key_heads, shape.key_dim)),
            "decay": StateTensor((heads,)),
        },
        chunk_multiple=CHUNK,
    )


def _kind_by_kind(rows: Tensor, sizes: list[int]) -> Tensor:
    """Reorder rows [key heads · sum(sizes), …] from key head by key head to kind by kind."""
    kinds = rows.unflatten(0, (-1, sum(sizes))).split(sizes, dim=1)
    return torch.cat([kind.flatten(0, 1) for kind in kinds])
