"""Masks of allowed tokens: the Triton kernel and the PyTorch reference against plain loops."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.kernels.sampling.token_mask import (
    TokenMask,
    apply_token_mask,
    apply_token_mask_reference,
    apply_token_mask_triton,
)

INF, NAN = float("inf"), float("nan")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = Callable[[Tensor, TokenMask, Tensor | None], tuple[Tensor, Tensor]]
RUNS: tuple[Run, ...] = (apply_token_mask_reference, apply_token_mask_triton)


def make_mask(allowed: Tensor, lines: list[int], device: torch.device = DEVICE) -> TokenMask:
    """Bits of allowed [C, V] bool; bits past V are set, and words are cut from a wider buffer."""
    count, vocab = allowed.shape
    words = -(-vocab // 32)
    bits = np.ones((count, words * 32), dtype=np.bool_)
    bits[:, :vocab] = allowed.numpy()
    packed = np.packbits(bits, axis=1, bitorder="little").view("<i4")
    buffer = torch.full((count, words + 1), -1, dtype=torch.int32)
    buffer[:, :words] = torch.from_numpy(packed.astype(np.int32))
    wanted = torch.tensor(lines, dtype=torch.int32, device=device)
    return TokenMask(buffer.to(device)[:, :words], wanted)


def expected_of(logits: Tensor, allowed: Tensor, lines: list[int]) -> tuple[Tensor, list[bool]]:
    """Token by token."""
    out, empty = logits.clone(), []
    for row, line in enumerate(lines):
        some = line < 0
        for token in range(logits.shape[1]) if line >= 0 else ():
            if not allowed[line, token]:
                out[row, token] = -INF
            elif math.isnan(logits[row, token]) or logits[row, token] > -INF:
                some = True
        empty.append(not some)
    return out, empty


def assert_equal(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.cpu(), expected, rtol=0, atol=0, equal_nan=True)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(0, 6),
    st.one_of(st.integers(1, 70), st.sampled_from([4096, 4097, 8191, 9000])),
    st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    st.integers(0, 3),
)
@settings(max_examples=settings().max_examples // 5, deadline=None)
def test_every_way_equals_plain_loops(
    seed: int, rows: int, vocab: int, dtype: torch.dtype, gap: int
) -> None:
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 4))
    density = rng.choice([0.0, 0.001, 0.5, 0.999, 1.0], (count, 1))
    allowed = torch.from_numpy(rng.random((count, vocab)) < density)
    allowed[:, int(rng.integers(vocab)) :] ^= bool(rng.integers(2))  # whole words of one kind
    lines = rng.integers(-1, count, rows).tolist()
    values = torch.tensor(rng.normal(size=rows * (vocab + gap)), dtype=dtype)
    values = values.view(rows, vocab + gap)
    for special in (-INF, INF, NAN):
        values[torch.from_numpy(rng.random(values.shape) < rng.choice([0, 0.01]))] = special
    logits = values.to(DEVICE)[:, :vocab]
    mask = make_mask(allowed, lines)
    expected, empty = expected_of(values[:, :vocab], allowed, lines)
    for run in RUNS:
        masked, found = run(logits, mask, None)
        assert_equal(masked, expected)
        assert masked.is_contiguous() and masked.dtype == dtype
        assert found.dtype == torch.bool and found.tolist() == empty
        assert_equal(logits, values[:, :vocab])
        other = torch.zeros((rows, vocab + 1), dtype=dtype, device=DEVICE)
        assert run(logits, mask, other[:, :vocab])[1].tolist() == empty
        assert_equal(other[:, :vocab], expected)
        assert not other[:, vocab:].any(), "nothing past the vocabulary is written"
        own = values.to(DEVICE, copy=True)
        view = own[:, :vocab]
        masked, found = run(view, mask, view)
        assert masked is view and found.tolist() == empty
        assert_equal(own, torch.cat((expected, values[:, vocab:]), 1))


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("in_place", [False, True])
def test_what_counts_as_empty(run: Run, in_place: bool) -> None:
    allowed = torch.tensor([[False, True, False], [False, False, False]])
    cases = [
        ([1.0, 2.0, 3.0], 0, False),
        ([1.0, -INF, 3.0], 0, True),
        ([1.0, NAN, 3.0], 0, False),
        ([1.0, INF, 3.0], 0, False),
        ([NAN, -INF, INF], 0, True),  # whoever looks at the raw logits finds those
        ([1.0, 2.0, 3.0], 1, True),
        ([-INF, -INF, -INF], -1, False),
        ([1.0, NAN, 3.0], -1, False),
    ]
    logits = torch.tensor([values for values, _, _ in cases], device=DEVICE)
    mask = make_mask(allowed, [line for _, line, _ in cases])
    _, empty = run(logits, mask, logits if in_place else None)
    assert empty.tolist() == [expected for _, _, expected in cases]


@pytest.mark.parametrize("token", [0, 31, 32, 63, 4095, 4096, 99])
def test_one_allowed_token_in_any_place_of_a_word(token: int) -> None:
    vocab = max(token + 1, 100)
    allowed = torch.zeros(1, vocab, dtype=torch.bool)
    allowed[0, token] = True
    for run in RUNS:
        masked, empty = run(torch.zeros(1, vocab, device=DEVICE), make_mask(allowed, [0]), None)
        assert (masked[0] == 0).nonzero().flatten().tolist() == [token]
        assert empty.tolist() == [False]


def test_a_mask_of_another_width_or_batch_is_refused() -> None:
    logits = torch.zeros(2, 64, device=DEVICE)
    for mask in (
        make_mask(torch.ones(1, 65, dtype=torch.bool), [0, 0]),
        make_mask(torch.ones(1, 64, dtype=torch.bool), [0]),
    ):
        for run in RUNS:
            with pytest.raises(AssertionError):
                run(logits, mask, None)


@pytest.mark.gpu
def test_on_a_gpu_it_is_captured_and_does_not_wait() -> None:
    rng = np.random.default_rng(0)
    allowed = torch.from_numpy(rng.random((3, 151_936)) < 0.01)
    lines = [0, -1, 2, 1, 0]
    logits = torch.randn(5, 151_936, device=DEVICE, dtype=torch.bfloat16)
    mask = make_mask(allowed, lines)
    apply_token_mask(logits, mask)  # compiled the first time
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.cuda.graph(graph):
            masked, empty = apply_token_mask(logits, mask)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    logits.copy_(torch.randn_like(logits))
    graph.replay()
    expected, expected_empty = apply_token_mask_reference(logits, mask)
    assert torch.equal(masked, expected) and torch.equal(empty, expected_empty)
