"""Linear layers. A weight may be 16-bit, FP8 or 4-bit, divided among ranks, and have LoRA adapters.

All projections of the models are made of these classes. `MergedLinear` stacks several projections.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from batchgen.engine.layers.cpu_products import CPUProducts
from batchgen.engine.layers.four_bit_slot import FourBitSlot, four_bit_parameters
from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.packed_format import FourBitFormat
from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.lora.layer_lora import LayerLoRA, LoRAState
from batchgen.engine.lora.lora_targets import Factors, LoRASite, LoRATarget
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.parallel.tensor_parallel import PendingParts, Stream, summed
from batchgen.kernels.four_bit.linear import four_bit_linear, four_bit_linear_parts
from batchgen.kernels.four_bit.panels import FourBitPanels, Layout
from batchgen.kernels.fp8.fp8_linear import fp8_linear, fp8_linear_parts
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight, scales_shape
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.layers.linear import MOST_ROWS, add_linear_, linear, pack_weight
from batchgen.kernels.layers.narrow_linear_triton import MOST_COLUMNS, narrow_linear
from batchgen.kernels.lora.lora import LoRAPart
from batchgen.kernels.rules import BY_BATCH


def empty_parameter(*shape: int, device: torch.device, dtype: torch.dtype) -> nn.Parameter:
    """Return an uninitialised parameter; the loader fills every parameter exactly once."""
    return nn.Parameter(torch.empty(shape, device=device, dtype=dtype), requires_grad=False)


def empty_fp8(
    *shape: int, device: torch.device, scale_rows: int = BLOCK
) -> tuple[nn.Parameter, nn.Parameter]:
    """Return uninitialised values and scales of an FP8 weight [..., N, K]. `scale_rows` rows (128
    or 1) share a scale."""
    *several, down, across = scales_shape(torch.Size(shape))
    down = down if scale_rows == BLOCK else shape[-2]
    values = empty_parameter(*shape, device=device, dtype=FP8)
    return values, empty_parameter(*several, down, across, device=device, dtype=torch.float32)


class Linear(nn.Module):
    """A linear layer y = x Wᵀ + b, with or without bias. W may be kept in FP8 or 4 bits. Adapters
    may add low-rank products to y.

    Attributes:
        scales: the scales of an FP8 or 4-bit weight, else None.
        form: the FP8 format of the weight, if it has one.
        rules: what the bits of a row may depend on.
        lora: the adapters of this layer; None without any.
    """

    weight: Tensor  # W, [out_features, in_features], or the words of `FourBitPanels`

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        quantisable: bool = True,
        where: Placement,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self._quantisable, self._dtype = quantisable, where.dtype
        make = partial(empty_parameter, device=where.device, dtype=where.dtype)
        self.weight = make(out_features, in_features)
        self.bias = make(out_features) if bias else None
        self.scales: nn.Parameter | None = None
        self.form: FP8Format | None = None
        self._layout: Layout | None = None  # of a weight in 4 bits
        self.rules = BY_BATCH
        self.lora: LayerLoRA | None = None
        # The most rows that a product on a CPU computes at once, as `linear` says.
        self._most_rows: int | None = MOST_ROWS

    @property
    def computes_in_fp8(self) -> bool:
        """Whether activations may be passed as `FP8Rows`. With adapters they may not, because
        adapters read them unquantised."""
        return self.scales is not None and self._layout is None and self.lora is None

    @property
    def in_four_bits(self) -> FourBitPanels | None:
        """The weight, if it is 4-bit."""
        if self._layout is None or self.scales is None:
            return None
        return FourBitPanels(self.weight, self.scales, self._layout)

    def forward(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute [T, out_features] from [T, in_features]."""
        out = self._product(x)
        return out if self.lora is None else self._with_lora(out, x)

    def _product(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute `forward` without adapters."""
        if isinstance(x, Tensor) and self.scales is None:
            return linear(x, self.weight, self.bias, self._most_rows)
        if (packed := self.in_four_bits) is not None:
            assert isinstance(x, Tensor)
            return four_bit_linear(x, packed, self.bias, rules=self.rules)
        return self._compute_fp8(x)

    def _with_lora(self, out: Tensor, x: Tensor | FP8Rows) -> Tensor:
        assert self.lora is not None and isinstance(x, Tensor)
        return self.lora.add_(out, x)

    def add_to(self, residual: Tensor | None, x: Tensor | FP8Rows) -> Stream:
        """Add x Wᵀ + b to `residual` in place, now or when the stream is read, and return the
        stream. None stands for zeros."""
        if self.lora is None:
            return self._add_product(residual, x)
        return self._with_lora(summed(self._add_product(residual, x)), x)

    def _add_product(self, residual: Tensor | None, x: Tensor | FP8Rows) -> Stream:
        """Compute `add_to` without adapters."""
        if isinstance(x, Tensor) and self.scales is None:
            if residual is None:
                return self._product(x)
            return add_linear_(residual, x, self.weight, self.bias, self._most_rows)
        if (packed := self.in_four_bits) is not None:
            assert isinstance(x, Tensor)
            return self._add_four_bits(residual, x, packed)
        x, weight = self._fp8_operands(x)
        rules, parts = self.rules, None
        if self.bias is None:
            parts = fp8_linear_parts(x, weight, self._dtype, rules)
        if parts is not None:
            return PendingParts(self._dtype if residual is None else residual, parts)
        return fp8_linear(
            x, weight, self.bias, dtype=self._dtype, out=residual, add=residual is not None,
            rules=rules,
        )  # fmt: skip

    def _add_four_bits(self, residual: Tensor | None, x: Tensor, packed: FourBitPanels) -> Stream:
        rules, parts = self.rules, None
        if self.bias is None:
            parts = four_bit_linear_parts(x, packed, rules)
        if parts is not None:
            return PendingParts(self._dtype if residual is None else residual, parts)
        add = residual is not None
        return four_bit_linear(x, packed, self.bias, out=residual, add=add, rules=rules)

    def _compute_fp8(self, x: Tensor | FP8Rows) -> Tensor:
        return self._fp8_product(x, self.bias)

    def _fp8_product(self, x: Tensor | FP8Rows, bias: Tensor | None) -> Tensor:
        x, weight = self._fp8_operands(x)
        return fp8_linear(x, weight, bias, dtype=self._dtype, rules=self.rules)

    def _fp8_operands(self, x: Tensor | FP8Rows) -> tuple[FP8Rows, FP8Weight]:
        assert self.scales is not None and self.form is not None
        if isinstance(x, Tensor):
            x = quantise_rows(x, powers_of_two=self.form.powers_of_two)
        return x, FP8Weight(self.weight, self.scales)

    def quantise(self, form: FP8Format | FourBitFormat, path: str) -> None:
        """Keep the weight in FP8 or 4 bits. Must be called before it is loaded.

        Args:
            path: this module's name in checkpoints.
        """
        if not self._quantisable or form.excludes(path):
            return
        if isinstance(form, FourBitFormat):
            self.keep_four_bits(form)
            return
        self.form = form
        if form.native:
            self.weight, self.scales = empty_fp8(*self.weight.shape, device=self.weight.device)

    def keep_four_bits(self, form: FourBitFormat) -> None:
        """Keep the weight in 4 bits, if its width allows it."""
        sizes = 1, self.out_features, self.in_features
        parameters = four_bit_parameters(form, sizes, self._dtype, self.weight.device)
        if parameters is not None:
            self.weight, self.scales, self._layout = parameters

    @property
    def value_bytes(self) -> float | None:
        """The bytes per weight, including its share of the scale, of a 4-bit weight; else None."""
        return None if self._layout is None else self._layout.value_bytes

    @property
    def scratch_bytes(self) -> int:
        """The bytes of the dequantised weight that a step of many tokens needs."""
        values = self.in_features * self.out_features
        return 0 if self._layout is None else values * self._dtype.itemsize

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the weight and of the bias."""
        yield self._slot(f"{path}.weight")
        if self.bias is not None:
            yield WeightSlot.plain(f"{path}.bias", self.bias)

    def _slot(self, name: str, shard: Shard | None = None) -> WeightSlot:
        """Return the slot of the weight (or of this shard of it) for a checkpoint's tensor of this
        name."""
        if (packed := self.in_four_bits) is not None:
            return FourBitSlot(self.weight, (name,), (name,), shard=shard, panels=packed)
        return WeightSlot(
            self.weight, (name,), (name,), form=self.form, scales=self.scales, shard=shard
        )

    def lora_targets(self, path: str) -> Iterator[LoRATarget]:
        """Yield the weights that adapters can be added to. `path` is the layer's name in
        checkpoints."""
        if self._quantisable:
            yield LoRATarget(path, LoRAPart(0, self.out_features))

    def lora_sites(self, path: str) -> Iterator[LoRASite]:
        """Yield the product, if adapters can be added to it."""
        if targets := tuple(self.lora_targets(path)):
            yield LoRASite(targets, self.out_features, self.in_features)

    def add_lora(
        self, path: str, factors: Sequence[Mapping[str, Factors]], state: LoRAState
    ) -> None:
        """Add adapters to the layer. Each entry of `factors` is an adapter; it maps names of
        weights to low-rank factors."""
        for site in self.lora_sites(path):
            if site.adapted_parts(factors):
                self.lora = LayerLoRA(site, factors, state, self._dtype, self.weight.device)

    def pack(self, products: CPUProducts) -> None:
        """Convert the loaded weight to the layout for this CPU; afterwards it cannot be loaded
        again. On a GPU nothing changes. `products` chooses the method for all layers of a model."""
        if self.weight.device.type != "cpu":
            return
        if self.lora is not None:
            self.lora.pack(products)
        if self.weight.is_mkldnn or self.scales is not None:
            return
        product = products.choose(self.weight, self.bias)
        self._most_rows = product.most_rows
        if product.packed:
            packed = pack_weight(self.weight)
            del self.weight  # a Parameter cannot be replaced by a tensor of another layout
            self.weight = packed


class Float32Linear(Linear):
    """A linear layer without bias whose products and sums are computed in float32.

    On a GPU, W keeps the given dtype: products of two 16-bit values are exact in float32, so matrix
    units compute what a float32 copy would give, except for the order of sums. Elsewhere W is
    float32.
    """

    def __init__(self, in_features: int, out_features: int, *, where: Placement) -> None:
        if where.device.type != "cuda":
            where = replace(where, dtype=torch.float32)
        super().__init__(in_features, out_features, bias=False, quantisable=False, where=where)

    def forward(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute [T, out_features] in float32 from [T, in_features]."""
        assert isinstance(x, Tensor)
        if self.weight.dtype == torch.float32:
            return super().forward(x.float())
        if self.out_features <= MOST_COLUMNS:
            return narrow_linear(x, self.weight, dtype=torch.float32)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32)


class RowParallelLinear(Linear):
    """A linear layer whose input features are divided among the ranks of tensor parallelism.

    Each rank has the columns of W for its features; the sum over all ranks is x Wᵀ + b. Rank 0 adds
    the bias. The number of ranks must divide in_features.

    Args:
        lane: the lane of the sum (`TensorParallel.add_sum`).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        *,
        bias: bool,
        lane: int,
        where: Placement,
    ) -> None:
        self._lane, self._parallel = lane, where.parallel
        self._shard = where.parallel.shard(1, in_features)
        super().__init__(self._shard.length, out_features, bias=bias, where=where)

    @property
    def is_divided(self) -> bool:
        """Whether the weight is divided among several ranks."""
        return self._parallel.size > 1

    def quantise(self, form: FP8Format | FourBitFormat, path: str) -> None:
        """Keep the weight in FP8 or 4 bits, as in `Linear.quantise`. Raises ValueError if FP8
        columns of a rank do not end at a block border: then two ranks would need the scale of one
        block."""
        super().quantise(form, path)
        columns = self._shard.length
        if self.computes_in_fp8 and columns < self._shard.size and columns % BLOCK:
            raise ValueError(
                f"tensor_parallel={self._parallel.size} leaves each rank {columns} of the "
                f"{self._shard.size} columns of {path}, and weights in FP8 are cut at multiples of "
                f"{BLOCK}: choose a smaller tensor_parallel, or a checkpoint in bfloat16"
            )

    def _product(self, x: Tensor | FP8Rows) -> Tensor:
        """Compute this rank's summand [T, out_features] from its features of x."""
        if self._parallel.rank == 0:
            return super()._product(x)
        if isinstance(x, Tensor) and self.scales is None:
            return linear(x, self.weight, None, self._most_rows)
        if (packed := self.in_four_bits) is not None:
            assert isinstance(x, Tensor)
            return four_bit_linear(x, packed, rules=self.rules)
        return self._fp8_product(x, None)

    def add_to(self, residual: Tensor | None, x: Tensor | FP8Rows) -> Stream:
        """Add the sum over all ranks to `residual` [T, out_features] in place, or to zeros, and
        return the stream."""
        if self._parallel.size == 1:
            return super().add_to(residual, x)
        return self._parallel.add_sum(residual, self(x), self._lane)

    def lora_targets(self, path: str) -> Iterator[LoRATarget]:
        """Yield the weight. Each rank has the same columns of A as of W."""
        shard = self._shard if self.is_divided else None
        yield LoRATarget(path, LoRAPart(0, self.out_features), columns=shard)

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the weight, whose columns are divided, and of the bias."""
        if self._parallel.size == 1:
            yield from super().weight_slots(path)
            return
        yield self._slot(f"{path}.weight", self._shard)
        if self.bias is not None:
            yield WeightSlot.plain(f"{path}.bias", self.bias)
