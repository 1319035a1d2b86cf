"""Rejection sampling in the engine: greedy rows equal those of `ar`, and sampled ones in law."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.admission import LengthPredictor
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.cases import some_slow
from tests.support.engine.engine_rows import beside, block_bytes, weights
from tests.support.engine.toy_mtp import with_head

VOCAB = 12
COUNT = 1600
SIZES = {"vocab_size": VOCAB, "num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48}
CONFIG = EngineConfig(max_num_seqs=512, max_model_len=100, kv_cache_gib=0.02, overlap=False)
Request = tuple[list[int], RequestParams]
Models = Mapping[str, CausalLM]


@pytest.fixture(scope="module")
def tiny_models(tiny_model: Callable[..., Path]) -> Models:
    """The model, which has a head, and drafts whose laws are the same, close to it and far."""
    folder = tiny_model("llama", **SIZES)
    model, close = with_head(folder), load(folder)
    generator = torch.Generator().manual_seed(0)
    for weight in weights(close).values():
        weight.add_(torch.empty_like(weight).normal_(0, 0.04, generator=generator))
    far = load(tiny_model("qwen3", **(SIZES | {"num_hidden_layers": 1})))
    return {"model": model, "itself": model, "close": close, "far": far}


def load(folder: Path) -> CausalLM:
    return load_model(folder, device=torch.device("cpu"), dtype=torch.float32)


def make_engine(
    tiny_models: Models, strategy: Strategy, config: EngineConfig, draft: str | None
) -> LLMEngine:
    drafter = None if draft is None else tiny_models[draft]
    return LLMEngine(tiny_models["model"], None, (), strategy, config, others=beside(drafter))


def rejecting(k: int = 3) -> ARSpecStrategy:
    return ARSpecStrategy("draft", k, "rejection", adaptive=False)


def rejecting_engine(
    tiny_models: Models, config: EngineConfig, draft: str, k: int = 3
) -> LLMEngine:
    """An engine whose drafts are those of another model, or of the model's own head."""
    if draft == "head":
        strategy = ARSpecStrategy("mtp", k, "rejection", adaptive=False)
        return make_engine(tiny_models, strategy, config, None)
    return make_engine(tiny_models, rejecting(k), config, draft)


def run(engine: LLMEngine, requests: Sequence[Request]) -> list[RequestOutput]:
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    engine.scheduler.block_manager.check_integrity([])
    assert engine.scheduler.block_manager.usage == 0
    return [outputs[str(i)] for i in range(len(requests))]


# --- the law --------------------------------------------------------------------------------------

LAWS: dict[str, dict[str, Any]] = {
    "plain": {},
    "filtered": {"temperature": 1.5, "top_k": 6, "top_p": 0.85},
    "penalised": {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "min_p": 0.02},
}


def samples(first_seed: int, **options: Any) -> list[Request]:
    """Many samples of one prompt, which holds n-grams that come again."""
    params = RequestParams(max_new_tokens=6, **options)
    seeds = range(first_seed, first_seed + COUNT)
    return [([3, 4, 5, 3, 4], replace(params, seed=seed * 7919)) for seed in seeds]


@pytest.fixture(scope="module")
def ar_tokens(tiny_models: Models) -> Callable[[str], list[list[int]]]:
    """`ar_tokens(law)` → those of `ar`, with seeds of its own."""

    @functools.cache
    def run_ar(law: str) -> list[list[int]]:
        engine = make_engine(tiny_models, ARStrategy(), CONFIG, None)
        return [output.token_ids for output in run(engine, samples(10**6, **LAWS[law]))]

    return run_ar


DRAFTS = ("itself", "close", "far", "head")


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("draft", "law"),
    some_slow(
        itertools.product(DRAFTS, LAWS),
        quick=[("itself", "penalised"), ("close", "filtered"), ("far", "plain")],
    ),
)
def test_the_tokens_have_the_law_of_ar(
    tiny_models: Models, ar_tokens: Callable[[str], list[list[int]]], draft: str, law: str
) -> None:
    outputs = run(rejecting_engine(tiny_models, CONFIG, draft), samples(0, **LAWS[law]))
    expected = ar_tokens(law)
    # Pairs of neighbours: the first drafts of a step, those after them, and across steps.
    for start in range(5):
        ours = Counter(tuple(output.token_ids[start : start + 2]) for output in outputs)
        theirs = Counter(tuple(token_ids[start : start + 2]) for token_ids in expected)
        assert_same_law(ours, theirs)
    held = sum(output.counts["num_accepted_tokens"] for output in outputs)
    offered = sum(output.counts["num_draft_tokens"] for output in outputs)
    # Not all or nothing, or little was tried; drafts of the model itself hold always.
    assert held == offered if draft == "itself" else 0.03 * offered < held < 0.97 * offered


