"""Scores the choices of rows: how likely the model finds each of them behind the prompt."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Sequence

import numpy as np

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.inputs.constraint.choice_columns import CHOICE_LOGPROBS, CHOICE_SCORES
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.generation.job_engine import TakesRequests
from batchgen.util.request_id import RequestId

_SCORED = SamplingParams(max_new_tokens=0)


def choice_ids(
    constraint: Constraint | None, encode: Callable[[str], list[int]], end: int | None
) -> list[list[int]]:
    """Return the token ids of each choice of a row's constraint, with the id `end` behind them if
    it is given; none for a row without choices."""
    if constraint is None or constraint.kind != "choice":
        return []
    behind = [] if end is None else [end]
    return [encode(choice) + behind for choice in json.loads(constraint.text)]


class ChoiceScorer:
    """Lets an engine run rows together with their choices, each of which is a request of its own
    that shares the row's prompt. A row is finished when all of them are.

    Args:
        is_on: whether the rows of the job have columns of choices.
    """

    def __init__(self, engine: TakesRequests, is_on: bool) -> None:
        self._engine, self._is_on = engine, is_on
        # By the id of a row's request: what has ended of the row and of its choices, by number.
        self._open: dict[RequestId, dict[int | None, RequestOutput]] = {}
        self._counts: dict[RequestId, int] = {}

    def add_request(self, request_id: RequestId, asked: RowRequest) -> None:
        """Queue a row and its choices. Raises RequestError if it can never be served."""
        if not self._is_on and not asked.images:
            self._engine.add_request(request_id, asked.prompt, asked.params, asked.answer)
            return
        # If the longest can be served, all can.
        longest_first = sorted(enumerate(asked.choices), key=lambda pair: -len(pair[1]))
        more = {"images": [each.image for each in asked.images]} if asked.images else {}
        for number, ids in longest_first:
            of_choice = request_id._replace(choice=number)
            self._engine.add_request(of_choice, asked.prompt, _SCORED, ids, **more)
        self._engine.add_request(request_id, asked.prompt, asked.params, asked.answer, **more)
        if self._is_on:
            self._open[request_id] = {}
            self._counts[request_id] = len(asked.choices)

    def step(self) -> list[RequestOutput]:
        """Run one step of the engine, and return the rows that are finished."""
        if not self._is_on:
            return self._engine.step()
        finished = []
        for output in self._engine.step():
            assert isinstance(output.request_id, RequestId)
            request_id = output.request_id._replace(choice=None)
            parts = self._open.get(request_id)
            if parts is None:  # a choice of a row that was refused
                continue
            parts[output.request_id.choice] = output
            if len(parts) == 1 + self._counts[request_id]:
                del self._open[request_id], self._counts[request_id]
                row = parts.pop(None)
                finished.append(_with_scores(row, [parts[i] for i in range(len(parts))]))
        return finished


def _with_scores(row: RequestOutput, choices: Sequence[RequestOutput]) -> RequestOutput:
    """Return a finished row with the columns of its choices."""
    error = next((choice.error for choice in choices if choice.error is not None), row.error)
    logprobs = np.array(
        [choice.columns["answer_logprobs"].sum(dtype=np.float64) for choice in choices], np.float64
    )
    weights = np.exp(logprobs - logprobs.max(initial=-np.inf))
    scores = weights / weights.sum() if len(weights) else weights
    columns = {
        **row.columns, CHOICE_LOGPROBS.name: logprobs, CHOICE_SCORES.name: scores
    }  # fmt: skip
    reason = row.finish_reason if error is None else "error"
    return dataclasses.replace(row, columns=columns, error=error, finish_reason=reason)
