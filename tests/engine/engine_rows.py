"""Running rows through an engine, for the tests of engines and strategies."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import replace

import pytest

from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.outputs import RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.admission import LengthPredictor

Request = tuple[list[int], SamplingParams]


def run(
    engine: LLMEngine,
    requests: Sequence[Request],
    aborts: Mapping[int, Sequence[int]] | None = None,
) -> list[RequestOutput]:
    """All outputs in order, with the strategy's columns; rows that `aborts` names by step are not
    among them."""
    columns = tuple(column.name for column in engine.strategy.columns)
    for i, (prompt, params) in enumerate(requests):
        engine.add_request(str(i), prompt, replace(params, columns=columns))
    outputs: dict[str, RequestOutput] = {}
    for step in itertools.count():
        if not engine.has_unfinished():
            break
        for i in (aborts or {}).get(step, ()):
            engine.abort(str(i))
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running)
    assert engine.scheduler.block_manager.usage == 0 and engine.scheduler.num_running == 0
    assert engine.step() == []
    return [outputs[name] for name in sorted(outputs, key=int)]


def expect_short_rows(patch: pytest.MonkeyPatch) -> None:
    """Admission takes every row to end with its next token, so that rows are preempted."""
    patch.setattr(LengthPredictor, "predict", lambda self, generated, limits, exact: generated)
