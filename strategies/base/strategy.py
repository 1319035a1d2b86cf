"""The base class of all strategies, with the behaviour of one token per row and step."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.base.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.engine.scheduling.admission import Ints
from batchgen.engine.strategy import TARGET, JoiningRows, Limits, ModelRole, Strategy


class BaseStrategy:
    """Implements the protocol `engine.strategy.Strategy` for decoding one token per row and step,
    with every option allowed and nothing kept besides the rows.

    A subclass must give `name`, `step_inputs` and `decide`, and overrides what differs. The
    protocol says what each method is for.
    """

    name: str
    columns: tuple[OutputColumn, ...] = ()
    counts: tuple[RowCount, ...] = ()

    # Pacing

    @property
    def prefill_multiple(self) -> int:
        return 1

    @property
    def least_tokens(self) -> int:
        return 1

    def step_width(self, num_rows: int) -> int:
        return 1

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """A new row reads its whole prompt, which yields its first token. A preempted row reads all
        its tokens but the last, with which it goes on decoding."""
        return seq.num_tokens - seq.resumed, not seq.resumed

    def cache_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """The next forward reads the newest token, which is not in the cache yet, and width - 1
        tokens after it."""
        tokens: Ints = np.minimum(num_tokens - 1 + pending + width, max_tokens)
        return tokens

    def most_cache_tokens(self, max_tokens: Ints) -> Ints:
        return max_tokens

    # Decoding

    @property
    def proposes_from_guide(self) -> bool:
        return False

    def propose(self, batch: DecodeBatch) -> None:
        """Does nothing, because the forward reads only the newest token of each row."""

    def forward(
        self: Strategy, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        inputs = self.step_inputs.model_inputs
        if prefill is None:
            return runner.decode(inputs), None
        return runner.mixed(inputs, prefill, self.needs_hidden)

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        mask = None if rows.guide is None else rows.guide.mask(output.logits)
        return sample(output.logits, rows.sampling, output.positions + 1, mask=mask)

    # Hooks

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {TARGET: ModelRole(widths=(1,))}

    @property
    def needs_hidden(self) -> bool:
        return False

    def block_length(self, model: ModelConfig) -> int:
        """Causal attention. Diffusion models are refused, as they do not predict the next token."""
        if model.diffusion is not None:
            raise ValueError(
                f"{model.architecture} is a diffusion model: its logits are of masked tokens, not "
                f"of next ones, so strategy {self.name} cannot run it; use strategy=dllm"
            )
        return 1

    def model_len(self, longest: int, model: ModelConfig) -> int:
        return longest

    def check(self, params: SamplingParams) -> None:
        """Accepts every combination of options."""

    def allocate(self, limits: Limits) -> None:
        """Allocates nothing, because the rows need no memory besides the caches."""

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        """Keeps no runner, because `forward` is given the only one that is needed."""

    def prefilled(
        self, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None, newest: Tensor
    ) -> None:
        """Does nothing, because the caches keep all that is needed of prompts."""

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Does nothing, because nothing is learned from steps."""

    def stats(self) -> Mapping[str, Any]:
        return {}

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        return []

    def remark(self, counts: Mapping[str, int]) -> str | None:
        return None
