"""A mixture of experts: a feed-forward part in which each token goes through a few of many MLPs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from batchgen.engine.execution.forward_context import ForwardContext
from batchgen.engine.execution.side_stream import beside
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import (
    CPUProducts,
    Float32Linear,
    Linear,
    empty_fp8,
    empty_parameter,
)
from batchgen.engine.layers.mlp import GatedMLP
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.outputs import OutputColumn
from batchgen.engine.parallel.tensor_parallel import (
    ALONE,
    FEED_FORWARD_LANE,
    PendingParts,
    Stream,
    TensorParallel,
)
from batchgen.kernels.fp8.experts import fp8_grouped_mlp, fp8_grouped_parts
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight
from batchgen.kernels.fp8.quantise import BothRows, FP8Rows, plain_rows
from batchgen.kernels.fp8.tiles import copy_engine_reads
from batchgen.kernels.layers.linear import pack_weight
from batchgen.kernels.moe.experts import grouped_mlp, grouped_parts
from batchgen.kernels.moe.experts_cpu import ExpertProducts, grouped_mlp_cpu
from batchgen.kernels.moe.panels import (
    are_panels,
    keeps_panels,
    matrix_sizes,
    panels_shape,
    rows_of_panels,
)
from batchgen.kernels.moe.router_form import SOFTMAX, RouterForm
from batchgen.kernels.moe.routing import route
from batchgen.kernels.moe.shared_part import SharedPart, add_up


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


class Experts(nn.Module):
    """E gated MLPs without biases, whose weights stand in one tensor for each kind of projection.

    A checkpoint may hold each projection of each expert in a tensor of its own
    (`experts.3.gate_proj.weight`), or those of all experts in one (`experts.gate_up_proj`
    [E, 2·I, H] and `experts.down_proj` [E, H, I], with or without `.weight`).

    Each rank of tensor parallelism has consecutive experts as a whole.

    Args:
        num_experts: E, over all ranks.
        hidden_size: H, the width of the hidden states.
        intermediate_size: I, the width of one expert.
        parallel: the ranks.
        device: where the parameters are created.
        dtype: the dtype of the parameters.

    Attributes:
        gate_up_proj, down_proj: the weights, in panels where `keeps_panels` says so.
        gate_up_scales, down_scales: their scales, if they are kept in FP8.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        parallel: TensorParallel = ALONE,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        super().__init__()
        self._inner = intermediate_size
        self._num_experts, self._parallel = num_experts, parallel
        own = parallel.share("num_experts", num_experts)
        self._first = parallel.rank * own
        shapes = (own, 2 * intermediate_size, hidden_size), (own, hidden_size, intermediate_size)
        in_panels = keeps_panels(device, dtype, hidden_size, intermediate_size)
        wide, narrow = (panels_shape(*shape, dtype) if in_panels else shape for shape in shapes)
        self.gate_up_proj = empty_parameter(*wide, device=device, dtype=dtype)
        self.down_proj = empty_parameter(*narrow, device=device, dtype=dtype)
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None
        self.form: FP8Format | None = None
        self._packed: tuple[ExpertProducts, ExpertProducts] | None = None

    def quantise(self, form: FP8Format, path: str) -> None:
        """Keep the weights in FP8 from now on; they must not be loaded yet.

        If I is a multiple of 128, so many rows share a scale; else each row of gate and up has
        scales of its own.

        Args:
            form: how, and which modules are not.
            path: this module's name in checkpoints.

        Raises:
            ValueError: only some of the experts are excluded.
        """
        if form.excludes(path):
            return
        if some := [name for name in form.excluded if f".{name}.".find(f".{path}.") >= 0]:
            raise ValueError(
                f"modules_to_not_convert excludes {some[0]} and not {path}, whose experts are "
                "computed together: exclude all of them or none"
            )
        self.form = form
        if form.native:
            rows = BLOCK if self._inner % BLOCK == 0 else 1
            self.gate_up_proj, self.gate_up_scales = _empty_fp8(self.gate_up_proj, rows)
            self.down_proj, self.down_scales = _empty_fp8(self.down_proj, BLOCK)

    @property
    def computes_in_fp8(self) -> bool:
        """Whether tokens may come as `BothRows`."""
        return self.gate_up_scales is not None

    def forward(
        self,
        x: Tensor | BothRows,
        ids: Tensor,
        weights: Tensor,
        residual: Tensor | None = None,
        shared: Callable[[], SharedPart] | None = None,
    ) -> Tensor:
        """Compute the sum [T, H] of what each token's experts on this rank make of it.

        Args:
            x: [T, H], the tokens.
            ids: [T, k] int32, the experts of each token.
            weights: [T, k] float32, the weight of each of them.
            residual: [T, H], to which the sum is added in place; None returns a new tensor.
            shared: returns what the shared expert adds to it; called last, and once.
        """
        if (in_fp8 := self._in_fp8()) is not None:
            gate_up, down, powers = in_fp8
            return fp8_grouped_mlp(
                x, gate_up, down, ids, weights, residual, shared=shared, powers_of_two=powers
            )
        assert isinstance(x, Tensor)
        if self._parallel.size > 1:
            ids = self._own_ids(ids)
        if self._packed is None:
            products, of = (self.gate_up_proj, self.down_proj), self._num_experts
            return grouped_mlp(x, *products, ids, weights, residual, shared=shared, num_routed=of)
        return add_up(grouped_mlp_cpu(x, *self._packed, ids, weights), residual, shared)

    def add_to(
        self,
        residual: Tensor,
        x: Tensor | BothRows,
        ids: Tensor,
        weights: Tensor,
        shared: Callable[[], SharedPart] | None = None,
    ) -> Stream:
        """Add the sum to `residual` [T, H] in place, now or when it is read, and return it. All
        experts must be on this rank.

        Args:
            residual, x, ids, weights, shared: as of `forward`.
        """
        parts = self._parts(x, ids, weights)
        if parts is not None:
            return PendingParts(residual, parts, shared and shared())
        self(x, ids, weights, residual, shared)
        return residual

    def _parts(self, x: Tensor | BothRows, ids: Tensor, weights: Tensor) -> Tensor | None:
        """Compute the results [k, T, H] of each token's experts times their weights; None where
        they are added up right away."""
        if (in_fp8 := self._in_fp8()) is not None:
            gate_up, down, powers = in_fp8
            return fp8_grouped_parts(x, gate_up, down, ids, weights, powers_of_two=powers)
        assert isinstance(x, Tensor)
        if self._packed is not None:
            return None
        return grouped_parts(x, self.gate_up_proj, self.down_proj, ids, weights)

    def _in_fp8(self) -> tuple[FP8Weight, FP8Weight, bool] | None:
        """Return the weights of both products, and whether tokens are scaled by powers of two; None
        if the weights are not kept in FP8."""
        if self.gate_up_scales is None or self.down_scales is None:
            return None
        assert self.form is not None
        gate_up = FP8Weight(self.gate_up_proj, self.gate_up_scales)
        return gate_up, FP8Weight(self.down_proj, self.down_scales), self.form.powers_of_two

    def _own_ids(self, ids: Tensor) -> Tensor:
        """Turn the ids [T, k] of experts into indices among those of this rank; those of other
        ranks become the number of this rank's experts, which stands for none."""
        own = self._num_experts // self._parallel.size
        places = ids - self._first
        return places.masked_fill_((places < 0) | (places >= own), own)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield a slot for each projection of each expert, and those of all experts together."""
        shard = self._parallel.shard(0, self._num_experts) if self._parallel.size > 1 else None
        for whole, parameter, all_scales, parts in (
            ("gate_up_proj", self.gate_up_proj, self.gate_up_scales, ("gate_proj", "up_proj")),
            ("down_proj", self.down_proj, self.down_scales, ("down_proj",)),
        ):
            in_panels = are_panels(parameter)
            weights = rows_of_panels(parameter) if in_panels else parameter
            pieces: list[str] = []
            for expert in range(self._num_experts):
                place = expert - self._first
                elsewhere = not 0 <= place < len(parameter)
                weight = parameter.new_empty(0) if elsewhere else weights[place]
                slices: Sequence[Tensor] = [weight] * len(parts)
                scales: Sequence[Tensor | None] = [None] * len(parts)
                if not elsewhere:
                    slices = weight.chunk(len(parts))
                    if all_scales is not None:
                        scales = all_scales[place].chunk(len(parts))
                for part, values, its_scales in zip(parts, slices, scales, strict=True):
                    name = f"{path}.{expert}.{part}.weight"
                    pieces.append(name)
                    yield WeightSlot(
                        values,
                        (name,),
                        (name,),
                        form=self.form,
                        scales=its_scales,
                        elsewhere=elsewhere,
                        in_panels=in_panels,
                    )
            for source in (f"{path}.{whole}", f"{path}.{whole}.weight"):
                yield WeightSlot(
                    weights,
                    tuple(pieces),
                    (source,),
                    form=self.form,
                    scales=all_scales,
                    shard=shard,
                    in_panels=in_panels,
                )

    def pack(self, products: CPUProducts) -> None:
        """Convert the loaded weights to the layout that was chosen for this CPU.

        After that they cannot be loaded again. On a GPU they stay as they are.

        Args:
            products: chooses how to compute; shared by all layers of a model.
        """
        if self._packed is not None or self.gate_up_scales is not None:
            return
        if self.gate_up_proj.device.type != "cpu":
            return
        self._packed = (
            packed_products(self.gate_up_proj, products),
            packed_products(self.down_proj, products),
        )
        del self.gate_up_proj, self.down_proj


def _empty_fp8(weights: Tensor, scale_rows: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Return room in FP8 for weights [E, N, K] or panels that are not loaded yet, and for their
    scales. The values are in panels where `keeps_panels` says so and there is a copy engine, which
    some GPUs with units for FP8 lack."""
    shape, device = matrix_sizes(weights), weights.device
    values, scales = empty_fp8(*shape, device=device, scale_rows=scale_rows)
    if keeps_panels(device, FP8, shape[2]) and copy_engine_reads(shape[2], device):
        values = nn.Parameter(values.view(panels_shape(*shape, FP8)), requires_grad=False)
    return values, scales


def packed_products(weights: Tensor, products: CPUProducts) -> ExpertProducts:
    """Lay out the weights [E, N, K] of all experts, or heads, as it was chosen for one of them."""
    product = products.choose(weights[0], None)
    laid_out = [pack_weight(weight) if product.packed else weight for weight in weights]
    return ExpertProducts(laid_out, product.most_rows, not products.takes_few(weights[0]))


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
