"""Speculation changes nothing: the rows of `ar`, to the bit, whatever is drafted and scheduled."""

from __future__ import annotations

import functools
import itertools
import random
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.cases import some_slow
from tests.support.engine.engine_rows import (
    Request,
    beside,
    block_bytes,
    expect_short_rows,
    run,
    weights,
)
from tests.support.engine.proposer_cases import proposer_cases
from tests.support.engine.toy_mtp import with_head

EOS = 7
VOCAB = 128
MAX_LEN = 90
ROWS = 18
SOME = 12
"""Rows of an example of the property."""
SPEC_COLUMNS = ("draft_accepted", "step_map")
SIMPLE = EngineConfig(
    max_num_seqs=32,
    max_batched_tokens=2048,
    chunk_tokens=0,
    max_model_len=MAX_LEN,
    kv_cache_gib=0.01,
    overlap=False,
    prefix_caching=False,
)
Models = Mapping[str, CausalLM]


class AnyWidth(ARSpecStrategy):
    """Each step has a number of drafts of its own, none too."""

    def __init__(self, seed: int, **options: Any) -> None:
        super().__init__(adaptive=False, **options)
        self._random = random.Random(seed)

    def step_width(self, num_rows: int) -> int:
        return self._random.choice(self.models["target"].widths)


# What is drafted with: the options of the strategy and the draft model.
PROPOSERS: dict[str, tuple[dict[str, Any], str | None]] = {
    "ngram": ({"proposer": "ngram", "ngram_min": 1}, None),
    "longer ngram": ({"proposer": "ngram", "ngram_min": 2, "ngram_max": 3}, None),
    "pool": ({"proposer": "ngram", "ngram_min": 1, "ngram_pool": True}, None),
    "other": ({"proposer": "draft"}, "other"),
    "close": ({"proposer": "draft"}, "close"),
    "itself": ({"proposer": "draft"}, "itself"),
    "head": ({"proposer": "mtp"}, "head"),
}


@pytest.fixture(scope="module")
def tiny_models(tiny_model: Callable[..., Path]) -> Models:
    return make_models(tiny_model)


def make_models(tiny_model: Callable[..., Path]) -> dict[str, CausalLM]:
    """The model, and drafts: itself, a copy with noise on its weights, and a random smaller one."""
    model, close = sharpened(with_head(tiny_model("llama"))), load(tiny_model("llama"))
    generator = torch.Generator().manual_seed(0)
    for weight in weights(close).values():
        weight.add_(torch.empty_like(weight).normal_(0, 0.02, generator=generator))
    other = load(tiny_model("qwen3", num_hidden_layers=2, hidden_size=32))
    return {"model": model, "itself": model, "close": close, "other": other}


def load(folder: Path) -> CausalLM:
    return sharpened(load_model(folder, device=torch.device("cpu"), dtype=torch.float32))


def sharpened(model: CausalLM) -> CausalLM:
    # Sampled rows of little entropy repeat themselves, too, and n-grams draft them well.
    for name, weight in weights(model).items():
        if name in ("model.norm.weight", "mtp.norm.weight"):
            weight.mul_(2.5)
    return model


@functools.cache
def spelling_tokenizer() -> PreTrainedTokenizerFast:
    """Token i spells the letters of i in base 3, so that most strings span tokens."""
    spelt = {
        "abc"[i % 3] + "xyz"[i // 3 % 3] + "uvw"[i // 9 % 3] + str(i // 27): i for i in range(VOCAB)
    }
    raw = Tokenizer(models.WordLevel(spelt, unk_token=next(iter(spelt))))
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw)


OPTIONS: list[dict[str, Any]] = [
    {"temperature": 0, "ignore_eos": True},
    {"temperature": 0, "logprobs": True, "top_logprobs": 3},
    {"temperature": 0, "repetition_penalty": 1.4, "presence_penalty": 0.5},
    {"temperature": 0.7, "top_k": 5, "logprobs": True},
    {"temperature": 1.3, "top_p": 0.8, "logprobs": True, "logprobs_mode": "processed"},
    {"min_p": 0.1, "top_logprobs": 7},
    {"temperature": 0.3, "top_k": 20, "top_p": 0.9, "min_p": 0.01, "frequency_penalty": 0.7},
    {"temperature": 0.2, "min_new_tokens": 12, "stop_token_ids": tuple(range(0, VOCAB, 3))},
    # Repeats itself, with a law that counts how often.
    {
        "temperature": 0.5,
        "ignore_eos": True,
        "repetition_penalty": 0.6,
        "frequency_penalty": -0.2,
        "logprobs": True,
        "logprobs_mode": "processed",
    },
    {"temperature": 0.1, "stop_token_ids": (1, 2, 3), "min_new_tokens": 2},
]


