"""Log-probabilities of given tokens against transformers', of every family of models."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.engine.constrained_rows import CONSTRAINTS
from tests.support.engine.engine_rows import Request, Scored, run
from tests.support.engine.families import AUTOREGRESSIVE, CHUNKED, DELTA, family_folder
from tests.support.engine.ranked_engines import Case, run_divided
from tests.support.engine.scored_rows import Reference, make_engine, scored

TinyModel = Callable[..., Path]
# With weights as large as the fixture's, rounding takes transformers itself 4e-5 away from what it
# computes in float64.
SMALL = {"initializer_range": 0.03}
WIDE = SMALL | {"linear_num_key_heads": 4, "linear_num_value_heads": 8}
TOP = 7


def rows() -> list[Scored]:
    """Several answers to one prompt, and others, of one token up to more than a chunk."""
    rng = random.Random(0)
    prompt = [rng.randrange(3, 120) for _ in range(70)]
    lengths = ((70, 9), (70, 1), (33, 20), (1, 5), (70, 30), (69, 12), (16, 16))
    return [
        scored(prompt[:n], [rng.randrange(3, 120) for _ in range(m)], top_logprobs=TOP)
        for n, m in lengths
    ]


def check(found: Sequence[RequestOutput], asked: Sequence[Scored], reference: Reference) -> None:
    for output, (prompt, params, answer) in zip(found, asked, strict=True):
        assert output.finish_reason == "scored" and output.token_ids == []
        assert output.prompt_token_ids == prompt and output.answer_token_ids == answer
        expected = reference.logprobs(prompt, answer)
        own = expected[np.arange(len(answer)), answer]
        np.testing.assert_allclose(output.columns["answer_logprobs"], own, atol=1e-5, rtol=5e-6)
        order = np.argsort(-expected, axis=1, kind="stable")[:, : params.top_logprobs]
        np.testing.assert_array_equal(output.columns["answer_top_logprob_ids"], order)
        best = np.take_along_axis(expected, order, 1)
        np.testing.assert_allclose(
            output.columns["answer_top_logprobs"], best, atol=1e-5, rtol=5e-6
        )
        rest = 1 - np.exp(best.astype(float)).sum(1)
        np.testing.assert_allclose(output.columns["answer_rest_probs"], rest, atol=1e-5)


@pytest.mark.quick(1, thorough=4)
@pytest.mark.parametrize("kind", AUTOREGRESSIVE)
def test_scores_equal_transformers(kind: str, tiny_model: TinyModel) -> None:
    folder = tiny_model(kind, **SMALL) if kind in DELTA else family_folder(kind, tiny_model)
    asked = rows()
    reference = Reference(folder)
    whole = make_engine(folder, prefix_caching=False)
    check(run(whole, asked), asked, reference)
    chunk = 64 if kind in CHUNKED else 5
    chunked = make_engine(folder, max_batched_tokens=chunk, block_size=4, overlap=True)
    check(run(chunked, asked), asked, reference)
    hits = chunked.stats.cached_tokens
    assert hits > 60, "answers to one prompt share it"
    check(run(chunked, asked), asked, reference)
    assert chunked.stats.cached_tokens - hits > 3 * 60


@pytest.mark.thorough
def test_ranks_score_what_one_process_scores(tiny_model: TinyModel) -> None:
    folders = [
        tiny_model("qwen3", vocab_size=129),
        tiny_model("qwen3_next", **WIDE),
        tiny_model("deepseek_v3"),
    ]
    cases = [Case(folder, rows()) for folder in folders]
    for folder, (found, _) in zip(folders, run_divided(cases, 2), strict=True):
        check(found, rows(), Reference(folder))


@pytest.mark.slow
def test_ranks_score_with_every_family(tiny_model: TinyModel) -> None:
    options = dict.fromkeys(DELTA, WIDE) | {"gemma4_e2b": SMALL}
    folders = [
        tiny_model(kind, **options[kind]) if kind in options else family_folder(kind, tiny_model)
        for kind in AUTOREGRESSIVE
    ]
    cases = [Case(folder, rows(), config={"block_size": 4}) for folder in folders]
    for folder, (found, _) in zip(folders, run_divided(cases, 2), strict=True):
        check(found, rows(), Reference(folder))


def test_probabilities_of_the_whole_vocabulary_add_up_to_one(tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"))
    params: dict[str, Any] = {"top_logprobs": 128, "logprobs_mode": "processed", "temperature": 0.7}
    asked = [scored([3, 4], [5, 6, 7], **options) for options in ({"top_logprobs": 128}, params)]
    found = run(engine, asked)
    for output in found:
        values = output.columns["answer_top_logprobs"]
        assert values.shape == (3, 128)
        np.testing.assert_allclose(np.exp(values.astype(float)).sum(1), 1, atol=1e-5)
        assert output.columns["answer_rest_probs"].max() < 1e-5
    raw, processed = (output.columns["answer_logprobs"] for output in found)
    assert np.abs(raw - processed).max() > 0.01


def test_context_columns_are_of_prompt_and_answer(tiny_model: TinyModel) -> None:
    """They are those of a row that has generated the same tokens."""
    folder = tiny_model("qwen3_moe")
    engine = make_engine(folder, columns=(ROUTED_EXPERTS,), max_batched_tokens=5)
    prompt = list(range(10, 30))
    ask: Request = (prompt, RequestParams(max_new_tokens=9, columns=(ROUTED_EXPERTS,)))
    (made,) = run(engine, [ask])
    asked = scored(prompt, made.token_ids, columns=(ROUTED_EXPERTS,))
    (found,) = run(engine, [asked])
    experts = found.columns[ROUTED_EXPERTS]
    assert len(experts) == len(prompt) + len(made.token_ids) - 1
    np.testing.assert_array_equal(experts, made.columns[ROUTED_EXPERTS])


def test_diffusion_models_refuse_answers(tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("sdar"), DLLMStrategy(block_length=4))
    with pytest.raises(ValueError, match="strategy dllm cannot score a given answer"):
        engine.add_request("0", [3, 4], RequestParams(max_new_tokens=0), [5])


def test_what_cannot_be_scored_is_refused_by_name(tiny_model: TinyModel) -> None:
    engine = make_engine(tiny_model("llama"), ARSpecStrategy("ngram"), max_model_len=40)
    params = RequestParams(max_new_tokens=0)
    for error, answer in (
        ("empty_answer", []),
        ("answer_too_long", [5] * 31),
        ("bad_token_ids", [128]),
        ("bad_token_ids", [-1]),
    ):
        with pytest.raises(RequestError) as refused:
            engine.add_request("0", [3] * 10, params, answer)
        assert refused.value.type == error
    with pytest.raises(RequestError) as refused:
        engine.add_request("0", [], params, [3])
    assert refused.value.type == "empty_prompt"
    with pytest.raises(
        ValueError, match="max_new_tokens is 0, and the request has no answer to score"
    ):
        engine.add_request("0", [3], params)
    with pytest.raises(ValueError, match="an answer to score, and also generates"):
        engine.add_request("0", [3], RequestParams(max_new_tokens=5), [4])
    with pytest.raises(ValueError, match="column step_map describes generated tokens"):
        engine.add_request("0", [3], replace(params, columns=("step_map",)), [4])
    with pytest.raises(ValueError, match="constraint must be none with max_new_tokens=0"):
        RequestParams(max_new_tokens=0, constraint=CONSTRAINTS[0])
    with pytest.raises(ValueError, match="top_logprobs must be between 0 and 256"):
        RequestParams(max_new_tokens=0, top_logprobs=257)
    assert not engine.has_unfinished()
    (output,) = run(engine, [scored([3] * 10, [5] * 30)])  # as long as the model allows
    assert output.finish_reason == "scored" and len(output.columns["answer_logprobs"]) == 30
