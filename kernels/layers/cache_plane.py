"""Writes values of tokens into a plane of the paged cache.

A *plane* holds one value for each KV slot, such as an output column. Keys and values are not
planes: `attention/qkv.py` writes them.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_VALUES = 512
"""Values per program."""


def write_plane(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """Store the values [T, *tail] of T tokens at their KV slots [T] int64 of plane [N, *tail].

    Each entry of the plane is contiguous, but the stride between entries may be larger, as in one
    layer's view. The plane's dtype must be able to hold the values. If a slot occurs twice, either
    of its values may remain.
    """
    run = write_plane_triton if plane.is_cuda else write_plane_reference
    run(plane, slots, values)


def write_plane_reference(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """`write_plane` in PyTorch."""
    values = values.to(plane.dtype)
    if plane.dtype == torch.uint16:  # which has no index_copy_
        plane, values = plane.view(torch.int16), values.view(torch.int16)
    plane.index_copy_(0, slots, values)


def write_plane_triton(plane: Tensor, slots: Tensor, values: Tensor) -> None:
    """`write_plane` in one launch, which converts the dtype as well."""
    assert plane[0].is_contiguous() and values.is_contiguous() and slots.is_contiguous()
    size = values[0].numel()
    _write_plane[(triton.cdiv(values.numel(), _VALUES),)](
        plane, slots, values, values.numel(), plane.stride(0), SIZE=size, BLOCK=_VALUES, num_warps=4
    )


@triton.jit(do_not_specialize=["count"])
def _write_plane(
    plane_ptr, slots_ptr, values_ptr, count, stride, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    """Each program copies BLOCK values."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = index < count
    slot = tl.load(slots_ptr + index // SIZE, mask=mask, other=0)
    value = tl.load(values_ptr + index, mask=mask, other=0)
    target = plane_ptr + slot * stride + index % SIZE
    tl.store(target, value.to(plane_ptr.dtype.element_ty), mask=mask)