def mixed_requests(seed: int) -> list[Request]:
    """Rows with every option: prompts that share a beginning, that repeat themselves, that come
    twice, and that leave one token or a few until the longest that a row may get."""
    rng = random.Random(seed)
    shared = [rng.randrange(8, VOCAB) for _ in range(13)]
    requests: list[Request] = []
    for i, options in zip(range(ROWS), itertools.cycle(OPTIONS)):
        own = [rng.randrange(8, VOCAB) for _ in range(rng.randint(1, 30))]
        prompt = [shared + own, (own * 4)[:40], own][i % 3]
        if i % 6 == 5:
            prompt = requests[i - 1][0]  # another sample
        if i == 12:
            prompt = [*own, *shared * 8][: MAX_LEN - 1 - seed % 3]
        length = rng.choice([1, 2, 5, 20, 30, 40]) if i % 4 == 3 else rng.randint(15, 40)
        length = max(length, int(options.get("min_new_tokens", 0)))
        requests.append(
            (prompt, RequestParams(max_new_tokens=length, seed=100 * seed + i, **options))
        )
    return requests


@pytest.fixture(scope="module")
def plain(tiny_models: Models) -> Callable[[int], tuple[list[Request], list[RequestOutput]]]:
    """`plain(seed)` → rows, some with a stop string that spans tokens, and what `ar` makes of them
    in its simplest loop."""

    @functools.cache
    def run_plain(seed: int) -> tuple[list[Request], list[RequestOutput]]:
        requests = mixed_requests(seed)
        free = run(make_engine(tiny_models, ARStrategy(), SIMPLE), requests)
        for i in range(0, ROWS, 5):
            prompt, params = requests[i]
            start = len(free[i].text) // 2 + i % 4
            stop = ("never", free[i].text[start : start + 6] or "no")
            requests[i] = (prompt, replace(params, stop=stop))
        outputs = run(make_engine(tiny_models, ARStrategy(), SIMPLE), requests)
        assert (
            sum(
                output.stop in params.stop
                for output, (_, params) in zip(outputs, requests, strict=True)
            )
            > 1
        )
        return requests, outputs

    return run_plain


def make_engine(
    tiny_models: Models, strategy: Strategy, config: EngineConfig, draft: str | None = None
) -> LLMEngine:
    drafter = None if draft is None or draft == "head" else tiny_models[draft]
    return LLMEngine(
        tiny_models["model"], spelling_tokenizer(), (EOS,), strategy, config, others=beside(drafter)
    )


