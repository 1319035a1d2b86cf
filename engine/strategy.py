"""What the engine needs from a decoding paradigm; the paradigms live in `strategies/`."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import numpy.typing as npt
from torch import Tensor

from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.model_runner import ModelOutput
from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling_inputs import SamplingInputs
from batchgen.engine.sampling_params import SamplingParams
from batchgen.engine.scheduled_batch import DecodeBatch


class StepInputs(Protocol):
    """State of the decoding rows between steps; `strategies/base` says what each part does."""

    @property
    def model_inputs(self) -> ModelInputs: ...

    @property
    def sampling(self) -> SamplingInputs: ...

    def merge_prefill(
        self,
        block_tables: Tensor,
        context_lens: npt.NDArray[np.int64],
        sampling: SamplingInputs,
        step: StepOutput,
    ) -> None: ...

    def reindex(self, batch: DecodeBatch) -> None: ...

    def step_decode(self, step: StepOutput) -> None: ...


class Strategy(Protocol):
    """A way to turn forwards into tokens.

    Attributes:
        name: as the configuration calls it.
        columns: output columns it can produce besides the sampler's.
        num_slots: KV slots that a row's decode step may write, and tokens that it may yield.
        step_inputs: all that it remembers between steps.
    """

    name: str
    columns: tuple[OutputColumn, ...]
    num_slots: int

    @property
    def step_inputs(self) -> StepInputs: ...

    def check(self, params: SamplingParams) -> None:
        """Raises ValueError, naming the option, if it cannot honour the parameters."""

    def decide(self, output: ModelOutput, sampling: SamplingInputs) -> StepOutput:
        """Turn the logits of a forward into tokens and columns, a row for each sampled row."""
