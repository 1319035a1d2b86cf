"""A token has the same log-probability, to the bit, when it is generated and when it is scored."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling import sampler
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from tests.support.cases import some_slow
from tests.support.engine.engine_rows import Request, Scored, expect_short_rows, run, weights
from tests.support.engine.qwen_mtp import TheirHead
from tests.support.engine.scored_rows import make_engine, scored

TinyModel = Callable[..., Path]
OPTIONS: tuple[dict[str, Any], ...] = (
    {"temperature": 0},
    {"temperature": 1.0},
    {"temperature": 0, "top_logprobs": 3},
    {"temperature": 1.0, "top_logprobs": 5},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.95, "logprobs_mode": "processed"},
    {
        "temperature": 0.9,
        "logprobs_mode": "processed",
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "frequency_penalty": 0.2,
    },
)


def generated(count: int) -> list[Request]:
    rng = random.Random(count)
    common = [rng.randrange(3, 120) for _ in range(40)]
    made: list[Request] = []
    for i in range(count):
        prompt = common[: 40 * (i % 2)] + [rng.randrange(3, 120) for _ in range(1 + 11 * i % 37)]
        options = OPTIONS[i % len(OPTIONS)]
        params = RequestParams(
            logprobs=True, seed=i, max_new_tokens=3 + 5 * i % 29, ignore_eos=True, **options
        )
        made.append((prompt, params))
    return made


def as_answers(asked: Sequence[Request], made: Sequence[RequestOutput]) -> list[Scored]:
    return [
        scored(prompt, output.token_ids, **OPTIONS[i % len(OPTIONS)])
        for i, ((prompt, _), output) in enumerate(zip(asked, made, strict=True))
    ]


def assert_equal_bits(found: Sequence[RequestOutput], made: Sequence[RequestOutput]) -> None:
    for one, other in zip(found, made, strict=True):
        assert one.answer_token_ids == other.token_ids
        names = {f"answer_{name}" for name in other.columns}
        assert names == one.columns.keys() - {"answer_rest_probs"}
        for name, values in other.columns.items():
            np.testing.assert_array_equal(one.columns[f"answer_{name}"], values, err_msg=name)


def check_mixed(engine: LLMEngine, count: int = 12) -> None:
    """Score what rows generated, alone and beside rows that generate the same again."""
    asked = generated(count)
    # Strategies add columns of their own, which answers do not have.
    engine.strategy.columns = ()
    made = run(engine, asked)
    answers = as_answers(asked, made)
    assert_equal_bits(run(engine, answers), made)
    mixed = [row for pair in zip(answers, asked, strict=True) for row in pair]
    found = run(engine, mixed)
    assert_equal_bits(found[::2], made)
    for again, before in zip(found[1::2], made, strict=True):
        assert again.token_ids == before.token_ids
        np.testing.assert_array_equal(again.columns["logprobs"], before.columns["logprobs"])


@pytest.mark.quick(1, thorough=2)
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "qwen3_next", "qwen3_5", "deepseek_v3"])
def test_bits_in_mixed_batches(kind: str, tiny_model: TinyModel) -> None:
    chunk = 64 if kind in ("qwen3_next", "qwen3_5") else 16
    check_mixed(make_engine(tiny_model(kind), chunk_tokens=chunk, max_batched_tokens=128))


@pytest.mark.thorough
@pytest.mark.parametrize("proposer", ["ngram", "mtp"])
def test_bits_beside_drafts(
    proposer: Literal["ngram", "mtp"], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Rows with answers run beside rows with drafts, and never have any."""
    strategy = ARSpecStrategy(proposer, adaptive=False, ngram_min=1)
    if proposer == "mtp":
        folder = TheirHead("deepseek_v3").save(tmp_path)
        engine = make_engine(folder, strategy, heads=("mtp",), max_batched_tokens=40)
    else:
        engine = make_engine(tiny_model("llama"), strategy, max_batched_tokens=40)
    check_mixed(engine)
    assert engine.stats.counts["num_draft_tokens"]


