"""The unmasking rules: the kernel and its reference compared with a loop over rows.

Also the inputs of the rules: the confidences of a draw, and noise that differs from draw to draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from batchgen.engine.sampling.sampler import Drawn, draw_fused, draw_tokens, process
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling import sampling
from batchgen.kernels.sampling.philox import Stream, gumbel_noise, philox, philox_at
from batchgen.kernels.sampling.sampling_triton import draw_triton
from batchgen.kernels.sampling.unmask import Rule, schedule, unmask, unmask_reference, unmask_triton

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
FORMS = [unmask_reference, unmask_triton, unmask]
NAN, INF = float("nan"), float("inf")
few = settings(max_examples=settings().max_examples // 6, deadline=None)


def expected(
    rule: Rule, masked: list[bool], confidence: list[float], count: int, threshold: float
) -> list[bool]:
    """One row, position by position."""
    left = [i for i, is_masked in enumerate(masked) if is_masked]
    if rule is Rule.SEQUENTIAL:
        chosen = set(left[:count])
    else:
        known = [i for i in left if confidence[i] == confidence[i]]
        best = sorted(known, key=lambda i: (-confidence[i], i)) + [
            i for i in left if i not in known
        ]
        if rule is Rule.LOW_CONFIDENCE_STATIC:
            chosen = set(best[:count])
        else:
            limit = float(np.float32(threshold))
            chosen = set(best[:1]) | {i for i in known if confidence[i] > limit}
    return [i in chosen for i in range(len(masked))]


def run(
    form: Any, rule: Rule, masked: Any, confidence: Any, count: Any, threshold: float
) -> Tensor:
    rows = torch.tensor(masked, device=DEVICE)
    if rule is Rule.SEQUENTIAL:
        out = form(rule, rows, None, counts=torch.tensor(count, device=DEVICE))
    else:
        values = torch.tensor(confidence, dtype=torch.float32, device=DEVICE)
        if rule is Rule.LOW_CONFIDENCE_STATIC:
            out = form(rule, rows, values, counts=torch.tensor(count, device=DEVICE))
        else:
            out = form(rule, rows, values, threshold=threshold)
    assert isinstance(out, Tensor) and out.dtype == torch.bool and out.shape == rows.shape
    return out


@pytest.mark.parametrize("rule", Rule)
@pytest.mark.parametrize("form", FORMS)
@given(
    seed=st.integers(0, 2**32 - 1),
    rows=st.integers(1, 6),
    length=st.integers(1, 64),
    threshold=st.sampled_from([0.0, 0.1, 0.25, 0.5, 0.9, 1.0]),
)
@few
def test_every_row_is_what_a_loop_says(
    form: Any, rule: Rule, seed: int, rows: int, length: int, threshold: float
) -> None:
    """Ties, NaN, thresholds met exactly; rows all masked or not at all; garbage where unmasked."""
    rng = np.random.default_rng(seed)
    masked = rng.random((rows, length)) < rng.choice([0.0, 0.1, 0.5, 1.0], (rows, 1))
    values = rng.choice([0.1, 0.25, 0.5, 1.0, 0.0, NAN], (rows, length))
    if rng.integers(2):
        values = np.where(rng.random(values.shape) < 0.5, rng.random(values.shape), values)
    confidence = values.astype(np.float32)
    garbage = rng.choice([NAN, INF, -INF, 2.0], (rows, length)).astype(np.float32)
    confidence = np.where(masked, confidence, garbage)
    counts = rng.integers(0, length + 3, rows).astype(rng.choice(["int32", "int64"]))
    out = run(form, rule, masked, confidence, counts, threshold)
    for i in range(rows):
        row = expected(rule, masked[i].tolist(), confidence[i].tolist(), counts[i], threshold)
        assert out[i].tolist() == row


@pytest.mark.parametrize("form", FORMS)
def test_ties_take_the_lowest_position_and_nan_comes_last(form: Any) -> None:
    masked = [[False, True, True, True, True, True]] * 3
    confidence = [[9.0, 0.5, NAN, 0.5, 0.75, 0.5], [9.0, *[NAN] * 5], [9.0, NAN, *[0.0] * 4]]
    static, dynamic = Rule.LOW_CONFIDENCE_STATIC, Rule.LOW_CONFIDENCE_DYNAMIC
    out = run(form, static, masked, confidence, [3, 2, 5], 0.0)
    assert [row.nonzero().flatten().tolist() for row in out] == [[1, 3, 4], [1, 2], [1, 2, 3, 4, 5]]
    out = run(form, dynamic, masked, confidence, None, 0.5)
    assert [row.nonzero().flatten().tolist() for row in out] == [[4], [1], [2]]
    out = run(form, dynamic, masked, confidence, None, 0.0)
    assert [row.nonzero().flatten().tolist() for row in out] == [[1, 3, 4, 5], [1], [2]]


@pytest.mark.parametrize("form", FORMS)
def test_confidence_and_threshold_are_compared_in_float32(form: Any) -> None:
    rounded = float(np.float32(0.1))
    assert rounded > 0.1
    out = run(form, Rule.LOW_CONFIDENCE_DYNAMIC, [[True] * 3], [[0.2, rounded, 0.11]], None, 0.1)
    assert out.tolist() == [[True, False, True]]


@pytest.mark.parametrize("form", FORMS)
def test_no_rows(form: Any) -> None:
    none = torch.zeros((0, 8), dtype=torch.bool, device=DEVICE)
    counts = torch.zeros(0, dtype=torch.int64, device=DEVICE)
    assert form(Rule.SEQUENTIAL, none, None, counts=counts).shape == (0, 8)


def test_the_triton_form_writes_every_place(monkeypatch: pytest.MonkeyPatch) -> None:
    poisoned = torch.ones((3, 11), dtype=torch.bool, device=DEVICE)
    monkeypatch.setattr(torch, "empty_like", lambda _: poisoned)
    masked, confidence = torch.zeros_like(poisoned), torch.ones((3, 11), device=DEVICE)
    out = unmask_triton(Rule.LOW_CONFIDENCE_DYNAMIC, masked, confidence, threshold=0.5)
    assert out is poisoned and not out.any()


def test_an_option_of_another_rule_is_refused() -> None:
    masked, values = torch.ones((1, 4), dtype=torch.bool), torch.ones(1, 4)
    one = torch.ones(1, dtype=torch.int64)
    for form in (unmask_reference, unmask_triton):
        for rule, confidence, counts, threshold in (
            (Rule.SEQUENTIAL, values, one, None),
            (Rule.SEQUENTIAL, None, one, 0.5),
            (Rule.LOW_CONFIDENCE_STATIC, values, one, 0.5),
            (Rule.LOW_CONFIDENCE_STATIC, None, one, None),
            (Rule.LOW_CONFIDENCE_DYNAMIC, values, one, 0.5),
            (Rule.LOW_CONFIDENCE_DYNAMIC, values, None, None),
        ):
            with pytest.raises(AssertionError):
                form(rule, masked, confidence, counts, threshold)


def test_schedules() -> None:
    assert schedule(10, 4) == (3, 3, 2, 2)
    assert schedule(4, 4) == (1, 1, 1, 1)
    assert schedule(3, 5) == (1, 1, 1, 0, 0)
    for length in range(1, 65):
        for steps in range(1, 70):
            counts = schedule(length, steps)
            assert len(counts) == steps and sum(counts) == length
            assert sorted(counts, reverse=True) == list(counts) and counts[0] - counts[-1] <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("rule", Rule)
def test_real_sizes_in_a_cuda_graph(rule: Rule) -> None:
    """The reference on the CPU, whatever the batch is when the graph is replayed."""
    for rows, length in ((256, 4), (256, 32), (64, 64), (1000, 7)):
        masked = torch.zeros((rows, length), dtype=torch.bool, device=DEVICE)
        values = torch.zeros((rows, length), device=DEVICE)
        counts = torch.zeros(rows, dtype=torch.int64, device=DEVICE)
        dynamic = rule is Rule.LOW_CONFIDENCE_DYNAMIC
        options: dict[str, Any] = {"threshold": 0.9} if dynamic else {"counts": counts}
        confidence = None if rule is Rule.SEQUENTIAL else values
        unmask(rule, masked, confidence, **options)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            captured = unmask(rule, masked, confidence, **options)
        rng = np.random.default_rng(rows)
        for _ in range(3):
            masked.copy_(torch.from_numpy(rng.random((rows, length)) < 0.6))
            values.copy_(torch.from_numpy(rng.choice([0.5, 0.9, 0.95, NAN], (rows, length))))
            counts.copy_(torch.from_numpy(rng.integers(0, length, rows)))
            graph.replay()
            on_host: dict[str, Any] = {
                k: v.cpu() if isinstance(v, Tensor) else v for k, v in options.items()
            }
            seen = None if confidence is None else values.cpu()
            wanted = unmask_reference(rule, masked.cpu(), seen, **on_host)
            assert torch.equal(captured.cpu(), wanted)


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
@settings(max_examples=settings().max_examples // 40, deadline=None)
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
        out: Drawn = form(*there, draws.to(DEVICE), confidence=True)
        assert out.confidence is not None and out.confidence.dtype == torch.float32
        assert (out.confidence >= 0).all() and (out.confidence <= 1).all()
        wanted = law.gather(1, out.token_ids.cpu().unsqueeze(1)).squeeze(1).float()
        torch.testing.assert_close(out.confidence.cpu(), wanted, rtol=2e-4, atol=1e-6)
        without: Drawn = form(*there, draws.to(DEVICE))
        assert without.confidence is None
        assert torch.equal(out.token_ids, without.token_ids)
        assert out.columns.keys() == without.columns.keys()
        for name, values in without.columns.items():
            assert torch.equal(values, out.columns[name]), name
    plain = draw_tokens(logits, on_cpu, positions, draws)
    assert (plain.token_ids == out.token_ids.cpu()).float().mean() > 0.9


@pytest.mark.quick(1)
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
