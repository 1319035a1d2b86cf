"""Defines the output columns of scored choices, and tokenizes a row's choices. A job with a
`choice` constraint that scores choices instead of generating uses these."""

import json
from collections.abc import Callable

import numpy as np

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import OutputColumn

CHOICE_LOGPROBS = OutputColumn("choice_logprobs", np.dtype(np.float64), scope="choice")
"""The log-probability of each choice: the sum over its tokens."""
CHOICE_SCORES = OutputColumn("choice_scores", np.dtype(np.float64), scope="choice")
"""The probability of each choice among all choices of the row."""


def choice_ids(
    constraint: Constraint | None, encode: Callable[[str], list[int]], end: int | None
) -> list[list[int]]:
    """Return the token ids of each choice of a row's constraint, each followed by `end` if that is
    not None; an empty list for a row without choices."""
    if constraint is None or constraint.kind != "choice":
        return []
    suffix = [] if end is None else [end]
    return [encode(choice) + suffix for choice in json.loads(constraint.text)]
