"""Per-layer embeddings (Gemma 4): a vector of each token for each layer, which the layer
adds to the residual stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext, OutputTokens
from batchgen.engine.layers.embedding import Embedding
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import ALONE
from batchgen.kernels.layers.activation import gelu_and_mul


class LayerInputs(nn.Module):
    """Computes the inputs of all layers, for each (√size · table[id] + norm(W · embedding)) / √2.

    `size` is the length of the vector that one layer reads. Tokens of images have the id `pad_id`
    here. Every rank of tensor parallelism holds the whole table.
    """

    checkpoint_names: Mapping[str, str] = {
        "table": "embed_tokens_per_layer",
        "projection": "per_layer_model_projection",
        "norm": "per_layer_projection_norm",
    }

    def __init__(
        self,
        vocab_size: int,
        hidden_size: int,
        num_layers: int,
        size: int,
        norm: RMSNorm,
        *,
        pad_id: int = 0,
        where: Placement,
    ) -> None:
        super().__init__()
        self._pad_id = pad_id
        self._sizes, self._factor, width = (num_layers, size), hidden_size**-0.5, num_layers * size
        whole = replace(where, parallel=ALONE)
        self.table = Embedding(vocab_size, width, scale=size**0.5, where=whole)
        self.projection = Linear(hidden_size, width, bias=False, quantisable=False, where=where)
        self.norm = norm

    def forward(self, input_ids: Tensor, embedded: Tensor, images: Tensor | None = None) -> Tensor:
        """Compute the inputs [T, layers, size] of ids [T] with embeddings [T, hidden_size]. Those
        at the indices `images` are of images."""
        if images is not None:
            input_ids = input_ids.index_fill(0, images, self._pad_id)
        projected = self.projection(embedded).mul_(self._factor).unflatten(1, self._sizes)
        of_ids = self.table(input_ids).unflatten(1, self._sizes)
        inputs: Tensor = self.norm(projected) + of_ids
        return inputs.mul_(2**-0.5)


class LayerInput(nn.Module):
    """The part of a layer that adds the layer's input to the residual stream. The stream becomes
    stream + norm(W · (gelu(gate(stream)) · input)).

    `layer` says which of `ForwardContext.layer_inputs` the layer reads.
    """

    checkpoint_names: Mapping[str, str] = {
        "gate": "per_layer_input_gate",
        "projection": "per_layer_projection",
        "norm": "post_per_layer_input_norm",
    }

    def __init__(
        self, layer: int, hidden_size: int, size: int, norm: RMSNorm, *, where: Placement
    ) -> None:
        super().__init__()
        self._layer = layer
        self.gate = Linear(hidden_size, size, bias=False, where=where)
        self.projection = Linear(size, hidden_size, bias=False, where=where)
        self.norm = norm

    def forward(self, stream: Tensor, ctx: ForwardContext, outputs: OutputTokens | None) -> Tensor:
        """Return the stream plus what the layer's input adds to it, in the stream's shape:
        [T, hidden_size], or [R, hidden_size] for `outputs`."""
        assert ctx.layer_inputs is not None
        inputs = ctx.layer_inputs[:, self._layer]
        if outputs is not None:
            inputs = inputs[outputs.index]
        gated = gelu_and_mul(torch.cat((self.gate(stream), inputs), 1))
        added: Tensor = self.norm(self.projection(gated))
        return stream + added
