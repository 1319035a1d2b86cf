"""The end of a part of a layer whose result is normalised before it is added to the residual stream
(post-norm), together with the norms that read the stream next, in one kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.layers.partial_sums_triton import sum_parts
from batchgen.kernels.layers.rms_norm import (
    add_parts_reference,
    norm_of_rows,
    norm_tile,
    rms_norm_reference,
    sizes_of_parts,
)
from batchgen.kernels.layers.shared_part import SharedPart

MOST_READERS = 3
"""The most norms that one launch computes of the stream."""


class Term(NamedTuple):
    """The result of a part of a layer, x + Σ_p parts_p + shared, and the norm of it.

    The sum is computed as `rms_norm_of_sum` does. All last axes are contiguous.
    """

    x: Tensor | None  # [T, D], may be overwritten; None: only the parts
    weight: Tensor | None  # [D], of the norm; None: the result is added as it is
    parts: Tensor | None = None  # [P, T, D]
    shared: SharedPart | None = None  # only with parts


def add_post_norm(
    residual: Tensor,  # [T, D], contiguous
    terms: Sequence[Term],  # one or two
    eps: float,
    weight: Tensor | None = None,  # [D]
    scalar: Tensor | None = None,  # [1]
    readers: Sequence[Tensor] = (),  # up to MOST_READERS, each [D]
) -> tuple[Tensor, list[Tensor]]:
    """Add the sum of the terms to the residual stream, in place, and normalise the stream.

    Each term is normalised with its own weight. The sum of both is normalised with `weight`, if
    there is one, before it is added, and the new stream is multiplied by `scalar`. All norms are
    `rms_norm`, and everything is rounded where separate operations round.

    Returns:
        The residual stream, and its norms [T, D] with the weights `readers`.
    """
    run = post_norm_triton if residual.is_cuda else post_norm_reference
    return run(residual, terms, eps, weight, scalar, readers)


def post_norm_reference(
    residual: Tensor,
    terms: Sequence[Term],
    eps: float,
    weight: Tensor | None = None,
    scalar: Tensor | None = None,
    readers: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """`add_post_norm` in PyTorch."""
    first, *others = (_term_reference(residual, term, eps) for term in terms)
    for other in others:
        first = first + other
    residual.add_(first if weight is None else rms_norm_reference(first, weight, eps))
    if scalar is not None:
        residual.mul_(scalar)
    return residual, [rms_norm_reference(residual, reader, eps) for reader in readers]


def _term_reference(residual: Tensor, term: Term, eps: float) -> Tensor:
    x = torch.zeros_like(residual) if term.x is None else term.x
    if term.parts is not None:
        add_parts_reference(x, term.parts, term.shared)
    return x if term.weight is None else rms_norm_reference(x, term.weight, eps)


def post_norm_triton(
    residual: Tensor,
    terms: Sequence[Term],
    eps: float,
    weight: Tensor | None = None,
    scalar: Tensor | None = None,
    readers: Sequence[Tensor] = (),
) -> tuple[Tensor, list[Tensor]]:
    """`add_post_norm` in one launch."""
    assert residual.is_contiguous() and residual.ndim == 2 and 1 <= len(terms) <= 2
    (tokens, size), missing = residual.shape, MOST_READERS - len(readers)
    normed = [torch.empty_like(residual) for _ in readers]
    counts, operands = zip(*(_operands(residual, term) for term in terms), strict=True)
    nothing = (None, 0, None, None, 0, 0, None, None)
    rows, block, num_warps = norm_tile(size)
    _post_norm[(triton.cdiv(tokens, rows),)](
        residual, *operands[0], *(operands[1] if len(terms) > 1 else nothing), weight, scalar,
        *readers, *[None] * missing, *normed, *[None] * missing, tokens, size, eps,
        PARTS=counts[0], OTHER_PARTS=counts[1] if len(terms) > 1 else 0, PAIR=len(terms) > 1,
        ROWS=rows, BLOCK=block, num_warps=num_warps,
    )  # fmt: skip
    return residual, normed


def _operands(residual: Tensor, term: Term) -> tuple[int, tuple[Tensor | int | None, ...]]:
    """Return the number of a term's parts, and its arguments of the kernel."""
    x, parts = term.x, term.parts
    assert x is not None or parts is not None
    assert x is None or (x.shape == residual.shape and x.stride(1) == 1)
    count, *strides = sizes_of_parts(residual, parts, term.shared)
    values, gate = term.shared or (None, None)
    stride = 0 if x is None else x.stride(0)
    return count, (x, stride, term.weight, parts, *strides, values, gate)


