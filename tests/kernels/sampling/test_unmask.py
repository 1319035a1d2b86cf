"""The unmasking rules: the kernel and its reference compared with a loop over rows.

Also the inputs of the rules: the confidences of a draw, and noise that differs from draw to draw.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import isnan
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import Drawn, draw_fused, draw_tokens
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling import sampling
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, philox_at
from batchgen.kernels.sampling.sampling_triton import draw_triton
from batchgen.kernels.sampling.unmask import unmask, unmask_reference, unmask_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = [unmask_reference, unmask_triton, unmask]
NAN, INF = float("nan"), float("inf")
few = settings(max_examples=settings().max_examples // 6, deadline=None)


@dataclass(frozen=True)
class Block:
    """One row: lists as long as the block, and None for what no row has."""

    masked: list[bool]
    count: int
    keys: list[float] | None = None
    confidence: list[float] | None = None
    threshold: float | None = None
    entropy: list[float] | None = None
    bound: float | None = None


def expected(block: Block) -> list[bool]:
    """One row, position by position."""
    left = [i for i, is_masked in enumerate(block.masked) if is_masked]
    if block.keys is not None:
        keys = block.keys
        known = [i for i in left if keys[i] == keys[i]]
        left = sorted(known, key=lambda i: -keys[i]) + [i for i in left if i not in known]
    chosen, before = set(left[: block.count]), 0.0
    for i in left:
        if block.confidence is not None and block.threshold is not None:
            chosen |= {i} if block.confidence[i] > float(np.float32(block.threshold)) else set()
        if block.entropy is not None and block.bound is not None:
            chosen |= {i} if before <= float(np.float32(block.bound)) else set()
            before += INF if isnan(block.entropy[i]) else block.entropy[i]
    return [i in chosen for i in range(len(block.masked))]


def run(form: Any, blocks: list[Block]) -> Tensor:
    def tensor(name: str, dtype: torch.dtype | None = torch.float32) -> Tensor | None:
        values = [getattr(block, name) for block in blocks]
        return None if values[0] is None else torch.tensor(values, dtype=dtype, device=DEVICE)

    masked, counts = tensor("masked", torch.bool), tensor("count", torch.int64)
    names = ("keys", "confidence", "threshold", "entropy", "bound")
    out = form(masked, counts, *(tensor(name) for name in names))
    assert isinstance(out, Tensor) and masked is not None
    assert out.dtype == torch.bool and out.shape == masked.shape
    return out


def places(out: Tensor) -> list[list[int]]:
    return [row.nonzero().flatten().tolist() for row in out]


@pytest.mark.parametrize("form", FORMS)
@given(seed=st.integers(0, 2**32 - 1), rows=st.integers(1, 6), length=st.integers(1, 64),
       parts=st.tuples(st.booleans(), st.booleans(), st.booleans()))  # fmt: skip
@few
def test_every_row_is_what_a_loop_says(
    form: Any, seed: int, rows: int, length: int, parts: tuple[bool, bool, bool]
) -> None:
    """Ties, NaN, limits met exactly; rows all masked or not at all; garbage where unmasked."""
    rng = np.random.default_rng(seed)

    def values(masked: Any) -> list[float]:
        out = rng.choice([0.125, 0.25, 0.5, 1.0, 0.0, NAN], length)
        if rng.integers(2):
            out = np.where(rng.random(length) < 0.5, rng.random(length), out)
        garbage = rng.choice([NAN, INF, -INF, 2.0], length)
        found: list[float] = np.where(masked, out, garbage).astype(np.float32).tolist()
        return found

    blocks = []
    for _ in range(rows):
        masked = rng.random(length) < rng.choice([0.0, 0.1, 0.5, 1.0])
        threshold = float(rng.choice([0.0, 0.1, 0.25, 0.5, 0.9, 1.0, INF]))
        bound = float(rng.choice([-1.0, 0.0, 0.125, 0.5, 1.1, 3.0, INF]))
        blocks.append(
            Block(
                masked.tolist(), int(rng.integers(0, length + 3)),
                values(masked) if parts[0] else None,
                *((values(masked), threshold) if parts[1] else (None, None)),
                *((values(masked), bound) if parts[2] else (None, None)),
            )
        )  # fmt: skip
    assert run(form, blocks).tolist() == [expected(block) for block in blocks]


@pytest.mark.parametrize("form", FORMS)
def test_ties_take_the_lowest_position_and_nan_comes_last(form: Any) -> None:
    masked = [False, True, True, True, True, True]
    rows = [[9.0, 0.5, NAN, 0.5, 0.75, 0.5], [9.0, *[NAN] * 5], [9.0, NAN, *[0.0] * 4]]
    out = run(form, [Block(masked, n, keys) for n, keys in zip((3, 2, 5), rows, strict=True)])
    assert places(out) == [[1, 3, 4], [1, 2], [1, 2, 3, 4, 5]]
    out = run(form, [Block(masked, 1, keys, keys, 0.5) for keys in rows])
    assert places(out) == [[4], [1], [2]]
    out = run(form, [Block(masked, 1, keys, keys, 0.0) for keys in rows])
    assert places(out) == [[1, 3, 4, 5], [1], [2]]


@pytest.mark.parametrize("form", FORMS)
def test_entropies_before_a_position_are_bounded_and_not_its_own(form: Any) -> None:
    entropy = [0.5, 0.0, 0.25, NAN, 0.25]
    keys = [-value for value in entropy]
    blocks = [Block([True] * 5, 1, keys, entropy=entropy, bound=b)
              for b in (-1.0, 0.0, 0.25, 0.5, 0.75, 1.0, INF)]  # fmt: skip
    found = places(run(form, blocks))
    assert found == [[1], [1, 2], [1, 2, 4], [0, 1, 2, 4], [0, 1, 2, 4], *[[0, 1, 2, 3, 4]] * 2]


@pytest.mark.parametrize("form", FORMS)
def test_confidence_and_threshold_are_compared_in_float32(form: Any) -> None:
    rounded = float(np.float32(0.1))
    assert rounded > 0.1
    values = [0.2, rounded, 0.11]
    out = run(form, [Block([True] * 3, 1, values, values, 0.1)])
    assert out.tolist() == [[True, False, True]]


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form: Any) -> None:
    none = torch.zeros((0, 8), dtype=torch.bool, device=DEVICE)
    assert form(none, torch.zeros(0, dtype=torch.int64, device=DEVICE)).shape == (0, 8)


def test_the_triton_form_writes_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = torch.ones((3, 11), dtype=torch.bool, device=DEVICE)
    monkeypatch.setattr(torch, "empty_like", lambda _: poisoned)
    masked, values = torch.zeros_like(poisoned), torch.ones((3, 11), device=DEVICE)
    counts, limits = torch.ones(3, device=DEVICE).long(), torch.zeros(3, device=DEVICE)
    out = unmask_triton(masked, counts, values, values, limits)
    assert out is poisoned and not out.any()


@pytest.mark.gpu
def test_real_sizes_in_a_cuda_graph() -> None:
    """The reference on the CPU, whatever the batch is when the graph is replayed."""
    for rows, length in ((256, 4), (256, 32), (64, 64), (1000, 7)):
        masked = torch.zeros((rows, length), dtype=torch.bool, device=DEVICE)
        values, entropy = (torch.zeros((rows, length), device=DEVICE) for _ in range(2))
        counts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        limits, bounds = (torch.zeros(rows, device=DEVICE) for _ in range(2))
        given = (masked, counts, values, values, limits, entropy, bounds)
        unmask(*given)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = unmask(*given)
        rng = np.random.default_rng(rows)
        for _ in range(3):
            masked.copy_(torch.from_numpy(rng.random((rows, length)) < 0.6))
            values.copy_(torch.from_numpy(rng.choice([0.5, 0.9, 0.95, NAN], (rows, length))))
            entropy.copy_(torch.from_numpy(rng.choice([0.5, 0.25, NAN], (rows, length))))
            counts.copy_(torch.from_numpy(rng.integers(0, length, rows)))
            limits.copy_(torch.from_numpy(rng.choice([0.9, INF], rows)))
            bounds.copy_(torch.from_numpy(rng.choice([-1, 1.0], rows)))
            graph.replay()
            assert torch.equal(captured.cpu(), unmask_reference(*(each.cpu() for each in given)))


# --- confidences, and the number of the draw ------------------------------------------------------


OPTIONS = [
    RequestParams(),
    RequestParams(temperature=0, min_new_tokens=9, logprobs=True),
    RequestParams(temperature=0, top_k=3, logprobs=True, logprobs_mode="processed"),
    RequestParams(temperature=0.6, top_k=4, logprobs=True),
    RequestParams(temperature=1.4, top_p=0.7, logprobs=True, logprobs_mode="processed"),
    RequestParams(min_p=0.2, min_new_tokens=9, top_logprobs=3),
    RequestParams(temperature=0.01, top_k=1),
]
BARE = [RequestParams(), RequestParams(temperature=0), RequestParams(temperature=0.7)]


def build(params: list[RequestParams], device: torch.device) -> SamplingInputs:
    count = len(params)
    return SamplingInputs.build(params, [3] * count, [[1, 2, 3]] * count, [[0, 2]] * count,
                                [300] * count, device)  # fmt: skip


def random_logits(rng: np.random.Generator, rows: int, vocab: int, dtype: torch.dtype) -> Tensor:
    values = rng.normal(size=(rows, vocab)) * rng.choice([0.5, 3.0, 30.0], (rows, 1))
    values[:, 1:][rng.random((rows, vocab - 1)) < 0.05] = -INF
    return torch.from_numpy(values).to(dtype)


@pytest.mark.thorough
@given(
    st.integers(0, 2**32 - 1),
    st.integers(1, 2),
    st.sampled_from([4100, 40]),
    st.sampled_from([torch.float32, torch.bfloat16]),
    st.booleans(),
)
@settings(max_examples=max(1, settings().max_examples // 40), deadline=None)
def test_confidence_is_the_probability_of_the_token_under_the_law_it_is_drawn_from(
    seed: int, width: int, vocab: int, dtype: torch.dtype, bare: bool
) -> None:
    """Beside raw or processed log-probabilities or none, which are what they are without it."""
    rng = np.random.default_rng(seed)
    params = BARE if bare else OPTIONS
    count = len(params) * width
    logits = random_logits(rng, count, vocab, dtype)
    positions = torch.from_numpy(rng.integers(3, 20, count))
    draws = torch.from_numpy(rng.integers(0, 64, count))
    on_cpu = build(params, torch.device("cpu")).repeat(width)
    law = process(logits, on_cpu, positions).double().softmax(-1)
    there = logits.to(DEVICE), build(params, DEVICE).repeat(width), positions.to(DEVICE)
    for form in (draw_tokens, draw_fused):
        out: Drawn = form(*there, draws.to(DEVICE), confidence=True, entropy=True)
        assert out.confidence is not None and out.confidence.dtype == torch.float32
        assert (out.confidence >= 0).all() and (out.confidence <= 1).all()
        wanted = law.gather(1, out.token_ids.cpu().unsqueeze(1)).squeeze(1).float()
        torch.testing.assert_close(out.confidence.cpu(), wanted, rtol=2e-4, atol=1e-6)
        assert out.entropy is not None and out.entropy.dtype == torch.float32
        entropies = torch.special.entr(law).sum(-1).float()
        torch.testing.assert_close(out.entropy.cpu(), entropies, rtol=2e-4, atol=1e-5)
        without: Drawn = form(*there, draws.to(DEVICE))
        assert without.confidence is None and without.entropy is None
        assert torch.equal(out.token_ids, without.token_ids)
        assert out.columns.keys() == without.columns.keys()
        for name, values in without.columns.items():
            assert torch.equal(values, out.columns[name]), name
    plain = draw_tokens(logits, on_cpu, positions, draws)
    assert (plain.token_ids == out.token_ids.cpu()).float().mean() > 0.9


@pytest.mark.thorough
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_noise_is_that_of_the_number_of_the_draw(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(0)
    rows, vocab = 12, 4100
    seeds = torch.from_numpy(rng.integers(-(2**63), 2**63, rows))
    positions = torch.from_numpy(rng.integers(0, 2**32, rows))
    draws = torch.from_numpy(np.where(np.arange(rows) % 3, rng.integers(0, 64, rows), 0))
    logits = torch.zeros(rows, vocab)
    words = torch.cat([
        philox(seeds[i : i + 1], positions[i : i + 1], int(draws[i]), Stream.SAMPLE, vocab)
        for i in range(rows)
    ])  # fmt: skip
    assert torch.equal(words, philox(seeds, positions, draws, Stream.SAMPLE, vocab))
    columns = torch.from_numpy(rng.integers(0, vocab, (rows, 1)))
    at = philox_at(seeds, positions, draws, Stream.SAMPLE, columns)
    assert torch.equal(at, words.gather(1, columns))
    tokens = gumbel_noise(words).argmax(-1)
    never = torch.zeros(rows, dtype=torch.bool)
    out = sampling.sample(logits, seeds, positions, never, draws=draws)
    assert torch.equal(out, tokens)
    sparse = torch.full_like(logits, -INF)
    sparse[:, ::50] = 0.0
    out = sampling.sample(sparse, seeds, positions, never, draws=draws)
    assert torch.equal(out, (gumbel_noise(words) + sparse).argmax(-1))

    def by_triton(numbers: Tensor | None) -> Tensor:
        rows_of, ones = logits.to(DEVICE), torch.ones(rows, device=DEVICE)
        key = (seeds.to(DEVICE), positions.to(DEVICE), never.to(DEVICE))
        return draw_triton(rows_of, rows_of, ones, None, *key, None, draws=numbers).token_ids.cpu()

    assert torch.equal(by_triton(draws.to(DEVICE, dtype)), tokens)
    assert torch.equal(by_triton(None) == tokens, draws == 0)


def test_broken_rows_fail_and_leave_the_confidences_of_others_alone() -> None:
    logits = random_logits(np.random.default_rng(1), 3, 5000, torch.float32)
    inputs = build(BARE, DEVICE)
    positions = torch.arange(5, 8, device=DEVICE)
    good = draw_fused(logits.to(DEVICE), inputs, positions, confidence=True)
    logits[1, 4999] = NAN
    out = draw_fused(logits.to(DEVICE), inputs, positions, confidence=True)
    assert out.failed.tolist() == [False, True, False]
    assert good.confidence is not None and out.confidence is not None
    assert torch.equal(out.confidence[::2], good.confidence[::2])


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_confidence_at_real_size(dtype: torch.dtype) -> None:
    rng = np.random.default_rng(2)
    width, vocab = 32, 151_936
    logits = random_logits(rng, len(OPTIONS) * width, vocab, dtype).to(DEVICE)
    inputs = build(OPTIONS, DEVICE).repeat(width)
    positions = torch.from_numpy(rng.integers(3, 20, len(logits))).to(DEVICE)
    draws = torch.from_numpy(rng.integers(0, 32, len(logits))).to(DEVICE)
    out = draw_fused(logits, inputs, positions, draws, confidence=True)
    law = process(logits, inputs, positions).double().softmax(-1)
    wanted = law.gather(1, out.token_ids.unsqueeze(1)).squeeze(1).float()
    assert out.confidence is not None and (out.confidence <= 1).all()
    torch.testing.assert_close(out.confidence, wanted, rtol=1e-3, atol=1e-6)
    expected_logprobs = draw_fused(logits, inputs, positions, draws).columns["logprobs"]
    assert torch.equal(out.columns["logprobs"], expected_logprobs)