def small_cache(
    tiny_models: Models, draft: str | None, tokens: int, **changes: Any
) -> EngineConfig:
    """A configuration whose cache holds so many tokens: rows fight for it."""
    config = replace(SIMPLE, block_size=4, prefix_caching=True, **changes)
    model = tiny_models["model"]
    used: list[TokenModel] = [model]
    if draft is not None:
        used.append(model.heads["mtp"] if draft == "head" else tiny_models[draft])
    per_block = block_bytes(config.block_size, *used)
    blocks = -(-tokens // config.block_size) + 1.5
    return replace(config, kv_cache_gib=blocks * per_block / 2**30)


def assert_same(one: RequestOutput, other: RequestOutput) -> None:
    """`other` is what speculation made of the row."""
    assert one.token_ids == other.token_ids
    assert one.text == other.text
    assert (one.finish_reason, one.stop) == (other.finish_reason, other.stop)
    assert (one.error is None) == (other.error is None)
    assert {*one.columns, *SPEC_COLUMNS} == set(other.columns)
    for name, values in one.columns.items():
        np.testing.assert_array_equal(values, other.columns[name], err_msg=name, strict=True)
    assert_consistent(other)


def assert_consistent(output: RequestOutput) -> None:
    """What the columns and counts say of a row's forwards goes together."""
    drafted, steps = (output.columns[name] for name in SPEC_COLUMNS)
    assert len(drafted) == len(steps) == len(output.token_ids)
    if not len(steps):
        return
    assert steps[0] == 1 and not drafted[0]
    assert np.isin(np.diff(steps), (0, 1)).all()
    # A forward commits drafts and then a token of its own, unless the row ends before.
    assert ((np.diff(steps) == 1) == ~drafted[:-1]).all()
    assert (
        drafted.sum() == output.counts["num_accepted_tokens"] <= output.counts["num_draft_tokens"]
    )
    failed = output.finish_reason == "error"
    assert output.counts["num_forwards"] in ((steps[-1], steps[-1] + 1) if failed else (steps[-1],))


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(("name", "k", "hard", "overlap"), proposer_cases(PROPOSERS))
def test_every_proposer_gives_the_rows_of_ar(
    tiny_models: Models,
    plain: Callable[[int], tuple[list[Request], list[RequestOutput]]],
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    k: int,
    hard: bool,
    overlap: bool,
) -> None:
    """Hard: chunked prefills, prefix cache, and rows that preempt each other."""
    options, draft = PROPOSERS[name]
    config = replace(SIMPLE, overlap=overlap)
    if hard:
        expect_short_rows(monkeypatch)
        config = small_cache(
            tiny_models, draft, 140, overlap=overlap, max_batched_tokens=17, chunk_tokens=8
        )
    strategy = ARSpecStrategy(num_spec_tokens=k, adaptive=False, **options)
    engine = make_engine(tiny_models, strategy, config, draft)
    requests, expected = plain(0)
    outputs = run(engine, requests)
    for one, other in zip(expected, outputs, strict=True):
        assert_same(one, other)
    stats = engine.stats
    accepted = sum(output.counts["num_accepted_tokens"] for output in outputs)
    assert accepted > {"other": 3, "longer ngram": 5}.get(name, 15)
    assert name == "itself" or accepted < sum(
        output.counts["num_draft_tokens"] for output in outputs
    )
    assert (stats.counts["num_accepted_tokens"], stats.generated_tokens) == (
        accepted,
        sum(len(output.token_ids) for output in outputs),
    )
    assert (stats.preemptions > 0) == hard == (stats.cached_tokens > 0)


# Shrinking an example of so many steps takes minutes and tells little more.
@pytest.mark.thorough
@settings(
    max_examples=max(1, settings().max_examples // 32),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.data())
def test_any_schedule_and_drafts_give_the_rows_of_ar(
    tiny_models: Models,
    plain: Callable[[int], tuple[list[Request], list[RequestOutput]]],
    data: st.DataObject,
) -> None:
    requests, expected = plain(data.draw(st.integers(0, 2), label="rows"))
    order = data.draw(st.permutations(range(ROWS)), label="order")[:SOME]
    options, draft = PROPOSERS[data.draw(st.sampled_from(list(PROPOSERS)), label="proposer")]
    options = options | {"num_spec_tokens": data.draw(st.integers(1, 7), label="k")}
    widths = data.draw(st.sampled_from(["fixed", "adaptive", "any"]), label="widths")
    if widths == "any":
        seed = data.draw(st.integers(0, 99), label="seed of widths")
        strategy: ARSpecStrategy = AnyWidth(seed, **options)
    else:
        strategy = ARSpecStrategy(adaptive=widths == "adaptive", **options)
    config = small_cache(
        tiny_models,
        draft,
        data.draw(st.integers(96, 400), label="cache"),
        max_num_seqs=data.draw(st.integers(1, 20), label="max_num_seqs"),
        max_batched_tokens=data.draw(st.integers(1, 200), label="max_batched_tokens"),
        chunk_tokens=data.draw(st.integers(0, 40), label="chunk_tokens"),
        overlap=data.draw(st.booleans(), label="overlap"),
    )
    config = replace(config, prefix_caching=data.draw(st.booleans(), label="prefix_caching"))
    aborts = data.draw(
        st.dictionaries(
            st.integers(0, 40), st.lists(st.integers(0, SOME - 1), max_size=2), max_size=3
        ),
        label="aborts",
    )
    with pytest.MonkeyPatch.context() as patch:
        if data.draw(st.booleans(), label="hopeful admission"):
            expect_short_rows(patch)
        engine = make_engine(tiny_models, strategy, config, draft)
        outputs = run(engine, [requests[i] for i in order], aborts)
    for output in outputs:
        assert_same(expected[order[int(output.request_id)]], output)
    gone = {i for rows in aborts.values() for i in rows}
    assert {str(i) for i in range(SOME)} - {output.request_id for output in outputs} <= set(
        map(str, gone)
    )


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("k", "overlap"),
    [
        pytest.param(
            k, overlap, marks=[] if k % 2 == overlap and k in (1, 2, 4, 7) else [pytest.mark.slow]
        )
        for k in range(1, 8)
        for overlap in (False, True)
    ],
)
def test_a_perfect_draft_is_accepted_whole(
    tiny_models: Models,
    plain: Callable[[int], tuple[list[Request], list[RequestOutput]]],
    k: int,
    overlap: bool,
) -> None:
    """Greedy and sampled, with every option: the draft model draws what the model will draw."""
    requests, expected = plain(1)
    strategy = ARSpecStrategy("draft", k, adaptive=False)
    config = replace(SIMPLE, overlap=overlap, prefix_caching=True)
    for one, output in zip(
        expected, run(make_engine(tiny_models, strategy, config, "itself"), requests), strict=True
    ):
        assert_same(one, output)
        count = len(output.token_ids) - 1
        assert output.counts["num_forwards"] == 1 + -(-count // (1 + k))
        if output.finish_reason == "length":
            assert output.counts["num_accepted_tokens"] == output.counts["num_draft_tokens"]


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("seed", "hard"),
    some_slow(itertools.product(range(4), (False, True)), quick=((1, True), (2, False))),
)
def test_a_perfect_draft_catches_up(
    tiny_models: Models,
    plain: Callable[[int], tuple[list[Request], list[RequestOutput]]],
    monkeypatch: pytest.MonkeyPatch,
    seed: int,
    hard: bool,
) -> None:
    """After steps without drafts, and for rows that share what others wrote, it has read all."""
    requests, expected = plain(2)
    strategy = AnyWidth(seed, proposer="draft", num_spec_tokens=1 + 2 * seed)
    config = SIMPLE
    if hard:
        expect_short_rows(monkeypatch)
        config = small_cache(tiny_models, "itself", 140, overlap=True, max_batched_tokens=30)
    outputs = run(make_engine(tiny_models, strategy, config, "itself"), requests)
    for one, output in zip(expected, outputs, strict=True):
        assert_same(one, output)
        if output.finish_reason == "length":
            assert output.counts["num_accepted_tokens"] == output.counts["num_draft_tokens"]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("name", "overlap"),
    some_slow(
        itertools.product(["ngram", "pool", "close"], [False, True]),
        quick=(("ngram", True), ("pool", False), ("pool", True), ("close", True)),
    ),
)
def test_rows_that_end_with_their_first_token_leave_nothing_behind(
    tiny_models: Models, name: str, overlap: bool
) -> None:
    """No decode step comes between their prefills."""
    options, draft = PROPOSERS[name]
    config = replace(SIMPLE, max_num_seqs=2, overlap=overlap)
    one = RequestParams(temperature=0, max_new_tokens=1)
    requests = [([9 + i, 10], one) for i in range(20)]
    requests.append(([9, 10], replace(one, max_new_tokens=12, ignore_eos=True)))
    expected = run(make_engine(tiny_models, ARStrategy(), config), requests)
    strategy = ARSpecStrategy(adaptive=False, **options)
    outputs = run(make_engine(tiny_models, strategy, config, draft), requests)
    for before, output in zip(expected, outputs, strict=True):
        assert_same(before, output)


@pytest.fixture(scope="module")
def poisoned(
    tiny_model: Callable[..., Path],
    plain: Callable[[int], tuple[list[Request], list[RequestOutput]]],
) -> tuple[Models, list[Request], list[RequestOutput]]:
    """Models with a poisoned token that rows generate, the rows, and what `ar` makes of them."""
    models = make_models(tiny_model)
    requests, healthy = plain(0)
    generated = [i for output in healthy for i in output.token_ids[3:-3] if i != EOS]
    token = max(set(generated), key=generated.count)
    models["model"].model.embed_tokens.weight.data[token] = float("nan")
    expected = run(make_engine(models, ARStrategy(), SIMPLE), requests)
    num_failed = sum(output.error is not None for output in expected)
    assert 2 < num_failed < ROWS - 2
    return models, requests, expected


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("name", "overlap"),
    [
        pytest.param(name, overlap, marks=[] if i % 2 == overlap else [pytest.mark.slow])
        for i, name in enumerate(PROPOSERS)
        for overlap in (False, True)
    ],
)
def test_a_row_that_fails_keeps_what_it_had(
    poisoned: tuple[Models, list[Request], list[RequestOutput]], name: str, overlap: bool
) -> None:
    """A row fails when it has read the poisoned token, and not before: drafts that are rejected may
    hold it, and leave their KV in the row's blocks."""
    poisoned_models, requests, expected = poisoned
    options, draft = PROPOSERS[name]
    config = small_cache(poisoned_models, draft, 400, overlap=overlap)
    strategy = AnyWidth(1, num_spec_tokens=5, **options)
    outputs = run(make_engine(poisoned_models, strategy, config, draft), requests)
    for one, other in zip(expected, outputs, strict=True):
        assert_same(one, other)


def test_a_perfect_draft_knows_the_blocks_that_others_generated(tiny_models: Models) -> None:
    """A row that ends with an accepted draft leaves no block behind that the draft model has not
    read."""
    strategy = ARSpecStrategy("draft", 3, adaptive=False)
    config = replace(SIMPLE, block_size=4, prefix_caching=True)
    engine = make_engine(tiny_models, strategy, config, "itself")
    # Every number of tokens that can be behind the last whole block, at every place of a step.
    first = [
        (list(range(20, 30 + i)), RequestParams(seed=i, max_new_tokens=20 + j, ignore_eos=True))
        for i, j in itertools.product(range(4), range(4))
    ]
    second = [
        (
            output.prompt_token_ids + output.token_ids,
            RequestParams(seed=100 + i, max_new_tokens=12, ignore_eos=True),
        )
        for i, output in enumerate(run(engine, first))
    ]
    for output in run(engine, second):
        assert output.num_cached_tokens > 24
        assert output.counts["num_accepted_tokens"] == output.counts["num_draft_tokens"]
