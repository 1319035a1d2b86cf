"""Scores the choices of multiple-choice rows: the likelihood of each choice after the prompt.

A row is one request for its answer, and one more for each choice. `Generation` joins their outputs
with `with_scores`: log-likelihoods of -1.0 and -2.0 give the scores 0.73 and 0.27.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.constraint.choice_columns import CHOICE_LOGPROBS, CHOICE_SCORES

SCORED = RequestParams(max_new_tokens=0)
"""The parameters of a choice's request: nothing is generated, and the choice's tokens are scored
after the prompt."""


def with_scores(ended: Sequence[RequestOutput]) -> RequestOutput:
    """Join the outputs of a row and of its choices, in any order, to one output of the row.

    Its column `CHOICE_LOGPROBS` has the sum of log-probabilities of each choice, and
    `CHOICE_SCORES` their softmax. An error of a choice is an error of the row.
    """
    (row,) = (output for output in ended if output.request_id.choice is None)
    choices = [output for output in ended if output is not row]
    choices.sort(key=lambda output: output.request_id.choice)
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
