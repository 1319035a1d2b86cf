"""An engine in a thread of its own, for callers that come at any time."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import CancelledError
from pathlib import Path

import pytest

from batchgen import LLM, SamplingParams
from batchgen.api.plugins.engine_thread import EngineThread
from batchgen.engine.interface.outputs import RequestError

PROMPTS = [f"What is {i}?" for i in range(12)]
GREEDY = SamplingParams(temperature=0, max_tokens=6)
DRAWN = SamplingParams(max_tokens=6, n=2, seed=5)


@pytest.fixture
def engine(model: Path) -> Iterator[EngineThread]:
    """A thread with a tiny model."""
    thread = EngineThread(LLM(str(model), device="cpu", max_model_len=200))
    yield thread
    thread.close()


def test_outputs_are_those_of_generate(engine: EngineThread, model: Path) -> None:
    futures = [engine.submit(prompt, GREEDY) for prompt in PROMPTS]
    with LLM(str(model), device="cpu", max_model_len=200) as llm:
        expected = llm.generate(PROMPTS, GREEDY)
    for future, outputs in zip(futures, expected, strict=True):
        (found,) = future.result(60)
        assert (found.text, found.token_ids) == (outputs[0].text, outputs[0].token_ids)


def test_the_order_of_callers_changes_nothing(engine: EngineThread, model: Path) -> None:
    first, again = _drawn(engine, PROMPTS), _drawn(engine, PROMPTS)
    assert len({str(ids) for both in first.values() for ids in both}) == 2 * len(PROMPTS)
    assert all(first[prompt] != again[prompt] for prompt in PROMPTS)  # asked again: other draws
    other = EngineThread(LLM(str(model), device="cpu", max_model_len=200))
    assert _drawn(other, PROMPTS[::-1]) == first
    other.close()


def _drawn(engine: EngineThread, prompts: list[str]) -> dict[str, list[list[int]]]:
    asked = {prompt: engine.submit(prompt, DRAWN) for prompt in prompts}
    return {key: [one.token_ids for one in each.result(60)] for key, each in asked.items()}


def test_errors_reach_their_callers_alone(engine: EngineThread) -> None:
    long = engine.submit("x" * 300, GREEDY)
    nothing = engine.submit(None, GREEDY)  # type: ignore[arg-type]
    fine = engine.submit("x", GREEDY)
    for future, kind in ((long, "prompt_too_long"), (nothing, "bad_prompt")):
        with pytest.raises(RequestError) as raised:
            future.result(60)
        assert raised.value.type == kind
    assert fine.result(60)[0].finish_reason == "length"


def test_what_nobody_waits_for_is_dropped(engine: EngineThread) -> None:
    endless = engine.submit("x", SamplingParams(temperature=0, max_tokens=190, ignore_eos=True))
    assert endless.cancel()
    assert engine.submit("y", GREEDY).result(60)
    with pytest.raises(CancelledError):
        endless.result(0)


def test_the_end_of_the_thread_is_heard(model: Path) -> None:
    thread = EngineThread(LLM(str(model), device="cpu", max_model_len=200))
    running = thread.submit("x", SamplingParams(max_tokens=190, ignore_eos=True))
    thread.close()
    with pytest.raises((RequestError, RuntimeError), match="stopped"):
        running.result(60)
