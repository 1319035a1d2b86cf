"""`Output`: one finished sample of a prompt, as `LLM.generate` returns it."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.util.shorten import both_ends
from batchgen.util.text.text_table import counted

MOST_SHOWN = 80
"""Characters of a text that `repr` shows."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Output(RequestOutput):
    """One finished output of a prompt: a `RequestOutput` that knows its prompt.

    With `SamplingParams(logprobs=5)` and N generated tokens:

        output.text             "Paris."
        output.token_ids        [12366, 13, 2]      N ids, with the one that ended it
        output.logprobs         float32 [N]
        output.top_logprobs     float32 [N, 5], the most likely token first
        output.top_logprob_ids  int32 [N, 5]
        output.finish_reason    "stop", "length", "constraint_conflict" or "error"
        output.error            None, or why there is no answer: `error.type` is one word, such as
                                "prompt_too_long", and `str(error)` a sentence

    Attributes:
        prompt: the prompt as it was given.
        prompt_index: the position of the prompt in the call, from 0.
        sample_index: which of the n outputs of the prompt it is, from 0. The `request_id` is
            "PROMPT_INDEX-SAMPLE_INDEX".
    """

    prompt: Any
    prompt_index: int
    sample_index: int

    @classmethod
    def of(cls, finished: RequestOutput, prompt: Any, prompt_index: int, sample_index: int) -> Self:
        """Make the output of a finished request, whose own `request_id` is dropped."""
        values = {field.name: getattr(finished, field.name) for field in fields(RequestOutput)}
        values["request_id"] = f"{prompt_index}-{sample_index}"
        return cls(**values, prompt=prompt, prompt_index=prompt_index, sample_index=sample_index)

    @property
    def logprobs(self) -> npt.NDArray[np.float32] | None:
        """[N] the log-probability of each generated token; None if they were not asked for."""
        return self.columns.get("logprobs")

    @property
    def top_logprobs(self) -> npt.NDArray[np.float32] | None:
        """[N, K] the log-probabilities of the K most likely tokens at each position, the most
        likely first; None if they were not asked for."""
        return self.columns.get("top_logprobs")

    @property
    def top_logprob_ids(self) -> npt.NDArray[np.int32] | None:
        """[N, K] the ids of those tokens; None if they were not asked for."""
        return self.columns.get("top_logprob_ids")

    @property
    def embedding(self) -> npt.NDArray[np.float32] | None:
        """[hidden_size] of the prompt (`LLM.embed`); None if it was not asked for."""
        return self.columns.get("embedding")

    @property
    def class_scores(self) -> npt.NDArray[np.float32] | None:
        """[C] the logits of a classifier's classes (`LLM.classify`); None if not asked for."""
        return self.columns.get("class_scores")

    def __repr__(self) -> str:
        which = f"prompt {self.prompt_index}, sample {self.sample_index}"
        if self.error is not None:
            return f"Output(error {self.error.type}: {self.error}, {which})"
        text, tokens = both_ends(self.text, MOST_SHOWN), counted(len(self.token_ids), "token")
        return f"Output({text!r}, {tokens}, {self.finish_reason}, {which})"
