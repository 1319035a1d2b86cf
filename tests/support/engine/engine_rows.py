"""Running rows through an engine, for the tests of engines and strategies."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

import pytest
from torch import Tensor

from batchgen.engine.caches.model_caches import paged_token_bytes
from batchgen.engine.interface.outputs import Begun, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.token_model import TokenModel
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.admission import LengthPredictor
from batchgen.engine.vision.image import Image

Request = tuple[list[int], RequestParams]
Scored = tuple[list[int], RequestParams, list[int]]
"""A row with an answer, the last of the three, that is scored."""
Pictured = tuple[list[int], RequestParams, list[Image]]
"""A row with images."""


def strategy_columns(engine: LLMEngine) -> tuple[str, ...]:
    """The names of the columns that the strategy has for every row: `edit_log` is of some rules."""
    names = (column.name for column in engine.strategy.columns)
    return tuple(name for name in names if name != "edit_log")


def run(
    engine: LLMEngine,
    requests: Sequence[Request | Scored | Pictured],
    aborts: Mapping[int, Sequence[int]] | None = None,
    restarts: Collection[int] = (),
) -> list[RequestOutput]:
    """All outputs in order, with the strategy's columns besides those that they ask for; rows that
    `aborts` names by step are not among them. In the steps `restarts` all rows that are begun are
    dropped, and added again with what they have."""
    columns = strategy_columns(engine)

    def add(i: int, begun: Begun | None = None) -> None:
        request = requests[i]
        prompt, params = request[:2]
        images = [x for x in request[2] if isinstance(x, Image)] if len(request) == 3 else []
        answer = [x for x in request[2] if isinstance(x, int)] if len(request) == 3 else []
        if answer:
            engine.add_request(str(i), prompt, params, answer)
        else:
            more = columns if params.max_new_tokens else ()
            asked = replace(params, columns=(*params.columns, *more))
            goes_on = engine.add_request(str(i), prompt, asked, images=images, begun=begun)
            assert goes_on == (begun is not None)

    for i in range(len(requests)):
        add(i)
    outputs: dict[str, RequestOutput] = {}
    for step in itertools.count():
        if not engine.has_unfinished():
            break
        for i in (aborts or {}).get(step, ()):
            engine.abort(str(i))
        for name in engine.begun_lengths() if step in restarts else ():
            begun = engine.begun(name)
            engine.abort(name)
            add(int(name), begun)
        outputs |= {output.request_id: output for output in engine.step()}
        engine.scheduler.block_manager.check_integrity(engine.scheduler.running.rows)
    assert engine.scheduler.block_manager.usage == 0 and len(engine.scheduler.running) == 0
    assert engine.step() == []
    return [outputs[name] for name in sorted(outputs, key=int)]


def beside(draft: CausalLM | None) -> dict[str, CausalLM]:
    """What an engine runs beside its target: a draft model, if there is one."""
    return {} if draft is None else {"draft": draft}


def block_bytes(block_size: int, *models: TokenModel) -> int:
    """Bytes of a block of the paged cache for all of these models."""
    return block_size * sum(paged_token_bytes(m.cache_specs, (), m.dtype) for m in models)


def weights(model: CausalLM) -> dict[str, Tensor]:
    """Name of every piece of the model's weights → where its values stand."""
    slots = model.checkpoint_slots()
    return {slot.pieces[0]: slot.parameter for slot in slots if len(slot.pieces) == 1}


def expect_short_rows(patch: pytest.MonkeyPatch) -> None:
    """Admission takes every row to end with its next token, so that rows are preempted."""
    patch.setattr(LengthPredictor, "predict", lambda self, generated, limits, exact: generated)
