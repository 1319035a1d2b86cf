"""The state of autoregressive decoding between steps: the newest token of each row. `ARStrategy`
owns it. The engine calls `merge_prefill` when prompts have been read, and `step_decode` after each
decode step; the next forward reads `newest`."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.step_inputs import JoiningRows, StepInputs


class ARStepInputs(StepInputs):
    """The newest token of each row, which the row's next forward reads."""

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        self._add_rows(rows, newest)

    def step_decode(self, step: StepOutput) -> None:
        inputs = self.newest
        positions = inputs.positions + 1
        self._sampling = self.sampling.append(step.token_ids, step.num_tokens, positions)
        self._newest = replace(inputs, input_ids=step.token_ids[:, 0], positions=positions)
