"""A mixture of experts: a feed-forward part in which each token goes through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from batchgen.engine.base.outputs import OutputColumn
from batchgen.engine.base.side_stream import beside
from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.linear import Float32Linear, Linear, empty_parameter
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.tensor_parallel import (
    ALONE,
    FEED_FORWARD_LANE,
    Stream,
    TensorParallel,
)
from batchgen.kernels.fp8.quantise import BothRows, FP8Rows, plain_rows
from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.moe.router.router_form import SOFTMAX, RouterForm
from batchgen.kernels.moe.router.routing import route


@dataclass(frozen=True, slots=True)
class Router:
    """What differs between the routers of models, besides their sizes.

    Attributes:
        form: how scores and weights are made, and from which groups experts are chosen.
        corrected: checkpoints have a value for each expert that is added to its score for the
            choice (`ScoreCorrection`).
        float32: logits are computed in float32, whatever the model's dtype is.
        gates_shared: the shared expert has a gate. Without one, checkpoints call it
            `shared_experts`.
    """

    form: RouterForm = SOFTMAX
    corrected: bool = False
    float32: bool = False
    gates_shared: bool = True


SOFTMAX_ROUTER = Router()
"""The router of Qwen's models."""


class ScoreCorrection(nn.Module):
    """What is added to the scores of a router for the choice of experts, under its published name.

    Args:
        num_experts: E.
        device: where the parameter is created.
    """

    def __init__(self, num_experts: int, *, device: torch.device) -> None:
        super().__init__()
        self.e_score_correction_bias = empty_parameter(
            num_experts, device=device, dtype=torch.float32
        )

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slot of the correction, which is 0 in a model without a checkpoint."""
        name = f"{path}.e_score_correction_bias"
        yield WeightSlot.plain(name, self.e_score_correction_bias, dummy=0.0)


class SparseMoE(nn.Module):
    """A feed-forward part of E experts, of which each token goes through k.

    It computes residual + Σ_j w_j · expert_j(x). A router computes a logit for each expert, from
    which follow the experts of a token and their weights (`route`). There may be a shared expert
    besides, which every token goes through: it adds shared(x), or sigmoid(gate(x)) · shared(x)
    (Yang et al. 2024).

    Args:
        hidden_size: the width of the hidden states.
        num_experts: E.
        experts_per_token: k.
        intermediate_size: the width of one expert.
        renormalise: whether the k weights of a token are divided by their sum.
        shared_size: the width of the shared expert; None if there is none.
        router: what else differs between routers.
        column: the column that records the experts of each token, and the index of this layer
            among those that it has values of.
        parallel: the ranks, each of which has some experts, a share of the shared one, and the
            whole router.
        device: where the parameters are created.
        dtype: the dtype of the parameters.
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
        router: Router = SOFTMAX_ROUTER,
        column: tuple[OutputColumn, int],
        parallel: TensorParallel = ALONE,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._parallel = parallel
        self.experts_per_token, self.renormalise = experts_per_token, renormalise
        self.column, self.index = column
        self.form = router.form
        self.checkpoint_names = {"correction": "gate"}
        self.gate: Linear
        if router.float32:
            self.gate = Float32Linear(hidden_size, num_experts, device=device, dtype=dtype)
        else:
            self.gate = Linear(
                hidden_size, num_experts, bias=False, quantisable=False, device=device, dtype=dtype
            )
        self.correction: ScoreCorrection | None = None
        if router.corrected:
            self.correction = ScoreCorrection(num_experts, device=device)
        self.experts = Experts(
            num_experts,
            hidden_size,
            intermediate_size,
            parallel=parallel,
            device=device,
            dtype=dtype,
        )
        self.shared_expert: GatedMLP | None = None
        self.shared_expert_gate: Linear | None = None
        if shared_size is not None:
            self.shared_expert = GatedMLP(
                hidden_size,
                shared_size,
                bias=False,
                size_name="shared expert's size",
                parallel=parallel,
                device=device,
                dtype=dtype,
            )
            if router.gates_shared:
                self.shared_expert_gate = Linear(
                    hidden_size, 1, bias=False, quantisable=False, device=device, dtype=dtype
                )
            else:
                self.checkpoint_names["shared_expert"] = "shared_experts"

    def forward(self, tokens: Tensor | BothRows, residual: Tensor, ctx: ForwardContext) -> Stream:
        """Add the result for tokens [T, hidden_size] to `residual` [T, hidden_size] in place and
        return it."""
        x = plain_rows(tokens)
        logits, shared = self._begin(tokens)
        ids, weights = route(
            logits,
            self.experts_per_token,
            renormalise=self.renormalise,
            form=self.form,
            bias=None if self.correction is None else self.correction.e_score_correction_bias,
        )
        ctx.record(self.column, ids, self.index)
        alone, own = self._parallel.size == 1, _own_tokens(x, ctx)
        if own is None and alone:
            return self.experts.add_to(residual, tokens, ids, weights, shared)
        out: Tensor
        if own is None:
            out = self.experts(tokens, ids, weights, None, shared)
        else:
            routed = torch.zeros_like(x)
            routed[own] = self.experts(x[own], ids[own], weights[own])
            out = add_up(routed, residual if alone else None, shared)
        if alone:
            return out
        return self._parallel.add_sum(residual, out, FEED_FORWARD_LANE)

    def _begin(self, tokens: Tensor | BothRows) -> tuple[Tensor, Callable[[], SharedPart] | None]:
        """Compute the router's logits [T, E] for tokens [T, hidden_size], and begin what the shared
        expert makes of them, `beside` what comes next.

        The router is launched first, as all experts wait for it, and as the shared expert's first
        product fills the device.

        Returns:
            The logits, and a function that returns this rank's part of the shared expert, to be
            called exactly once; None if there is no shared expert.
        """
        x = plain_rows(tokens)
        if self.shared_expert is None:
            return self.gate(x), None
        return beside(x, self.gate, lambda _: self._share(tokens))

    def _share(self, tokens: Tensor | BothRows) -> SharedPart:
        """Compute what the shared expert of this rank makes of tokens [T, hidden_size]."""
        shared, gate = self.shared_expert, self.shared_expert_gate
        assert shared is not None
        x = plain_rows(tokens)
        rows: Tensor | FP8Rows = x
        if isinstance(tokens, BothRows) and shared.input_projection.computes_in_fp8:
            rows = tokens.in_fp8
        return SharedPart(shared.compute(rows), None if gate is None else gate(x))


def _own_tokens(x: Tensor, ctx: ForwardContext) -> Tensor | None:
    """[N] int64, the tokens that belong to rows; None if all do, or if nobody needs to know.

    On a CPU forwards are filled up with tokens at KV slot 0, which no row owns. Going through
    experts of their own they would take as long as those of the rows.
    """
    if x.is_cuda or len(x) != len(ctx.kv_slots):
        return None
    own = ctx.kv_slots.nonzero().squeeze(1)
    return own if len(own) < len(x) else None
