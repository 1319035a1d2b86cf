"""Causal depthwise convolution over the tokens of each row, with the last inputs kept as a state.

Channel c of token t becomes silu(Σ_i weight[c, i] · x[t − (K − 1) + i, c] + bias[c]), or the sum
itself without SiLU. The K − 1 inputs before a row's first token are the *window* in its state slot,
or zeros at the row's beginning. Sums and SiLU are computed in float32 and rounded once.

A decode step cannot move the window over its tokens at once, because drafts among them may be
rejected. So it appends the tokens' inputs as *records* to a ring in the row's slot. The next step
reads the window followed by the *pending* records, those of accepted tokens, and moves the window
over the oldest of these, a multiple of `fold` (`state_rows.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from batchgen.kernels.layers.elementwise import silu
from batchgen.kernels.linear_attention.causal_conv_triton import (
    causal_conv_prefill_triton,
    causal_conv_step_triton,
)
from batchgen.kernels.linear_attention.state_rows import PrefillRows, StepRows


def causal_conv_step(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    records: Tensor,
    rows: StepRows,
    *,
    with_silu: bool = True,
) -> Tensor:
    """Convolve the W tokens of each of B rows, x [B · W, C] row by row.

    Args:
        weight: [C, K]; tap K − 1 multiplies the token itself.
        bias: [C].
        window: [S, K − 1, C], the windows of all slots, the oldest input first; written in place.
        records: [R, N, C], the rings of all slots; x is written after the pending records.
        rows: the rows' slots, and which of their records are pending.

    Returns [B · W, C] in x's dtype.

    Window and records have x's dtype. A slot's window, the records and the last axis of x are
    contiguous.
    """
    run = causal_conv_step_triton if x.is_cuda else causal_conv_step_reference
    return run(x, weight, bias, window, records, rows, with_silu=with_silu)


def causal_conv_prefill(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: PrefillRows,
    *,
    with_silu: bool = True,
) -> Tensor:
    """Convolve all tokens of each row, x [T, C] row by row; return [T, C] in x's dtype.

    Other arguments are those of `causal_conv_step`. The last K − 1 inputs of a row are written to
    the window of its slot, and the K − 1 inputs before each of its snapshots to the snapshot's
    slot. Snapshots need not end a chunk.
    """
    run = causal_conv_prefill_triton if x.is_cuda else causal_conv_prefill_reference
    return run(x, weight, bias, window, rows, with_silu=with_silu)


def causal_conv_step_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    records: Tensor,
    rows: StepRows,
    *,
    with_silu: bool = True,
) -> Tensor:
    """`causal_conv_step` in PyTorch."""
    slots, taps = rows.slots, weight.shape[1]
    pending, ring, new = rows.ring_entries(records.shape[1])
    # [B, K − 1 + N, C]: the window, the pending records, and unused records.
    inputs = torch.cat([window[slots], records[slots[:, None], ring]], dim=1)

    def last_inputs(count: Tensor) -> Tensor:
        """Return the K − 1 inputs [B, K − 1, C] that end with pending record `count` [B], counted
        from 1."""
        index = count[:, None] + torch.arange(taps - 1, device=x.device)
        return inputs.gather(1, index[:, :, None].expand(-1, -1, x.shape[1]))

    window.index_copy_(0, slots, last_inputs(pending - pending % rows.fold))
    tokens = x.view(len(slots), rows.width, x.shape[1])
    records[slots[:, None], new] = tokens
    out = _convolve(torch.cat([last_inputs(pending), tokens], dim=1), weight, bias, with_silu)
    return out.flatten(0, 1).to(x.dtype)


def causal_conv_prefill_reference(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    window: Tensor,
    rows: PrefillRows,
    *,
    with_silu: bool = True,
) -> Tensor:
    """`causal_conv_prefill` in PyTorch, row by row."""
    before, out, first = weight.shape[1] - 1, torch.zeros_like(x), 0  # before: K − 1
    for row, length in enumerate(rows.lengths()):
        if not length:
            continue
        slot = int(rows.slots[row])
        fresh = not rows.positions[first]
        start = torch.zeros_like(window[slot]) if fresh else window[slot]
        inputs = torch.cat([start, x[first : first + length]])
        out[first : first + length] = _convolve(inputs[None], weight, bias, with_silu)[0]
        for tokens, snapshot_slots in rows.snapshot_slots(row).items():
            window[snapshot_slots] = inputs[tokens : tokens + before]
        window[slot] = inputs[length:]
        first += length
    return out


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool) -> Tensor:
    """Convolve inputs [B, K − 1 + W, C] to [B, W, C] in float32, summing taps in the order of
    tokens."""
    taps, inputs, weight = weight.shape[1], inputs.float(), weight.float()
    width = inputs.shape[1] - (taps - 1)
    total = inputs[:, :width] * weight[:, 0]
    for tap in range(1, taps):
        total = total + inputs[:, tap : tap + width] * weight[:, tap]
    total = total if bias is None else total + bias.float()
    return silu(total) if with_silu else total
