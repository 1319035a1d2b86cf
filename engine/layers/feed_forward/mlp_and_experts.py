"""A feed-forward part of an MLP and experts that read the same residual stream (Gemma 4)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.layers.feed_forward.scaled_router import ScaledRouter
from batchgen.engine.layers.norm import RMSNorm, norms_of_stream
from batchgen.engine.parallel.tensor_parallel import PendingNorm, Stream


class MLPAndExperts(nn.Module):
    """An MLP and experts, as in Gemma 4: each has a norm before and after it, and the results are
    added.

    Args:
        before, after: the norms, as pairs (of the MLP, of the experts). The router has its own.
    """

    checkpoint_names: Mapping[str, str] = {
        "mlp_norm": "pre_feedforward_layernorm",
        "mlp_post_norm": "post_feedforward_layernorm_1",
        "moe_norm": "pre_feedforward_layernorm_2",
        "moe_post_norm": "post_feedforward_layernorm_2",
        "moe": "",
    }

    def __init__(
        self,
        mlp: GatedMLP,
        moe: SparseMoE,
        *,
        before: tuple[RMSNorm, RMSNorm],
        after: tuple[RMSNorm, RMSNorm],
    ) -> None:
        super().__init__()
        self.mlp, self.moe = mlp, moe
        self.mlp_norm, self.moe_norm = before
        self.mlp_post_norm, self.moe_post_norm = after

    @property
    def normed_parts(self) -> list[tuple[object, RMSNorm]]:
        """The MLP and the experts, each with the norm before it."""
        return [(self.mlp, self.mlp_norm), (self.moe, self.moe_norm)]

    def inputs_of(self, stream: Stream) -> tuple[list[Any], Tensor]:
        """Return the norms [T, hidden_size] that the MLP, the experts and the router read, and the
        residual stream."""
        assert isinstance(self.moe.gate, ScaledRouter)
        return norms_of_stream([self.mlp_norm, self.moe_norm, self.moe.gate.norm], stream)

    def forward(
        self, inputs: Sequence[Any], residual: Tensor | None, ctx: ForwardContext
    ) -> Stream:
        """Return the sum of both results for the norms of `inputs_of`, for the norm that follows
        or to be added to `residual`."""
        mlp_input, moe_input, router_input = inputs
        dense = self.mlp_post_norm.term(self.mlp(mlp_input, None, ctx))
        # The MLP's sum over ranks was read before the experts' sum begins.
        routed = self.moe(moe_input, None, ctx, router_input=router_input)
        terms = dense, self.moe_post_norm.term(routed)
        return PendingNorm(residual, terms, self.mlp_post_norm.eps)
