"""The model with its KV cache: runs forwards."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.engine.forward_context import ForwardContext
from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.kernels.attention import AttentionMetadata
from batchgen.kernels.kv_cache import KVCache

_CPU_TOKEN_MULTIPLE = 16
"""CPU matrix products give a row the same bits at every such number of rows, so a token's result
does not depend on what else is in the batch. Measured: any multiple of 4 will do with AVX-512."""


class ModelOutput(NamedTuple):
    """logits: [R, vocab] in the model's dtype; positions: [R], of the tokens they follow."""

    logits: Tensor
    positions: Tensor


class ModelRunner:
    """Runs a model over a paged KV cache.

    Args:
        model: on its device, in its dtype.
        kv_caches: one per layer.
    """

    def __init__(self, model: DenseForCausalLM, kv_caches: list[KVCache]) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.block_size = kv_caches[0].block_size
        self.device = model.device
        self._token_multiple = _CPU_TOKEN_MULTIPLE if self.device.type == "cpu" else 1

    @torch.inference_mode()
    def forward(self, inputs: ModelInputs, logits_of: Tensor | None = None) -> ModelOutput:
        """Run the tokens through the model and write their KV.

        Args:
            inputs: T tokens.
            logits_of: [R] int64, the tokens whose logits are wanted; None is all of them.
        """
        padded = inputs.pad_tokens(self._token_multiple)
        metadata = AttentionMetadata(
            padded.positions, padded.query_lens, padded.context_lens, padded.block_tables
        )
        context = ForwardContext(self.kv_caches, padded.slots(self.block_size), metadata)
        hidden = self.model(padded.input_ids, padded.positions, context)
        if logits_of is None:
            logits = self.model.compute_logits(hidden)[: len(inputs.input_ids)]
            return ModelOutput(logits, inputs.positions)
        missing = -len(logits_of) % self._token_multiple
        wanted = torch.nn.functional.pad(logits_of, (0, missing))
        logits = self.model.compute_logits(hidden[wanted])[: len(logits_of)]
        return ModelOutput(logits, inputs.positions[logits_of])
