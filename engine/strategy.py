"""What the engine needs from a decoding paradigm; the paradigms live in `strategies/`."""

from __future__ import annotations

from collections.abc import Sequence as Rows
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.constraint.guide import Guide
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner
from batchgen.engine.execution.transfer import upload
from batchgen.engine.models.config import ModelConfig
from batchgen.engine.outputs import HostOutput, OutputColumn, StepOutput
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.scheduling.scheduled_batch import DecodeBatch, PrefillBatch
from batchgen.engine.scheduling.scheduler import Pacing
from batchgen.engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """How much state a paradigm may need.

    Attributes:
        max_rows: decoding at once.
        max_model_len: prompt and output tokens of a row.
        vocab_size: of the model.
    """

    max_rows: int
    max_model_len: int
    vocab_size: int
    device: torch.device


@dataclass(frozen=True, slots=True)
class JoiningRows:
    """B rows whose prefill is complete.

    Attributes:
        seqs: as the host knows them, without the token that the prefill may yield.
        block_tables: [B, N] int64.
        context_lens: [B], tokens of each row whose KV is computed.
        sampling: before the prefill's token.
        hidden: [B, hidden_size], of each row's last token, if the strategy needs hidden states.
        guide: of the constrained ones; None if there are none.
    """

    seqs: Rows[Sequence]
    block_tables: Tensor
    context_lens: npt.NDArray[np.int64]
    sampling: SamplingInputs
    hidden: Tensor | None = None
    guide: Guide | None = None

    def index_select(self, rows: npt.NDArray[np.int64]) -> JoiningRows:
        """These of them, in this order."""
        index = upload(rows, torch.int64, self.block_tables.device)
        seqs = [self.seqs[i] for i in rows]
        return JoiningRows(
            seqs,
            self.block_tables[index],
            self.context_lens[rows],
            self.sampling.index_select(rows),
            None if self.hidden is None else self.hidden[index],
            Guide.of(seqs),
        )


class StepInputs(Protocol):
    """State of the decoding rows between steps; `strategies/base` says what each part does."""

    @property
    def model_inputs(self) -> ModelInputs: ...

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None: ...

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None: ...

    def reindex(self, batch: DecodeBatch) -> None: ...

    def step_decode(self, step: StepOutput) -> None: ...


class Strategy(Pacing, Protocol):
    """A way to turn forwards into tokens.

    A decode step: `step_inputs.reindex`, `propose`, `forward`, `decide`,
    `step_inputs.step_decode`. A prefill: the forward, `prefilled`; where rows are
    complete, `first_tokens` and `step_inputs.merge_prefill`.

    Attributes:
        name: as the configuration calls it.
        columns: output columns it can produce besides the sampler's.
        counts: fields of `RequestOutput` that say what a row cost in this paradigm.
        widths: tokens of a row in one decode forward, ascending from 1: all that can occur.
        draft_widths: the same of the draft model, if it takes one.
        needs_hidden: the hidden states of all tokens of a prefill.
        forward_rows: of a decode forward, at most, for each row of the batch.
        proposes_from_guide: `propose` asks the matchers of constrained rows, so all steps before
            must be read by then, and not only at `decide`.
    """

    name: str
    columns: tuple[OutputColumn, ...]
    counts: tuple[str, ...]

    @property
    def widths(self) -> tuple[int, ...]: ...

    @property
    def draft_widths(self) -> tuple[int, ...]: ...

    @property
    def needs_hidden(self) -> bool: ...

    @property
    def forward_rows(self) -> int: ...

    @property
    def proposes_from_guide(self) -> bool: ...

    @property
    def step_inputs(self) -> StepInputs: ...

    def block_length(self, model: ModelConfig) -> int:
        """Tokens of a block of the model's attention under this paradigm; 1 is causal attention.

        Raises ValueError, saying what to do, if the model is not made for the paradigm.
        """

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError, naming the option, if it cannot honour the parameters."""

    def allocate(self, limits: Limits) -> None:
        """Make what it keeps on the device; called once, before the KV cache takes the rest."""

    def attach(self, runner: ModelRunner, draft: ModelRunner | None) -> None:
        """Take the models that it may run or measure; called once, before the first step.

        Args:
            draft: of the draft model over a KV cache with the same blocks, if there is one.
        """

    def prefilled(self, batch: PrefillBatch, inputs: ModelInputs, hidden: Tensor | None) -> None:
        """The model has read these tokens of prompts; hidden: [T, hidden_size], if needed."""

    def first_tokens(self, output: ModelOutput, rows: JoiningRows) -> StepOutput:
        """From the logits that end a prefill: one token for each row."""

    def propose(self, batch: DecodeBatch) -> None:
        """Complete the inputs of the step's forward."""

    def forward(self, runner: ModelRunner) -> ModelOutput:
        """Run the step's forward."""

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """From the logits of a decode forward, in the rows' order, to tokens and columns.

        Args:
            guide: of the batch's constrained rows, whose matchers stand at their newest tokens.
        """

    def observe(self, step: HostOutput) -> None:
        """See what a decode step came to, once the host has read it."""
