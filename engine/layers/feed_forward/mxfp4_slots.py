"""Maps checkpoints' MXFP4 tensors of experts to slots, for `Experts.weight_slots`. A slot is the
part of a parameter that one tensor fills (`layers/weight_slot.py`)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.layers.feed_forward.expert_slots import Projections, bias_slots
from batchgen.engine.layers.weight_slot import CheckpointTensor, WeightSlot
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.four_bit.fp4_layout import MXFP4
from batchgen.kernels.four_bit.fp4_weight import MXFP4_GROUP, MXFP4Weight, quantise_mxfp4
from batchgen.kernels.four_bit.layouts import pack_panels
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.kernels.moe.tiled_layout import are_panels, rows_of_panels


@dataclass(frozen=True, slots=True)
class MXFP4Slot(WeightSlot):
    """The slot of a projection of all experts, which a checkpoint holds in two tensors of bytes:
    blocks [E, N, K/32, 16] and scales [E, N, K/32].

    `parameter` and `scales` are those of `FourBitPanels`. Without scales, `parameter` takes
    dequantised weights [E, N, K], or [E, N, K/P, P] in panels of P columns. Experts are read one by
    one, to save memory.
    """

    sizes: tuple[int, int] = (0, 0)  # N and K
    turns: int = 1  # the number of parts of N whose rows alternate in the checkpoint

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return (torch.uint8,)

    def fill(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Lay out or dequantise the checkpoint's two tensors. Raises ValueError if a shape differs,
        or if a scale is too large for the kernels."""
        rows, columns = self.sizes
        tensors_of_rank = []
        # The sources are blocks, with the codes of a group in an axis of bytes, and scales.
        for name, last in zip(self.sources, ((MXFP4_GROUP // 2,), ()), strict=True):
            tensor = tensors[name]
            assert isinstance(tensor, Tensor)
            expected = [self._all_experts, rows, columns // MXFP4_GROUP, *last]
            if list(tensor.shape) != expected:
                raise ValueError(
                    f"tensor {name} has shape {list(tensor.shape)}, the configuration says "
                    f"{expected}"
                )
            tensors_of_rank.append(tensor if self.shard is None else self.shard.take(tensor))
        for index, (blocks, scales) in enumerate(zip(*tensors_of_rank, strict=True)):
            values = self._ordered(blocks).flatten(1)
            self._write_expert(index, MXFP4Weight(values, self._ordered(scales)))

    def fill_dummy(self, values: Callable[[Tensor], None]) -> None:
        """Fill the parameter of a model without a checkpoint, as `WeightSlot.fill_dummy` does."""
        shape, device = (self._all_experts, *self.sizes), self.parameter.device
        drawn = torch.empty(shape, device=device, dtype=torch.bfloat16)
        values(drawn)
        rank_experts = drawn if self.shard is None else self.shard.take(drawn)
        for index, expert in enumerate(rank_experts):
            self._write_expert(index, quantise_mxfp4(expert))

    @property
    def _all_experts(self) -> int:
        """The number of experts on all ranks."""
        return len(self.parameter) if self.shard is None else self.shard.size

    def _ordered(self, rows: Tensor) -> Tensor:
        """Concatenate the parts whose rows [N, …] alternate."""
        parts: Tensor = rows.unflatten(0, (-1, self.turns))
        return parts.transpose(0, 1).flatten(0, 1)

    def _write_expert(self, index: int, weight: MXFP4Weight) -> None:
        """Write the weight [N, K] of this rank's expert `index` to the parameter and the scales."""
        if self.scales is None:
            target = self.parameter[index]
            target.copy_(weight.dequantise().view(target.shape))
            return
        expert = slice(index, index + 1)
        try:
            pack_panels(
                MXFP4Weight(*(tensor[None] for tensor in weight)),
                FourBitPanels(self.parameter[expert], self.scales[expert], MXFP4),
            )
        except ValueError as error:
            raise ValueError(f"tensor {self.sources[1]} {error}") from None


def mxfp4_slots(
    path: str, projections: Projections, sizes: tuple[int, int], turns: int, shard: Shard | None
) -> Iterator[WeightSlot]:
    """Yield the slot of the weights [E, *sizes] of this rank's experts, and that of their biases.
    `turns` is as for `MXFP4Slot`."""
    weight, scales, name = projections.weight, projections.scales, f"{path}.{projections.name}"
    if scales is None and are_panels(weight):
        weight = rows_of_panels(weight)
    yield MXFP4Slot(
        weight,
        (f"{name}_blocks",),
        (f"{name}_blocks", f"{name}_scales"),
        scales=scales,
        shard=shard,
        sizes=sizes,
        turns=turns,
    )
    yield from bias_slots(path, projections, turns, shard)
