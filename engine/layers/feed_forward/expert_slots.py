"""Maps checkpoints' tensors of experts to slots, for `Experts.weight_slots`. A slot is the part of
a parameter that one tensor fills (`layers/weight_slot.py`).

Checkpoints have one tensor for each expert (`experts.0.gate_proj.weight`) or for all experts
together (`experts.gate_up_proj`). Slots of both are yielded, and the loader fills those that it has
tensors for. E is the number of experts, H the hidden size, and I the size inside an expert.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from torch import Tensor

from batchgen.engine.layers.four_bit_slot import FourBitSlot
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.weight_slot import CheckpointTensor, WeightSlot, take_part
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.kernels.layers.activation import ExpertFunction
from batchgen.kernels.moe.epilogues import ClampedGate
from batchgen.kernels.moe.tiled_layout import are_panels, rows_of_panels


@dataclass(frozen=True, slots=True)
class ExpertForm:
    """What differs between the experts of model families, besides their sizes."""

    biased: bool = False  # checkpoints hold `gate_up_proj_bias` [E, 2·I], `down_proj_bias` [E, H]
    clamped: ClampedGate | None = None  # None: function(gate) · up
    function: ExpertFunction = "silu"  # relu2: no gate; `up_proj` replaces gate and up
    # Whether, in tensors of all experts, the rows of gate and up alternate and the last two axes
    # are transposed: [E, H, 2·I] and [E, I, H].
    interleaved: bool = False
    transposed: bool = False  # whether only the last two axes are transposed

    @property
    def first(self) -> tuple[str, ...]:
        """The projections of the first product."""
        return ("up_proj",) if self.function == "relu2" else ("gate_proj", "up_proj")


PLAIN_EXPERTS = ExpertForm()


@dataclass(frozen=True, slots=True)
class Projections:
    """One projection, or gate and up together, of all experts on this rank."""

    name: str  # the name in checkpoints that hold all experts in one tensor
    parts: tuple[str, ...]  # the names of an expert's projections, whose rows are concatenated
    weight: Tensor  # [E, N, K], or panels; or the words of `FourBitPanels`
    columns: int  # K
    scales: Tensor | None  # the scales of FP8 or MXFP4 weights
    bias: Tensor | None  # [E, N]


def expert_slots(
    path: str,
    projections: Projections,
    variant: ExpertForm,
    form: FP8Format | None,
    *,
    of: int,  # the number of experts on all ranks
    first: int,  # the index of the first expert on this rank
    shard: Shard | None,  # this rank's experts; None: all
) -> Iterator[WeightSlot]:
    """Yield a slot for each projection of each expert, and one for all experts together.

    Experts of other ranks get empty slots, so that their tensors count as expected.
    """
    parameter, parts, all_scales = projections.weight, projections.parts, projections.scales
    in_panels = are_panels(parameter)
    weights = rows_of_panels(parameter) if in_panels else parameter
    pieces: list[str] = []
    for expert in range(of):
        index = expert - first
        elsewhere = not 0 <= index < len(parameter)
        weight = parameter.new_empty(0) if elsewhere else weights[index]
        slices: Sequence[Tensor] = [weight] * len(parts)
        scales: Sequence[Tensor | None] = [None] * len(parts)
        if not elsewhere:
            slices = weight.chunk(len(parts))
            if all_scales is not None:
                scales = all_scales[index].chunk(len(parts))
        for part, values, its_scales in zip(parts, slices, scales, strict=True):
            name = f"{path}.{expert}.{part}.weight"
            pieces.append(name)
            yield WeightSlot(
                values,
                (name,),  # the one piece that is filled
                (name,),  # the one tensor that it is filled from
                form=form,
                scales=its_scales,
                elsewhere=elsewhere,
                in_panels=in_panels,
            )
    whole = f"{path}.{projections.name}"
    combine: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    at_load = form is not None and form.at_load
    if variant.interleaved or variant.transposed:
        combine = partial(_turned, parts=len(parts) if variant.interleaved else 1)
    elif all_scales is None or at_load:
        combine = partial(_upright, columns=projections.columns)
    kind = RoundedExperts if at_load else WeightSlot
    for source in (whole, f"{whole}.weight"):  # checkpoints use both names
        yield kind(
            weights,
            tuple(pieces),
            (source,),
            combine,
            form=form,
            scales=all_scales,
            shard=shard,
            in_panels=in_panels,
        )
    yield from bias_slots(path, projections, len(parts) if variant.interleaved else 1, shard)


@dataclass(frozen=True, slots=True)
class RoundedExperts(WeightSlot):
    """The slot of a projection of all experts, whose tensor is rounded to FP8 while it loads.

    `combine` is applied before rounding, because blocks share scales in the parameter's order. The
    experts are rounded one after another, so that little extra memory is needed.
    """

    def fill(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Round this rank's experts of the checkpoint's tensor into the parameter.

        Raises ValueError if the shape differs.
        """
        ((name, tensor),) = tensors.items()
        assert self.combine is not None
        rank_tensor = self._plain(tensor)
        if self.shard is not None:
            rank_tensor = take_part(name, rank_tensor, self.shard)
        self._check_shape(self.combine({name: rank_tensor.to("meta")}), self.parameter)
        for index, expert in enumerate(rank_tensor.split(1)):
            its = slice(index, index + 1)
            WeightSlot(
                self.parameter[its],
                self.pieces,
                self.sources,
                form=self.form,
                scales=None if self.scales is None else self.scales[its],
                in_panels=self.in_panels,
            ).fill({name: self.combine({name: expert})})


