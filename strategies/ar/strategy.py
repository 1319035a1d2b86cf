"""Autoregressive decoding."""

from __future__ import annotations

from batchgen.engine.model_runner import ModelOutput
from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampler import SamplingInputs, sample
from batchgen.engine.sampling_params import SamplingParams
from batchgen.engine.sequence import Sequence
from batchgen.strategies.ar.step_inputs import ARStepInputs


class ARStrategy:
    """One sampled token per row and step; every sampling option applies."""

    name = "ar"
    columns: tuple[OutputColumn, ...] = ()

    def __init__(self) -> None:
        self.step_inputs = ARStepInputs()

    def check(self, params: SamplingParams) -> None:
        """Nothing is refused."""

    def num_slots(self, seq: Sequence) -> int:
        return 1

    def decide(self, output: ModelOutput, sampling: SamplingInputs) -> StepOutput:
        return sample(output.logits, sampling, output.positions + 1)
