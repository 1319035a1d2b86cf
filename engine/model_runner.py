"""The model with its KV cache: runs forwards."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.cuda_graph import DecodeGraphs
from batchgen.engine.forward_context import ForwardContext, OutputTokens
from batchgen.engine.model_inputs import ModelInputs
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.engine.transfer import upload
from batchgen.kernels.attention import AttentionMetadata
from batchgen.kernels.kv_cache import KVCache, slot_mapping

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
        self._graphs: DecodeGraphs | None = None

    @torch.inference_mode()
    def capture(self, max_rows: int, max_blocks: int) -> None:
        """Make `decode` replay CUDA graphs, for up to max_rows rows of max_blocks blocks each."""
        self._graphs = DecodeGraphs(self._all_tokens, max_rows, max_blocks, self.device)

    @torch.inference_mode()
    def prefill(self, inputs: ModelInputs, rows: npt.NDArray[np.int64]) -> ModelOutput:
        """Run the tokens through the model, write their KV, and give the logits of the last token
        of R of the B rows. The last layer computes those tokens only.
        """
        last = upload(inputs.query_lens.cumsum()[rows] - 1, torch.int64, self.device)
        positions = inputs.positions[last]
        tables = inputs.block_tables[upload(rows, torch.int64, self.device)]
        # At least one token, so that no kernel has nothing to do.
        missing = -max(len(rows), 1) % self._token_multiple + (not len(rows))
        ends = inputs.context_lens[rows].tolist()
        outputs = OutputTokens(
            torch.nn.functional.pad(last, (0, missing)),
            AttentionMetadata(
                torch.nn.functional.pad(positions, (0, missing)),
                (1,) * (len(rows) + missing),
                (*ends, *[1] * missing),
                torch.nn.functional.pad(tables, (0, 0, 0, missing)),
            ),
        )
        hidden = self._forward(inputs.pad_tokens(self._token_multiple), outputs)
        return ModelOutput(self.model.compute_logits(hidden)[: len(rows)], positions)

    @torch.inference_mode()
    def decode(self, inputs: ModelInputs) -> ModelOutput:
        """Run rows of equally many tokens, write their KV, and give the logits of every token."""
        if self._graphs is not None:
            hidden = self._graphs.run(inputs)
        else:
            hidden = self._all_tokens(inputs.pad_tokens(self._token_multiple))
        logits = self.model.compute_logits(hidden)[: len(inputs.input_ids)]
        return ModelOutput(logits, inputs.positions)

    def _all_tokens(self, inputs: ModelInputs) -> Tensor:
        return self._forward(inputs, None)

    def _forward(self, inputs: ModelInputs, outputs: OutputTokens | None) -> Tensor:
        """[T or R, hidden_size]: the hidden states of all tokens, or of the output tokens."""
        attention = AttentionMetadata(
            inputs.positions,
            tuple(inputs.query_lens.tolist()),
            tuple(inputs.context_lens.tolist()),
            inputs.block_tables,
        )
        rows = None
        if len(set(attention.query_lens)) > 1:
            of_token = np.repeat(np.arange(inputs.num_rows, dtype=np.int32), inputs.query_lens)
            rows = upload(of_token, torch.int32, self.device)
        slots = slot_mapping(inputs.positions, rows, inputs.block_tables, self.block_size)
        context = ForwardContext(self.kv_caches, slots, attention, outputs)
        hidden: Tensor = self.model(inputs.input_ids, inputs.positions, context)
        return hidden
