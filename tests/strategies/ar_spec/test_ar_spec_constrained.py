"""Speculation under constraints: the rows of `ar`, whatever is drafted, forced and rolled back."""

from __future__ import annotations

import functools
import itertools
import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from scipy import stats
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.engine.constrained_rows import (
    END,
    NUM_TOKENS,
    SIMPLE,
    TURN,
    WIDTH,
    assert_same,
    compiler,
    encode,
    load,
    make_tokenizer,
    mixed_requests,
)
from tests.support.engine.engine_rows import Request, beside, block_bytes, expect_short_rows, run
from tests.support.engine.proposer_cases import proposer_cases
from tests.support.engine.toy_mtp import with_head

ROWS = 26
SOME = 12
"""Rows of an example of the property."""
SPEC_COLUMNS = ("draft_accepted", "step_map")
Models = Mapping[str, CausalLM]
Plain = Callable[[int], tuple[list[Request], list[RequestOutput]]]


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
    "pool": ({"proposer": "ngram", "ngram_min": 1, "ngram_pool": True}, None),
    "other": ({"proposer": "draft"}, "other"),
    "itself": ({"proposer": "draft"}, "itself"),
    "head": ({"proposer": "mtp"}, "head"),
}


@pytest.fixture(scope="module")
def tiny_models(tiny_model: Callable[..., Path]) -> Models:
    return make_models(tiny_model)


def make_models(tiny_model: Callable[..., Path]) -> dict[str, CausalLM]:
    """The model, and drafts: itself and a random smaller one."""
    model = with_head(tiny_model("llama", vocab_size=WIDTH, num_hidden_layers=2))
    other = load(tiny_model("qwen3", vocab_size=WIDTH, num_hidden_layers=1, hidden_size=32))
    return {"model": model, "itself": model, "other": other}


@pytest.fixture(scope="module")
def plain(tiny_models: Models) -> Plain:
    """`plain(seed)` → rows, and what `ar` makes of them in its simplest loop."""

    @functools.cache
    def run_plain(seed: int) -> tuple[list[Request], list[RequestOutput]]:
        requests = mixed_requests(ROWS, 11 + seed, free=4)
        return requests, run(make_engine(tiny_models, ARStrategy(), SIMPLE), requests)

    return run_plain


