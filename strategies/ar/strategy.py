"""The strategy `ar`: plain autoregressive decoding, which yields one token per row and step."""

from __future__ import annotations

from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.sampler import sample_tokens
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.step_inputs import ARStepInputs


class ARStrategy(Strategy):
    """Samples one token per row and step, with all sampling options."""

    name = "ar"

    def __init__(self) -> None:
        self._step_inputs = ARStepInputs()

    @property
    def step_inputs(self) -> ARStepInputs:
        return self._step_inputs

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """Draw each row's next token. `guide` masks what the rows' constraints do not allow."""
        mask = None if guide is None else guide.mask(output.logits)
        return sample_tokens(
            output.divided, self.step_inputs.sampling, output.positions + 1, mask=mask
        )
