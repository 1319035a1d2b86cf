"""The causal convolution of `causal_conv.py` in Triton: one launch for a decode step, two for a
prefill."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.linear_attention.chunks_triton import row_of_chunk, tokens_of_chunk
from batchgen.kernels.linear_attention.state_rows import CHUNK, PrefillRows, StepRows

_STEP_BLOCK = 256
"""Channels per program of a decode step: one 16-byte access of 2-byte elements per thread of a
warp."""
_BLOCK = 256
"""Channels per program of a prefill."""
_TOKENS = 8
"""Tokens that a prefill program loads and computes at once."""


def causal_conv_step_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    records: Tensor,
    rows: StepRows,
    *,
    with_silu: bool = True,
) -> Tensor:
    """`causal_conv_step` in one launch."""
    channels, taps = weight.shape
    assert x.stride(1) == 1 and records.is_contiguous() and window[0].is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    blocks = triton.cdiv(channels, _STEP_BLOCK)
    if len(rows.slots):
        _conv_step[(len(rows.slots) * blocks,)](
            x, weight, bias, window, records, out, rows.slots, rows.pending, rows.first,
            x.stride(0), weight.stride(0), weight.stride(1), window.stride(0), channels, TAPS=taps,
            WIDTH=rows.width, RING=records.shape[1], FOLD=rows.fold, SILU=with_silu,
            BLOCKS=blocks, BLOCK=_STEP_BLOCK, TILE=triton.next_power_of_2(taps), num_warps=1,
        )  # fmt: skip
    return out


def causal_conv_prefill_triton(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: PrefillRows,
    *,
    with_silu: bool = True,
) -> Tensor:
    """Compute `causal_conv_prefill` in two launches: the tokens first, then the windows that they
    read."""
    channels, taps = weight.shape
    assert x.stride(1) == 1 and window[0].is_contiguous() and rows.starts.is_contiguous()
    out = rows.empty(x.shape, x.dtype)
    blocks, batch = triton.cdiv(channels, _BLOCK), len(rows.slots)
    snapshots = rows.slots if rows.snapshots is None else rows.snapshots
    if batch and len(x):
        _conv_prefill[(rows.most_chunks(), blocks)](
            x, weight, bias, window, out, rows.slots, rows.positions, rows.starts, x.stride(0),
            weight.stride(0), weight.stride(1), window.stride(0), channels, batch,
            TAPS=taps, CHUNK=CHUNK, TOKENS=_TOKENS, SILU=with_silu, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
        _conv_windows[(batch, blocks)](
            x, window, rows.slots, rows.positions, rows.starts, snapshots, x.stride(0),
            window.stride(0), channels,
            SNAPSHOTS=0 if rows.snapshots is None else rows.snapshots.shape[1],
            TAPS=taps, BLOCK=_BLOCK, num_warps=1,
        )  # fmt: skip
    return out


@triton.jit
def _conv_step(
    x_ptr, weight_ptr, bias_ptr, window_ptr, records_ptr, out_ptr, slots_ptr, pending_ptr,
    first_ptr, x_stride, weight_channel, weight_tap, window_stride, channels,
    TAPS: tl.constexpr, WIDTH: tl.constexpr, RING: tl.constexpr, FOLD: tl.constexpr,
    SILU: tl.constexpr, BLOCKS: tl.constexpr, BLOCK: tl.constexpr, TILE: tl.constexpr,
):  # fmt: skip
    """Each program convolves BLOCK channels of one row for its WIDTH tokens.

    A tap reads one of the step's own tokens, or before these a pending record, or before these the
    window. The step's tokens become records. A full group of pending records is folded into the
    window.
    """
    row = (tl.program_id(0) // BLOCKS).to(tl.int64)
    channel = (tl.program_id(0) % BLOCKS * BLOCK + tl.arange(0, BLOCK))[None, :]
    slot = tl.load(slots_ptr + row)
    pending = tl.minimum(tl.maximum(tl.load(pending_ptr + slot), 0), RING)
    first = tl.load(first_ptr + slot)
    window = window_ptr + slot * window_stride + channel
    records = records_ptr + slot * (RING * channels) + channel
    tap = tl.arange(0, TILE)[:, None]
    inside = (tap < TAPS) & (channel < channels)
    weight = tl.load(
        weight_ptr + channel * weight_channel + tap * weight_tap, mask=inside, other=0.0
    ).to(tl.float32)
    x = x_ptr + row * WIDTH * x_stride + channel
    for j in tl.static_range(WIDTH):
        index = j + tap - (TAPS - 1)
        value = tl.load(x + index * x_stride, mask=inside & (index >= 0), other=0.0)
        if j < TAPS - 1:
            before = _before(
                window, records, first, pending + j + tap, inside & (index < 0), channels, TAPS,
                RING,
            )  # fmt: skip
            value = tl.where(index < 0, before, value)
        total = tl.sum(value.to(tl.float32) * weight, axis=0)[None, :]
        if bias_ptr is not None:
            total += tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
        out = total / (1.0 + tl.exp(-total)) if SILU else total
        target = out_ptr + (row * WIDTH + j) * channels + channel
        tl.store(target, out.to(out_ptr.dtype.element_ty), mask=channel < channels)
        record = tl.load(x + j * x_stride, mask=channel < channels, other=0.0)
        new = (first + pending + j) % RING
        tl.store(records + new * channels, record, mask=channel < channels)
    folded = pending // FOLD * FOLD
    kept = inside & (tap < tl.where(folded > 0, TAPS - 1, 0))
    before = _before(window, records, first, folded + tap, kept, channels, TAPS, RING)
    # Other threads of the program may read what this one overwrites.
    tl.debug_barrier()
    tl.store(window + tap * channels, before, mask=kept)


@triton.jit
def _before(
    window, records, first, offsets, mask, channels, TAPS: tl.constexpr, RING: tl.constexpr
):
    """Return the inputs at offsets in the window followed by the pending records."""
    recorded = offsets >= TAPS - 1
    kept = tl.load(window + offsets * channels, mask=mask & (offsets < TAPS - 1), other=0.0)
    record = records + (first + tl.maximum(offsets - (TAPS - 1), 0)) % RING * channels
    return tl.where(recorded, tl.load(record, mask=mask & recorded, other=0.0), kept)


@triton.jit(do_not_specialize=["num_rows"])
def _conv_prefill(
    x_ptr, weight_ptr, bias_ptr, window_ptr, out_ptr, slots_ptr, positions_ptr, starts_ptr,
    x_stride, weight_channel, weight_tap, window_stride, channels, num_rows,
    TAPS: tl.constexpr, CHUNK: tl.constexpr, TOKENS: tl.constexpr, SILU: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program takes BLOCK channels of one chunk, TOKENS tokens at a time."""
    row, chunk = row_of_chunk(starts_ptr, tl.program_id(0), num_rows, CHUNK)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    first, count = tokens_of_chunk(positions_ptr, start, end, chunk, CHUNK)
    if count <= 0:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    # The channels that are read of the window: none at a row's beginning. Here and below, loads are
    # masked by a number of channels that is 0 where nothing is loaded.
    kept = tl.where(tl.load(positions_ptr + start) == 0, 0, channels)
    window = window_ptr + tl.load(slots_ptr + row) * window_stride + channel
    weights = ()
    for tap in tl.static_range(TAPS):
        weight = weight_ptr + channel * weight_channel + tap * weight_tap
        weight = tl.load(weight, mask=channel < channels, other=0.0).to(tl.float32)
        weights += (weight,)  # type: ignore[assignment]
    if bias_ptr is not None:
        bias = tl.load(bias_ptr + channel, mask=channel < channels, other=0.0).to(tl.float32)
    for offset in range(0, count, TOKENS):
        begin, values = first + offset, ()
        for i in tl.static_range(TOKENS + TAPS - 1):
            token = begin + i - (TAPS - 1)
            size = tl.where((token >= start) & (token < first + count), channels, 0)
            x = x_ptr + token.to(tl.int64) * x_stride + channel
            value = tl.load(x, mask=channel < size, other=0.0)
            if i < TAPS - 1:
                size = tl.where(token < start, kept, 0)
                before = window + (token - start + TAPS - 1) * channels
                before = tl.load(before, mask=channel < size, other=0.0)
                value = tl.where(channel < size, before, value)
            values += (value.to(tl.float32),)  # type: ignore[assignment]
        for i in tl.static_range(TOKENS):
            total = values[i] * weights[0]  # type: ignore[misc]
            for tap in tl.static_range(1, TAPS):
                total += values[i + tap] * weights[tap]
            if bias_ptr is not None:
                total += bias
            out = total / (1.0 + tl.exp(-total)) if SILU else total
            size = tl.where(begin + i < first + count, channels, 0)
            target = out_ptr + (begin + i).to(tl.int64) * channels + channel
            tl.store(target, out.to(out_ptr.dtype.element_ty), mask=channel < size)


