"""A mixture of experts: a feed-forward part in which each token is computed by a few of many MLPs.

`SparseMoE` holds the router and the shared expert, and calls `Experts` (`experts.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.device.side_stream import beside
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.layers.feed_forward.expert_slots import PLAIN_EXPERTS, ExpertForm
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.feed_forward.mlp import GatedMLP, PlainMLP
from batchgen.engine.layers.feed_forward.scaled_router import ScaledRouter
from batchgen.engine.layers.linear import Float32Linear, Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import (
    FEED_FORWARD_LANE,
    Stream,
)
from batchgen.kernels.fp8.quantise import FP8Rows, RoundedRows, plain_rows
from batchgen.kernels.layers.elementwise import sigmoid
from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.moe.router.router_form import SOFTMAX, RouterForm
from batchgen.kernels.moe.router.routing import route


@dataclass(frozen=True, slots=True)
class Router:
    """What differs between the routers of model families, besides their sizes."""

    form: RouterForm = SOFTMAX
    biased: bool = False  # whether the router's linear layer has a bias
    corrected: bool = False  # whether checkpoints hold a `ScoreCorrection`
    float32: bool = False  # whether logits are computed in float32, whatever the model's dtype is
    wide: bool = False  # with `float32`: whether checkpoints hold the router's weight in float32
    gates_shared: bool = True  # whether the shared expert has a gate; its name depends on it
    gates_input: bool = False  # whether a token's only expert reads sigmoid(its logit) · x


SOFTMAX_ROUTER = Router()
"""The router of Qwen's models."""


class ScoreCorrection(nn.Module):
    """A number per expert that is added to its score when a token's experts are chosen, but not to
    the weight of the expert. The parameter has the name that checkpoints use."""

    def __init__(self, num_experts: int, *, device: torch.device) -> None:
        super().__init__()
        self.e_score_correction_bias = empty_parameter(
            num_experts, device=device, dtype=torch.float32
        )

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the correction, which is 0 in a model without a checkpoint.

        Checkpoints hold it as [E], or as the one row of a table [1, E].
        """
        name = (f"{path}.e_score_correction_bias",)
        target = self.e_score_correction_bias
        yield WeightSlot(target, name, name, lambda match: match[name[0]].squeeze(0), dummy=0.0)


def _gate(hidden_size: int, num_experts: int, router: Router, where: Placement) -> Linear:
    """Make the linear layer that computes the router's logits."""
    if router.float32:
        assert not router.biased
        gate_where = replace(where, dtype=torch.float32) if router.wide else where
        return Float32Linear(hidden_size, num_experts, where=gate_where)
    return Linear(hidden_size, num_experts, bias=router.biased, quantisable=False, where=where)


def _shared_expert(
    hidden_size: int, shared_size: int, variant: ExpertForm, where: Placement
) -> GatedMLP | PlainMLP:
    """Make the shared expert, which every token goes through."""
    name = "shared expert's size"
    if variant.function == "relu2":
        return PlainMLP(
            hidden_size, shared_size, bias=False, function="relu2", size_name=name, where=where
        )
    return GatedMLP(hidden_size, shared_size, bias=False, size_name=name, where=where)


