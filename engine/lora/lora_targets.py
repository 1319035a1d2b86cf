"""The weights of a checkpoint that low-rank adapters can change (LoRA, Hu et al. 2021).

A layer of a model yields a `LoRASite` for each product that it computes. `loading/adapters.py`
matches the tensors of adapters with the site's targets, and `LayerLoRA` computes what they add.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.parallel.shard import Shard
from batchgen.kernels.lora.lora import LoRAPart

_FEWEST_RANKS = 16
"""The least rank that matrix units of a GPU multiply; smaller ones are filled up with zeros."""


@dataclass(frozen=True, slots=True)
class LoRATarget:
    """A weight [out_features, in_features] of a checkpoint that an adapter can add B·A to."""

    name: str  # the module's name in checkpoints, without `.weight`
    part: LoRAPart  # its features among those of the layer, on this rank
    # Puts B [out_features, rank] into the order of the layer's features; None if it is.
    arrange: Callable[[Tensor], Tensor] | None = None
    rows: Shard | None = None  # this rank's out features of the checkpoint's weight; None: all
    columns: Shard | None = None  # this rank's in features of the checkpoint's weight; None: all
    # The out features of the checkpoint's weight that are the part's, where it holds several parts.
    within: tuple[int, int] | None = None
    # The expert that it belongs to among those of this rank, and None if that is on another one.
    expert: int | None = 0

    @property
    def out_features(self) -> int:
        """The out features of the part in the checkpoint's weight."""
        return self.part.size if self.rows is None else self.rows.size


@dataclass(frozen=True, slots=True)
class LoRASite:
    """A product y = x Wᵀ whose result adapters can change, or that of each expert of a layer."""

    targets: tuple[LoRATarget, ...]
    width: int  # the out features on this rank
    depth: int  # the in features on this rank
    experts: int = 1  # on this rank; 1 for a product that is of none
    of_experts: bool = False

    def in_features(self, target: LoRATarget) -> int:
        """The in features of a target in the checkpoint's weight."""
        return self.depth if target.columns is None else target.columns.size

    def adapted_parts(self, adapters: Sequence[Container[str]]) -> list[LoRAPart]:
        """Return the parts of the product's output that some adapter changes; `adapters` has the
        names of the targets of each."""
        adapted = (p for p in self.targets if any(p.name in names for names in adapters))
        return list(dict.fromkeys(target.part for target in adapted))

    def slot_numbers(self, adapters: Sequence[Container[str]], rank: int) -> int:
        """Return how many values an adapter slot holds on a GPU for adapters of this rank."""
        parts = self.adapted_parts(adapters)
        expert_numbers = rank * (len(parts) * self.depth + self.width)
        return self.experts * expert_numbers if parts else 0


class HasLoRASites(Protocol):
    """A layer whose products adapters can change."""

    def lora_sites(self, path: str) -> Iterator[LoRASite]:
        """Yield the products; `path` is the layer's name in checkpoints."""


@dataclass(frozen=True, slots=True)
class Factors:
    """What one adapter adds to one weight of a checkpoint: scale · B·A."""

    down: Tensor  # A, [rank, in_features]
    up: Tensor  # B, [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


def own_factors(target: LoRATarget, factors: Factors, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return this rank's A [rank, in] and scale · B [out, rank] in the layer's order and dtype."""
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
    """Return the rank that adapters are filled up to in adapter slots."""
    highest = max((_FEWEST_RANKS, *ranks))
    return 1 << (highest - 1).bit_length()
