"""The places of weights that stay in int4."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from batchgen.engine.layers.packed_format import Int4Format
from batchgen.engine.layers.weight_slot import CheckpointTensor, WeightSlot
from batchgen.kernels.four_bit.int4_layout import (
    Int4Panels,
    empty_int4_panels,
    group_in_panels,
    pack_int4_panels,
)
from batchgen.kernels.four_bit.int4_weight import Int4Weight, quantise_int4

_CODES = 2
"""Codes in a byte, along the columns."""


@dataclass(frozen=True, slots=True)
class Int4Slot(WeightSlot):
    """The place of a weight [N, K] in int4, or of those [E, N, K] of all experts.

    `parameter` are the words of `panels`. A group that ends on another rank has its scale on both.
    """

    panels: Int4Panels | None = None  # what is filled; None only for a piece that is elsewhere
    several: bool = False  # the source has all experts

    def fill(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Lay out this rank's part of the checkpoint's weight.

        Raises ValueError if a shape differs, or the weight has other groups than the configuration
        says.
        """
        if self.elsewhere:
            return
        assert self.panels is not None
        (name,) = self.sources
        weight = tensors[name]
        if not isinstance(weight, Int4Weight):
            raise ValueError(f"tensor {name} is not in int4, as other parts of its layer are")
        expected = self.source_shape
        if self.combine is None and list(weight.shape) != expected:
            raise ValueError(
                f"tensor {name} has shape {list(weight.shape)}, the configuration says {expected}"
            )
        if weight.group % self.panels.group:
            raise ValueError(
                f"tensor {name} has groups of {weight.group} values, and quantization_config says "
                "another size"
            )
        weight = weight.regrouped(self.panels.group)
        own = [self._own(name, part, place) for place, part in enumerate(weight)]
        experts, rows, columns = self.panels.sizes
        sizes = (columns // _CODES, *[columns // self.panels.group] * 2)
        for part, size in zip(own, sizes, strict=True):
            if part.shape[-2:] != (rows, size):
                raise ValueError(
                    f"tensor {name} has {part.shape[-2]} rows, the configuration says {rows}"
                )
        values, scales, zeros = (part.expand(experts, -1, -1) for part in own)
        try:
            pack_int4_panels(Int4Weight(values, scales, zeros), self.panels)
        except ValueError as error:
            raise ValueError(f"tensor {name} {error}") from None

    def fill_dummy(self, values: Callable[[Tensor], None]) -> None:
        """Fill the parameter of a model without a checkpoint, as `WeightSlot.fill_dummy`."""
        assert self.panels is not None
        device = self.parameter.device
        drawn = torch.empty(self.source_shape, device=device, dtype=torch.bfloat16)
        values(drawn)
        (name,) = self.sources
        self.fill({name: quantise_int4(drawn, self.panels.group)})

    @property
    def source_shape(self) -> list[int]:
        """The shape of the checkpoint's weight."""
        assert self.panels is not None
        shape = [*self.panels.sizes][0 if self.several else 1 :]
        return shape if self.shard is None else self.shard.whole_shape(shape)

    def _own(self, name: str, part: Tensor, index: int) -> Tensor:
        """This rank's share of one of the three parts of the weight, in the order of the layer."""
        assert self.panels is not None
        shard = self.shard
        if shard is not None:
            if shard.axis == (2 if self.several else 1):
                shard = shard.of_blocks(self.panels.group if index else _CODES)
            try:
                part = shard.take(part)
            except ValueError as error:
                raise ValueError(f"tensor {name} {error}") from None
        return part if self.combine is None else self.combine({name: part})


def int4_parameters(
    form: Int4Format, sizes: Sequence[int], dtype: torch.dtype, device: torch.device
) -> tuple[nn.Parameter, nn.Parameter, int] | None:
    """Make room for weights [E, N, K] in int4: words, scales and the columns of a group; None if
    they cannot be kept in it."""
    experts, rows, columns = sizes
    group = group_in_panels(dtype, columns, form.group or columns)
    if group is None:
        return None
    panels = empty_int4_panels(experts, rows, columns, group, dtype, device=device)
    words, scales = (nn.Parameter(each, requires_grad=False) for each in panels[:2])
    return words, scales, group
