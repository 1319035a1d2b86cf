"""Requests of harnesses: what is asked once, and how texts are cut."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import LLM
from batchgen.api.plugins.harness_requests import (
    EngineAnswers,
    ScoreRequest,
    TextRequest,
    cut_left,
    each_once,
    rolling_windows,
)
from batchgen.util.errors import ConfigError

SCORED = [
    ScoreRequest(f"choice/{i}/{k}", tuple(range(i + 1)), (5, 6, k))
    for i in range(4)
    for k in range(3)
]
ASKED = [
    TextRequest(f"sum/{i}/0", (1, 2, i), {"max_new_tokens": 3 + i, "temperature": i % 2, "seed": 0})
    for i in range(4)
]


def test_equal_requests_are_asked_once_unless_they_draw() -> None:
    asked = []

    def answer(requests: Sequence[Any]) -> list[str]:
        asked.append(len(requests))
        return [one.name for one in requests]

    assert each_once([*SCORED, *SCORED[:2]], answer)[-2:] == ["choice/0/0", "choice/0/1"]
    greedy, drawn = [ASKED[0]] * 3, [ASKED[1]] * 3
    assert each_once([*greedy, *drawn], answer) == ["sum/0/0"] * 3 + ["sum/1/0"] * 3
    assert asked == [len(SCORED), 4]


@given(length=st.integers(0, 60), most=st.integers(1, 20))
def test_windows_predict_each_token_once(length: int, most: int) -> None:
    ids = list(range(length))
    windows = rolling_windows(ids, -1, most)
    assert [token for _, answer in windows for token in answer] == ids
    for context, answer in windows:
        whole = [-1, *ids][: ids.index(answer[-1]) + 2]
        assert whole[-len(context) - len(answer) :] == context + answer
        assert context and len(context) + len(answer) - 1 <= most
    assert all(len(c) + len(a) - 1 == most for c, a in windows[1:])


def test_a_long_context_loses_its_first_tokens() -> None:
    assert cut_left([1, 2, 3, 4], [5, 6], 5, "a").prompt == (2, 3, 4)
    assert cut_left([1], [5, 6], 9, "a").prompt == (1,)
    for prompt, answer, why in (
        ([1], [], "continuation has no"),
        ([1], [2, 3], "raise max_length"),
    ):
        with pytest.raises(ConfigError, match=f"a: the {why}|a: .*{why}"):
            cut_left(prompt, answer, 2, "a")


def test_an_error_names_its_request(model: Path) -> None:
    with LLM(str(model), device="cpu", max_model_len=8) as llm:
        with pytest.raises(ConfigError, match="long: prompt and answer have 7 and 2 tokens"):
            EngineAnswers(llm).score([*SCORED[:2], ScoreRequest("long", (1,) * 7, (1, 2))])
        with pytest.raises(ConfigError, match="long: the prompt has 8 tokens"):
            EngineAnswers(llm).generate([*ASKED[:2], TextRequest("long", (1,) * 8, {})])
