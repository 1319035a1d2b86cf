"""Per-layer embeddings (Gemma 4): a vector of each token for each layer, which the layer adds to
the residual stream.

`LayerInputs` computes the vectors of all layers at once; each layer's `LayerInput` adds its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor, nn

from batchgen.engine.caches.forward_context import (
    ForwardContext,
    ImageFeatures,
    ImagePlanes,
    OutputTokens,
)
from batchgen.engine.layers.embedding import Embedding
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import ALONE, Stream
from batchgen.kernels.layers.activation import gelu_and_mul


class LayerInputs(nn.Module):
    """Computes the inputs of all layers: (√size · table[id] + norm(W · embedding)) / √2 for each
    layer.

    Every rank of tensor parallelism holds the whole table.

    Args:
        size: the length of the vector that one layer reads.
        pad_id: the id that is looked up for image tokens.
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

    def forward(
        self,
        input_ids: Tensor,
        embedded: Tensor,
        images: ImageFeatures | ImagePlanes | None = None,
    ) -> Tensor:
        """Compute the inputs [T, layers, size] for ids [T] with embeddings [T, hidden_size]."""
        if images is not None:
            input_ids = images.hide(input_ids, self._pad_id)
        projected = self.projection(embedded).mul_(self._factor).unflatten(1, self._sizes)
        looked_up = self.table(input_ids).unflatten(1, self._sizes)
        inputs: Tensor = self.norm(projected) + looked_up
        return inputs.mul_(2**-0.5)


class LayerInput(nn.Module):
    """Adds a layer's input to the residual stream: stream + norm(W · (gelu(gate(stream)) · input)).

    Args:
        layer: the index in `ForwardContext.layer_inputs`.
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

    def forward(
        self,
        stream: Tensor,
        ctx: ForwardContext,
        outputs: OutputTokens | None,
        scalar: Tensor | None,
    ) -> Stream:
        """Return the stream with the layer's input added, multiplied by `scalar` [1] if there is
        one: [T, hidden_size], or [R, hidden_size] for `outputs`."""
        assert ctx.layer_inputs is not None
        inputs = ctx.layer_inputs[:, self._layer]
        if outputs is not None:
            inputs = inputs[outputs.index]
        # `gelu_and_mul` computes gelu(first half) · second half.
        gated = gelu_and_mul(torch.cat((self.gate(stream), inputs), 1))
        return self.norm.add_to(stream, self.projection(gated), scalar)
