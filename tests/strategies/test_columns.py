"""A strategy's own column: declared once, returned to the rows that ask, refused elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import OutputColumn, StepOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.step_inputs import JoiningRows
from batchgen.strategies.ar.strategy import ARStrategy

PLACE = OutputColumn("place", np.dtype(np.int64), (2,))


class PlacedStrategy(ARStrategy):
    name = "placed"
    columns = (PLACE,)

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        return self._with_place(output, super().first_tokens(output, rows))

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        return self._with_place(output, super().decide(output, guide))

    def _with_place(self, output: ModelOutput, step: StepOutput) -> StepOutput:
        place = torch.stack([output.positions, output.positions + 1], dim=-1).unsqueeze(1)
        return replace(step, columns={**step.columns, PLACE.name: place})


def make_engine(
    tiny_model: Callable[..., Path], strategy: ARStrategy, overlap: bool = False
) -> LLMEngine:
    model = load_model(tiny_model("llama"), device=torch.device("cpu"), dtype=torch.float32)
    config = EngineConfig(kv_cache_gib=0.01, overlap=overlap)
    return LLMEngine(model, None, (), strategy, config)


@pytest.mark.parametrize("overlap", [False, True])
def test_a_column_reaches_the_rows_that_ask(tiny_model: Callable[..., Path], overlap: bool) -> None:
    engine = make_engine(tiny_model, PlacedStrategy(), overlap)
    asking = RequestParams(max_new_tokens=5, columns=("place",), logprobs=True)
    engine.add_request("with", [9, 8, 7], asking)
    engine.add_request("without", [9, 8], RequestParams(max_new_tokens=3))
    outputs = {}
    while engine.has_unfinished():
        outputs.update({output.request_id: output for output in engine.step()})
    assert outputs["with"].columns["place"].tolist() == [[i, i + 1] for i in range(2, 7)]
    assert outputs["with"].columns["place"].dtype == np.int64
    assert set(outputs["with"].columns) == {"place", "logprobs"}
    assert not outputs["without"].columns


def test_a_column_that_the_strategy_has_not_is_refused(tiny_model: Callable[..., Path]) -> None:
    engine = make_engine(tiny_model, ARStrategy())
    with pytest.raises(ValueError, match="strategy ar has no column 'place'"):
        engine.add_request("0", [9], RequestParams(columns=("place",)))
