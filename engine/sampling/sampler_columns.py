"""The output columns that the sampler computes, for generated tokens and for given answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.sampling.sampling_params import RequestParams

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
"""The log-probability of each generated token."""


# The tail shape of the next two columns is [K], with the K of a row, which `requested_columns`
# sets.
TOP_LOGPROBS = OutputColumn("top_logprobs", np.dtype(np.float32), (0,))
"""The log-probabilities of the K most likely tokens at each position."""
TOP_LOGPROB_IDS = OutputColumn("top_logprob_ids", np.dtype(np.int32), (0,))
"""The ids of the K most likely tokens at each position."""
ENTROPY = OutputColumn("entropy", np.dtype(np.float32))
"""The entropy in nats of the distribution at each generated token."""
ANSWER_PREFIX = "answer_"
"""The prefix of the names of columns with values for the tokens of a given answer."""
ANSWER_TOP_LOGPROBS = ANSWER_PREFIX + TOP_LOGPROBS.name
ANSWER_REST_PROBS = OutputColumn("answer_rest_probs", np.dtype(np.float32), scope="answer")
"""The total probability of all tokens except the K most likely ones, at each position of an
answer."""


def requested_columns(params: RequestParams) -> tuple[OutputColumn, ...]:
    """Return the sampler's output columns that a row with these options asks for."""
    columns = [LOGPROBS] if params.logprobs else []
    if params.top_logprobs:
        tail = (params.top_logprobs,)
        columns.append(replace(TOP_LOGPROBS, tail_shape=tail))
        columns.append(replace(TOP_LOGPROB_IDS, tail_shape=tail))
    columns += [ENTROPY] if ENTROPY.name in params.columns else []
    if params.scores_answer:
        columns = [replace(c, name=ANSWER_PREFIX + c.name, scope="answer") for c in columns]
        columns += [ANSWER_REST_PROBS] if params.top_logprobs else []
    return tuple(columns)


def of_answer(columns: Mapping[str, npt.NDArray[Any]]) -> dict[str, npt.NDArray[Any]]:
    """Rename columns of a given answer's tokens that were computed as if the tokens were generated.

    The sampler's columns get the prefix `answer_`; others keep their names. If there are top
    log-probabilities, ANSWER_REST_PROBS is added.
    """
    sampler_names = {LOGPROBS.name, TOP_LOGPROBS.name, TOP_LOGPROB_IDS.name, ENTROPY.name}
    out = {
        ANSWER_PREFIX + name if name in sampler_names else name: v for name, v in columns.items()
    }
    if ANSWER_TOP_LOGPROBS in out:
        out[ANSWER_REST_PROBS.name] = rest_probs(out[ANSWER_TOP_LOGPROBS])
    return out


def rest_probs(top_logprobs: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the total probability of all tokens except the K whose log-probabilities [N, K] are
    given."""
    rest = 1 - np.exp(top_logprobs.astype(np.float64)).sum(1)
    clipped: npt.NDArray[np.float32] = rest.clip(0).astype(np.float32)
    return clipped