@triton.jit(do_not_specialize=["num_rows"])
def _post_norm(
    residual_ptr,
    x_ptr, x_row, x_weight_ptr, parts_ptr, part_stride, parts_row, shared_ptr, gate_ptr,
    other_ptr, other_row, other_weight_ptr, other_parts_ptr, other_part_stride, other_parts_row,
    other_shared_ptr, other_gate_ptr,
    weight_ptr, scalar_ptr, reader0_ptr, reader1_ptr, reader2_ptr, out0_ptr, out1_ptr, out2_ptr,
    num_rows, size, eps,
    PARTS: tl.constexpr, OTHER_PARTS: tl.constexpr, PAIR: tl.constexpr, ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program finishes ROWS rows."""
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    mask = (row < num_rows) & (column < size)
    dtype: tl.constexpr = residual_ptr.dtype.element_ty
    added = _term(
        x_ptr, x_row, x_weight_ptr, parts_ptr, part_stride, parts_row, shared_ptr, gate_ptr, row,
        num_rows, column, mask, size, eps, dtype, PARTS,
    )  # fmt: skip
    if PAIR:
        other = _term(
            other_ptr, other_row, other_weight_ptr, other_parts_ptr, other_part_stride,
            other_parts_row, other_shared_ptr, other_gate_ptr, row, num_rows, column, mask, size,
            eps, dtype, OTHER_PARTS,
        )  # fmt: skip
        added = (added.to(tl.float32) + other.to(tl.float32)).to(dtype)
    if weight_ptr is not None:
        added = _normed(added, weight_ptr, column, mask, size, eps, dtype)
    target = residual_ptr + row * size + column
    stream = tl.load(target, mask=mask, other=0.0).to(tl.float32) + added.to(tl.float32)
    stream = stream.to(dtype)
    if scalar_ptr is not None:
        stream = (stream.to(tl.float32) * tl.load(scalar_ptr).to(tl.float32)).to(dtype)
    tl.store(target, stream, mask=mask)
    offset = row * size + column
    if out0_ptr is not None:
        normed = _normed(stream, reader0_ptr, column, mask, size, eps, dtype)
        tl.store(out0_ptr + offset, normed, mask=mask)
    if out1_ptr is not None:
        normed = _normed(stream, reader1_ptr, column, mask, size, eps, dtype)
        tl.store(out1_ptr + offset, normed, mask=mask)
    if out2_ptr is not None:
        normed = _normed(stream, reader2_ptr, column, mask, size, eps, dtype)
        tl.store(out2_ptr + offset, normed, mask=mask)


@triton.jit
def _term(
    x_ptr, x_row, weight_ptr, parts_ptr, part_stride, parts_row, shared_ptr, gate_ptr, row,
    num_rows, column, mask, size, eps, dtype: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Return the rows of a term, in `dtype`."""
    source = x_ptr + row * x_row + column if x_ptr is not None else None
    if PARTS:
        total = sum_parts(
            parts_ptr, part_stride, parts_row, None, 0, shared_ptr, gate_ptr, row, row < num_rows,
            column, mask, size, PARTS,
        )  # fmt: skip
        if x_ptr is not None:
            total = total + tl.load(source, mask=mask, other=0.0).to(tl.float32)
        x = total.to(dtype)
    else:
        x = tl.load(source, mask=mask, other=0.0)
    if weight_ptr is not None:
        x = _normed(x, weight_ptr, column, mask, size, eps, dtype)
    return x


@triton.jit
def _normed(x, weight_ptr, column, mask, size, eps, dtype: tl.constexpr):
    """Return the norm of rows, in `dtype`."""
    weight = tl.load(weight_ptr + column, mask=column < size, other=0.0).to(tl.float32)
    normed = norm_of_rows(
        x.to(tl.float32), weight, mask, size, eps, weight_ptr.dtype.element_ty, CENTRED=False
    )
    return normed.to(dtype)
