"""Autoregressive decoding."""

from __future__ import annotations

from batchgen.engine.model_runner import ModelOutput
from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampler import sample
from batchgen.engine.sampling_inputs import SamplingInputs
from batchgen.engine.sampling_params import SamplingParams
from batchgen.strategies.ar.step_inputs import ARStepInputs


class ARStrategy:
    """One sampled token per row and step; every sampling option applies."""

    name = "ar"
    columns: tuple[OutputColumn, ...] = ()
    num_slots = 1

    def __init__(self) -> None:
        self.step_inputs = ARStepInputs()

    def check(self, params: SamplingParams) -> None:
        """Nothing is refused."""

    def decide(self, output: ModelOutput, sampling: SamplingInputs) -> StepOutput:
        return sample(output.logits, sampling, output.positions + 1)