def make_engine(
    tiny_models: Models, strategy: Strategy, config: EngineConfig, draft: str | None = None
) -> LLMEngine:
    drafter = None if draft is None or draft == "head" else tiny_models[draft]
    return LLMEngine(
        tiny_models["model"],
        make_tokenizer(),
        (END,),
        strategy,
        config,
        others=beside(drafter),
        compiler=compiler(),
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


def assert_row(one: RequestOutput, other: RequestOutput) -> None:
    """`other` is what speculation made of the row."""
    assert_same(one, other, more=SPEC_COLUMNS)
    assert_consistent(other)


def assert_consistent(output: RequestOutput) -> None:
    """What the columns and counts say of a row's forwards goes together."""
    drafted, steps = (output.columns[name] for name in SPEC_COLUMNS)
    assert len(drafted) == len(steps) == len(output.token_ids)
    assert (
        drafted.sum() == output.counts["num_accepted_tokens"] <= output.counts["num_draft_tokens"]
    )
    if not len(steps):
        return
    assert steps[0] == 1 and not drafted[0]
    assert np.isin(np.diff(steps), (0, 1)).all()
    # A forward commits drafts and then a token of its own, unless the row ends before.
    assert ((np.diff(steps) == 1) == ~drafted[:-1]).all()
    # One that ends the row may commit nothing.
    cut = output.finish_reason in ("error", "constraint_conflict")
    assert output.counts["num_forwards"] in ((steps[-1], steps[-1] + 1) if cut else (steps[-1],))


@pytest.mark.quick(1, thorough=2)
@pytest.mark.parametrize(("name", "k", "hard", "overlap"), proposer_cases(PROPOSERS))
def test_every_proposer_gives_the_rows_of_ar(
    tiny_models: Models,
    plain: Plain,
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
        assert_row(one, other)
    guided = [output for output in outputs if output.constraint_satisfied is not None]
    assert {output.finish_reason for output in guided} == {
        *("stop", "length", "constraint_conflict")
    }
    assert sum(output.counts["num_accepted_tokens"] for output in guided) > 15
    assert all(max(output.token_ids, default=0) < NUM_TOKENS for output in guided)
    assert (engine.stats.preemptions > 0) == hard == (engine.stats.cached_tokens > 0)


# Shrinking an example of so many steps takes minutes and tells little more.
@pytest.mark.thorough
@settings(
    max_examples=max(1, settings().max_examples // 25),
    deadline=None,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],
)
@given(data=st.data())
def test_any_schedule_and_drafts_give_the_rows_of_ar(
    tiny_models: Models, plain: Plain, data: st.DataObject
) -> None:
    requests, expected = plain(data.draw(st.integers(0, 1), label="rows"))
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
        assert_row(expected[order[int(output.request_id)]], output)
    gone = {i for rows in aborts.values() for i in rows}
    assert {*range(SOME)} - {int(output.request_id) for output in outputs} <= gone


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("name", "overlap", "hard"),
    [
        ("ngram", False, False),
        ("other", True, False),
        pytest.param("ngram", True, True, marks=pytest.mark.slow),
        pytest.param("other", False, True, marks=pytest.mark.slow),
        pytest.param("ngram", False, True, marks=pytest.mark.slow),
        pytest.param("ngram", True, False, marks=pytest.mark.slow),
        pytest.param("other", False, False, marks=pytest.mark.slow),
        pytest.param("other", True, True, marks=pytest.mark.slow),
    ],
)
def test_a_number_of_drafts_that_adapts_changes_nothing(
    tiny_models: Models,
    plain: Plain,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    overlap: bool,
    hard: bool,
) -> None:
    """Down to none and back: a draft model that did not read what was forced reads it later, and
    rows that lost their KV behind drafts go on without drafts."""
    options, draft = PROPOSERS[name]
    options = options | {"num_spec_tokens": 5}
    config = replace(SIMPLE, overlap=overlap)
    if hard:
        expect_short_rows(monkeypatch)
        config = small_cache(tiny_models, draft, 110, overlap=overlap, max_batched_tokens=50)
    requests, expected = plain(1)
    for strategy in (ARSpecStrategy(**options), AnyWidth(3, **options), AnyWidth(4, **options)):
        engine = make_engine(tiny_models, strategy, config, draft)
        for one, other in zip(expected, run(engine, requests), strict=True):
            assert_row(one, other)
        assert (engine.stats.preemptions > 0) == hard


# --- forced tokens --------------------------------------------------------------------------------

# Their letters are tokens each and nothing else: there is one way to spell them.
NAMES = ("zyxwvuzyxwvu", "qponmlkqponmlk")
LONG_NAMES = Constraint.make(
    "json_schema",
    {
        "type": "object",
        "properties": {name: {"enum": [0, 3]} for name in NAMES},
        "required": list(NAMES),
        "additionalProperties": False,
    },
)


def long_rows(count: int, constraint: Constraint | None = LONG_NAMES) -> list[Request]:
    """Their prompts hold nothing of what they must say."""
    return [
        ([*range(200, 210), 150 + i], RequestParams(seed=i, constraint=constraint))
        for i in range(count)
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["ngram", "other"])
def test_tokens_without_a_choice_are_drafts_that_hold(
    tiny_models: Models, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    options, draft = PROPOSERS[name]
    if name == "ngram":
        options = options | {"ngram_min": 4}  # which finds nothing
    requests = long_rows(6)
    expected = run(make_engine(tiny_models, ARStrategy(), SIMPLE), requests)

    def with_drafts() -> list[RequestOutput]:
        strategy = ARSpecStrategy(num_spec_tokens=5, adaptive=False, **options)
        outputs = run(make_engine(tiny_models, strategy, SIMPLE, draft), requests)
        for one, other in zip(expected, outputs, strict=True):
            assert_row(one, other)
            assert other.finish_reason == "stop" and other.constraint_satisfied
        return outputs

    forced = with_drafts()
    monkeypatch.setattr(Guide, "forced", lambda self, most: None)
    free = with_drafts()
    for one, other in zip(forced, free, strict=True):
        length = sum(map(len, NAMES))
        assert one.counts["num_forwards"] < 0.6 * other.counts["num_forwards"]
        assert one.counts["num_accepted_tokens"] > length // 2
        assert other.counts["num_accepted_tokens"] < length // 4


@pytest.mark.thorough
def test_what_was_forced_is_read_by_the_draft_model_later(tiny_models: Models) -> None:
    """A perfect draft holds behind it wherever the constraint allows what the model likes best."""
    text = Constraint.make("regex", f"{NAMES[0]}[^\\x00]{{24}}")
    likes: dict[str, Any] = {"max_new_tokens": 30, "temperature": 0.0, "top_logprobs": 1}
    requests = [(prompt, replace(params, **likes)) for prompt, params in long_rows(8, text)]
    expected = run(make_engine(tiny_models, ARStrategy(), SIMPLE), requests)
    k, held = 3, 0
    strategy = ARSpecStrategy("draft", k, adaptive=False)
    outputs = run(make_engine(tiny_models, strategy, SIMPLE, "itself"), requests)
    for one, other in zip(expected, outputs, strict=True):
        assert_row(one, other)
        liked = other.columns["top_logprob_ids"][:, 0] == other.token_ids
        drafted = other.columns["draft_accepted"]
        starts = np.flatnonzero(np.diff(other.columns["step_map"])) + 1
        for start in starts[starts >= len(NAMES[0])]:
            # No draft is of use where no token could follow it.
            run_there = [*liked[start : min(start + k, 29)], False].index(False)
            count = int((other.columns["step_map"] == other.columns["step_map"][start]).sum())
            assert drafted[start : start + count].sum() == run_there == count - 1
            held += count - 1
    assert held > 20


# --- how rows end ---------------------------------------------------------------------------------


@pytest.mark.quick(1, thorough=3)
@pytest.mark.parametrize(
    ("name", "k", "overlap"),
    [
        pytest.param(name, k, overlap, marks=[] if (i + j) % 2 == overlap else [pytest.mark.slow])
        for i, name in enumerate(["ngram", "itself"])
        for j, k in enumerate([1, 2, 4, 7])
        for overlap in (False, True)
    ],
)
def test_rows_that_end_inside_an_accepted_run_end_as_without_drafts(
    tiny_models: Models, name: str, k: int, overlap: bool
) -> None:
    """By EOS, a stop id that is text, a stop string, their length and a conflict, at each place of
    a run: the forced drafts and those that repeat the prompt go on behind it."""
    word = "zyxwvuts"
    said = Constraint.make("choice", [word, word + "r"])
    base = RequestParams(constraint=said, temperature=0, max_new_tokens=20, logprobs=True)
    letters = encode(word)
    rows: list[RequestParams] = [
        base,
        replace(base, constraint=Constraint("regex", f"({word})+")),
    ]
    for place in range(1, len(word)):
        cut = Constraint("regex", f"{word[:place]}({word[place:]})?")
        rows += [
            replace(base, max_new_tokens=place),
            replace(base, stop=(word[place - 1 : place + 1],)),
            replace(base, constraint=cut, stop_token_ids=(letters[place], TURN)),
            replace(base, constraint=Constraint("choice", f'["{word[:place]}"]'), min_new_tokens=9),
        ]
    prompts: list[list[int]] = [[*letters, END, *letters, END, 5], [*letters[:3], 6], [7]]
    requests = list(itertools.product(prompts, rows))
    expected = run(make_engine(tiny_models, ARStrategy(), SIMPLE), requests)
    options, draft = PROPOSERS[name]
    strategy = ARSpecStrategy(num_spec_tokens=k, adaptive=False, **options)
    config = replace(SIMPLE, overlap=overlap, max_num_seqs=100)
    outputs = run(make_engine(tiny_models, strategy, config, draft), requests)
    for one, other in zip(expected, outputs, strict=True):
        assert_row(one, other)
    reasons = Counter(output.finish_reason for output in outputs)
    assert min(reasons[r] for r in ("stop", "length", "constraint_conflict")) >= 3 * 7
    conflicts = [output for output in outputs if output.finish_reason == "constraint_conflict"]
    assert all(output.constraint_satisfied for output in conflicts)
    assert any(
        output.counts["num_accepted_tokens"] == len(output.token_ids) - 1
        for output in conflicts[3:]
    )


@pytest.mark.parametrize("overlap", [False, True])
def test_a_row_that_ended_does_not_fail_for_what_drafts_read_behind_it(
    tiny_model: Callable[..., Path], overlap: bool
) -> None:
    """Nobody reads EOS but a forward that verifies it as a draft: its logits are not the row's."""
    models = make_models(tiny_model)
    word = Constraint.make("choice", ["zyxwvuts"])
    requests = [([5 + i], RequestParams(constraint=word, logprobs=True)) for i in range(4)]
    models["model"].model.embed_tokens.weight.data[END] = float("nan")
    expected = run(make_engine(models, ARStrategy(), SIMPLE), requests)
    options, _ = PROPOSERS["pool"]
    config = replace(SIMPLE, overlap=overlap, max_num_seqs=1)
    strategy = ARSpecStrategy(num_spec_tokens=5, adaptive=False, **options)
    outputs = run(make_engine(models, strategy, config), requests)
    for one, other in zip(expected, outputs, strict=True):
        assert_row(one, other)
        assert (other.finish_reason, other.token_ids[-1]) == ("stop", END)
    # Later rows find the EOS of earlier ones.
    assert any(output.columns["draft_accepted"][-1] for output in outputs)


# --- verification by rejection --------------------------------------------------------------------

LETTERS = "abcdefgh01"
SMALL = 14
"""Width of the logits: the letters, EOS, and ids that the tokenizer does not have."""


@functools.cache
def small_tokenizer() -> PreTrainedTokenizerFast:
    raw = Tokenizer(models.BPE({letter: i for i, letter in enumerate(LETTERS)}, []))
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    raw.decoder = decoders.ByteLevel()
    raw.add_special_tokens([AddedToken("<|end|>", special=True)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


@pytest.fixture(scope="module")
def small_models(tiny_model: Callable[..., Path]) -> Models:
    """The model, and drafts whose laws are the same and far from it."""
    sizes = {
        "vocab_size": SMALL,
        "num_hidden_layers": 1,
        "hidden_size": 32,
        "intermediate_size": 48,
    }
    loaded = [
        load_model(tiny_model(kind, **sizes), device=torch.device("cpu"), dtype=torch.float32)
        for kind in ("llama", "qwen3")
    ]
    return {"model": loaded[0], "itself": loaded[0], "far": loaded[1]}


def small_engine(models: Models, draft: str | None, overlap: bool = False) -> LLMEngine:
    strategy: Strategy = ARStrategy()
    if draft is not None:
        strategy = ARSpecStrategy("draft", 3, "rejection", adaptive=False)
    config = replace(SIMPLE, max_num_seqs=500, overlap=overlap)
    drafter = None if draft is None else models[draft]
    tokenizer = small_tokenizer()
    return LLMEngine(
        models["model"], tokenizer, (len(LETTERS),), strategy, config, others=beside(drafter)
    )


SAID = Constraint.make("regex", "[a-f]([b-h]0?){2,3}1?")


def said_texts(models: Models, draft: str | None, first: int) -> list[str]:
    """What many samples of a constrained row say, with seeds from `first` on."""
    params = RequestParams(constraint=SAID, max_new_tokens=9, temperature=0.9, top_p=0.95)
    requests = [([3, 4, 5], replace(params, seed=(first + i) * 7919)) for i in range(1500)]
    outputs = run(small_engine(models, draft), requests)
    if draft is not None:
        held = sum(output.counts["num_accepted_tokens"] for output in outputs)
        offered = sum(output.counts["num_draft_tokens"] for output in outputs)
        assert 0.02 * offered < held < 0.98 * offered
    assert all(output.constraint_satisfied for output in outputs)
    return [output.text for output in outputs]


@pytest.fixture(scope="module")
def texts_of_ar(small_models: Models) -> list[str]:
    return said_texts(small_models, None, 10**6)


@pytest.mark.thorough
@pytest.mark.parametrize("draft", ["itself", "far"])
def test_rejection_has_the_law_of_ar_within_the_constraint(
    small_models: Models, texts_of_ar: list[str], draft: str
) -> None:
    ours, theirs = said_texts(small_models, draft, 0), texts_of_ar
    for part in (slice(0, 2), slice(1, 3), slice(2, 9)):
        ours_there, theirs_there = (Counter(text[part] for text in said) for said in (ours, theirs))
        cells = sorted(ours_there.keys() | theirs_there.keys())
        table = np.array([[ours_there[cell], theirs_there[cell]] for cell in cells])
        few = table.sum(1) < 20
        table = np.vstack([table[~few], table[few].sum(0, keepdims=True)])
        table = table[table.sum(1) > 0]
        assert len(table) > 5
        assert stats.chi2_contingency(table).pvalue > 1e-4


def rejection_rows() -> list[Request]:
    """Greedy and random ones, free and constrained, some with a conflict at their end."""
    options: list[dict[str, Any]] = [
        {"constraint": SAID},
        {"constraint": SAID, "min_new_tokens": 8},
        {"constraint": Constraint.make("choice", ["abcdefgh", "abc", "hgfedcba"])},
        {"constraint": Constraint.make("choice", ["abcde"]), "min_new_tokens": 7},
        {"constraint": Constraint.make("regex", "[0-9]*"), "max_new_tokens": 7},
        {"max_new_tokens": 12},
    ]
    return [
        ([i % 7, 3, i % 5], RequestParams(**({"max_new_tokens": 20, "seed": i} | own | kind)))
        for i, (own, kind) in enumerate(
            itertools.product(
                [{"temperature": 0, "logprobs": True, "top_logprobs": 2}, {"temperature": 1.2}],
                options * 4,
            )
        )
    ]


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("draft", ["itself", "far"])
def test_rows_verified_by_rejection_conform_and_greedy_ones_are_those_of_ar(
    small_models: Models, draft: str, overlap: bool
) -> None:
    requests = rejection_rows()
    expected = run(small_engine(small_models, None), requests)
    outputs = run(small_engine(small_models, draft, overlap), requests)
    greedy = len(requests) // 2
    for one, other in zip(expected[:greedy], outputs[:greedy], strict=True):
        assert_row(one, other)
    accepted = sum(output.counts["num_accepted_tokens"] for output in outputs)
    assert accepted > 10
    seen = Counter[tuple[str, bool | None]]()
    for (_, params), output in zip(requests[greedy:], outputs[greedy:], strict=True):
        assert_consistent(output)
        seen[output.finish_reason, output.constraint_satisfied] += 1
        if params.constraint is not None and output.finish_reason == "stop":
            assert output.constraint_satisfied
        if output.finish_reason == "constraint_conflict":
            assert len(output.token_ids) < params.min_new_tokens
            assert output.constraint_satisfied
    assert seen["stop", True] and seen["constraint_conflict", True]
