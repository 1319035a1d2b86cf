"""Low-rank adapters beside the linear layers of a model (LoRA, Hu et al. 2021)."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
from torch import Tensor

from batchgen.engine.layers.weight_slot import WeightSlot
from batchgen.engine.parallel.shard import Shard
from batchgen.engine.sampling.sampling_params import BASE
from batchgen.kernels.layers.cpu_product import CPUProduct
from batchgen.kernels.layers.linear import linear, pack_weight
from batchgen.kernels.lora.lora import LoRAPart, LoRAProducts, StackedFactors, add_lora_
from batchgen.kernels.lora.lora_tokens import LoRATokens
from batchgen.kernels.lora.lora_triton import BLOCK_N

_FEWEST_RANKS = 16
"""The least rank that matrix units of a GPU multiply; smaller ones are filled up with zeros."""


@dataclass(frozen=True, slots=True)
class LoRAPlace:
    """A weight [out_features, in_features] of a checkpoint that an adapter can add B·A to."""

    name: str  # the module's name in checkpoints, without `.weight`
    part: LoRAPart  # its features among those of the layer, on this rank
    # Puts B [out_features, rank] into the order of the layer's features; None if it is.
    arrange: Callable[[Tensor], Tensor] | None = None
    rows: Shard | None = None  # this rank's out features of the checkpoint's weight; None: all
    columns: Shard | None = None  # this rank's in features of the checkpoint's weight; None: all
    # The out features of the checkpoint's weight that are the part's, where it holds several parts.
    within: tuple[int, int] | None = None

    @property
    def out_features(self) -> int:
        """The out features of the part in the checkpoint's weight."""
        return self.part.size if self.rows is None else self.rows.size


@dataclass(frozen=True, slots=True)
class Factors:
    """What one adapter adds to one weight of a checkpoint: scale · B·A."""

    down_name: str  # what the adapter's file calls A
    up_name: str  # and B
    down: Tensor  # A, [rank, in_features]
    up: Tensor  # B, [out_features, rank]
    scale: float

    @property
    def rank(self) -> int:
        return len(self.down)


@dataclass
class LoRAState:
    """The adapters of a model, which of them are in its adapter slots, and those of the tokens of
    the forward that runs.

    Attributes:
        names: the adapters, which are numbered from 1 on; 0 is the model without one.
        ranks: the highest rank of each.
        default: the adapter of rows that ask for none; None: they have none.
        in_slots: the number of the adapter in each slot; slots are numbered from 1 on, too.
        layers: the linear layers that have adapters.
        num_bytes: what the adapters take of the device's memory.
        tokens: which adapters the tokens have; None if no token has any.
        outputs: the same of the tokens whose results are wanted, which are all that the end of the
            last layer computes; None if their number is that of all tokens.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    default: str | None
    in_slots: list[int]
    layers: list[LayerLoRA] = field(default_factory=list, repr=False)
    tokens: LoRATokens | None = field(default=None, repr=False)
    outputs: LoRATokens | None = field(default=None, repr=False)

    @property
    def numbers(self) -> dict[str | None, int]:
        """The number of each adapter by the name that rows ask for it by."""
        own: dict[str | None, int] = {name: number for number, name in enumerate(self.names, 1)}
        return {None: 0 if self.default is None else own[self.default], BASE: 0, **own}

    @property
    def num_slots(self) -> int:
        """How many adapters the rows of one forward can have."""
        return len(self.in_slots)

    @property
    def swaps(self) -> bool:
        """Whether there are more adapters than slots."""
        return len(self.names) > self.num_slots

    @property
    def num_bytes(self) -> int:
        """What the adapters take of the device's memory."""
        return sum(layer.num_bytes for layer in self.layers)

    def load(self, slot: int, adapter: int) -> None:
        """Put the adapter of this number into a slot, for the forwards that are launched from now
        on, without waiting for the device."""
        self.in_slots[slot - 1] = adapter
        for layer in self.layers:
            layer.load(slot, adapter)


class ChoosesProduct(Protocol):
    """Chooses how products with a weight are computed on a CPU."""

    def choose(self, weight: Tensor, bias: Tensor | None) -> CPUProduct: ...


