"""What an engine is like after a step that raised."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.engine import llm_engine
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy

PARAMS = RequestParams(max_new_tokens=3)


@pytest.fixture
def engine(tiny_model: Callable[..., Path]) -> LLMEngine:
    """One row that failed before it ran, as one whose constraint does not compile, and one that
    waits."""
    model = load_model(tiny_model("llama"), device=torch.device("cpu"), dtype=torch.float32)
    made = LLMEngine(model, None, (), ARStrategy(), EngineConfig(kv_cache_gib=0.01))
    made.add_request("failed", [5, 6], PARAMS)
    made.add_request("waiting", [5, 6], PARAMS)
    seq = made._live["failed"]
    made.scheduler.abort(seq)
    seq.fail(RequestError("bad_constraint", "it cannot be followed"))
    made._finished.append(seq)
    return made


@pytest.mark.parametrize("place", ["schedule", "HostCopy"])
@pytest.mark.parametrize("error", [KeyboardInterrupt, torch.OutOfMemoryError])
def test_all_rows_can_be_aborted_and_their_ids_used_again(
    engine: LLMEngine, place: str, error: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object) -> None:
        raise error("now")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler if place == "schedule" else llm_engine, place, fail)
        with pytest.raises(error, match="now"):
            engine.step()
    assert engine.abort("failed") and engine.abort("waiting")
    assert not engine.has_unfinished() and engine.scheduler.block_manager.usage == 0
    for name in ("failed", "waiting"):
        engine.add_request(name, [7, 8, 9], PARAMS)
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    assert sorted(output.request_id for output in outputs) == ["failed", "waiting"]
    assert all(len(output.token_ids) == 3 for output in outputs)


def test_a_row_that_ended_before_is_returned_by_the_next_step(
    engine: LLMEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail() -> None:
        raise torch.OutOfMemoryError("now")

    with monkeypatch.context() as patch:
        patch.setattr(engine.scheduler, "schedule", fail)
        with pytest.raises(torch.OutOfMemoryError):
            engine.step()
    (output,) = engine.step()
    assert output.request_id == "failed" and output.error is not None
    assert output.error.type == "bad_constraint"