def four_bit_slots(
    path: str,
    projections: Projections,
    panels: FourBitPanels,  # of this rank's experts
    *,
    of: int,
    first: int,
    shard: Shard | None,
) -> Iterator[WeightSlot]:
    """Yield the slots of `expert_slots` for 4-bit weights."""
    parts, (rank_experts, rows, _) = projections.parts, panels.sizes
    size, pieces = rows // len(parts), list[str]()
    for expert in range(of):
        rank_index = expert - first
        elsewhere = not 0 <= rank_index < rank_experts
        for index, part in enumerate(parts):
            name = f"{path}.{expert}.{part}.weight"
            pieces.append(name)
            if elsewhere:
                empty = panels.words.new_empty(0)
                yield FourBitSlot(empty, (name,), (name,), elsewhere=True)
                continue
            its = panels.experts(rank_index, rank_index + 1).rows(index * size, (index + 1) * size)
            yield FourBitSlot(its.words, (name,), (name,), panels=its)
    source = (f"{path}.{projections.name}.weight",)
    yield FourBitSlot(panels.words, tuple(pieces), source, shard=shard, panels=panels, several=True)
    yield from bias_slots(path, projections, 1, shard)


def bias_slots(
    path: str, projections: Projections, turns: int, shard: Shard | None
) -> Iterator[WeightSlot]:
    """Yield the slot of all experts' biases, if there are any. `turns` is the number of parts whose
    rows alternate in the checkpoint."""
    if projections.bias is not None:
        name = f"{path}.{projections.name}_bias"
        ordered = partial(_in_parts, parts=turns) if turns > 1 else None
        yield WeightSlot(projections.bias, (name,), (name,), ordered, shard=shard)


def _upright(tensors: Mapping[str, Tensor], columns: int) -> Tensor:
    """Return the only tensor as [E, N, columns], transposing its last axes if needed."""
    (weights,) = tensors.values()
    turned = weights.shape[-2] == columns != weights.shape[-1]
    return weights.transpose(-1, -2) if turned else weights


def _turned(tensors: Mapping[str, Tensor], parts: int) -> Tensor:
    """Return the only tensor [E, K, N], in which N parts alternate, as [E, N, K] with the parts
    concatenated. The shape cannot tell whether to transpose: gpt-oss's H and I are equal."""
    (weights,) = tensors.values()
    return _in_parts({"": weights.transpose(-1, -2)}, parts)


def _in_parts(tensors: Mapping[str, Tensor], parts: int) -> Tensor:
    """Return the only tensor [E, N, …] with its alternating parts concatenated."""
    (values,) = tensors.values()
    split: Tensor = values.unflatten(1, (-1, parts))
    return split.transpose(1, 2).flatten(1, 2) if parts > 1 else values
