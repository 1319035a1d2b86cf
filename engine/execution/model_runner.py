"""The model with its KV cache: runs forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.execution.cuda_graph import ForwardGraphs, GraphShapes, Part
from batchgen.engine.execution.forward_context import ForwardContext, OutputTokens
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.transfer import upload
from batchgen.engine.models.dense import DenseForCausalLM
from batchgen.kernels.attention.attention import AttentionMetadata
from batchgen.kernels.attention.kv_cache import KVCache, slot_mapping
from batchgen.kernels.attention.prefill import tile_tokens

_CPU_TOKEN_MULTIPLE = 16
"""CPU matrix products give a row the same bits at every such number of rows, so a token's result
does not depend on what else is in the batch. Measured: any multiple of 4 will do with AVX-512."""


class ModelOutput(NamedTuple):
    """logits: [R, vocab] in the model's dtype; positions: [R], of the tokens they follow.

    hidden: [T, hidden_size] of all tokens of the forward, valid until the next one; None where only
    those of the R tokens were computed.
    """

    logits: Tensor
    positions: Tensor
    hidden: Tensor | None = None


class ModelRunner:
    """Runs a model over a paged KV cache.

    Args:
        model: on its device, in its dtype.
        kv_caches: one per layer.
        block_length: tokens of a block of the attention, which is causal over blocks and full
            inside; 1 is causal attention. Above 1, a row's tokens in one forward must end where a
            block or the row ends: a block sees none of its tokens that come in a later forward.
    """

    def __init__(
        self, model: DenseForCausalLM, kv_caches: list[KVCache], block_length: int = 1
    ) -> None:
        self.model = model
        self.kv_caches = kv_caches
        self.block_size = kv_caches[0].block_size
        # Without self, which holds the graphs that hold it: an engine that is dropped is freed.
        self._forward = partial(_forward, model, kv_caches, block_length)
        self.device = model.device
        self._token_multiple = _CPU_TOKEN_MULTIPLE if self.device.type == "cpu" else 1
        self._graphs: ForwardGraphs | None = None

    @torch.inference_mode()
    def capture(self, shapes: GraphShapes) -> None:
        """Let batches of these shapes replay CUDA graphs."""
        config = self.model.config
        tile = tile_tokens(config.num_heads, config.num_kv_heads, config.head_dim, self.model.dtype)
        self._graphs = ForwardGraphs(self._forward, shapes, self.block_size, tile, self.device)

    @torch.inference_mode()
    def prefill(
        self, inputs: ModelInputs, rows: npt.NDArray[np.int64], all_hidden: bool = False
    ) -> ModelOutput:
        """Run the tokens through the model, write their KV, and give the logits of the last token
        of R of the B rows. Unless all hidden states are wanted, the last layer computes those
        tokens only.
        """
        last = self._last_tokens(inputs, rows)
        if all_hidden:
            hidden = self._forward([self._part(inputs.pad_tokens(self._token_multiple))])
            hidden = hidden[: len(inputs.input_ids)]
            return ModelOutput(self.compute_logits(hidden[last]), inputs.positions[last], hidden)
        wanted = ModelInputs(
            inputs.input_ids[last],
            inputs.positions[last],
            inputs.block_tables[upload(rows, torch.int64, self.device)],
            np.ones_like(rows),
            inputs.context_lens[rows],
        )
        if self._graphs is not None and self._graphs.takes_prefill(inputs):
            hidden = self._graphs.prefill(inputs, last, wanted)
        else:
            # The last query of a row sees just what causal attention lets it see.
            # At least one token, so that no kernel has nothing to do.
            missing = -max(len(rows), 1) % self._token_multiple + (not len(rows))
            attention = AttentionMetadata(
                F.pad(wanted.positions, (0, missing)),
                (1,) * (len(rows) + missing),
                (*wanted.context_lens.tolist(), *[1] * missing),
                F.pad(wanted.block_tables, (0, 0, 0, missing)),
            )
            outputs = OutputTokens(F.pad(last, (0, missing)), [attention])
            hidden = self._forward([self._part(inputs.pad_tokens(self._token_multiple))], outputs)
        if not len(rows):  # the head is as much to read as some layers
            empty = hidden.new_empty((0, self.model.config.vocab_size))
            return ModelOutput(empty, wanted.positions)
        return ModelOutput(self.compute_logits(hidden[: len(rows)]), wanted.positions)

    @torch.inference_mode()
    def decode(self, inputs: ModelInputs) -> ModelOutput:
        """Run rows of equally many tokens, write their KV, and give the logits of every token."""
        hidden = self.hidden_states(inputs)
        return ModelOutput(self.compute_logits(hidden), inputs.positions, hidden)

    def filled_rows(self, num_rows: int, width: int) -> int:
        """How many rows of so many tokens a decode forward of num_rows can take for the same time:
        what a captured graph would fill up with nothing."""
        graphs = self._graphs
        if graphs is None or not graphs.takes_decode(num_rows, width):
            return num_rows
        return graphs.decode_rows(num_rows, width)

    @torch.inference_mode()
    def hidden_states(self, inputs: ModelInputs) -> Tensor:
        """[T, hidden_size] of rows of equally many tokens, whose KV is written; valid until the
        next forward.
        """
        tokens = len(inputs.input_ids)
        width = tokens // inputs.num_rows
        if self._graphs is not None and self._graphs.takes_decode(inputs.num_rows, width):
            return self._graphs.decode(inputs)
        part = self._part(inputs.pad_tokens(self._token_multiple))
        part = replace(part, width=width)
        return self._forward([part])[:tokens]

    @torch.inference_mode()
    def compute_logits(self, hidden: Tensor) -> Tensor:
        """[R, hidden_size] → [R, vocab], in the model's dtype."""
        rows = len(hidden)
        if missing := -rows % self._token_multiple:
            hidden = F.pad(hidden, (0, 0, 0, missing))
        return self.model.compute_logits(hidden)[:rows]

    @torch.inference_mode()
    def mixed(
        self, decode: ModelInputs, prefill: ModelInputs, rows: npt.NDArray[np.int64]
    ) -> tuple[ModelOutput, ModelOutput]:
        """`decode` and `prefill`, in one forward: it reads the weights once for both."""
        last = self._last_tokens(prefill, rows)
        count = len(decode.input_ids)
        if self._graphs is not None and self._graphs.takes_chunk(prefill):
            decoded, chunk = self._graphs.mixed(decode, prefill)
        else:
            padded = prefill.pad_tokens(self._token_multiple, beside=count)
            hidden = self._forward([Part(decode, width=1), self._part(padded)])
            decoded, chunk = hidden[:count], hidden[count:]
        logits = self.compute_logits(torch.cat((decoded, chunk[last])))
        return (
            ModelOutput(logits[:count], decode.positions, decoded),
            ModelOutput(logits[count:], prefill.positions[last], chunk[: len(prefill.input_ids)]),
        )

    def _last_tokens(self, inputs: ModelInputs, rows: npt.NDArray[np.int64]) -> Tensor:
        """[R] places of the last tokens of these rows."""
        return upload(inputs.query_lens.cumsum()[rows] - 1, torch.int64, self.device)

    def _part(self, inputs: ModelInputs) -> Part:
        """Of rows that may have different numbers of tokens."""
        if len(set(inputs.query_lens.tolist())) == 1:
            return Part(inputs)
        rows = np.repeat(np.arange(inputs.num_rows, dtype=np.int32), inputs.query_lens)
        return Part(inputs, upload(rows, torch.int32, self.device))


def _joined(tensors: Sequence[Tensor]) -> Tensor:
    return tensors[0] if len(tensors) == 1 else torch.cat(list(tensors))


def _forward(
    model: DenseForCausalLM,
    kv_caches: list[KVCache],
    block_length: int,
    parts: Sequence[Part],
    outputs: OutputTokens | None = None,
) -> Tensor:
    """[T, hidden_size]: the hidden states of all parts' tokens; [R, hidden_size] of outputs."""
    input_ids = _joined([part.inputs.input_ids for part in parts])
    positions = _joined([part.inputs.positions for part in parts])
    slots = [
        slot_mapping(p.inputs.positions, p.rows, p.inputs.block_tables, kv_caches[0].block_size)
        for p in parts
    ]
    attention = [
        AttentionMetadata(
            part.inputs.positions,
            tuple(part.inputs.query_lens.tolist()),
            tuple(part.inputs.context_lens.tolist()),
            part.inputs.block_tables,
            part.tiles,
            decode_width=part.width,
            block_length=block_length,
        )
        for part in parts
    ]
    context = ForwardContext(kv_caches, _joined(slots), attention, outputs)
    hidden: Tensor = model(input_ids, positions, context)
    return hidden
