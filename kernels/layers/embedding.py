"""The lookup of token embeddings: of a whole table, or of one rank's share of it."""

from __future__ import annotations

import torch
import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

_CHUNK = 1024
"""Columns per program."""


def embedding(ids: Tensor, weight: Tensor) -> Tensor:
    """Return weight[ids] [T, D] for ids [T] and a weight [V, D]. A GPU does not check that ids are
    in [0, V)."""
    run = embedding_triton if weight.is_cuda else embedding_reference
    return run(ids, weight)


def embedding_reference(ids: Tensor, weight: Tensor) -> Tensor:
    """`embedding` in PyTorch. Raises IndexError for an id outside the table."""
    return F.embedding(ids, weight)


def embedding_share(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """Look up ids [T] in a share of a table: `weight` [V, D] holds V of its rows, from row `first`
    on.

    Return [T, D], with zeros for ids whose rows are not in the share.
    """
    run = embedding_share_triton if weight.is_cuda else embedding_share_reference
    return run(ids, weight, first)


def embedding_share_reference(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """`embedding_share` in PyTorch."""
    rows = ids - first
    elsewhere = (rows < 0) | (rows >= len(weight))
    values = F.embedding(rows.masked_fill_(elsewhere, 0), weight)
    return values.masked_fill_(elsewhere.unsqueeze(1), 0)


def embedding_triton(ids: Tensor, weight: Tensor) -> Tensor:
    """`embedding` in one launch."""
    return _launch(ids, weight, 0, share=False)


def embedding_share_triton(ids: Tensor, weight: Tensor, first: int) -> Tensor:
    """`embedding_share` in one launch."""
    return _launch(ids, weight, first, share=True)


def _launch(ids: Tensor, weight: Tensor, first: int, *, share: bool) -> Tensor:
    """Launch the kernel. `share`: ids outside `weight` get zeros; otherwise there are none."""
    num_ids, size = weight.shape
    assert ids.ndim == 1 and ids.is_contiguous() and weight.stride(1) == 1
    out = torch.empty((len(ids), size), dtype=weight.dtype, device=weight.device)
    chunks = triton.cdiv(size, _CHUNK)
    _embedding[(len(ids) * chunks,)](
        ids, weight, out, weight.stride(0), size, first, num_ids, SHARE=share, CHUNKS=chunks,
        BLOCK=_CHUNK, num_warps=4,
    )  # fmt: skip
    return out


@triton.jit(do_not_specialize=["first", "num_ids"])
def _embedding(
    ids_ptr, weight_ptr, out_ptr, stride, size, first, num_ids, SHARE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program copies one chunk of columns of one token."""
    token = (tl.program_id(0) // CHUNKS).to(tl.int64)
    column = tl.program_id(0) % CHUNKS * BLOCK + tl.arange(0, BLOCK)
    mask = column < size
    row = tl.load(ids_ptr + token).to(tl.int64)
    loaded = mask
    if SHARE:
        row -= first
        loaded = column < tl.where((row >= 0) & (row < num_ids), size, 0)
    values = tl.load(weight_ptr + row * stride + column, mask=loaded, other=0.0)
    tl.store(out_ptr + token * size + column, values, mask=mask)
