"""The law of every sampling option, alone and mixed, against an independent numpy reference."""

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats

from batchgen.engine.sampling.processed_logits import process
from batchgen.engine.sampling.sampler import sample_fused, sample_tokens
from batchgen.engine.sampling.sampler_columns import (
    LOGPROBS,
    TOP_LOGPROB_IDS,
    TOP_LOGPROBS,
    requested_columns,
)
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.sampling.sampling_params import RequestParams
from tests.support.engine.sampled_rows import (
    INF,
    OPTIONS,
    OUTPUT,
    POSITION,
    PROMPT,
    STOP_IDS,
    any_params,
    build,
    mixed_params,
    numbers,
    row_of,
)

Array = npt.NDArray[np.float64]


def reference_law(logits: Array, params: RequestParams) -> Array:
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


@pytest.mark.quick(2, thorough=6)
@pytest.mark.parametrize("name", OPTIONS)
def test_the_law_of_each_option(name: str) -> None:
    params, count = OPTIONS[name], 6000
    logits = numbers(12, seed=1) * 1.5
    sampling = build([replace(params, seed=seed) for seed in range(count)])
    positions = torch.full((count,), POSITION)
    step = sample_tokens(logits.expand(count, -1), sampling, positions)
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
        params = [RequestParams(seed=int(s) + seed_step) for s in seeds]
        return sample_tokens(logits, build(params), places + place_step).token_ids[:, 0].numpy()

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
    step = sample_tokens(
        logits, build([RequestParams(seed=s) for s in seeds]), torch.zeros(6, dtype=torch.int64)
    )
    ids = step.token_ids[:, 0].tolist()
    assert len(set(ids[:5])) == 5
    assert ids[4] == ids[5], "-1 and 2⁶⁴ - 1 are the same 64 bits"


@pytest.mark.quick(2)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [12, 301, 40_000])
def test_a_mixed_batch_equals_each_row_alone_bit_for_bit(vocab: int, dtype: torch.dtype) -> None:
    params = mixed_params()
    logits = (numbers(len(params), vocab, seed=2) * 3).to(dtype)
    positions = torch.full((len(params),), POSITION)
    before = logits.clone()
    sampling = build(params)
    step = sample_tokens(logits, sampling, positions)
    assert torch.equal(logits, before), "the model's logits are not written to"
    assert step.num_tokens.tolist() == [1] * len(params)
    processed = process(logits, sampling, positions)
    for i, p in enumerate(params):
        one = slice(i, i + 1)
        alone = sample_tokens(logits[one], build([p]), positions[one])
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
    step = sample_tokens(logits, build(params), positions)
    order = np.random.default_rng(0).permutation(len(params))
    joined = SamplingInputs.concat([build(params[:5]), build(params[5:])])
    assert joined.params == tuple(params)
    again = sample_tokens(logits[order], joined.index_select(order), positions)
    assert torch.equal(again.token_ids, step.token_ids[order])


def test_logprobs_are_raw_or_processed_as_each_row_asks() -> None:
    base = RequestParams(temperature=0.5, top_k=4, logprobs=True, top_logprobs=6)
    params = [base, replace(base, logprobs_mode="processed")]
    logits = numbers(1, 9, seed=4).expand(2, -1)
    step = sample_tokens(logits, build(params), torch.full((2,), POSITION))
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
    assert requested_columns(RequestParams()) == ()
    assert requested_columns(RequestParams(logprobs=True)) == (LOGPROBS,)
    assert requested_columns(RequestParams(top_logprobs=4)) == (
        replace(TOP_LOGPROBS, tail_shape=(4,)),
        replace(TOP_LOGPROB_IDS, tail_shape=(4,)),
    )
    step = sample_tokens(torch.zeros(1, 8), build([RequestParams()]), torch.tensor([0]))
    assert step.columns == {}


