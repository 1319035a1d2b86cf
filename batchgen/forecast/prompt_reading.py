"""What a job does with its rows before they reach the model, for `scan.scan_rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchgen.config.job_config import JobConfig
from batchgen.constraint.row_constraints import RowConstraints
from batchgen.dataset.source import Row, Source
from batchgen.engine.constraint.constraint import Constraint
from batchgen.prompts.row_prompts import fit_prompt

if TYPE_CHECKING:
    from batchgen.resolve.opened_job import OpenedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a job does with a row before it reaches the model; its calls raise RequestError.

    `fit` cuts or refuses a prompt of more than `room` tokens. The tokenizer may make a text
    `growth` times longer before it splits it.
    """

    source: Source
    check: Callable[[Row], object]
    size: Callable[[Row], int]
    text: Callable[[Row], str | None]
    token_ids: Callable[[Row], list[int]]
    fit: Callable[[list[int]], list[int]]
    constraint: Callable[[Row], Constraint | None]
    room: int
    growth: int = 1


def job_reading(config: JobConfig, opened: OpenedJob) -> Reading:
    """The reading of a job whose longest answer leaves room for a prompt."""
    source, prompt, tokenizer = opened.source, opened.prompt, opened.model.tokenizer
    room = opened.max_model_len - config.sampling.max_new_tokens
    assert room >= 1
    return Reading(
        source=source,
        check=source.passthrough,
        size=prompt.size,
        text=prompt.text,
        token_ids=prompt.token_ids,
        fit=partial(
            fit_prompt,
            max_len=room,
            too_long=config.prompt.too_long,
            bos_id=None if tokenizer is None else tokenizer.bos_token_id,
        ),
        constraint=RowConstraints(config.constraint, source.features).of,
        room=room,
        growth=_growth(tokenizer),
    )


def _growth(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """How many times longer a text can get in UTF-8 before the tokenizer splits it."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return 1
    normalizer = repr(tokenizer.backend_tokenizer.normalizer)
    return 11 if "NFK" in normalizer or "Precompiled" in normalizer else 1
