"""The update cycle of autoregressive decoding: one token per row and step."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.outputs import StepOutput
from batchgen.engine.sampling_inputs import SamplingInputs
from batchgen.engine.transfer import upload
from batchgen.strategies.base.step_inputs import StepInputs


class ARStepInputs(StepInputs):
    """Each row's next forward reads the token that its last one produced."""

    def merge_prefill(
        self,
        block_tables: Tensor,
        context_lens: npt.NDArray[np.int64],
        sampling: SamplingInputs,
        step: StepOutput,
    ) -> None:
        positions = upload(context_lens, torch.int64, step.token_ids.device)
        self._add_rows(
            ModelInputs(
                input_ids=step.token_ids[:, 0],
                positions=positions,
                block_tables=block_tables,
                query_lens=np.ones_like(context_lens),
                context_lens=context_lens + 1,
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
            context_lens=inputs.context_lens + 1,
        )
