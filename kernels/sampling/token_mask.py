"""Excludes from logits the tokens that a grammar does not allow. The sampler calls
`apply_token_mask` for constrained rows.

The allowed tokens come as lines of bits. Each row of logits names its line, so rows in the
same grammar state can share one, and rows without a constraint need none.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_INF = float("inf")
_CHUNK = 4096
"""Logits per program."""


class TokenMask(NamedTuple):
    """The tokens that each of R rows of logits may take, on the device of the logits."""

    bits: Tensor  # [C, ceil(V / 32)] int32: bit v % 32 of word v // 32 allows token v
    lines: Tensor  # [R] int32, or -1 for a row without a constraint


def apply_token_mask(
    logits: Tensor, mask: TokenMask, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Set the logits of tokens that are not allowed to -inf.

    `out` [R, V] is overwritten. It may be `logits` itself; then rows without a constraint are
    neither read nor written. Returns out, and [R] bool: the constrained rows in which no allowed
    token has a logit above -inf. NaN counts as above -inf, so a row of NaN is not reported as a
    violated constraint.
    """
    run = apply_token_mask_triton if logits.is_cuda else apply_token_mask_reference
    return run(logits, mask, out)


def apply_token_mask_reference(
    logits: Tensor, mask: TokenMask, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """`apply_token_mask` in PyTorch."""
    out = _check(logits, mask, out)
    if out is not logits:
        out.copy_(logits)
    rows = (mask.lines >= 0).nonzero().squeeze(1)
    empty = torch.zeros(len(logits), dtype=torch.bool, device=logits.device)
    if len(rows):
        words = mask.bits[mask.lines[rows]]
        bits = words.unsqueeze(-1) & (1 << torch.arange(32, device=words.device)).int()
        excluded = (bits == 0).flatten(1)[:, : logits.shape[1]]
        masked = logits[rows].masked_fill_(excluded, -_INF)
        out[rows] = masked
        empty[rows] = masked.amax(-1) == -_INF  # a NaN is the maximum of its row
    return out, empty


def apply_token_mask_triton(
    logits: Tensor, mask: TokenMask, out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Compute `apply_token_mask` in one pass over the logits, with one program per chunk of a row.

    A word's 32 tokens are not read if none of them is allowed, and not written if all are allowed
    and out is logits.
    """
    out = _check(logits, mask, out)
    rows, vocab = logits.shape
    chunks = triton.cdiv(vocab, _CHUNK)
    # Every program writes a flag of its own, so no atomics are needed and nothing must be zeroed.
    empty = torch.empty((rows, chunks), dtype=torch.bool, device=logits.device)
    if rows:
        _apply_token_mask[(rows, chunks)](
            logits, mask.bits, mask.lines, out, empty, logits.stride(0), mask.bits.stride(0),
            out.stride(0), vocab, IN_PLACE=out is logits, CHUNK=_CHUNK, num_warps=8,
        )  # fmt: skip
    return out, empty.all(-1)


def _check(logits: Tensor, mask: TokenMask, out: Tensor | None) -> Tensor:
    """Check the arguments, and return `out` or a new tensor for the result."""
    rows, vocab = logits.shape
    bits, lines = mask
    assert logits.stride(1) == 1
    assert bits.dtype == torch.int32 and bits.stride(1) == 1
    assert bits.shape[1] == triton.cdiv(vocab, 32), f"{bits.shape[1]} words, {vocab} logits"
    assert lines.dtype == torch.int32 and lines.is_contiguous() and lines.shape == (rows,)
    if out is None:
        return torch.empty((rows, vocab), dtype=logits.dtype, device=logits.device)
    assert out.shape == logits.shape and out.dtype == logits.dtype and out.stride(1) == 1
    return out


@triton.jit(do_not_specialize_on_alignment=["bits_ptr", "lines_ptr", "empty_ptr"])
def _apply_token_mask(
    logits_ptr, bits_ptr, lines_ptr, out_ptr, empty_ptr, stride, bits_stride, out_stride, vocab,
    IN_PLACE: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Each program masks one chunk of one row, and writes whether the row is constrained and none
    of the chunk's logits is above -inf."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    line = tl.load(lines_ptr + row).to(tl.int64)
    constrained = line >= 0
    word = chunk * (CHUNK // 32) + tl.arange(0, CHUNK // 32)
    lane = tl.arange(0, 32)[None, :]
    columns = word[:, None] * 32 + lane
    some = 0
    if constrained | (not IN_PLACE):
        words = tl.full((CHUNK // 32,), -1, tl.int32)
        if constrained:
            words = tl.load(bits_ptr + line * bits_stride + word, mask=word * 32 < vocab, other=0)
        allowed = ((words[:, None] >> lane) & 1) != 0
        inside = columns < vocab
        # Whole words are skipped, not single tokens, so memory accesses stay wide.
        values = tl.load(
            logits_ptr + row * stride + columns,
            mask=inside & (words != 0)[:, None],
            other=-float("inf"),
        )
        values = tl.where(allowed, values, -float("inf"))
        write = inside
        if IN_PLACE:
            write = inside & (words != -1)[:, None]
        tl.store(out_ptr + row * out_stride + columns, values, mask=write)
        above = (values.to(tl.float32) != -float("inf")).to(tl.int32)
        some = tl.max(tl.max(above, axis=1), axis=0)
    tl.store(empty_ptr + row * tl.num_programs(1) + chunk, constrained & (some == 0))
