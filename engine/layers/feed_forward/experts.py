"""The experts of an MoE layer as one module: their weights, how these are loaded, and the products.

`SparseMoE` (`moe.py`) routes tokens and calls `Experts`. The word *slot* has two meanings here. A
weight slot is a place of a parameter that the loader fills with a tensor of the checkpoint
(`WeightSlot`). An adapter slot is the index of a LoRA adapter in memory, and a token has one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.layers.cpu_products import CPUProducts
from batchgen.engine.layers.feed_forward.expert_slots import (
    PLAIN_EXPERTS,
    ExpertForm,
    Projections,
    expert_slots,
    four_bit_slots,
)
from batchgen.engine.layers.feed_forward.mxfp4_slots import mxfp4_slots
from batchgen.engine.layers.four_bit_slot import four_bit_parameters
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.linear import empty_fp8, empty_parameter
from batchgen.engine.layers.mxfp4_format import MXFP4Format, WeightFormat, format_name
from batchgen.engine.layers.packed_format import FourBitFormat
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.lora.layer_lora import LayerLoRA, LoRAState
from batchgen.engine.lora.lora_targets import Factors, LoRASite, LoRATarget
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import PendingParts, Stream
from batchgen.kernels.four_bit.experts import FourBitExperts
from batchgen.kernels.four_bit.fp4_layout import MXFP4, takes_fp4
from batchgen.kernels.four_bit.panels import FourBitPanels, Layout, empty_panels
from batchgen.kernels.four_bit.tiles import four_bit_tiles
from batchgen.kernels.fp8.fp8_experts import FP8Experts
from batchgen.kernels.fp8.fp8_tiles import tma_reads
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight
from batchgen.kernels.fp8.quantise import RoundedRows, plain_rows
from batchgen.kernels.layers.linear import pack_weight
from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.lora.expert_lora import ExpertAdapters
from batchgen.kernels.lora.lora import LoRAPart
from batchgen.kernels.moe.epilogues import Epilogues
from batchgen.kernels.moe.experts import PlainExperts, grouped_mlp, grouped_parts
from batchgen.kernels.moe.experts_cpu import ExpertProducts, grouped_mlp_cpu
from batchgen.kernels.moe.experts_triton import ExpertWeights
from batchgen.kernels.moe.tiled_layout import keeps_panels, matrix_sizes, panels_shape


class Experts(nn.Module):
    """E MLPs, with or without a gate. One tensor holds each kind of projection of all experts.

    A checkpoint may hold each projection of each expert in a separate tensor
    (`experts.3.gate_proj.weight`), or all experts in one (`experts.gate_up_proj` [E, 2·I, H] and
    `experts.down_proj` [E, H, I], with or without `.weight`). The last two axes may be transposed
    (Qwen3-VL), or the rows of gate and up interleaved (gpt-oss); `variant` says so. Weights are
    kept in FP8 or 4 bits after `quantise`, and on a GPU in panels, a layout in memory
    (`tiled_layout.py`). Each rank of tensor parallelism has consecutive whole experts.

    E is the number of experts, H the hidden size, I an expert's intermediate size, T the number of
    tokens and k the number of experts per token.
    """

    gate_up_proj: Tensor
    down_proj: Tensor

    def __init__(
        self,
        num_experts: int,
        hidden_size: int,
        intermediate_size: int,
        *,
        variant: ExpertForm = PLAIN_EXPERTS,
        where: Placement,
    ) -> None:
        super().__init__()
        self.variant = variant
        self._hidden, self._inner, parallel = hidden_size, intermediate_size, where.parallel
        self._num_experts, self._parallel = num_experts, parallel
        rank_experts = parallel.share("num_experts", num_experts)
        self._first = parallel.rank * rank_experts  # the index of this rank's first expert
        # For each expert of all ranks, its index among those of this rank, or else their number.
        self._own_indices = torch.full(
            (num_experts,), rank_experts, dtype=torch.int32, device=where.device
        )
        indices = torch.arange(rank_experts, dtype=torch.int32, device=where.device)
        self._own_indices[self._first : self._first + rank_experts] = indices
        rows = len(variant.first) * intermediate_size
        shapes = (rank_experts, rows, hidden_size), (rank_experts, hidden_size, intermediate_size)
        in_panels = keeps_panels(where.device, where.dtype, hidden_size, intermediate_size)
        gate_up, down = (
            panels_shape(*shape, where.dtype) if in_panels else shape for shape in shapes
        )
        self.gate_up_proj = empty_parameter(*gate_up, device=where.device, dtype=where.dtype)
        self.down_proj = empty_parameter(*down, device=where.device, dtype=where.dtype)
        self.gate_up_bias: nn.Parameter | None = None
        self.down_bias: nn.Parameter | None = None
        if variant.biased:
            make = partial(empty_parameter, device=where.device, dtype=where.dtype)
            self.gate_up_bias = make(rank_experts, rows)
            self.down_bias = make(rank_experts, hidden_size)
        self.gate_up_scales: nn.Parameter | None = None
        self.down_scales: nn.Parameter | None = None
        self.form: FP8Format | MXFP4Format | None = None
        # The layouts of gate and up, and of down, in 4 bits; None for weights of another format.
        self._layouts: tuple[Layout, Layout] | None = None
        self._dtype = where.dtype
        # The weights in the layout for a CPU, after `pack`. They replace the parameters.
        self._packed: tuple[ExpertProducts, ExpertProducts] | None = None
        self._lora: LoRAState | None = None
        self._gate_up_lora: LayerLoRA | None = None
        self._down_lora: LayerLoRA | None = None

    def quantise(self, form: WeightFormat, path: str) -> None:
        """Keep the weights in FP8 or 4 bits. Must be called before they are loaded.

        If I is a multiple of 128, 128 rows share an FP8 scale; otherwise each row of gate and up
        has its own.

        Args:
            path: this module's name in checkpoints.

        Raises:
            ValueError: only some experts are excluded, experts have no gate, or an FP8 checkpoint
                holds experts with interleaved rows or transposed axes.
        """
        if isinstance(form, FourBitFormat):
            self._keep_four_bits(form, path)
            return
        if form.excludes(path):
            return
        name, variant = format_name(form), self.variant
        if variant.function == "relu2":
            raise ValueError(
                f"{path} has experts without a gate, which {name} kernels do not support: load the "
                f"model without quantisation to {name}"
            )
        if isinstance(form, MXFP4Format):
            self.form = form
            if form.native and takes_fp4(self.gate_up_proj.dtype, self._hidden, self._inner):
                self.gate_up_proj, self.gate_up_scales = _empty_mxfp4(self.gate_up_proj)
                self.down_proj, self.down_scales = _empty_mxfp4(self.down_proj)
                self._layouts = MXFP4, MXFP4
            return
        if not form.at_load and (variant.interleaved or variant.transposed):
            raise ValueError(
                f"{path} is in FP8 in the checkpoint, with axes or rows in another order than "
                "the blocks that share scales: use the checkpoint in bfloat16 with "
                "model.quantization=fp8"
            )
        # A name below `path` excludes a part of the experts.
        if below := [name for name in form.excluded if f".{name}.".find(f".{path}.") >= 0]:
            raise ValueError(
                f"modules_to_not_convert excludes {below[0]} and not {path}, whose experts are "
                "computed together: exclude all of them or none"
            )
        self.form = form
        if form.native:
            rows = BLOCK if self._inner % BLOCK == 0 else 1
            self.gate_up_proj, self.gate_up_scales = _empty_fp8(self.gate_up_proj, rows)
            self.down_proj, self.down_scales = _empty_fp8(self.down_proj, BLOCK)

    def _keep_four_bits(self, form: FourBitFormat, path: str) -> None:
        """Keep the weights in 4 bits, if no part is excluded and the kernels have a layout for
        them."""
        kinds = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
        for whole, parts in kinds.items():
            # Checkpoints list the tensor of all experts, or each projection of each expert.
            names = (f"{path}.{i}.{part}" for i in range(self._num_experts) for part in parts)
            if form.excludes(f"{path}.{whole}") and any(map(form.excludes, names)):
                return
        if self.variant.interleaved or self.variant.function == "relu2":
            return
        weights = self.gate_up_proj, self.down_proj
        dtype, device = self._dtype, self.down_proj.device
        parameters = [
            four_bit_parameters(form, matrix_sizes(each), dtype, device) for each in weights
        ]
        gate_up, down = parameters
        if gate_up is None or down is None:
            return
        self.gate_up_proj, self.gate_up_scales, gate_up_layout = gate_up
        self.down_proj, self.down_scales, down_layout = down
        self._layouts = gate_up_layout, down_layout

    @property
    def names(self) -> tuple[str, str]:
        """The names in checkpoints of the two weights of all experts."""
        first = self.variant.first
        return "gate_up_proj" if len(first) > 1 else first[0], "down_proj"

    def sizes(self, name: str) -> tuple[int, int, int]:
        """Return the number of experts on all ranks, and the output and input features of an
        expert's weight. `name` is one of `names`."""
        rows = len(self.variant.first) * self._inner
        gate_up, down = (rows, self._hidden), (self._hidden, self._inner)
        return self._num_experts, *(down if name == "down_proj" else gate_up)

    @property
    def computes_in_fp8(self) -> bool:
        """Whether kernels read FP8 weights. Then tokens may be passed as `RoundedRows`, which are
        already rounded to FP8."""
        return self.gate_up_scales is not None and isinstance(self.form, FP8Format)

    @property
    def computes_in_four_bits(self) -> bool:
        """Whether kernels read 4-bit weights."""
        return self._layouts is not None

    @property
    def value_bytes(self) -> float | None:
        """The bytes per weight, including its share of the scale, if kernels read 4-bit weights;
        else None."""
        return None if self._layouts is None else self._layouts[0].value_bytes

    def epilogues(self, ids: Tensor, adapter_slots: Tensor | None) -> Epilogues:
        """Return the operations that follow this rank's expert products.

        Args:
            ids: [T, k], the experts of the tokens.
            adapter_slots: [T], the adapter slots of the tokens; None without adapters.
        """
        adapters, loras = None, (self._gate_up_lora, self._down_lora)
        if adapter_slots is not None:
            gate_up, down = (None if lora is None else lora.of_experts() for lora in loras)
            rank_experts = self._num_experts // self._parallel.size
            adapters = ExpertAdapters(adapter_slots, ids, rank_experts, gate_up, down)
        variant = self.variant
        return Epilogues(
            self.gate_up_bias, self.down_bias, variant.clamped, variant.function, adapters
        )

    def adapter_slots(self, count: int) -> Tensor | None:
        """Return the adapter slots [T] of a forward's `count` tokens; None if these experts have no
        adapters."""
        tokens = None if self._lora is None else self._lora.tokens_of(count)
        return None if tokens is None else tokens.slots

    def forward(
        self,
        x: Tensor | RoundedRows,  # [T, H]
        ids: Tensor,  # [T, k] int32
        weights: Tensor,  # [T, k] float32
        residual: Tensor | None = None,
        shared: Callable[[], SharedPart] | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Tensor:
        """Compute the weighted sum [T, H] of each token's experts on this rank, with their
        adapters.

        Args:
            ids: the experts of the tokens, among those of all ranks.
            weights: their weights in the sum.
            residual: if not None, the sum is added to it in place.
            shared: computes the output of the layer's shared expert, which is added too. It is
                called once, after the experts.
            adapter_slots: as for `epilogues`.
        """
        if self._parallel.size > 1:
            ids = self._own_ids(ids)
        epilogues = self.epilogues(ids, adapter_slots)
        if self._packed is not None:
            assert isinstance(x, Tensor)
            out = grouped_mlp_cpu(x, *self._packed, ids, weights, epilogues)
            return add_up(out, residual, shared)
        return grouped_mlp(
            plain_rows(x),
            self._weights(x),
            ids,
            weights,
            residual,
            epilogues=epilogues,
            shared=shared,
            num_routed=self._num_experts,
        )

    def add_to(
        self,
        residual: Tensor | None,
        x: Tensor | RoundedRows,
        ids: Tensor,
        weights: Tensor,
        shared: Callable[[], SharedPart] | None = None,
        adapter_slots: Tensor | None = None,
    ) -> Stream:
        """Add the sum of `forward` to `residual` in place, or to zeros, and return the stream. If
        the next layer's norm can add up the experts' results in its own kernel, they are returned
        unsummed (`PendingParts`). Needs all experts on this rank."""
        parts = None
        if self._packed is None:
            epilogues = self.epilogues(ids, adapter_slots)
            parts = grouped_parts(plain_rows(x), self._weights(x), ids, weights, epilogues)
        if parts is not None:
            start = parts.dtype if residual is None else residual
            return PendingParts(start, parts, shared and shared())
        result: Tensor = self(x, ids, weights, residual, shared, adapter_slots)
        return result

    def _weights(self, x: Tensor | RoundedRows) -> ExpertWeights:
        """Return the weights of both products in their format, for these tokens."""
        if (packed := self.in_four_bits) is not None:
            return packed
        gate_up_scales, down_scales, form = self.gate_up_scales, self.down_scales, self.form
        if gate_up_scales is None or down_scales is None:
            return PlainExperts(self.gate_up_proj, self.down_proj)
        assert isinstance(form, FP8Format)
        gate_up = FP8Weight(self.gate_up_proj, gate_up_scales)
        down = FP8Weight(self.down_proj, down_scales)
        rows = x.in_fp8 if isinstance(x, RoundedRows) else None
        return FP8Experts(gate_up, down, form.powers_of_two, rows)

    @property
    def in_four_bits(self) -> FourBitExperts | None:
        """The weights of both products, if they are 4-bit."""
        gate_up_scales, down_scales = self.gate_up_scales, self.down_scales
        if gate_up_scales is None or down_scales is None or self._layouts is None:
            return None
        gate_up_layout, down_layout = self._layouts
        return FourBitExperts(
            FourBitPanels(self.gate_up_proj, gate_up_scales, gate_up_layout),
            FourBitPanels(self.down_proj, down_scales, down_layout),
        )

    def scratch_bytes(self, pairs: int) -> int:
        """Return the bytes of the weights that are dequantised at once in a forward of this many
        pairs of a token and one of its experts; 0 if none are, because kernels read 4-bit
        weights for so few pairs."""
        experts, rows, columns = len(self.gate_up_proj), 2 * self._inner, self._hidden
        if self._layouts is None or four_bit_tiles(pairs, self._num_experts, self._layouts[1]):
            return 0
        return experts * rows * columns * torch.bfloat16.itemsize

    def _own_ids(self, ids: Tensor) -> Tensor:
        """Turn expert ids into indices among this rank's experts; experts of other ranks become the
        index one past the last."""
        return self._own_indices.index_select(0, ids.flatten()).view_as(ids)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield a weight slot for each projection of each expert, and one for each kind of
        projection of all experts, because checkpoints have the one or the other. `path` is this
        module's name in checkpoints."""
        shard = self._parallel.shard(0, self._num_experts) if self._parallel.size > 1 else None
        gate_up, down = (self.gate_up_scales, self.gate_up_bias), (self.down_scales, self.down_bias)
        both, single = self.variant.first, ("down_proj",)
        for kind in (
            Projections(self.names[0], both, self.gate_up_proj, self._hidden, *gate_up),
            Projections("down_proj", single, self.down_proj, self._inner, *down),
        ):
            packed = self.in_four_bits
            if packed is not None and not isinstance(self.form, MXFP4Format):
                panels = packed[0] if kind.parts == both else packed[1]
                count, first = self._num_experts, self._first
                yield from four_bit_slots(path, kind, panels, of=count, first=first, shard=shard)
                continue
            if isinstance(self.form, MXFP4Format):
                rows = 2 * self._inner if kind.parts == both else self._hidden
                # Interleaved rows of gate and up take turns in the checkpoint.
                turns = len(kind.parts) if self.variant.interleaved else 1
                yield from mxfp4_slots(path, kind, (rows, kind.columns), turns, shard)
                continue
            yield from expert_slots(
                path,
                kind,
                self.variant,
                self.form,
                of=self._num_experts,
                first=self._first,
                shard=shard,
            )

    def lora_sites(self, path: str) -> Iterator[LoRASite]:
        """Yield both products as places for LoRA adapters. An adapter may change each projection of
        an expert, or gate and up together, under the name of the weight of all experts
        (`experts.3.gate_up_proj`)."""
        rank_experts, both = self._num_experts // self._parallel.size, self.variant.first
        for whole, parts in zip(self.names, (both, ("down_proj",)), strict=True):
            _, width, depth = self.sizes(whole)
            size, targets = width // len(parts), list[LoRATarget]()
            for index in range(self._num_experts):
                expert = index - self._first if 0 <= index - self._first < rank_experts else None
                # The name of each target, and its rows of the expert's weight.
                spans = [(part, i * size, size) for i, part in enumerate(parts)]
                spans += [(whole, 0, width)] if len(parts) > 1 else []
                for name, start, length in spans:
                    part = LoRAPart(start, length)
                    targets.append(LoRATarget(f"{path}.{index}.{name}", part, expert=expert))
            yield LoRASite(tuple(targets), width, depth, rank_experts, of_experts=True)

    def add_lora(
        self, path: str, factors: Sequence[Mapping[str, Factors]], state: LoRAState
    ) -> None:
        """Add the adapters' factors to the products, as `Linear.add_lora` does."""
        device, products = self.down_proj.device, list[LayerLoRA | None]()
        for site in self.lora_sites(path):
            adapted = site.adapted_parts(factors)
            products.append(
                LayerLoRA(site, factors, state, self._dtype, device) if adapted else None
            )
        self._gate_up_lora, self._down_lora = products
        self._lora = state if any(products) else None

    def pack(self, products: CPUProducts) -> None:
        """Convert the loaded weights to the layout for this CPU; afterwards they cannot be loaded
        again. On a GPU nothing changes. `products` chooses the method for all layers of a model."""
        for lora in (self._gate_up_lora, self._down_lora):
            if lora is not None:
                lora.pack(products)
        if self._packed is not None or self.gate_up_scales is not None:
            return
        if self.gate_up_proj.device.type != "cpu":
            return
        self._packed = (
            packed_products(self.gate_up_proj, products, self.gate_up_bias),
            packed_products(self.down_proj, products, self.down_bias),
        )
        del self.gate_up_proj, self.down_proj


def _empty_mxfp4(weights: Tensor) -> tuple[nn.Parameter, nn.Parameter]:
    """Allocate MXFP4 parameters for weights [E, N, K] or their panels."""
    panels = empty_panels(matrix_sizes(weights), MXFP4, device=weights.device)
    words = nn.Parameter(panels.words, requires_grad=False)
    return words, nn.Parameter(panels.scales, requires_grad=False)


def _empty_fp8(weights: Tensor, scale_rows: int) -> tuple[nn.Parameter, nn.Parameter]:
    """Allocate FP8 values and scales for weights [E, N, K] or their panels, in panels where TMA can
    read these. `scale_rows` rows share a scale."""
    shape, device = matrix_sizes(weights), weights.device
    values, scales = empty_fp8(*shape, device=device, scale_rows=scale_rows)
    if keeps_panels(device, FP8, shape[2]) and tma_reads(shape[2], device):
        values = nn.Parameter(values.view(panels_shape(*shape, FP8)), requires_grad=False)
    return values, scales


def packed_products(
    weights: Tensor, products: CPUProducts, bias: Tensor | None = None
) -> ExpertProducts:
    """Lay out the weights [E, N, K] of all experts (or heads) for products on this CPU, by the
    method that `products` chooses for the first one."""
    product = products.choose(weights[0], None)
    laid_out = [pack_weight(weight) if product.packed else weight for weight in weights]
    return ExpertProducts(laid_out, product.most_rows, not products.takes_few(weights[0]), bias)