def assert_same_law(ours: Counter[tuple[int, ...]], theirs: Counter[tuple[int, ...]]) -> None:
    """Chi-square of two samples; cells of few are one."""
    cells = ours.keys() | theirs.keys()
    table = np.array([[ours[cell], theirs[cell]] for cell in cells])
    few = table.sum(1) < 20
    table = np.vstack([table[~few], table[few].sum(0, keepdims=True)])
    table = table[table.sum(1) > 0]
    assert len(table) > 5
    assert stats.chi2_contingency(table).pvalue > 1e-4


# --- each row its own -----------------------------------------------------------------------------


def mixed_requests(count: int, new_tokens: int = 24) -> list[Request]:
    """Greedy and random rows; some share a beginning."""
    rng = random.Random(0)
    options: list[dict[str, Any]] = [
        {"temperature": 0, "logprobs": True, "top_logprobs": 2},
        {"temperature": 0.6, "logprobs": True},
        {"temperature": 0, "repetition_penalty": 1.3},
        {"top_k": 5, "top_p": 0.9},
        {"temperature": 0, "min_new_tokens": 4, "stop_token_ids": (3, 4)},
        {"frequency_penalty": 0.5, "min_p": 0.05},
    ]
    requests: list[Request] = []
    for i in range(count):
        own = [rng.randrange(VOCAB) for _ in range(rng.randint(1, 12))]
        params = RequestParams(max_new_tokens=new_tokens, seed=i, **options[i % len(options)])
        requests.append(([5, 6, 7, 8, 9] * 2 * (i % 2) + own, params))
    return requests


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("draft", "overlap"),
    [
        pytest.param(draft, overlap, marks=[pytest.mark.slow] if i % 2 == overlap else [])
        for i, draft in enumerate(DRAFTS)
        for overlap in (False, True)
    ],
)
def test_greedy_rows_are_those_of_ar(tiny_models: Models, draft: str, overlap: bool) -> None:
    requests = mixed_requests(18)
    config = replace(CONFIG, overlap=overlap)
    expected = run(make_engine(tiny_models, ARStrategy(), CONFIG, None), requests)
    outputs = run(rejecting_engine(tiny_models, config, draft, 5), requests)
    for one, other in list(zip(expected, outputs, strict=True))[::2]:
        assert one.token_ids == other.token_ids
        assert (one.finish_reason, one.stop) == (other.finish_reason, other.stop)
        for name, values in one.columns.items():
            np.testing.assert_array_equal(values, other.columns[name], err_msg=name, strict=True)
    assert sum(output.counts["num_accepted_tokens"] for output in outputs) > 5


@pytest.mark.thorough
@pytest.mark.parametrize("draft", [pytest.param("close", marks=pytest.mark.slow), "far"])
def test_a_row_is_the_same_whatever_runs_beside_it(tiny_models: Models, draft: str) -> None:
    """Nor does it depend on how many slots there are: n-grams of other rows displace none."""
    requests, compared = mixed_requests(14, new_tokens=30), 6
    options: list[dict[str, Any]] = [
        {"overlap": True},
        {"max_num_seqs": 7},
        {"max_num_seqs": 32, "prefix_caching": False},
    ]
    alone = [
        run(make_engine(tiny_models, rejecting(), CONFIG, draft), [request])[0]
        for request in requests[:compared]
    ]
    for changes in options:
        engine = make_engine(tiny_models, rejecting(), replace(CONFIG, **changes), draft)
        for one, other in zip(alone, run(engine, requests), strict=False):
            assert one.token_ids == other.token_ids
            for name, values in one.columns.items():
                np.testing.assert_array_equal(values, other.columns[name], strict=True)


@pytest.mark.thorough
def test_random_rows_are_those_of_their_seed(tiny_models: Models) -> None:
    requests = mixed_requests(24)
    others = [(prompt, replace(params, seed=params.seed + 99)) for prompt, params in requests]
    first, same, changed = (
        [
            output.token_ids
            for output in run(make_engine(tiny_models, rejecting(), CONFIG, "close"), rows)
        ]
        for rows in (requests, requests, others)
    )
    assert first == same
    assert first[::2] == changed[::2]
    assert all(one != other for one, other in zip(first[1::2], changed[1::2], strict=True))


