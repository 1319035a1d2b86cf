"""Maps the tensors of a checkpoint to the parameters of a model by *slots*. A slot is a parameter,
or the part of one, that a tensor fills.

Layers yield their slots (`weight_slots`), and the loader calls `WeightSlot.fill` with the tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch
from torch import Tensor, nn

from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.four_bit.layouts import GroupedWeight
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8Weight, quantise_fp8, rows_of_scales

CheckpointTensor = Tensor | FP8Weight | GroupedWeight
"""What a checkpoint has under a name: a plain tensor, or quantised values with their scales."""
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A part of a model's parameters that tensors of a checkpoint fill.

    Weights consist of *pieces*, each named like the tensor in which most checkpoints hold it. Every
    piece must be filled exactly once, by any one of the slots that contain it. So a checkpoint that
    holds several pieces in one tensor (fused projections, all experts) fills them through another
    slot.
    """

    parameter: Tensor  # the parameter to fill, or the slice of one
    pieces: tuple[str, ...]  # the pieces that the parameter consists of
    sources: tuple[str, ...]  # the names of the checkpoint's tensors; several are combined
    # Computes the values from the sources by name; None takes the only source. For an FP8 weight it
    # reorders the rows of values and of scales.
    combine: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    dummy: float | None = None  # the value of all elements without a checkpoint; None: random
    form: FP8Format | None = None  # None: not in FP8, so quantised sources are dequantised
    scales: Tensor | None = None  # the scales of an FP8 parameter; one per row with `combine`
    shard: Shard | None = None  # this rank's part of the checkpoint's tensor; None: all
    elsewhere: bool = False  # whether other ranks hold the whole piece; `parameter` is then empty
    # Whether `parameter` is from `rows_of_panels`: its last two axes are a tensor's last axis.
    in_panels: bool = False

    @classmethod
    def plain(
        cls,
        name: str,
        parameter: Tensor,
        dummy: float | None = None,
        shard: Shard | None = None,
    ) -> WeightSlot:
        """Make the slot of one piece, held in a tensor of this name with the parameter's shape
        (larger with a shard)."""
        return cls(parameter, (name,), (name,), dummy=dummy, shard=shard)

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes that sources without scales may have."""
        return _FLOATS

    @property
    def source_shape(self) -> list[int]:
        """The shape of the checkpoint's tensor, if there is only one source."""
        shape = self._shape_of(self.parameter)
        return shape if self.shard is None else self.shard.whole_shape(shape)

    def fill(self, tensors: Mapping[str, CheckpointTensor]) -> None:
        """Copy the checkpoint's tensors named by `sources` into the parameter. Raises ValueError if
        a shape differs, or if a tensor should be FP8 and is not."""
        if self.elsewhere:
            return
        if self.form is not None:
            tensors = {name: self._in_fp8(name, tensor) for name, tensor in tensors.items()}
        if self.scales is None:
            plain = {name: self._plain(t) for name, t in tensors.items()}
            self._copy(self.parameter, plain, self.shard)
            return
        of_rows = self._has_scales_of_rows()
        values, scales = {}, {}
        for name, tensor in tensors.items():
            assert isinstance(tensor, FP8Weight)
            values[name] = tensor.values
            rows = tensor.values.shape[-2]
            scales[name] = rows_of_scales(tensor.scales, rows) if of_rows else tensor.scales
        self._copy(self.parameter, values, self.shard)
        self._copy(self.scales, scales, self._shard_of_scales(of_rows))

    def fill_dummy(self, values: Callable[[Tensor], None]) -> None:
        """Fill the parameter of a model without a checkpoint. `values` writes values into a tensor.

        Values are drawn for the whole tensor of a checkpoint, so that the ranks have parts of equal
        weights.
        """
        is_plain = self.form is None and self.shard is None and self.combine is None
        if is_plain and self.parameter.is_contiguous():
            values(self.parameter)
            return
        if self.form is None:
            whole = self.parameter.new_empty(self.source_shape)
            values(whole)
            self.fill(dict.fromkeys(self.sources, whole))
            return
        drawn = torch.empty(self.source_shape, device=self.parameter.device, dtype=torch.bfloat16)
        values(drawn)
        rounded = quantise_fp8(drawn)
        if self.shard is not None:
            self.fill(dict.fromkeys(self.sources, rounded))
            return
        if self.scales is None:
            self._write(self.parameter, rounded.dequantise())
            return
        self._write(self.parameter, rounded.values)
        by_row = self._has_scales_of_rows()
        self.scales.copy_(rounded.by_row().scales if by_row else rounded.scales)

    def _has_scales_of_rows(self) -> bool:
        """Whether each row of an FP8 parameter has its own scales."""
        assert self.scales is not None
        return self.scales.shape[-2] == self._shape_of(self.parameter)[-2]

    def _shard_of_scales(self, of_rows: bool) -> Shard | None:
        """Return the part of a checkpoint's scales that corresponds to the shard of its values."""
        if self.shard is None:
            return None
        # Scales have one entry per block of columns, and per block of rows or per row.
        from_end = self.shard.axis - len(self._shape_of(self.parameter))
        if from_end == -1 or (from_end == -2 and not of_rows):
            return self.shard.of_blocks(BLOCK)
        return self.shard

    def _copy(self, target: Tensor, tensors: Mapping[str, Tensor], shard: Shard | None) -> None:
        """Combine this rank's part of the sources, and copy it to `target`: the parameter or its
        scales."""
        if shard is not None:
            tensors = {name: take_part(name, tensor, shard) for name, tensor in tensors.items()}
        values = tensors[self.sources[0]] if self.combine is None else self.combine(tensors)
        self._check_shape(values, target)
        self._write(target, values)

    def _check_shape(self, values: Tensor, target: Tensor) -> None:
        """Raise ValueError if the values for the parameter, or its scales, have another shape."""
        if list(values.shape) != self._shape_of(target):
            raise ValueError(
                f"tensor {self.sources[0]} has shape {list(values.shape)}, the configuration says "
                f"{self._shape_of(target)}"
            )

    def _shape_of(self, target: Tensor) -> list[int]:
        """Return the shape that checkpoints give the parameter, or its scales."""
        shape = list(target.shape)
        return [*shape[:-2], shape[-2] * shape[-1]] if self._is_panels(target) else shape

    def _is_panels(self, target: Tensor) -> bool:
        return self.in_panels and target is self.parameter

    def _write(self, target: Tensor, values: Tensor) -> None:
        """Copy values, which have a checkpoint's shape, to `target`."""
        if not self._is_panels(target):
            target.copy_(values)
            return
        rows = values.unflatten(-1, target.shape[-2:])
        if target.ndim == 3:
            target.copy_(rows)
            return
        # Copy one expert after another: a copy to a GPU in another layout takes as much memory
        # again.
        for row, source in zip(target, rows, strict=True):
            row.copy_(source)

    def _in_fp8(self, name: str, tensor: CheckpointTensor) -> FP8Weight:
        """Return a source as an FP8 weight, rounded now if the format is `at_load`."""
        assert self.form is not None
        if isinstance(tensor, FP8Weight):
            return tensor
        plain = tensor if isinstance(tensor, Tensor) else tensor.dequantise()
        if not self.form.at_load:
            raise ValueError(
                f"tensor {name} is in {str(plain.dtype).removeprefix('torch.')} and has no "
                f"scales, but quantization_config says that weights are in FP8: list its module in "
                "modules_to_not_convert if it is not"
            )
        return quantise_fp8(plain.to(self.parameter.device))

    def _plain(self, tensor: CheckpointTensor) -> Tensor:
        if isinstance(tensor, Tensor):
            return tensor
        if not isinstance(tensor, FP8Weight):
            return tensor.dequantise()
        device = self.parameter.device
        return FP8Weight(tensor.values.to(device), tensor.scales.to(device)).dequantise()


