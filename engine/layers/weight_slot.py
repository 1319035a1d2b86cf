"""Maps the tensors of a checkpoint to the parameters of a model."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor, nn

from batchgen.engine.parallel.shard import Shard


@dataclass(frozen=True, slots=True)
class WeightSlot:
    """A place in a model's parameters that tensors of a checkpoint fill.

    A model's weights consist of *pieces*, each named as the tensor in which most checkpoints hold
    it. Every piece must be filled exactly once, by any one of the slots that contain it. So
    checkpoints that hold several pieces in one tensor (fused projections, all experts of a layer)
    fill them through a slot of their own.

    Attributes:
        parameter: the parameter, or the slice of one, that is filled.
        pieces: the names of the pieces that the parameter consists of.
        sources: the names of the checkpoint's tensors that fill it; several if they are combined.
        combine: computes the values, of the parameter's shape, from the sources by name, such as
            from a quantised weight and its scales; None takes the only source as it is.
        dummy: the value of all elements in a model without a checkpoint; None draws random values.
        shard: which part of the checkpoint's tensor this rank holds; None means all of it.
        elsewhere: other ranks hold the whole piece, and `parameter` has no elements.
    """

    parameter: Tensor
    pieces: tuple[str, ...]
    sources: tuple[str, ...]
    combine: Callable[[Mapping[str, Tensor]], Tensor] | None = None
    dummy: float | None = None
    shard: Shard | None = None
    elsewhere: bool = False

    @classmethod
    def plain(
        cls,
        name: str,
        parameter: Tensor,
        dummy: float | None = None,
        shard: Shard | None = None,
    ) -> WeightSlot:
        """Make the slot of one piece that a checkpoint holds in a tensor of this name, and of this
        shape or a larger one of which the parameter is a shard."""
        return cls(parameter, (name,), (name,), dummy=dummy, shard=shard)

    @property
    def source_shape(self) -> list[int]:
        """The shape of the checkpoint's tensor, if it is a single one and none of its axes is left
        out in the parameter."""
        shape = list(self.parameter.shape)
        return shape if self.shard is None else self.shard.whole_shape(shape)

    def fill(self, tensors: Mapping[str, Tensor]) -> None:
        """Copy a checkpoint's values into the parameter.

        Args:
            tensors: the tensors named by `sources`, by name.

        Raises:
            ValueError: the shape of the values differs from that of the parameter.
        """
        if self.elsewhere:
            return
        if self.shard is not None:
            tensors = {name: self._own(name, tensor) for name, tensor in tensors.items()}
        if self.combine is None:
            (source,) = self.sources
            values = tensors[source]
        else:
            values = self.combine(tensors)
        if values.shape != self.parameter.shape:
            raise ValueError(
                f"tensor {self.sources[0]} has shape {list(values.shape)}, the configuration says "
                f"{list(self.parameter.shape)}"
            )
        self.parameter.copy_(values)

    def _own(self, name: str, whole: Tensor) -> Tensor:
        assert self.shard is not None
        try:
            return self.shard.take(whole)
        except ValueError as error:
            raise ValueError(f"tensor {name} {error}") from None


@runtime_checkable
class HasWeightSlots(Protocol):
    """A module that says itself which tensors of a checkpoint fill its parameters."""

    def weight_slots(self, path: str) -> Iterator[WeightSlot]:
        """Yield the weight slots of the module's own parameters.

        Args:
            path: the module's name in checkpoints.
        """


def weight_slots(module: nn.Module, path: str) -> Iterator[WeightSlot]:
    """Yield the weight slots of a module and of all modules in it.

    A checkpoint names a module by the attribute that holds it, unless the parent module maps that
    name to another in `checkpoint_names`.

    Args:
        path: the module's name in checkpoints; empty for the whole model.
    """
    if isinstance(module, HasWeightSlots):
        yield from module.weight_slots(path)
    else:
        for name, parameter in module.named_parameters(recurse=False):
            yield WeightSlot.plain(_joined(path, name), parameter)
    names = module.checkpoint_names if isinstance(module, HasCheckpointNames) else {}
    for name, child in module.named_children():
        yield from weight_slots(child, _joined(path, names.get(name, name)))


@runtime_checkable
class HasCheckpointNames(Protocol):
    """A module some of whose children have names in checkpoints that differ from the attributes.

    Attributes:
        checkpoint_names: maps the attribute of such a child to its name in checkpoints.
    """

    checkpoint_names: Mapping[str, str]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
