"""Scores of given answers from Python."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen import LLM, SamplingParams, Score


@pytest.fixture(scope="module")
def llm(model: Path) -> Iterator[LLM]:
    with LLM(str(model), device="cpu", kv_cache_gib=0.01, max_num_seqs=8) as llm:
        yield llm


def ids_of(llm: LLM, text: str) -> list[int]:
    assert llm.tokenizer is not None
    return list(llm.tokenizer.encode(text, add_special_tokens=False))


def test_scores_are_nested_as_prompts_and_answers_are(llm: LLM) -> None:
    one = llm.score("ab", " cd", top_logprobs=3)
    assert isinstance(one, Score) and one.error is None
    assert one.token_ids == ids_of(llm, " cd") and (one.prompt, one.answer) == ("ab", " cd")
    assert one.top_logprobs is not None and one.rest_probs is not None
    assert one.top_logprobs.shape == (len(one.token_ids), 3)
    assert one.logprob == pytest.approx(one.logprobs.sum())
    count = len(one.token_ids)
    assert repr(one) == f"Score(' cd', {count} tokens, logprob={one.logprob:.4g})"
    assert one.perplexity == pytest.approx(math.exp(-one.logprobs.mean()))
    many = llm.score("ab", [" cd", " e"])
    both: list[Any] = [" cd", one.token_ids]
    paired = llm.score(["ab", "ab"], both)
    assert [score.answer for score in many] == [" cd", " e"]
    array: Any = np.array(one.token_ids)
    same: list[Score] = [many[0], *paired, llm.score("ab", array)]
    for score in same:
        np.testing.assert_array_equal(score.logprobs, one.logprobs)
    none: list[str] = []
    assert llm.score(none, none) == [] and llm.score("ab", none) == []
    (listed,) = llm.score(["ab"], [" cd"])
    np.testing.assert_array_equal(listed.logprobs, one.logprobs)


def test_what_was_generated_is_scored_with_its_bits(llm: LLM) -> None:
    params = SamplingParams(max_tokens=9, seed=3, logprobs=2)
    chat = [{"role": "user", "content": "hi"}]
    (made,) = llm.generate(chat, params)
    score = llm.score(chat, made.token_ids, top_logprobs=2)
    assert score.prompt_token_ids == made.prompt_token_ids
    np.testing.assert_array_equal(score.logprobs, made.logprobs)
    np.testing.assert_array_equal(score.top_logprob_ids, made.top_logprob_ids)
    (greedy,) = llm.generate("ab", params.replace(temperature=0))
    assert llm.score("ab", greedy.token_ids, top_logprobs=1).is_greedy
    assert not llm.score("ab", [*greedy.token_ids[:-1], 5], top_logprobs=1).is_greedy or (
        greedy.token_ids[-1] == 5
    )


def test_answers_that_cannot_be_scored_have_an_error(llm: LLM) -> None:
    answers: list[Any] = ["c", "", [5] * 300, 7.5, [10**6]]
    scores = llm.score("ab", answers)
    errors = [None if score.error is None else score.error.type for score in scores]
    assert errors == [None, "empty_answer", "answer_too_long", "bad_answer", "bad_token_ids"]
    assert math.isnan(scores[1].perplexity) and scores[1].token_ids == []


def test_calls_that_make_no_sense_are_refused(llm: LLM) -> None:
    with pytest.raises(ValueError, match="2 answers for 3 prompts"):
        llm.score(["a", "b", "c"], ["d", "e"])
    with pytest.raises(ValueError, match="1 answers for 2 prompts"):
        llm.score(["a", "b"], "c")
    with pytest.raises(ValueError, match="score generates nothing"):
        llm.score("a", "b", max_new_tokens=3)
    with pytest.raises(ValueError, match="answers must be a text"):
        llm.score("a", 5)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="top_logprobs must be between 0 and 256"):
        llm.score("a", "b", top_logprobs=300)
    with pytest.raises(
        ValueError, match="max_new_tokens is 0, and the request has no answer to score"
    ):
        llm.generate("a", SamplingParams(max_new_tokens=0))
    with pytest.raises(ValueError, match="ask for top_logprobs=1"):
        _ = llm.score("a", "b").is_greedy
