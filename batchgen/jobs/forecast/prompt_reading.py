"""What a job does with its rows before they reach the model, for `scan.scan_rows`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.inputs.constraint.row_params import RowParams
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.prompts.row_prompts import fit_prompt, prompt_room

if TYPE_CHECKING:
    from batchgen.jobs.resolve.opened_job import OpenedJob


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """What a job does with a row before it reaches the model; its calls raise RequestError.

    `fit` cuts or refuses a prompt that leaves an answer no room. `room` is what the job's longest
    answer leaves for a prompt. The tokenizer may make a text `growth` times longer before it splits
    it. `image_token_id` is the token that stands for images, None where rows have none.
    """

    source: Source
    check: Callable[[Row], object]
    size: Callable[[Row], int]
    text: Callable[[Row], str | None]
    token_ids: Callable[[Row], list[int]]
    sampling: Callable[[Row], SamplingParams]
    fit: Callable[[list[int], SamplingParams], list[int]]
    constrained: Callable[[Row, SamplingParams], SamplingParams]
    room: int
    growth: int = 1
    image_token_id: int | None = None


def job_reading(config: JobConfig, opened: OpenedJob) -> Reading:
    """The reading of a job whose longest answer leaves room for a prompt."""
    source, prompt, tokenizer = opened.source, opened.prompt, opened.model.tokenizer
    room = opened.max_model_len - config.sampling.max_new_tokens
    assert room >= 1
    params = RowParams(config, source.features, opened.check_params)
    bos_id = None if tokenizer is None else tokenizer.bos_token_id

    def fit(ids: list[int], params: SamplingParams) -> list[int]:
        most = prompt_room(opened.max_model_len, params.max_new_tokens)
        return fit_prompt(ids, most, config.prompt.too_long, bos_id)

    answer = opened.answer
    size, text, token_ids = prompt.size, prompt.text, prompt.token_ids
    if answer is not None:  # its tokens are read with those of the prompt
        answers = answer

        def size(row: Row) -> int:
            return prompt.size(row) + answers.size(row)

        def token_ids(row: Row) -> list[int]:
            return prompt.token_ids(row) + answers.token_ids(row)

    return Reading(
        source=source,
        check=source.passthrough,
        size=size,
        text=text,
        token_ids=token_ids,
        sampling=params.sampling,
        fit=fit,
        constrained=params.constrained,
        room=room,
        growth=_growth(tokenizer),
        image_token_id=None if opened.images is None else opened.images.image_token_id,
    )


def _growth(tokenizer: PreTrainedTokenizerBase | None) -> int:
    """How many times longer a text can get in UTF-8 before the tokenizer splits it."""
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        return 1
    normalizer = repr(tokenizer.backend_tokenizer.normalizer)
    return 11 if "NFK" in normalizer or "Precompiled" in normalizer else 1