@pytest.mark.thorough
@pytest.mark.parametrize("overlap", some_slow([False, True], quick=[True]))
def test_preempted_rows_are_those_of_an_undisturbed_run(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, overlap: bool
) -> None:
    requests = mixed_requests(16, new_tokens=40)
    expected = run(make_engine(tiny_models, rejecting(), CONFIG, "close"), requests)
    monkeypatch.setattr(
        LengthPredictor, "predict", lambda self, generated, limits, exact: generated
    )
    per_block = block_bytes(4, tiny_models["model"], tiny_models["close"])
    config = replace(CONFIG, block_size=4, kv_cache_gib=40.5 * per_block / 2**30, overlap=overlap)
    engine = make_engine(tiny_models, rejecting(), config, "close")
    outputs = run(engine, requests)
    assert any(output.num_preemptions for output in outputs[::2])
    assert any(output.num_preemptions for output in outputs[1::2])
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


@pytest.mark.thorough
def test_a_prefix_that_another_row_generated_changes_nothing(tiny_models: Models) -> None:
    """Its KV of the draft model, too, is that of the tokens."""
    config = replace(CONFIG, block_size=4)
    engine = make_engine(tiny_models, rejecting(), config, "close")
    params = RequestParams(max_new_tokens=40)
    first = run(
        engine, [([3 + i % 8, *range(i % 4 + 1)], replace(params, seed=i)) for i in range(48)]
    )
    again = [
        (output.prompt_token_ids + output.token_ids, replace(params, seed=100 + i))
        for i, output in enumerate(first)
    ]
    outputs = run(engine, again)
    assert all(output.num_cached_tokens >= 36 for output in outputs)
    plain = replace(config, prefix_caching=False)
    expected = run(make_engine(tiny_models, rejecting(), plain, "close"), again)
    assert [output.token_ids for output in outputs] == [output.token_ids for output in expected]


# --- options --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"verifier": "rejection"}, "rejection needs adaptive=false"),
        (
            {"verifier": "rejection", "adaptive": False},
            "rejection needs proposer=draft",
        ),
        ({"verifier": "typical"}, "verifier must be pathwise or rejection, got 'typical'"),
        ({"proposer": "eagle"}, "proposer must be"),
        ({"num_spec_tokens": 0}, "num_spec_tokens must be 1 to 7, got 0"),
        ({"num_spec_tokens": 8}, "num_spec_tokens must be 1 to 7, got 8"),
        ({"ngram_min": 0}, "ngram_min must be"),
        ({"ngram_min": 4, "ngram_max": 3}, "ngram_min must be"),
        ({"ngram_max": 9}, "ngram_max must be at most 8"),
        ({"acceptance_floor": 1.1}, "acceptance_floor must be"),
        ({"acceptance_floor": float("nan")}, "acceptance_floor must be"),
        ({"draft_model": "some/model"}, "proposer is ngram: set it to draft"),
        ({"proposer": "draft", "ngram_pool": True}, "ngram_pool is true"),
    ],
    ids=str,
)
def test_options_that_cannot_be_honoured(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        ARSpecStrategy(**options)


def test_a_draft_model_where_none_belongs_and_none_where_one_does(tiny_models: Models) -> None:
    with pytest.raises(ValueError, match="strategy ar_spec needs a draft model: none was given"):
        make_engine(tiny_models, rejecting(), CONFIG, None)
    with pytest.raises(ValueError, match="strategy ar_spec has no use for a draft model"):
        make_engine(tiny_models, ARSpecStrategy(), CONFIG, "close")
    with pytest.raises(ValueError, match="no use for a draft model"):
        make_engine(tiny_models, ARStrategy(), CONFIG, "close")


def test_a_draft_model_of_another_vocabulary_or_too_short(
    tiny_models: Models, tiny_model: Callable[..., Path]
) -> None:
    wide = load(tiny_model("llama", **(SIZES | {"vocab_size": VOCAB + 1})))
    with pytest.raises(ValueError, match="choose a draft model with the same tokenizer"):
        make_engine({**tiny_models, "wide": wide}, rejecting(), CONFIG, "wide")
    short = load(tiny_model("llama", **(SIZES | {"max_position_embeddings": 60})))
    with pytest.raises(ValueError, match="positions for 60 tokens and rows may get 100"):
        make_engine({**tiny_models, "short": short}, rejecting(), CONFIG, "short")
