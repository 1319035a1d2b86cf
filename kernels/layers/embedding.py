"""The lookup of token embeddings in a table."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
"""Columns that a program copies."""


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[ids].

    Args:
        ids: [T] int64 or int32, each in [0, V). This is not checked on a GPU.
        weight: [V, D], the last axis contiguous.

    Returns:
        [T, D], dtype of weight.
    """
    run = embedding_triton if weight.is_cuda else embedding_reference
    return run(ids, weight)


def embedding_reference(ids: Tensor, weight: Tensor) -> Tensor:
    """`embedding` in PyTorch. It raises IndexError for an id outside the table."""
    return F.embedding(ids, weight)


def embedding_triton(ids: Tensor, weight: Tensor) -> Tensor:
    """`embedding` in one launch."""
    size = weight.shape[1]
    assert ids.ndim == 1 and ids.is_contiguous() and weight.stride(1) == 1
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    chunks = triton.cdiv(size, _CHUNK)
    _embedding[(len(ids) * chunks,)](
        ids, weight, out, weight.stride(0), size, CHUNKS=chunks, BLOCK=_CHUNK, num_warps=4
    )
    return out


@triton.jit
def _embedding(
    ids_ptr, weight_ptr, out_ptr, stride, size, CHUNKS: tl.constexpr, BLOCK: tl.constexpr
):
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    column = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    row = tl.load(ids_ptr + token).to(tl.int64)
    values = tl.load(weight_ptr + row * stride + column, mask=mask)
    tl.store(out_ptr + token * size + column, values, mask=mask)
