"""The causal convolution: windows, records and snapshots, of the reference and of Triton."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.linear_attention.causal_conv import (
    causal_conv_prefill_reference,
    causal_conv_step_reference,
)
from batchgen.kernels.linear_attention.causal_conv_triton import (
    causal_conv_prefill_triton,
    causal_conv_step_triton,
)
from tests.support.kernels.delta_cases import DEVICE, NAN, Pending, prefill_rows

CHANNELS = 300 if DEVICE == "cuda" else 70
CLOSE = {torch.float32: 1e-6, torch.bfloat16: 8e-3}
Conv = Callable[..., Tensor]
BOTH = [
    pytest.param(causal_conv_step_reference, causal_conv_prefill_reference, id="reference"),
    pytest.param(causal_conv_step_triton, causal_conv_prefill_triton, id="triton"),
]


def normal(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def inputs(tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """[tokens, CHANNELS] in rows that are longer, as those of a projection with more parts."""
    return normal(tokens, CHANNELS + 8, seed=seed, dtype=dtype)[:, :CHANNELS]


def expected(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, *, with_silu: bool = True
) -> Tensor:
    """[T, C] float64 of a whole row, by PyTorch's convolution."""
    added = None if bias is None else bias.double()
    wide = F.pad(x.double().T, (weight.shape[1] - 1, 0))[None]
    found = F.conv1d(wide, weight.double()[:, None], added, groups=len(weight))[0].T
    return F.silu(found) if with_silu else found


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize(("step", "prefill"), BOTH)
def test_a_prefill_is_the_convolution_however_it_is_cut(
    step: Conv, prefill: Conv, dtype: torch.dtype
) -> None:
    weight, window = normal(CHANNELS, 4, dtype=dtype), normal(9, 3, CHANNELS, dtype=dtype)
    bias = normal(CHANNELS, seed=3, dtype=dtype)
    window[1:3] = NAN
    x, y = inputs(90, 1, dtype), inputs(70, 2, dtype)
    first = prefill(torch.cat([x[:2], y[:69]]), weight, bias, window, prefill_rows([2, 69]))
    snapshots = [[(1, 5), (62, 6)], [(0, 0), (0, 0)], [(0, 0), (0, 0)]]
    rows = prefill_rows([88, 0, 1], [2, 7, 69], [1, 4, 2], snapshots)
    untouched = window[4].clone()
    last = prefill(torch.cat([x[2:], y[69:]]), weight, bias, window, rows)
    for parts, row in (([first[:2], last[:88]], x), ([first[2:], last[88:]], y)):
        found = torch.cat(parts)
        assert found.dtype == dtype
        torch.testing.assert_close(
            found.double(), expected(row, weight, bias), rtol=CLOSE[dtype], atol=CLOSE[dtype]
        )
    assert torch.equal(window[1], x[-3:]) and torch.equal(window[2], y[-3:])
    begun = torch.cat([torch.zeros_like(x[:1]), x])
    assert torch.equal(window[5], begun[1:4]) and torch.equal(window[6], x[61:64])
    assert torch.equal(window[4], untouched)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "dtype", [pytest.param(torch.float32, marks=pytest.mark.slow), torch.bfloat16]
)
@pytest.mark.parametrize("fold", [1, 3, 8])
@pytest.mark.parametrize(("step", "prefill"), BOTH)
def test_steps_take_back_what_was_not_accepted(
    step: Conv, prefill: Conv, fold: int, dtype: torch.dtype
) -> None:
    """Two rows in changing order, one with drafts that are taken back, beside padding."""
    weight, window = normal(CHANNELS, 4, dtype=dtype), normal(4, 3, CHANNELS, dtype=dtype)
    bias = normal(CHANNELS, seed=3, dtype=dtype) if fold > 1 else None
    pending = Pending(4, 4, fold)
    records = torch.full((4, pending.ring, CHANNELS), NAN, dtype=dtype, device=DEVICE)
    true = {slot: inputs(12, slot, dtype) for slot in (1, 3)}
    done = dict.fromkeys(true, 0)
    whole = {
        slot: expected(torch.cat([window[slot], x]), weight, bias)[3:] for slot, x in true.items()
    }
    steps: list[tuple[int, list[int], dict[int, int]]] = [
        (1, [1, 3], {1: 1, 3: 1}),
        (3, [3, 1, 0], {3: 1, 1: 3}),
        (4, [0, 1, 3], {3: 4, 1: 2}),
        (2, [3], {3: 2}),
        (1, [1, 3], {1: 1, 3: 1}),
    ]
    for seed, (width, slots, accepted) in enumerate(steps):
        x = inputs(width * len(slots), 100 + seed, dtype)
        for i, slot in enumerate(slots):
            if slot:
                kept = accepted[slot]
                x[i * width : i * width + kept] = true[slot][done[slot] :][:kept]
        found = step(x, weight, bias, window, records, pending.rows(slots, width))
        for i, slot in enumerate(slots):
            if slot:
                at, kept = done[slot], accepted[slot]
                torch.testing.assert_close(
                    found[i * width : i * width + kept].double(), whole[slot][at : at + kept],
                    rtol=CLOSE[dtype], atol=CLOSE[dtype],
                )  # fmt: skip
                done[slot] = at + kept
        pending.accept(accepted)
    settled: Any = pending.settle([1, 3])
    step(inputs(0, dtype=dtype), weight, bias, window, records, settled)
    for slot, x in true.items():
        assert torch.equal(window[slot], x[done[slot] - 3 : done[slot]])


def test_a_row_has_the_same_bits_alone_and_among_others() -> None:
    weight, x = normal(CHANNELS, 4).cpu(), inputs(20).cpu()
    window = torch.zeros(4, 3, CHANNELS)
    among = causal_conv_prefill_reference(x, weight, None, window, _host([7, 6, 7]))
    alone = causal_conv_prefill_reference(x[7:13], weight, None, window, _host([6]))
    assert torch.equal(among[7:13], alone)


def _host(lengths: list[int]) -> Any:
    rows = prefill_rows(lengths)
    return rows._replace(**{k: getattr(rows, k).cpu() for k in ("slots", "positions", "starts")})


@pytest.mark.parametrize(("step", "prefill"), BOTH)
def test_a_convolution_without_silu(step: Conv, prefill: Conv) -> None:
    """A prefill, and two steps behind it."""
    weight, window = normal(CHANNELS, 3), normal(2, 2, CHANNELS)
    x, pending = inputs(20, 1), Pending(2, 4, 1)
    records = torch.full((2, pending.ring, CHANNELS), NAN, device=DEVICE)
    parts = [prefill(x[:16], weight, None, window, prefill_rows([16]), with_silu=False)]
    for start in (16, 18):
        rows = pending.rows([1], 2)
        parts.append(
            step(x[start : start + 2], weight, None, window, records, rows, with_silu=False)
        )
        pending.accept({1: 2})
    whole = expected(x, weight, with_silu=False)
    torch.testing.assert_close(torch.cat(parts).double(), whole, rtol=1e-6, atol=1e-6)