@triton.jit
def _conv_windows(
    x_ptr, window_ptr, slots_ptr, positions_ptr, starts_ptr, snapshots_ptr, x_stride,
    window_stride, channels, SNAPSHOTS: tl.constexpr, TAPS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes BLOCK channels of one row's windows, that of its own slot last."""
    row = tl.program_id(0)
    start, end = tl.load(starts_ptr + row), tl.load(starts_ptr + row + 1)
    if start == end:
        return
    channel = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = channel < channels
    kept = tl.where(tl.load(positions_ptr + start) == 0, 0, channels)
    slot = tl.load(slots_ptr + row)
    window = window_ptr + slot * window_stride + channel
    x = x_ptr + start.to(tl.int64) * x_stride + channel
    for i in tl.static_range(SNAPSHOTS + 1):
        tokens, target = (end - start).to(tl.int64), slot
        if i < SNAPSHOTS:
            entry = snapshots_ptr + (row * SNAPSHOTS + i) * 2
            tokens, target = tl.load(entry), tl.load(entry + 1)
        if tokens > 0:
            for tap in tl.static_range(TAPS - 1):
                index = tokens + tap
                old = tl.load(
                    window + index * channels,
                    mask=channel < tl.where(index < TAPS - 1, kept, 0), other=0.0,
                )  # fmt: skip
                new = tl.load(
                    x + (index - (TAPS - 1)) * x_stride,
                    mask=channel < tl.where(index < TAPS - 1, 0, channels), other=0.0,
                )  # fmt: skip
                # What is read here may be overwritten by other threads of the program.
                tl.debug_barrier()
                written = window_ptr + target * window_stride + tap * channels + channel
                tl.store(written, tl.where(index < TAPS - 1, old, new), mask=inside)
