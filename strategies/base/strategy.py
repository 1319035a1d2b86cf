"""What most paradigms do alike: nothing besides sampling."""

from __future__ import annotations

import numpy as np
from torch import Tensor

from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.outputs import HostOutput, OutputColumn, StepOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.sampling.sampler import sample
from batchgen.engine.scheduling.admission import Ints
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.sequence import Sequence
from batchgen.engine.strategy import JoiningRows, Limits, Strategy


class BaseStrategy:
    """A paradigm of one token per row and step that refuses no option and keeps no extra state.

    `engine.strategy.Strategy` says what each method is for.
    """

    name: str
    columns: tuple[OutputColumn, ...] = ()
    counts: tuple[str, ...] = ()

    @property
    def widths(self) -> tuple[int, ...]:
        return (1,)

    @property
    def draft_widths(self) -> tuple[int, ...]:
        return ()

    @property
    def needs_hidden(self) -> bool:
        return False

    @property
    def forward_rows(self) -> int:
        return 1

    @property
    def proposes_from_guide(self) -> bool:
        return False

    def block_length(self, model: ModelConfig) -> int:
        """Causal attention; a model that does not predict the next token is refused."""
        if model.diffusion is not None:
            raise ValueError(
                f"{model.architecture} is a diffusion model: its logits are of masked tokens, not "
                f"of next ones, so strategy {self.name} cannot run it; use strategy=dllm"
            )
        return 1

    def check(self, params: SamplingParams) -> None:
        """Nothing is refused."""

    def allocate(self, limits: Limits) -> None:
        """Nothing is kept."""

    def attach(self, runner: ModelRunner, draft: ModelRunner | None) -> None:
        if draft is not None:
            raise ValueError(f"strategy {self.name} has no use for a draft model")

    @property
    def prefill_multiple(self) -> int:
        return 1

    @property
    def least_tokens(self) -> int:
        return 1

    def step_width(self, num_rows: int) -> int:
        return 1

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """All tokens; but a resumed row goes on from its last one as if nothing had happened."""
        return seq.num_tokens - seq.resumed, not seq.resumed

    def kv_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        tokens: Ints = np.minimum(num_tokens - 1 + pending + width, max_tokens)
        return tokens

    def prefilled(self, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None) -> None:
        """Nothing to do."""

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        mask = None if rows.guide is None else rows.guide.mask(output.logits)
        return sample(output.logits, rows.sampling, output.positions + 1, mask=mask)

    def forward(self: Strategy, runner: ModelRunner) -> ModelOutput:
        return runner.decode(self.step_inputs.model_inputs)

    def propose(self, batch: DecodeBatch) -> None:
        """Nothing to add."""

    def observe(self, step: HostOutput) -> None:
        """Nothing to learn."""
