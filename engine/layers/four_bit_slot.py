"""Slots for weights that stay in 4 bits. They take packed values and scales together from a
checkpoint, instead of a tensor of 16-bit values."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import torch
from torch import Tensor, nn

from batchgen.engine.layers.packed_format import FourBitFormat
from batchgen.engine.layers.weight_slot import CheckpointTensor, WeightSlot
from batchgen.kernels.four_bit.fp4_weight import quantise_nvfp4
from batchgen.kernels.four_bit.int4_weight import Int4Weight, quantise_int4
from batchgen.kernels.four_bit.layouts import GroupedWeight, layout_of, pack_panels
from batchgen.kernels.four_bit.panels import FourBitPanels, Layout, empty_panels

_CODES = 2
"""The number of codes in a byte, along the columns."""


@dataclass(frozen=True, slots=True)
class FourBitSlot(WeightSlot):
    """The slot of a 4-bit weight [N, K], or of the weights [E, N, K] of all experts.

    `parameter` holds the words of `panels`. If a group of columns with a common scale extends over
    two ranks, both have its scale.
    """

    panels: FourBitPanels | None = None  # the target; None only if the piece is on another rank
    several: bool = False  # whether the source has all experts

    def fill(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Lay out this rank's part of the checkpoint's weight. Raises ValueError if a shape
        differs, or if the weight has another code or group size than the configuration says."""
        if self.elsewhere:
            return
        assert self.panels is not None
        (name,) = self.sources
        weight, layout = tensors[name], self.panels.layout
        is_int4 = layout.code == "int4"
        if (
            not isinstance(weight, get_args(GroupedWeight))
            or isinstance(weight, Int4Weight) != is_int4
        ):
            raise ValueError(
                f"tensor {name} is not in {layout.code}, as other parts of its layer are"
            )
        expected = self.source_shape
        if self.combine is None and list(weight.shape) != expected:
            raise ValueError(
                f"tensor {name} has shape {list(weight.shape)}, the configuration says {expected}"
            )
        if weight.group % layout.group:
            raise ValueError(
                f"tensor {name} has groups of {weight.group} values, and quantization_config says "
                "another size"
            )
        if isinstance(weight, Int4Weight):
            weight = weight.regrouped(layout.group)
        # The parts of a `GroupedWeight`: codes, scales, and zero points or factors.
        rank_parts = [self._own(name, part, index) for index, part in enumerate(weight)]
        experts, rows, columns = self.panels.sizes
        sizes = (columns // _CODES, *[columns // layout.group] * 2)
        for part, size in zip(rank_parts, sizes, strict=True):
            if part.shape[-2:] != (rows, size):
                raise ValueError(
                    f"tensor {name} has {part.shape[-2]} rows, the configuration says {rows}"
                )
        try:
            # The weight of one layer becomes that of one expert.
            pack_panels(
                type(weight)(*(part.expand(experts, -1, -1) for part in rank_parts)), self.panels
            )
        except ValueError as error:
            raise ValueError(f"tensor {name} {error}") from None

    def fill_dummy(self, values: Callable[[Tensor], None]) -> None:
        """Fill the parameter of a model without a checkpoint, as `WeightSlot.fill_dummy` does."""
        assert self.panels is not None
        device = self.parameter.device
        drawn = torch.empty(self.source_shape, device=device, dtype=torch.bfloat16)
        values(drawn)
        (name,) = self.sources
        layout = self.panels.layout
        in_int4 = layout.code == "int4"
        self.fill({name: quantise_int4(drawn, layout.group) if in_int4 else quantise_nvfp4(drawn)})

    @property
    def source_shape(self) -> list[int]:
        """The shape of the checkpoint's weight."""
        assert self.panels is not None
        shape = [*self.panels.sizes][0 if self.several else 1 :]
        return shape if self.shard is None else self.shard.whole_shape(shape)

    def _own(self, name: str, part: Tensor, index: int) -> Tensor:
        """Return this rank's share of one of the weight's parts, in the layer's row order. Part 0
        is the codes; others have an entry for each group of columns."""
        assert self.panels is not None
        shard = self.shard
        if shard is not None:
            if shard.axis == (2 if self.several else 1):
                shard = shard.of_blocks(self.panels.layout.group if index else _CODES)
            try:
                part = shard.take(part)
            except ValueError as error:
                raise ValueError(f"tensor {name} {error}") from None
        return part if self.combine is None else self.combine({name: part})


def four_bit_parameters(
    form: FourBitFormat, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter, Layout] | None:
    """Allocate 4-bit parameters for weights [E, N, K]: words, scales and their layout. Returns None
    if no layout fits."""
    experts, rows, columns = sizes
    layout = layout_of(form.code, dtype, columns, form.group or columns)
    if layout is None:
        return None
    panels = empty_panels((experts, rows, columns), layout, device=device)
    words, scales = (nn.Parameter(part, requires_grad=False) for part in panels[:2])
    return words, scales, layout
