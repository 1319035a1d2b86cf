"""The law of every sampling option, alone and mixed, against an independent numpy reference."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from forced_drafts import some_slow
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from batchgen.engine.base.outputs import HostCopy, StepOutput
from batchgen.engine.sampling.sampler import (
    LOGPROBS,
    TOP_LOGPROB_IDS,
    TOP_LOGPROBS,
    Drawn,
    draw,
    draw_fused,
    process,
    requested_columns,
    sample,
    sample_fused,
)
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.kernels.sampling import sampling as kernels
from batchgen.kernels.sampling.token_mask import TokenMask

CPU = torch.device("cpu")
INF = float("inf")
Array = npt.NDArray[np.float64]

PROMPT = [3, 1, 4, 1]
OUTPUT = [5, 3, 3]
STOP_IDS = (2, 5)
POSITION = len(PROMPT) + len(OUTPUT)

OPTIONS = {
    "plain": SamplingParams(),
    "greedy": SamplingParams(temperature=0, top_k=2, top_p=0.1, min_p=0.9),
    "cold": SamplingParams(temperature=0.5),
    "hot": SamplingParams(temperature=1.7),
    "top_k": SamplingParams(top_k=3),
    "top_k of all": SamplingParams(top_k=1000),
    "top_p": SamplingParams(top_p=0.7),
    "min_p": SamplingParams(min_p=0.15),
    "repetition": SamplingParams(repetition_penalty=1.8),
    "presence": SamplingParams(presence_penalty=1.1),
    "frequency": SamplingParams(frequency_penalty=-0.9),
    "banned stop": SamplingParams(min_new_tokens=4),
    "stop allowed again": SamplingParams(min_new_tokens=3),
    "greedy with penalties": SamplingParams(
        temperature=0, repetition_penalty=3.0, frequency_penalty=1.5, min_new_tokens=9
    ),
    "everything": SamplingParams(
        temperature=0.8,
        top_k=6,
        top_p=0.9,
        min_p=0.02,
        repetition_penalty=1.2,
        presence_penalty=0.3,
        frequency_penalty=0.4,
        min_new_tokens=4,
    ),
}


def build(
    params: Sequence[SamplingParams],
    prompt: Sequence[int] = PROMPT,
    output: Sequence[int] = OUTPUT,
    stop_ids: Sequence[int] = STOP_IDS,
    device: torch.device = CPU,
) -> SamplingInputs:
    count = len(params)
    return SamplingInputs.build(
        params,
        [len(prompt)] * count,
        [[*prompt, *output]] * count,
        [stop_ids] * count,
        [len(prompt) + p.max_new_tokens for p in params],
        device,
    )


def numbers(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).normal(size=shape)).float()


def reference_law(logits: Array, params: SamplingParams) -> Array:
    """The probabilities, one rule after another, by sorting and loops."""
    logits = logits.copy()
    for token in set(PROMPT + OUTPUT):
        scale = params.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        count = OUTPUT.count(token)
        logits[token] -= params.frequency_penalty * count + params.presence_penalty * (count > 0)
    if len(OUTPUT) < params.min_new_tokens:
        logits[list(STOP_IDS)] = -INF
    if params.temperature == 0:
        point: Array = np.eye(len(logits))[int(logits.argmax())]
        return point
    probs = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-probs)
    if params.top_k:
        probs[order[params.top_k :]] = 0
    probs /= probs.sum()
    kept, mass = np.zeros_like(probs), 0.0
    for token in order:
        if mass >= params.top_p:
            break
        kept[token] = probs[token]
        mass += probs[token]
    kept[kept < params.min_p * kept.max()] = 0
    total: Array = kept / kept.sum()
    return total


# --- laws -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", OPTIONS)
def test_the_law_of_each_option(name: str) -> None:
    params, count = OPTIONS[name], 6000
    logits = numbers(12, seed=1) * 1.5
    sampling = build([replace(params, seed=seed) for seed in range(count)])
    positions = torch.full((count,), POSITION)
    step = sample(logits.expand(count, -1), sampling, positions)
    probs = reference_law(logits.double().numpy(), params)
    counts = np.bincount(step.token_ids[:, 0].numpy(), minlength=len(probs))
    support = probs > 0
    assert counts[~support].sum() == 0
    if support.sum() > 1:
        assert stats.chisquare(counts[support], probs[support] * count).pvalue > 1e-3
    processed = process(logits.unsqueeze(0), build([params]), torch.tensor([POSITION]))
    if not params.greedy:
        np.testing.assert_allclose(processed.softmax(-1)[0].numpy(), probs, rtol=1e-4, atol=1e-7)


def test_seeds_reproduce_and_neighbours_are_independent() -> None:
    count, vocab = 8000, 4
    logits = torch.zeros(count, vocab)
    seeds, places = torch.arange(count) // 100, torch.arange(count) % 100

    def tokens(seed_step: int, place_step: int) -> npt.NDArray[np.int64]:
        params = [SamplingParams(seed=int(s) + seed_step) for s in seeds]
        return sample(logits, build(params), places + place_step).token_ids[:, 0].numpy()

    first = tokens(0, 0)
    assert (tokens(0, 0) == first).all()
    assert (tokens(1, 0)[:-100] == first[100:]).all(), "a row is its seed, wherever it stands"
    for other in (tokens(1, 0), tokens(0, 1), tokens(2**32, 0)):
        table = np.zeros((vocab, vocab))
        np.add.at(table, (first, other), 1)
        assert stats.chi2_contingency(table).pvalue > 1e-3
        assert stats.chisquare(table.flatten()).pvalue > 1e-3


def test_seeds_use_all_64_bits() -> None:
    seeds = [0, 1, 2**32, 2**63, 2**64 - 1, -1]
    logits = torch.zeros(len(seeds), 50_000)
    step = sample(
        logits, build([SamplingParams(seed=s) for s in seeds]), torch.zeros(6, dtype=torch.int64)
    )
    ids = step.token_ids[:, 0].tolist()
    assert len(set(ids[:5])) == 5
    assert ids[4] == ids[5], "-1 and 2⁶⁴ - 1 are the same 64 bits"


# --- one batch of everything ----------------------------------------------------------------------


def mixed_params() -> list[SamplingParams]:
    params = [replace(p, seed=1000 + i) for i, p in enumerate(OPTIONS.values())]
    asks: tuple[dict[str, Any], ...] = (
        {"logprobs": True},
        {},
        {"logprobs": True, "top_logprobs": 3, "logprobs_mode": "processed"},
        {"top_logprobs": 7},
        {"logprobs": True, "logprobs_mode": "processed"},
        {"logprobs": True, "top_logprobs": 40},
    )
    return [
        replace(p, **asks[(i + turn) % len(asks)], seed=p.seed + 100 * turn)
        for turn in range(2)
        for i, p in enumerate(params)
    ]


def row_of(step: StepOutput, i: int, params: SamplingParams) -> dict[str, torch.Tensor]:
    """What row i asked for, each column cut to its own shape."""
    out = {"token_ids": step.token_ids[i]}
    for column in requested_columns(params):
        values = step.columns[column.name][i]
        out[column.name] = values[(slice(None), *(slice(n) for n in column.tail_shape))]
    return out


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [12, 301, 40_000])
def test_a_mixed_batch_equals_each_row_alone_bit_for_bit(vocab: int, dtype: torch.dtype) -> None:
    params = mixed_params()
    logits = (numbers(len(params), vocab, seed=2) * 3).to(dtype)
    positions = torch.full((len(params),), POSITION)
    before = logits.clone()
    sampling = build(params)
    step = sample(logits, sampling, positions)
    assert torch.equal(logits, before), "the model's logits are not written to"
    assert step.num_tokens.tolist() == [1] * len(params)
    processed = process(logits, sampling, positions)
    for i, p in enumerate(params):
        one = slice(i, i + 1)
        alone = sample(logits[one], build([p]), positions[one])
        assert torch.equal(process(logits[one], build([p]), positions[one])[0], processed[i])
        wanted = row_of(step, i, p)
        assert set(alone.columns) == set(wanted) - {"token_ids"}, "only what is asked for"
        for name, values in row_of(alone, 0, p).items():
            assert torch.equal(values, wanted[name]), (name, p)
            assert not values.isnan().any()


def test_rows_keep_their_results_when_reordered_and_joined() -> None:
    params = mixed_params()
    logits = numbers(len(params), 60, seed=3) * 3
    positions = torch.full((len(params),), POSITION)
    step = sample(logits, build(params), positions)
    order = np.random.default_rng(0).permutation(len(params))
    joined = SamplingInputs.concat([build(params[:5]), build(params[5:])])
    assert joined.params == tuple(params)
    again = sample(logits[order], joined.index_select(order), positions)
    assert torch.equal(again.token_ids, step.token_ids[order])


def test_logprobs_are_raw_or_processed_as_each_row_asks() -> None:
    base = SamplingParams(temperature=0.5, top_k=4, logprobs=True, top_logprobs=6)
    params = [base, replace(base, logprobs_mode="processed")]
    logits = numbers(1, 9, seed=4).expand(2, -1)
    step = sample(logits, build(params), torch.full((2,), POSITION))
    assert torch.equal(step.token_ids[0], step.token_ids[1])
    raw = logits[0].log_softmax(-1)
    kept = raw.topk(4)
    scaled = torch.full((9,), -INF)
    scaled[kept.indices] = (logits[0][kept.indices] / 0.5).log_softmax(-1)
    token = step.token_ids[0, 0]
    for i, law in enumerate((raw, scaled)):
        assert step.columns["logprobs"][i, 0].item() == pytest.approx(law[token].item(), abs=1e-5)
        torch.testing.assert_close(step.columns["top_logprobs"][i, 0], law.topk(6).values)
    assert step.columns["top_logprob_ids"][0, 0].tolist() == raw.topk(6).indices.tolist()
    assert step.columns["top_logprob_ids"][1, 0].tolist() == [*kept.indices.tolist(), -1, -1]


def test_requested_columns_have_the_rows_own_width() -> None:
    assert requested_columns(SamplingParams()) == ()
    assert requested_columns(SamplingParams(logprobs=True)) == (LOGPROBS,)
    assert requested_columns(SamplingParams(top_logprobs=4)) == (
        replace(TOP_LOGPROBS, tail_shape=(4,)),
        replace(TOP_LOGPROB_IDS, tail_shape=(4,)),
    )
    step = sample(torch.zeros(1, 8), build([SamplingParams()]), torch.tensor([0]))
    assert step.columns == {}


# --- parity with transformers ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (SamplingParams(temperature=0.7), [transformers.TemperatureLogitsWarper(0.7)]),
        (SamplingParams(top_k=10), [transformers.TopKLogitsWarper(10)]),
        (SamplingParams(top_p=0.8), [transformers.TopPLogitsWarper(0.8)]),
        (SamplingParams(min_p=0.05), [transformers.MinPLogitsWarper(0.05)]),
        (
            SamplingParams(repetition_penalty=1.3),
            [transformers.RepetitionPenaltyLogitsProcessor(1.3)],
        ),
        (
            SamplingParams(min_new_tokens=5),
            [transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, list(STOP_IDS), "cpu")],
        ),
        (
            SamplingParams(
                temperature=0.7, top_k=50, top_p=0.9, repetition_penalty=1.1, min_new_tokens=5
            ),
            [
                transformers.RepetitionPenaltyLogitsProcessor(1.1),
                transformers.MinNewTokensLengthLogitsProcessor(
                    len(PROMPT), 5, list(STOP_IDS), "cpu"
                ),
                transformers.TemperatureLogitsWarper(0.7),
                transformers.TopKLogitsWarper(50),
                transformers.TopPLogitsWarper(0.9),
            ],
        ),
    ],
)
def test_parity_with_transformers(
    params: SamplingParams, processors: list[transformers.LogitsProcessor]
) -> None:
    count = 40
    logits = numbers(count, 500, seed=6) * 4
    ids = torch.tensor([PROMPT + OUTPUT] * count)
    expected = logits.clone()
    for processor in processors:
        expected = processor(ids, expected)
    out = process(logits, build([params] * count), torch.full((count,), POSITION))
    assert torch.equal(out == -INF, expected == -INF)
    torch.testing.assert_close(out.softmax(-1), expected.softmax(-1), rtol=1e-4, atol=1e-8)


# --- histories ------------------------------------------------------------------------------------


def test_append_advances_histories_as_if_built_anew() -> None:
    penalised = SamplingParams(repetition_penalty=1.5, max_new_tokens=6)
    params = [penalised, SamplingParams(max_new_tokens=50), replace(penalised, max_new_tokens=8)]
    sampling = build(params)
    assert sampling.history.shape == (3, len(PROMPT) + 8)
    assert (sampling.history[1] == -1).all()
    new = torch.tensor([[7, 8, 9], [1, 1, 1], [6, 6, 6]])
    added = sampling.append(new, torch.tensor([3, 3, 1]), torch.full((3,), POSITION))
    assert added is sampling, "in place: a copy of all histories every step would cost too much"
    assert torch.equal(added.history[:2], build(params, output=[*OUTPUT, 7, 8, 9]).history[:2])
    assert torch.equal(added.history[2], build(params, output=[*OUTPUT, 6]).history[2])


def test_append_ignores_tokens_past_the_end_of_a_row() -> None:
    sampling = build([SamplingParams(frequency_penalty=1.0, max_new_tokens=4)])
    added = sampling.append(
        torch.tensor([[7, 8, 9]]), torch.tensor([3]), torch.tensor([POSITION])
    ).append(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([POSITION + 3]))
    assert added.history.tolist() == [[*PROMPT, *OUTPUT, 7]]


def test_appending_to_picked_or_joined_rows_leaves_the_others_alone() -> None:
    params = [SamplingParams(repetition_penalty=1.5, max_new_tokens=6)] * 2
    first, second = build(params), build(params)
    for other in (first.index_select(np.array([1, 0])), SamplingInputs.concat([first, second])):
        count = other.num_rows
        other.append(torch.full((count, 1), 9), torch.ones(count), torch.full((count,), POSITION))
        assert (other.history[:, POSITION] == 9).all()
    assert torch.equal(first.history, build(params).history)


def test_a_batch_without_penalties_keeps_no_history() -> None:
    sampling = build([SamplingParams(), SamplingParams(temperature=0)])
    assert sampling.history.shape == (2, 0)
    assert sampling.append(torch.zeros(2, 1), torch.ones(2), torch.zeros(2)) is sampling


def test_a_batch_with_nothing_to_do_is_not_copied() -> None:
    logits = numbers(2, 9)
    greedy = SamplingParams(temperature=0, top_k=5, top_p=0.5)
    assert process(logits, build([SamplingParams(), greedy]), torch.tensor([9, 9])) is logits


# --- edges ----------------------------------------------------------------------------------------

EDGES = [
    SamplingParams(temperature=1e-5, logprobs=True, top_logprobs=5, logprobs_mode="processed"),
    SamplingParams(temperature=1e-45, top_p=1e-45, min_p=1e-45, logprobs=True),
    SamplingParams(temperature=1e300, top_k=1, logprobs=True, logprobs_mode="processed"),
    SamplingParams(repetition_penalty=1e-300, logprobs=True, logprobs_mode="processed"),
    SamplingParams(repetition_penalty=1e300, temperature=0.3, top_p=0.5, logprobs=True),
    SamplingParams(min_new_tokens=200, top_logprobs=100, logprobs_mode="processed"),
    SamplingParams(temperature=0, min_new_tokens=200, presence_penalty=2, logprobs=True),
    SamplingParams(top_k=2**80, top_p=1.0, min_p=1.0, logprobs=True, logprobs_mode="processed"),
]


@pytest.mark.parametrize("scale", [0.0, 1.0, 1e4, 1e30, 3e37])
@pytest.mark.parametrize("vocab", [1, 2, 6, 200])
def test_no_nan_and_no_masked_token_at_extremes(vocab: int, scale: float) -> None:
    logits = numbers(len(EDGES), vocab, seed=8) * scale
    logits[:, 1::7] = -INF
    sampling = build(EDGES, prompt=[0], output=[vocab - 1], stop_ids=(*range(min(vocab, 6)), 500))
    positions = torch.full((len(EDGES),), 2)
    processed = process(logits, sampling, positions)
    assert not processed.isnan().any()
    assert (processed > -INF).any(-1).all()
    step = sample(logits, sampling, positions)
    assert (logits.gather(1, step.token_ids) > -INF).all()
    assert (processed.gather(1, step.token_ids) > -INF).all()
    for i, params in enumerate(EDGES):
        assert not any(v.isnan().any() for v in row_of(step, i, params).values())


def test_a_vocabulary_of_stop_ids_lifts_the_ban() -> None:
    sampling = build([SamplingParams(temperature=0, min_new_tokens=99)], stop_ids=(0, 1, 2))
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert sample(logits, sampling, torch.tensor([POSITION])).token_ids.item() == 1


def test_the_ban_ends_at_the_position_of_min_new_tokens() -> None:
    params = [SamplingParams(temperature=0, min_new_tokens=n) for n in (0, 1, 3, 4, 5)]
    logits = torch.tensor([0.0, 1.0, 9.0, 2.0, 3.0, 8.0]).expand(5, -1)
    step = sample(logits, build(params), torch.full((5,), POSITION))
    assert step.token_ids[:, 0].tolist() == [2, 2, 2, 4, 4]


probability = st.floats(2**-10, 1, width=32)
any_params = st.builds(
    SamplingParams,
    temperature=st.one_of(st.just(0.0), st.just(1.0), st.floats(1e-5, 100)),
    top_k=st.integers(0, 9),
    top_p=st.one_of(st.just(1.0), probability),
    min_p=st.one_of(st.just(0.0), probability),
    repetition_penalty=st.one_of(st.just(1.0), st.floats(0.1, 10)),
    presence_penalty=st.floats(-2, 2),
    frequency_penalty=st.floats(-2, 2),
    min_new_tokens=st.integers(0, 6),
    seed=st.integers(-(2**63), 2**64 - 1),
)


@given(
    st.lists(any_params, min_size=1, max_size=5),
    st.integers(6, 20).flatmap(
        lambda n: st.lists(st.integers(-9, 9) | st.floats(-30, 30), min_size=n, max_size=n)
    ),
)
@settings(deadline=None)
def test_any_row_in_any_batch(params: list[SamplingParams], values: list[float]) -> None:
    logits = torch.tensor(values, dtype=torch.float32).expand(len(params), -1)
    positions = torch.full((len(params),), POSITION)
    processed = process(logits, build(params), positions)
    step = sample(logits, build(params), positions)
    assert not processed.isnan().any()
    assert (processed.gather(1, step.token_ids) > -INF).all(), "always in the support"
    for i, p in enumerate(params):
        one = slice(i, i + 1)
        assert torch.equal(process(logits[one], build([p]), positions[one])[0], processed[i])
        alone = sample(logits[one], build([p]), positions[one])
        assert alone.token_ids.item() == step.token_ids[i].item()
        if p.greedy:
            assert step.token_ids[i, 0] == processed[i].argmax()


# --- masks ----------------------------------------------------------------------------------------

Draw = Callable[..., Drawn]
BOTH = pytest.mark.parametrize("run", [draw, draw_fused])


def mask_of(
    allowed: torch.Tensor, constrained: torch.Tensor | None = None, device: torch.device = CPU
) -> TokenMask:
    """A line of bits for each row of allowed [R, V], of which only constrained rows have one."""
    rows, vocab = allowed.shape
    bits = np.zeros((rows, -(-vocab // 32) * 32), dtype=np.bool_)
    bits[:, :vocab] = allowed.numpy()
    words = np.packbits(bits, axis=1, bitorder="little").view("<i4").astype(np.int32)
    lines = torch.arange(rows, dtype=torch.int32)
    if constrained is not None:
        lines = torch.where(constrained, lines, -1)
    return TokenMask(torch.from_numpy(words).to(device), lines.to(device))


def drawn_by(
    run: Draw,
    logits: torch.Tensor,
    params: Sequence[SamplingParams],
    mask: TokenMask | None = None,
) -> Drawn:
    """On a GPU, if there is one, for the kernels; always on the CPU for the reference."""
    device = torch.device("cuda" if run is draw_fused and torch.cuda.is_available() else "cpu")
    if mask is not None:
        mask = TokenMask(mask.bits.to(device), mask.lines.to(device))
    positions = torch.full((len(params),), POSITION, device=device)
    out = run(
        logits.to(device), build(params, device=device), positions, confidence=True, mask=mask
    )
    assert out.confidence is not None
    return Drawn(
        out.token_ids.cpu(),
        out.failed.cpu(),
        {name: values.cpu() for name, values in out.columns.items()},
        out.confidence.cpu(),
        None if out.conflict is None else out.conflict.cpu(),
    )


@pytest.mark.parametrize(
    ("dtype", "penalised", "run"),
    some_slow(
        itertools.product([torch.float32, torch.bfloat16], [True, False], [draw, draw_fused]),
        quick=[
            (torch.float32, True, draw),
            (torch.float32, True, draw_fused),
            (torch.bfloat16, False, draw),
        ],
    ),
)
def test_a_mask_is_as_if_the_model_excluded_the_tokens(
    run: Draw, dtype: torch.dtype, penalised: bool
) -> None:
    params = mixed_params()[: len(OPTIONS)]
    if not penalised:  # the mask then is the first to make a copy
        params = [p for p in params if not (p.has_penalties or p.min_new_tokens)]
    count, vocab = len(params), 301
    rng = np.random.default_rng(5)
    logits = (numbers(count, vocab, seed=11) * 3).to(dtype)
    density = rng.choice([0.02, 0.6], (count, 1))
    allowed = torch.from_numpy(rng.random((count, vocab)) < density)
    allowed[:, 40] = True
    constrained = torch.arange(count) % 5 > 0
    excluded = logits.masked_fill(~allowed & constrained.unsqueeze(1), -INF)
    before = logits.clone()
    found = drawn_by(run, logits, params, mask_of(allowed, constrained))
    assert torch.equal(logits, before), "the model's logits are not written to"
    expected = drawn_by(run, excluded, params)
    assert torch.equal(found.token_ids, expected.token_ids)
    assert found.confidence is not None and expected.confidence is not None
    assert torch.equal(found.confidence, expected.confidence)
    assert expected.conflict is None and found.conflict is not None
    assert not found.conflict.any() and not found.failed.any()
    # Raw log-probabilities are the model's own, processed ones those of what the mask left.
    raw = kernels.logprobs_of(logits, found.token_ids)
    ids, values = kernels.top_logprobs(logits, 40)
    own = {"logprobs": raw, "top_logprob_ids": ids, "top_logprobs": values}
    for i, p in enumerate(params):
        wanted = expected.columns if p.logprobs_mode == "processed" else own
        for column in requested_columns(p):
            tail = tuple(slice(n) for n in column.tail_shape)
            torch.testing.assert_close(
                found.columns[column.name][i][tail],
                wanted[column.name][i][tail],
                rtol=1e-5,
                atol=2e-5,
            )


def test_the_processed_law_is_renormalised_and_never_the_models_own_tensor() -> None:
    logits = torch.tensor([[1.0, 4.0, 2.0, 3.0]] * 2)
    allowed = torch.tensor([[True, False, True, False]] * 2)
    mask = mask_of(allowed, torch.tensor([True, False]))
    law = process(logits, build([SamplingParams()] * 2), torch.tensor([9, 9]), mask=mask)
    assert law.tolist() == [[1.0, -INF, 2.0, -INF], [1.0, 4.0, 2.0, 3.0]]
    assert logits[0, 1] == 4.0
    narrow = build([SamplingParams(top_k=1), SamplingParams(top_p=0.01)])
    law = process(logits, narrow, torch.tensor([9, 9]), mask=mask_of(allowed))
    assert (law > -INF).tolist() == [[False, False, True, False]] * 2, "filters come after the mask"
    asks = SamplingParams(logprobs=True, logprobs_mode="processed", seed=3)
    step = sample(logits[:1], build([asks]), torch.tensor([9]), mask=mask_of(allowed[:1]))
    values = logits[0].masked_fill(~allowed[0], -INF).log_softmax(0)
    torch.testing.assert_close(step.columns["logprobs"][0], values[step.token_ids[0]])


@pytest.mark.parametrize("run", [sample, sample_fused])
def test_rows_whose_mask_leaves_nothing_are_in_conflict_and_others_as_without_them(
    run: Callable[..., StepOutput],
) -> None:
    params = mixed_params()[: len(OPTIONS)]
    count, vocab = len(params), 301
    device = torch.device("cuda" if run is sample_fused and torch.cuda.is_available() else "cpu")
    logits = numbers(count, vocab, seed=12) * 3
    allowed = torch.from_numpy(np.random.default_rng(6).random((count, vocab)) < 0.3)
    allowed[:, 40:42] = True
    constrained = torch.ones(count, dtype=torch.bool)
    constrained[::4] = False
    positions, sampling = (
        torch.full((count,), POSITION, device=device),
        build(params, device=device),
    )

    def step_of(logits: torch.Tensor, allowed: torch.Tensor) -> StepOutput:
        mask = mask_of(allowed, constrained, device)
        return run(logits.to(device), sampling, positions, mask=mask)

    expected = step_of(logits, allowed)
    some, none = torch.arange(count) % 2 == 1, allowed.clone()
    none[some & (torch.arange(count) > 4)] = False
    broken = logits.clone()
    broken[1, allowed[1]] = -INF  # allowed, but not by the model
    broken[2, ~allowed[2]] = float("nan")  # not allowed, but no numbers
    broken[4, 7] = float("nan")
    broken[7, 7] = INF
    broken[9] = -INF
    step = step_of(broken, none)
    failed, conflict = {2, 4, 7, 9}, set(range(1, count, 2)) - {3, 7, 9}
    assert set(step.failed.nonzero().flatten().tolist()) == failed
    assert step.conflicts is not None
    assert set(step.conflicts.nonzero().flatten().tolist()) == conflict
    assert ((step.token_ids >= 0) & (step.token_ids < vocab)).all(), "the next forward reads them"
    for i, p in enumerate(params):
        assert step.num_tokens[i].item() == (i not in failed | conflict)
        if i not in failed | conflict:
            for name, values in row_of(expected, i, p).items():
                assert torch.equal(row_of(step, i, p)[name], values)


@BOTH
def test_a_ban_and_a_mask_that_leave_nothing_together_are_a_conflict(run: Draw) -> None:
    banned = SamplingParams(temperature=0, min_new_tokens=4)
    params = [banned, replace(banned, min_new_tokens=3), banned, banned]
    logits = numbers(4, 40, seed=13)
    only_stops = torch.tensor(STOP_IDS)
    allowed = torch.zeros(4, 40, dtype=torch.bool)
    allowed[:, only_stops] = True
    allowed[2, 30] = True
    logits[3] = logits[3].masked_fill(~allowed[3], -INF)  # the ban is void here
    out = drawn_by(run, logits, params, mask_of(allowed))
    assert out.conflict is not None
    assert out.conflict.tolist() == [True, False, False, False]
    assert not out.failed.any()
    best = only_stops[logits[:, only_stops].argmax(1)]
    assert out.token_ids[1:].tolist() == [best[1], 30, best[3]]


def test_conflicts_reach_the_host_with_their_rows() -> None:
    allowed = torch.tensor([[True, False], [False, False], [False, True]])
    sampling, positions = build([SamplingParams()] * 3, stop_ids=()), torch.full((3,), POSITION)
    step = sample(torch.zeros(3, 2), sampling, positions, mask=mask_of(allowed))
    host = HostCopy(step.index_select(np.array([2, 1]))).wait()
    assert host.conflicts is not None and host.conflicts.tolist() == [False, True]
    assert host.num_tokens.tolist() == [1, 0] and host.token_ids[0].tolist() == [1]
    assert set(host.columns) == set(step.columns)
    step = sample(torch.zeros(3, 2), sampling, positions)
    assert step.conflicts is None and step.index_select(np.array([0])).conflicts is None
    assert HostCopy(step).wait().conflicts is None


@BOTH
@given(
    st.lists(any_params, min_size=1, max_size=4),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.02, 0.3, 0.9]),
)
@settings(max_examples=settings().max_examples // 10, deadline=None)
def test_any_masked_row_takes_an_allowed_token_or_is_in_conflict(
    run: Draw, params: list[SamplingParams], seed: int, density: float
) -> None:
    rng, vocab = np.random.default_rng(seed), 45
    count = len(params)
    logits = torch.tensor(rng.normal(size=(count, vocab)) * 9).float()
    logits[torch.from_numpy(rng.random((count, vocab)) < 0.2)] = -INF
    logits[:, 44] = 0.0
    allowed = torch.from_numpy(rng.random((count, vocab)) < density)
    constrained = torch.from_numpy(rng.random(count) < 0.7)
    out = drawn_by(run, logits, params, mask_of(allowed, constrained))
    left = (logits > -INF) & (allowed | ~constrained.unsqueeze(1))
    banned = torch.tensor([p.min_new_tokens > len(OUTPUT) for p in params])
    for token in STOP_IDS:  # never void: token 44 is left to the ban
        left[:, token] &= ~banned
    assert out.conflict is not None
    assert out.conflict.tolist() == (~left.any(1)).tolist()
    taken = left.gather(1, out.token_ids.unsqueeze(1)).squeeze(1)
    assert (taken | out.conflict).all() and not out.failed.any()


@pytest.mark.gpu
@pytest.mark.parametrize("masked", [False, True])
def test_on_a_gpu_nothing_waits_for_the_device(masked: bool) -> None:
    params = mixed_params()
    count, device = len(params), torch.device("cuda")
    logits = torch.randn(count, 500, dtype=torch.bfloat16, device=device)
    positions = torch.full((count,), POSITION, device=device)
    allowed = torch.from_numpy(np.random.default_rng(7).random((count, 500)) < 0.2)
    mask = mask_of(allowed, device=device) if masked else None
    for _ in range(2):  # kernels are compiled, and loaded, the first time
        torch.cuda.set_sync_debug_mode("error")
        try:
            sampling = build(params, device=device)
            step = sample(logits, sampling, positions, mask=mask)
            sampling.append(step.token_ids, step.num_tokens, positions)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert step.columns["top_logprobs"].shape == (count, 1, 40)


@pytest.mark.parametrize(
    ("dtype", "turn"),
    [
        (torch.float32, 0),
        (torch.bfloat16, 1),
        pytest.param(torch.float32, 1, marks=pytest.mark.slow),
        pytest.param(torch.bfloat16, 0, marks=pytest.mark.slow),
    ],
)
def test_the_fused_kernels_sample_what_the_reference_samples(dtype: torch.dtype, turn: int) -> None:
    """Every option in each turn, with other columns."""
    params = mixed_params()[turn * len(OPTIONS) :][: len(OPTIONS)]
    count = len(params)
    logits = (numbers(count, 700, seed=9) * 3).to(dtype)
    logits[5, 699] = float("nan")
    logits[6] = -INF
    positions = torch.full((count,), POSITION)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sampling = build(params, device=torch.device(device))
    step = sample_fused(logits.to(device), sampling, positions.to(device))
    expected = sample(logits, build(params), positions)
    assert step.failed.nonzero().squeeze(1).tolist() == [5, 6]
    assert torch.equal(step.num_tokens.cpu(), expected.num_tokens)
    assert step.columns.keys() == expected.columns.keys()
    for i, p in enumerate(params):
        if i in (5, 6):
            continue
        assert torch.equal(step.token_ids[i].cpu(), expected.token_ids[i])
        for name, values in row_of(expected, i, p).items():
            found = row_of(step, i, p)[name].cpu()
            torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
def test_cuda_samples_what_the_cpu_samples() -> None:
    params = mixed_params()
    count = len(params)
    logits = numbers(count, 5000, seed=9) * 3
    positions = torch.full((count,), POSITION)
    on_cuda = build(params, device=torch.device("cuda"))
    step = sample(logits.cuda(), on_cuda, positions.cuda())
    expected = sample(logits, build(params), positions)
    assert torch.equal(step.token_ids.cpu(), expected.token_ids)
    for i, p in enumerate(params):
        for name, values in row_of(expected, i, p).items():
            found = row_of(step, i, p)[name].cpu()
            torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-5)
    law = process(logits.cuda(), on_cuda, positions.cuda()).cpu()
    torch.testing.assert_close(law, process(logits, build(params), positions))
