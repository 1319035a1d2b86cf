"""Requests of harnesses: what is asked once, how texts are cut, and an evaluation in two phases."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen import LLM
from batchgen.__main__ import run_command
from batchgen.plugins.harness_phases import DumpedAnswers, ReplayedAnswers
from batchgen.plugins.harness_requests import (
    Asked,
    EngineAnswers,
    Scored,
    cut_left,
    each_once,
    rolling_windows,
)
from batchgen.util.errors import ConfigError

SCORED = [
    Scored(f"choice/{i}/{k}", tuple(range(i + 1)), (5, 6, k)) for i in range(4) for k in range(3)
]
ASKED = [
    Asked(f"sum/{i}/0", (1, 2, i), {"max_new_tokens": 3 + i, "temperature": i % 2, "seed": 0})
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


@pytest.fixture
def dumped(model: Path, tmp_path: Path) -> Path:
    """A folder with the requests of two calls to score, and of one to generate."""
    folder = tmp_path / "eval"
    folder.mkdir()
    keys = {"model": {"choice": "hf", "path": str(model)}, "engine.device": "cpu"}
    writer = DumpedAnswers(folder, keys)
    writer.score(SCORED[:5])
    writer.generate(ASKED)
    writer.score(SCORED[5:])
    assert [path.name for path in writer.jobs] == ["score.yaml", "generate.yaml"]
    return folder


def test_two_phases_give_the_results_of_one(dumped: Path, model: Path) -> None:
    for job in ("score.yaml", "generate.yaml"):
        assert run_command([str(dumped / job)]) == 0
    replay = ReplayedAnswers(dumped)
    with LLM(str(model), device="cpu") as llm:
        engine = EngineAnswers(llm)
        assert replay.score(SCORED[:5]) + replay.score(SCORED[5:]) == engine.score(SCORED)
        assert replay.generate(ASKED) == engine.generate(ASKED)


def test_missing_rows_and_other_requests_are_named(dumped: Path) -> None:
    with pytest.raises(ConfigError, match="score is not the output of a job"):
        ReplayedAnswers(dumped).score(SCORED[:5])
    run_command([str(dumped / "score.yaml"), "dataset.limit=4"])
    with pytest.raises(ConfigError, match=r"1 of 5 rows of .* are missing \(choice/1/1\): run"):
        ReplayedAnswers(dumped).score(SCORED[:5])
    with pytest.raises(ConfigError, match="choice/0/1: the request is not line 1 of"):
        ReplayedAnswers(dumped).score(SCORED[1:5])
    with pytest.raises(ConfigError, match="sum/3/0: the request is not line 5 of"):
        ReplayedAnswers(dumped).generate([*ASKED, ASKED[-1]])
    (dumped / "score.jsonl").unlink()
    with pytest.raises(ConfigError, match="run dump first"):
        ReplayedAnswers(dumped).score(SCORED[:5])


def test_an_error_names_its_request(model: Path, tmp_path: Path) -> None:
    with LLM(str(model), device="cpu", max_model_len=8) as llm:
        with pytest.raises(ConfigError, match="long: prompt and answer have 7 and 2 tokens"):
            EngineAnswers(llm).score([*SCORED[:2], Scored("long", (1,) * 7, (1, 2))])
        with pytest.raises(ConfigError, match="long: the prompt has 8 tokens"):
            EngineAnswers(llm).generate([*ASKED[:2], Asked("long", (1,) * 8, {})])
