"""The update cycle of autoregressive decoding: one token per row and step."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from batchgen.engine.outputs import StepOutput
from batchgen.engine.strategy import JoiningRows
from batchgen.strategies.base.step_inputs import StepInputs


class ARStepInputs(StepInputs):
    """Each row's next forward reads the token that its last one produced."""

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        self._add_rows(rows, newest)

    def step_decode(self, step: StepOutput) -> None:
        inputs = self.newest
        positions = inputs.positions + 1
        self._sampling = self.sampling.append(step.token_ids, step.num_tokens, positions)
        self._newest = replace(inputs, input_ids=step.token_ids[:, 0], positions=positions)
