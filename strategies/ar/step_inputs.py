"""The update cycle of autoregressive decoding: one token per row and step."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampler import SamplingInputs
from batchgen.strategies.base.step_inputs import StepInputs


class ARStepInputs(StepInputs):
    """Each row's next forward reads the token that its last one produced."""

    def merge_prefill(
        self,
        block_tables: Tensor,
        context_lens: list[int],
        sampling: SamplingInputs,
        step: StepOutput,
    ) -> None:
        positions = torch.tensor(context_lens, device=step.token_ids.device)
        self._add_rows(
            ModelInputs(
                input_ids=step.token_ids[:, 0],
                positions=positions,
                block_tables=block_tables,
                query_lens=(1,) * len(positions),
                context_lens=tuple(length + 1 for length in context_lens),
            ),
            sampling.append(step.token_ids, step.num_tokens, positions),
        )

    def step_decode(self, step: StepOutput) -> None:
        inputs = self.model_inputs
        positions = inputs.positions + 1
        self._sampling = self.sampling.append(step.token_ids, step.num_tokens, positions)
        self._model_inputs = replace(
            inputs,
            input_ids=step.token_ids[:, 0],
            positions=positions,
            context_lens=tuple(length + 1 for length in inputs.context_lens),
        )
