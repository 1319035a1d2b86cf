"""The weights of a checkpoint that LoRA adapters can change (Hu et al. 2021).

A layer yields a `LoRASite` for each product that it computes. `loading/adapters.py` matches an
adapter's tensors with the site's targets, and `LayerLoRA` computes the products.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.lora.lora import LoRAPart

_MIN_RANK = 16
"""The smallest rank that a GPU's matrix units multiply; smaller ranks are padded with zeros."""


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A weight [out_features, in_features] of a checkpoint to which an adapter can add B·A.

    `rows` and `columns` are this rank's parts of the weight's axes. Their `Shard.size` is the
    length of the whole axis.
    """

    name: str  # the module's name in checkpoints, without `.weight`
    part: LoRAPart  # the weight's features among those of the layer, on this rank
    # Reorders B [out_features, rank] to the order of the layer's features; None if the order is
    # equal.
    arrange: Callable[[Tensor], Tensor] | None = None
    rows: Shard | None = None  # this rank's output features of the checkpoint's weight; None: all
    columns: Shard | None = None  # this rank's input features of the checkpoint's weight; None: all
    # The range of the checkpoint's output features that belong to this part, if the weight holds
    # several parts.
    within: tuple[int, int] | None = None
    # The index of the expert among those of this rank; None if the expert is on another rank. 0 for
    # a weight that belongs to no expert.
    expert: int | None = 0

    @property
    def out_features(self) -> int:
        """The number of output features of the part in the checkpoint's weight."""
        return self.part.size if self.rows is None else self.rows.size


@dataclass(frozen=True, slots=True)
class LoRASite:
    """A product y = x Wᵀ to which adapters can be added, or that product of each expert of a
    layer."""

    targets: tuple[LoRATarget, ...]
    width: int  # the number of output features on this rank
    depth: int  # the number of input features on this rank
    experts: int = 1  # the number of experts on this rank; 1 without experts
    of_experts: bool = False  # whether the product belongs to experts

    def in_features(self, target: LoRATarget) -> int:
        """Return the number of input features of a target in the checkpoint's weight."""
        return self.depth if target.columns is None else target.columns.size

    def adapted_parts(self, adapters: Sequence[Container[str]]) -> list[LoRAPart]:
        """Return the parts of the product's output that some adapter changes. Each entry of
        `adapters` contains the names of an adapter's targets."""
        adapted = (p for p in self.targets if any(p.name in names for names in adapters))
        return list(dict.fromkeys(target.part for target in adapted))

    def slot_numbers(self, adapters: Sequence[Container[str]], rank: int) -> int:
        """Return the number of values of A and B that an adapter slot on a GPU holds for this
        product, with adapters padded to `rank`; 0 if no adapter changes the product.

        A has `rank` rows for each part that some adapter changes. B has a row for every output
        feature, also of parts that no adapter changes.
        """
        parts = self.adapted_parts(adapters)
        expert_numbers = rank * (len(parts) * self.depth + self.width)
        return self.experts * expert_numbers if parts else 0


class HasLoRASites(Protocol):
    """A layer whose products adapters can change."""

    def lora_sites(self, path: str) -> Iterator[LoRASite]:
        """Yield the products; `path` is the layer's name in checkpoints."""


@dataclass(frozen=True, slots=True)
class Factors:
    """The factors of one adapter for one weight of a checkpoint; they add scale · B·A."""

    down: Tensor  # A, [rank, in_features]
    up: Tensor  # B, [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


def own_factors(target: LoRATarget, factors: Factors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's A [rank, in] and scale · B [out, rank], in the layer's order and dtype."""
    down = factors.down if target.columns is None else target.columns.take(factors.down)
    up = factors.up.float() * factors.scale
    if target.within is not None:
        up = up[slice(*target.within)]
    if target.rows is not None:
        up = target.rows.take(up)
    if target.arrange is not None:
        up = target.arrange(up)
    return down.to(dtype).contiguous(), up.to(dtype).contiguous()


def stacked_rank(ranks: Sequence[int]) -> int:
    """Return the rank to which adapters are padded in adapter slots: the smallest power of two from
    16 on that is at least the highest of their ranks."""
    highest = max((_MIN_RANK, *ranks))
    return 1 << (highest - 1).bit_length()
