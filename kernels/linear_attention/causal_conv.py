"""Causal depthwise convolution, whose last inputs are kept for each row.

Channel c of token t becomes silu(Σ_i weight[c, i] · x[t − (K − 1) + i, c] + bias[c]), or the sum
itself without SiLU. The K − 1 inputs before a row's first token are the *window* in its state slot,
or zeros at the row's beginning. Sums and SiLU are computed in float32 and rounded once.
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
    """Convolve W tokens of each row x [B · W, C], row by row, to that shape; their inputs become
    records.

    The weight [C, K] ends with the token's own tap; the bias is [C]. The windows [S, K − 1, C] of
    the rows' slots, the oldest input first, are overwritten as `StepRows` says, and the records
    [R, N, C] too; both have x's dtype. A slot's window, the records and the last axis of x are
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
    """Convolve the tokens x [T, C] of each row, to the same shape, and leave its last inputs in its
    slot.

    Tensors are as for `causal_conv_step`. Windows are overwritten as `PrefillRows` says; snapshots
    may be anywhere.
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
    pending, places, new = rows.places(records.shape[1])
    seen = torch.cat([window[slots], records[slots[:, None], places]], dim=1)
    last = pending[:, None] + torch.arange(taps - 1, device=x.device)
    before, kept = (
        seen.gather(1, (last - ahead[:, None])[:, :, None].expand(-1, -1, x.shape[1]))
        for ahead in (torch.zeros_like(pending), pending % rows.fold)
    )
    window.index_copy_(0, slots, kept)
    inputs = x.view(len(slots), rows.width, x.shape[1])
    records[slots[:, None], new] = inputs
    out = _convolve(torch.cat([before, inputs], dim=1), weight, bias, with_silu)
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
    before, out, first = weight.shape[1] - 1, torch.zeros_like(x), 0
    for row, length in enumerate(rows.lengths()):
        if not length:
            continue
        slot = int(rows.slots[row])
        fresh = not rows.positions[first]
        start = torch.zeros_like(window[slot]) if fresh else window[slot]
        inputs = torch.cat([start, x[first : first + length]])
        out[first : first + length] = _convolve(inputs[None], weight, bias, with_silu)[0]
        for tokens, target in rows.wanted(row).items():
            window[target] = inputs[tokens : tokens + before]
        window[slot] = inputs[length:]
        first += length
    return out


def _convolve(inputs: Tensor, weight: Tensor, bias: Tensor | None, with_silu: bool) -> Tensor:
    """[B, K − 1 + W, C] → [B, W, C] in float32, the taps in the order of the tokens."""
    taps, inputs, weight = weight.shape[1], inputs.float(), weight.float()
    width = inputs.shape[1] - (taps - 1)
    total = inputs[:, :width] * weight[:, 0]
    for tap in range(1, taps):
        total = total + inputs[:, tap : tap + width] * weight[:, tap]
    total = total if bias is None else total + bias.float()
    return silu(total) if with_silu else total
