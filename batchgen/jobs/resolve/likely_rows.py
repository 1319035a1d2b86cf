"""Estimates from the first rows how many tokens the rows of a job will have. The engine divides its
memory by this estimate where layers have a sliding window."""

from __future__ import annotations

from itertools import islice
from typing import TYPE_CHECKING

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.prompts.answer_text import Answer
from batchgen.inputs.prompts.row_prompts import Prompt

if TYPE_CHECKING:
    from batchgen.inputs.dataset.source import Source

_LOOKED_AT = 64  # rows
_LONGER = 4
"""The most tokens of a prompt, as a multiple of the longest prompt that was read."""


def likely_row_tokens(
    config: JobConfig, source: Source, prompt: Prompt, answer: Answer | None
) -> tuple[int, int] | None:
    """The fewest and the most tokens, of prompt and answer together, that rows are likely to have.

    The fewest are the mean of the first prompts and one token; the most are four times the longest
    of these prompts and the longest answer. None if no row has a prompt.
    """
    lengths = []
    for row in islice(source.rows(), _LOOKED_AT):
        try:
            known = prompt.token_ids(row)
            lengths.append(len(known) + (0 if answer is None else len(answer.of(row))))
        except RequestError:  # the row's own error
            continue
    if not lengths:
        return None
    mean = sum(lengths) // len(lengths)
    return mean + 1, _LONGER * max(lengths) + max(config.sampling.max_new_tokens, 1)