@pytest.mark.quick(1)
@pytest.mark.parametrize("overlap", some_slow([False, True], quick=[True]))
def test_preempted_rows_are_scored_once(
    overlap: bool, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows that decode take the blocks of a row between two chunks of its answer."""
    folder = tiny_model("llama")
    answer = scored([3], list(range(4, 81)), top_logprobs=4)
    (alone,) = run(make_engine(folder), [answer])
    long = RequestParams(max_new_tokens=40, ignore_eos=True, logprobs=True)
    expect_short_rows(monkeypatch)
    engine = make_engine(
        folder, chunk_tokens=5, kv_cache_gib=0.00009, max_model_len=100, block_size=4,
        overlap=overlap,
    )  # fmt: skip
    for i in range(3):
        engine.add_request(str(i), [5 + i], long)
    engine.step()
    engine.add_request("answer", *answer)
    outputs = {output.request_id: output for _ in range(200) for output in engine.step()}
    assert not engine.has_unfinished()
    found = outputs["answer"]
    assert found.num_preemptions
    for name, values in alone.columns.items():
        np.testing.assert_array_equal(found.columns[name], values)


@pytest.fixture(scope="module")
def each_alone(tiny_model: TinyModel) -> tuple[list[Scored], list[RequestOutput]]:
    """Eight rows, and what comes of each by itself."""
    rng = random.Random(5)
    pool = [
        scored(
            [rng.randrange(3, 120) for _ in range(rng.randrange(1, 50))],
            [rng.randrange(3, 120) for _ in range(rng.randrange(1, 50))],
            **OPTIONS[i % len(OPTIONS)],
        )
        for i in range(8)
    ]
    return pool, [run(make_engine(tiny_model("qwen3")), [row])[0] for row in pool]


@pytest.mark.thorough
@settings(max_examples=15)
@given(st.data())
def test_bits_do_not_depend_on_the_batch(
    tiny_model: TinyModel,
    each_alone: tuple[list[Scored], list[RequestOutput]],
    data: st.DataObject,
) -> None:
    pool, alone = each_alone
    chosen = data.draw(st.lists(st.integers(0, 7), min_size=1, max_size=12))
    engine = make_engine(
        tiny_model("qwen3"),
        max_batched_tokens=data.draw(st.sampled_from([1, 3, 17, 200])),
        block_size=data.draw(st.sampled_from([1, 4, 16])),
        overlap=data.draw(st.booleans()),
        prefix_caching=data.draw(st.booleans()),
    )
    for output, which in zip(run(engine, [pool[i] for i in chosen]), chosen, strict=True):
        for name, values in alone[which].columns.items():
            np.testing.assert_array_equal(output.columns[name], values)


def test_broken_logits_end_the_row_with_an_error(tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"))
    good = scored([3, 4], [5, 6, 7])
    model = engine._runner.model
    assert isinstance(model, CausalLM)
    weights(model)["model.embed_tokens.weight"][9] = float("nan")
    bad, output = run(engine, [scored([3, 4], [5, 9, 9, 6]), good])
    assert bad.error is not None and bad.error.type == "non_finite_logits"
    assert "3 of the answer's 4 tokens" in str(bad.error) or "2 of the answer's 4" in str(bad.error)
    assert output.finish_reason == "scored"


@pytest.mark.thorough
def test_the_largest_logits_are_those_of_a_chunk(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """4,000 tokens over a vocabulary of 30,000 are scored a few at a time."""
    sizes = {"max_position_embeddings": 4096, "hidden_size": 16, "head_dim": 4}
    folder = tiny_model("llama", vocab_size=30_000, num_hidden_layers=1, **sizes)
    engine = make_engine(folder)
    rows: list[int] = []
    describe = sampler.describe

    def record(logits: torch.Tensor, *rest: Any) -> dict[str, torch.Tensor]:
        rows.append(len(logits))
        return describe(logits, *rest)

    monkeypatch.setattr(sampler, "describe", record)
    (output,) = run(engine, [scored([3, 4], [7 * i % 30_000 for i in range(4000)])])
    assert len(output.columns["answer_logprobs"]) == 4000
    assert sum(rows) == 4000 and max(rows) * 30_000 * 4 <= 2**26