class SparseMoE(nn.Module):
    """A feed-forward part of E experts, of which each token uses k: residual + Σ_j w_j ·
    expert_j(x).

    A router's logits choose the experts and their weights (`route`). A shared expert adds
    shared(x), or sigmoid(gate(x)) · shared(x) (Yang et al. 2024). Each rank has some of the
    experts, a share of the shared expert, and the whole router.

    Args:
        intermediate_size: the intermediate size of each routed expert.
        renormalise: whether to divide a token's k weights by their sum.
        shared_size: the intermediate size of the shared expert; None for no shared expert.
        latent_size: if given, the experts read a projection of x to this many values, and their
            results are projected back.
        gate: the router; None makes one as `router` says.
        variant: what differs between the experts of model families.
        column: the output column of the chosen experts, and this layer's index in it.
        lane: the lane of the sums over ranks (`TensorParallel.add_sum`).
    """

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        experts_per_token: int,
        intermediate_size: int,
        *,
        renormalise: bool,
        shared_size: int | None,
        latent_size: int | None = None,
        router: Router = SOFTMAX_ROUTER,
        gate: ScaledRouter | None = None,
        variant: ExpertForm = PLAIN_EXPERTS,
        column: tuple[OutputColumn, int],
        lane: int = FEED_FORWARD_LANE,
        where: Placement,
    ) -> None:
        super().__init__()
        self._parallel, self._lane = where.parallel, lane
        self.experts_per_token, self.renormalise = experts_per_token, renormalise
        self.column, self.index = column
        self.form, self._gates_input = router.form, router.gates_input
        # With `gates_input` the input of an expert depends on the expert's logit, so a token can
        # have only one expert.
        assert experts_per_token == 1 or not router.gates_input, "the experts would read other rows"
        # Attributes of this module → their names in checkpoints, where they differ.
        self.checkpoint_names = {"correction": "gate"}
        self.fc1_latent_proj: Linear | None = None
        self.fc2_latent_proj: Linear | None = None
        if latent_size is not None:
            self.fc1_latent_proj = Linear(hidden_size, latent_size, bias=False, where=where)
            self.fc2_latent_proj = Linear(latent_size, hidden_size, bias=False, where=where)
        self.gate = _gate(hidden_size, num_experts, router, where) if gate is None else gate
        if gate is not None:
            self.checkpoint_names["gate"] = "router"
        self.correction: ScoreCorrection | None = None
        if router.corrected:
            self.correction = ScoreCorrection(num_experts, device=where.device)
        self.experts = Experts(
            num_experts,
            latent_size or hidden_size,
            intermediate_size,
            variant=variant,
            where=where,
        )
        self.shared_expert: GatedMLP | PlainMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if shared_size is not None:
            self.shared_expert = _shared_expert(hidden_size, shared_size, variant, where)
            if router.gates_shared:
                self.shared_expert_gate = Linear(
                    hidden_size, 1, bias=False, quantisable=False, where=where
                )
            else:
                self.checkpoint_names["shared_expert"] = "shared_experts"

    def forward(
        self,
        tokens: Tensor | RoundedRows,
        residual: Tensor | None,
        ctx: ForwardContext,
        router_input: Tensor | None = None,
    ) -> Stream:
        """Add the result for tokens [T, hidden_size] to `residual` in place, or to zeros, and
        return it. The router reads `router_input` [T, hidden_size] if given, else the tokens."""
        x, gate = plain_rows(tokens), self.gate
        logits, shared = self._begin(tokens, x if router_input is None else router_input)
        ids, weights = route(
            logits,
            self.experts_per_token,
            renormalise=self.renormalise,
            form=self.form,
            bias=None if self.correction is None else self.correction.e_score_correction_bias,
            scales=gate.expert_scales if isinstance(gate, ScaledRouter) else None,
        )
        ctx.record(self.column, ids, self.index)
        if self._gates_input:
            x = tokens = x * sigmoid(logits.gather(1, ids.long()).float()).to(x.dtype)
        # A single rank adds its result to the residual. Of several ranks, each computes a part, and
        # `add_sum` adds the sum of the parts.
        out: Tensor
        single_rank, row_tokens = self._parallel.size == 1, _row_tokens(x, ctx)
        slots = self.experts.adapter_slots(len(x))
        # Experts that read a projection of the tokens, and whose results are projected back.
        if self.fc1_latent_proj is not None and self.fc2_latent_proj is not None:
            routed = self.experts(self.fc1_latent_proj(x), ids, weights, adapter_slots=slots)
            projected = self.fc2_latent_proj(routed)
            out = add_up(projected, residual if single_rank else None, shared)
            return out if single_rank else self._parallel.add_sum(residual, out, self._lane)
        # All tokens on a single rank: the experts' kernels add to the residual themselves.
        if row_tokens is None and single_rank:
            return self.experts.add_to(residual, tokens, ids, weights, shared, slots)
        if row_tokens is None:
            # All tokens on several ranks.
            out = self.experts(tokens, ids, weights, None, shared, slots)
        else:
            # Without padding tokens, whose routed part stays zero.
            routed = torch.zeros_like(x)
            row_slots = None if slots is None else slots[row_tokens]
            routed[row_tokens] = self.experts(
                x[row_tokens], ids[row_tokens], weights[row_tokens], adapter_slots=row_slots
            )
            out = add_up(routed, residual if single_rank else None, shared)
        if single_rank:
            return out
        return self._parallel.add_sum(residual, out, self._lane)

    def scratch_bytes(self, tokens: int) -> int:
        """Return the bytes that this many tokens need at once, besides activations."""
        return self.experts.scratch_bytes(tokens * self.experts_per_token)

    def _begin(
        self, tokens: Tensor | RoundedRows, router_input: Tensor
    ) -> tuple[Tensor, Callable[[], SharedPart] | None]:
        """Compute the router's logits [T, E], and start to compute the shared expert.

        The router is launched first, because all experts wait for it and the shared expert fills
        the device.

        Returns:
            The logits, and a function that returns this rank's part of the shared expert, to be
                called exactly once; None without a shared expert.
        """
        if self.shared_expert is None:
            return self.gate(router_input), None
        return beside(router_input, self.gate, lambda _: self._share(tokens))

    def _share(self, tokens: Tensor | RoundedRows) -> SharedPart:
        """Compute this rank's part of the shared expert for tokens [T, hidden_size]."""
        shared, gate = self.shared_expert, self.shared_expert_gate
        assert shared is not None
        x = plain_rows(tokens)
        rows: Tensor | FP8Rows = x
        if isinstance(tokens, RoundedRows) and shared.input_projection.computes_in_fp8:
            rows = tokens.in_fp8
        return SharedPart(shared.compute(rows), None if gate is None else gate(x))


def _row_tokens(x: Tensor, ctx: ForwardContext) -> Tensor | None:
    """Return the indices [N] of the tokens that belong to rows, and not to padding; None if all
    tokens of x are to be computed.

    Padding tokens are at KV slot 0, in the cache's scratch block, which belongs to no row. They are
    left out on a CPU only: on a GPU the host would have to wait for their number.
    """
    if x.is_cuda or len(x) != len(ctx.kv_slots):
        return None
    indices = ctx.kv_slots.nonzero().squeeze(1)
    return indices if len(indices) < len(x) else None