class LayerLoRA:
    """The adapters of one linear layer.

    Args:
        factors: what each adapter adds, by the place; an adapter may leave places alone.
        state: shared by all layers of the model.
        width: the layer's out features.
        dtype: of the activations.
    """

    def __init__(
        self,
        places: Sequence[LoRAPlace],
        factors: Sequence[Mapping[str, Factors]],
        state: LoRAState,
        width: int,
        depth: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._state = state
        self._products: list[list[LoRAProducts]] = []
        self._cut: list[list[_Cut]] = []
        # On the host: what goes into an adapter slot, if there are more adapters than slots.
        self._apart: list[tuple[Tensor, Tensor]] = []
        parts = adapted_parts(places, factors)
        stacked = stacks(device)
        self._stacked = self._empty(parts, width, depth, dtype, device, stacked)
        for index, own in enumerate(factors):
            cut = [
                (place.part, *own_factors(place, own[place.name], depth, dtype))
                for place in places
                if place.name in own
            ]
            if not stacked:
                self._cut.append(cut)
            elif state.swaps:
                self._apart.append(self._on_host(parts, cut))
            else:
                _stack(parts, cut, self._stacked.down[index], self._stacked.up[index])
        if self._apart:
            for slot, number in enumerate(state.in_slots, 1):
                self.load(slot, number)
        self.num_bytes = sum(t.nbytes for t in self._stacked[:2]) + sum(
            down.nbytes + up.nbytes for cut in self._cut for _, down, up in cut
        )

    def _empty(
        self,
        parts: Sequence[LoRAPart],
        width: int,
        depth: int,
        dtype: torch.dtype,
        device: torch.device,
        stacked: bool,
    ) -> StackedFactors:
        """Make the factors for a GPU, all zeros; a CPU computes with those of each adapter."""
        rank = stacked_rank(self._state.ranks)
        count = self._state.num_slots if stacked else 0
        blocks = [
            (first, min(first + BLOCK_N, part.start + part.size), index * rank)
            for index, part in enumerate(parts)
            for first in range(part.start, part.start + part.size, BLOCK_N)
        ]
        return StackedFactors(
            torch.zeros((count, len(parts) * rank, depth), dtype=dtype, device=device),
            torch.zeros((count, width, rank), dtype=dtype, device=device),
            torch.tensor(blocks, dtype=torch.int32, device=device),
        )

    def _on_host(self, parts: list[LoRAPart], cut: Sequence[_Cut]) -> tuple[Tensor, Tensor]:
        """Return an adapter's factors as an adapter slot has them, in memory that a GPU reads while
        the host goes on."""
        down, up = (
            torch.zeros(t.shape[1:], dtype=t.dtype, pin_memory=t.is_cuda) for t in self._stacked[:2]
        )
        _stack(parts, cut, down, up)
        return down, up

    def load(self, slot: int, adapter: int) -> None:
        """Put the adapter of this number into a slot, see `LoRAState.load`. A CPU has all of them
        in memory, and reads which are in slots."""
        if self._apart:
            for target, source in zip(self._stacked[:2], self._apart[adapter - 1], strict=True):
                target[slot - 1].copy_(source, non_blocking=True)

    @property
    def addresses(self) -> tuple[int, int]:
        """Where the device has the factors of the slots, which a CUDA graph has written into it."""
        return self._stacked.down.data_ptr(), self._stacked.up.data_ptr()

    def pack(self, products: ChoosesProduct) -> None:
        """Choose how a CPU computes, so that a token's bits do not depend on the batch."""
        if not self._cut:
            return
        self._products = [
            [
                LoRAProducts(part, _packed(down, products), _packed(up, products))
                for part, down, up in cut
            ]
            for cut in self._cut
        ]
        self._cut = []

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """Add what the tokens' adapters make of x [T, in_features] to `out` [T, out_features] in
        place, and return it; x may be of the output tokens alone."""
        tokens, outputs = self._state.tokens, self._state.outputs
        if tokens is None:
            return out
        if outputs is not None and len(outputs.slots) == len(x):
            tokens = outputs
        assert len(tokens.slots) == len(x), "the rows of this layer are not the forward's tokens"
        products = [self._products[number - 1] for number in self._state.in_slots if self._products]
        return add_lora_(out, x, tokens, self._stacked, products)


_Cut = tuple[LoRAPart, Tensor, Tensor]
"""A part of a layer with this rank's A and scale · B of one adapter."""


def stacks(device: torch.device) -> bool:
    """Whether a device computes with the factors of all adapter slots in one launch."""
    return device.type != "cpu"


def adapted_parts(places: Sequence[LoRAPlace], factors: Sequence[Container[str]]) -> list[LoRAPart]:
    """Return the parts of a layer that some adapter adds to; `factors` has the names of the places
    that each adapts."""
    own = [place for place in places if any(place.name in names for names in factors)]
    return list(dict.fromkeys(place.part for place in own))


def num_slots(num_adapters: int, slots: int | None) -> int:
    """Return how many adapter slots there are if `slots` are asked for."""
    return num_adapters if slots is None else min(slots, num_adapters)


def stacked_rank(ranks: Sequence[int]) -> int:
    """Return the rank that adapters are filled up to in adapter slots."""
    highest = max((_FEWEST_RANKS, *ranks))
    return 1 << (highest - 1).bit_length()


def _stack(parts: list[LoRAPart], cut: Sequence[_Cut], down: Tensor, up: Tensor) -> None:
    """Write an adapter's factors into those of a slot, [P · R, in_features] and [out_features, R],
    which are zeros."""
    rank = up.shape[1]
    for part, own_down, own_up in cut:
        at = parts.index(part) * rank
        down[at : at + len(own_down)].copy_(own_down)
        up[part.start : part.start + part.size, : own_up.shape[1]].copy_(own_up)


def own_factors(
    site: LoRAPlace, factors: Factors, depth: int, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Return this rank's A [rank, in] and scale · B [out, rank] in the layer's order and dtype."""
    down = torch.empty((factors.rank, depth), dtype=dtype)
    name = factors.down_name
    WeightSlot(down, (name,), (name,), shard=site.columns).fill({name: factors.down})
    up = torch.empty((site.part.size, factors.rank), dtype=dtype)
    name, arrange = factors.up_name, site.arrange
    combine = None if arrange is None else lambda tensors: arrange(tensors[name])
    scaled = factors.up.float() * factors.scale
    if site.within is not None:
        scaled = scaled[slice(*site.within)]
    WeightSlot(up, (name,), (name,), combine, shard=site.rows).fill({name: scaled})
    return down, up


def _packed(weight: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
    chosen = products.choose(weight, None)
    laid_out = pack_weight(weight) if chosen.packed else weight
    return partial(linear, weight=laid_out, bias=None, most_rows=chosen.most_rows)


class HasLoRAPlaces(Protocol):
    """A layer that adapters can stand beside."""

    def lora_places(self, path: str) -> Iterator[LoRAPlace]:
        """Yield the places; `path` is the layer's name in checkpoints."""