def take_part(name: str, whole: Tensor, shard: Shard) -> Tensor:
    """Return the part of a checkpoint's tensor that is here. Raises ValueError, which names it, if
    the tensor is no such whole."""
    try:
        return shard.take(whole)
    except ValueError as error:
        raise ValueError(f"tensor {name} {error}") from None


@runtime_checkable
class HasWeightSlots(Protocol):
    """A module that itself maps a checkpoint's tensors to its parameters."""

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the slots of the module's own parameters. `path` is the module's name in
        checkpoints."""


def weight_slots(module: nn.Module, path: str) -> Iterator[WeightSlot]:
    """Yield the weight slots of a module, named `path` in checkpoints, and of all its
    submodules."""
    for part_path, part in named_parts(module, path):
        if isinstance(part, HasWeightSlots):
            yield from part.weight_slots(part_path)
        else:
            for name, parameter in part.named_parameters(recurse=False):
                yield WeightSlot.plain(_joined(part_path, name), parameter)


def named_parts(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
    """Yield a module and all its submodules, each with its name in checkpoints.

    A submodule's name is the attribute that holds it, unless the parent's `checkpoint_names` maps
    the attribute to another name. If that name is empty, checkpoints hold the submodule's contents
    in the parent.
    """
    yield path, module
    names = module.checkpoint_names if isinstance(module, HasCheckpointNames) else {}
    for name, child in module.named_children():
        yield from named_parts(child, _joined(path, names.get(name, name)))


@runtime_checkable
class HasCheckpointNames(Protocol):
    """A module with children whose names in checkpoints differ from their attributes."""

    checkpoint_names: Mapping[str, str]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path and name else path or name
