"""What a job asks of the engine for a row."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from batchgen.engine.sampling.sampling_params import SamplingParams


class RowRequest(NamedTuple):
    """What the requests of a row ask for."""

    prompt: list[int]
    params: SamplingParams
    answer: list[int] | None = None  # the tokens that are scored; None if the row generates
    choices: Sequence[list[int]] = ()  # the tokens of each choice that is scored beside the row
