"""Self-conditioning of a diffusion model (Chen et al. 2022, arXiv 2208.04202).

A *canvas* is a block of tokens that the model denoises together, in several steps.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.tensor_parallel import summed
from batchgen.kernels.layers.rms_norm import rms_norm


class SelfConditioning(nn.Module):
    """Computes the embeddings of tokens on a canvas: norm(embedding + mlp(pre_norm(signal))).

    The signal of a token is the mean embedding of the distribution that the previous step computed
    at its position; it is zero before the first step. The outer norm has no weight.
    """

    checkpoint_names: Mapping[str, str] = {"mlp": ""}

    def __init__(self, mlp: GatedMLP, pre_norm: RMSNorm) -> None:
        super().__init__()
        self.mlp, self.pre_norm = mlp, pre_norm
        self._ones = torch.ones_like(pre_norm.weight)

    def forward(self, embedded: Tensor, ctx: ForwardContext) -> Tensor:
        """Return the embeddings [T, hidden_size]. Those of the first `ctx.canvas_tokens` tokens,
        which are on canvases, are replaced, using their signals in `ctx.hidden`."""
        count, signals = ctx.canvas_tokens, ctx.hidden
        assert signals is not None
        # All T tokens go through the products, because these need a round number of rows.
        padded = torch.zeros_like(embedded)
        padded[:count] = signals
        added = summed(self.mlp(self.pre_norm(padded), embedded.clone(), ctx))
        return torch.cat((rms_norm(added[:count], self._ones, self.pre_norm.eps), embedded[count:]))