@pytest.mark.parametrize(
    ("params", "processors"),
    [
        (RequestParams(temperature=0.7), [transformers.TemperatureLogitsWarper(0.7)]),
        (RequestParams(top_k=10), [transformers.TopKLogitsWarper(10)]),
        (RequestParams(top_p=0.8), [transformers.TopPLogitsWarper(0.8)]),
        (RequestParams(min_p=0.05), [transformers.MinPLogitsWarper(0.05)]),
        (
            RequestParams(repetition_penalty=1.3),
            [transformers.RepetitionPenaltyLogitsProcessor(1.3)],
        ),
        (
            RequestParams(min_new_tokens=5),
            [transformers.MinNewTokensLengthLogitsProcessor(len(PROMPT), 5, list(STOP_IDS), "cpu")],
        ),
        (
            RequestParams(
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
    params: RequestParams, processors: list[transformers.LogitsProcessor]
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


def test_append_advances_histories_as_if_built_anew() -> None:
    penalised = RequestParams(repetition_penalty=1.5, max_new_tokens=6)
    params = [penalised, RequestParams(max_new_tokens=50), replace(penalised, max_new_tokens=8)]
    sampling = build(params)
    assert sampling.history.shape == (3, len(PROMPT) + 8)
    assert (sampling.history[1] == -1).all()
    new = torch.tensor([[7, 8, 9], [1, 1, 1], [6, 6, 6]])
    added = sampling.append(new, torch.tensor([3, 3, 1]), torch.full((3,), POSITION))
    assert added is sampling, "in place: a copy of all histories every step would cost too much"
    assert torch.equal(added.history[:2], build(params, output=[*OUTPUT, 7, 8, 9]).history[:2])
    assert torch.equal(added.history[2], build(params, output=[*OUTPUT, 6]).history[2])


def test_append_ignores_tokens_past_the_end_of_a_row() -> None:
    sampling = build([RequestParams(frequency_penalty=1.0, max_new_tokens=4)])
    added = sampling.append(
        torch.tensor([[7, 8, 9]]), torch.tensor([3]), torch.tensor([POSITION])
    ).append(torch.tensor([[1]]), torch.tensor([1]), torch.tensor([POSITION + 3]))
    assert added.history.tolist() == [[*PROMPT, *OUTPUT, 7]]


def test_appending_to_picked_or_joined_rows_leaves_the_others_alone() -> None:
    params = [RequestParams(repetition_penalty=1.5, max_new_tokens=6)] * 2
    first, second = build(params), build(params)
    for other in (first.index_select(np.array([1, 0])), SamplingInputs.concat([first, second])):
        count = other.num_rows
        other.append(torch.full((count, 1), 9), torch.ones(count), torch.full((count,), POSITION))
        assert (other.history[:, POSITION] == 9).all()
    assert torch.equal(first.history, build(params).history)


def test_a_batch_without_penalties_keeps_no_history() -> None:
    sampling = build([RequestParams(), RequestParams(temperature=0)])
    assert sampling.history.shape == (2, 0)
    assert sampling.append(torch.zeros(2, 1), torch.ones(2), torch.zeros(2)) is sampling


def test_a_batch_with_nothing_to_do_is_not_copied() -> None:
    logits = numbers(2, 9)
    greedy = RequestParams(temperature=0, top_k=5, top_p=0.5)
    assert process(logits, build([RequestParams(), greedy]), torch.tensor([9, 9])) is logits


EDGES = [
    RequestParams(temperature=1e-5, logprobs=True, top_logprobs=5, logprobs_mode="processed"),
    RequestParams(temperature=1e-45, top_p=1e-45, min_p=1e-45, logprobs=True),
    RequestParams(temperature=1e300, top_k=1, logprobs=True, logprobs_mode="processed"),
    RequestParams(repetition_penalty=1e-300, logprobs=True, logprobs_mode="processed"),
    RequestParams(repetition_penalty=1e300, temperature=0.3, top_p=0.5, logprobs=True),
    RequestParams(min_new_tokens=200, top_logprobs=100, logprobs_mode="processed"),
    RequestParams(temperature=0, min_new_tokens=200, presence_penalty=2, logprobs=True),
    RequestParams(top_k=2**80, top_p=1.0, min_p=1.0, logprobs=True, logprobs_mode="processed"),
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
    step = sample_tokens(logits, sampling, positions)
    assert (logits.gather(1, step.token_ids) > -INF).all()
    assert (processed.gather(1, step.token_ids) > -INF).all()
    for i, params in enumerate(EDGES):
        assert not any(v.isnan().any() for v in row_of(step, i, params).values())


def test_a_vocabulary_of_stop_ids_lifts_the_ban() -> None:
    sampling = build([RequestParams(temperature=0, min_new_tokens=99)], stop_ids=(0, 1, 2))
    logits = torch.tensor([[0.0, 2.0, 1.0]])
    assert sample_tokens(logits, sampling, torch.tensor([POSITION])).token_ids.item() == 1


def test_the_ban_ends_at_the_position_of_min_new_tokens() -> None:
    params = [RequestParams(temperature=0, min_new_tokens=n) for n in (0, 1, 3, 4, 5)]
    logits = torch.tensor([0.0, 1.0, 9.0, 2.0, 3.0, 8.0]).expand(5, -1)
    step = sample_tokens(logits, build(params), torch.full((5,), POSITION))
    assert step.token_ids[:, 0].tolist() == [2, 2, 2, 4, 4]


@given(
    st.lists(any_params, min_size=1, max_size=5),
    st.integers(6, 20).flatmap(
        lambda n: st.lists(st.integers(-9, 9) | st.floats(-30, 30), min_size=n, max_size=n)
    ),
)
@settings(deadline=None)
def test_any_row_in_any_batch(params: list[RequestParams], values: list[float]) -> None:
    logits = torch.tensor(values, dtype=torch.float32).expand(len(params), -1)
    positions = torch.full((len(params),), POSITION)
    processed = process(logits, build(params), positions)
    step = sample_tokens(logits, build(params), positions)
    assert not processed.isnan().any()
    assert (processed.gather(1, step.token_ids) > -INF).all(), "always in the support"
    for i, p in enumerate(params):
        one = slice(i, i + 1)
        assert torch.equal(process(logits[one], build([p]), positions[one])[0], processed[i])
        alone = sample_tokens(logits[one], build([p]), positions[one])
        assert alone.token_ids.item() == step.token_ids[i].item()
        if p.greedy:
            assert step.token_ids[i, 0] == processed[i].argmax()


@pytest.mark.thorough
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
    expected = sample_tokens(logits, build(params), positions)
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
    step = sample_tokens(logits.cuda(), on_cuda, positions.cuda())
    expected = sample_tokens(logits, build(params), positions)
    assert torch.equal(step.token_ids.cpu(), expected.token_ids)
    for i, p in enumerate(params):
        for name, values in row_of(expected, i, p).items():
            found = row_of(step, i, p)[name].cpu()
            torch.testing.assert_close(found, values, rtol=1e-4, atol=1e-5)
    law = process(logits.cuda(), on_cuda, positions.cuda()).cpu()
    torch.testing.assert_close(law, process(logits, build(params), positions))
