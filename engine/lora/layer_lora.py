"""Low-rank adapters beside the layers of a model (LoRA, Hu et al. 2021): each adds B·(A·x) to what
a layer computes of x. The factors A and B of the adapters that rows may have now are on the device,
in *adapter slots*."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.engine.lora.lora_targets import Factors, LoRASite, own_factors, stacked_rank
from batchgen.engine.sampling.sampling_params import BASE
from batchgen.kernels.layers.cpu_product import CPUProduct
from batchgen.kernels.layers.linear import linear, pack_weight
from batchgen.kernels.lora.expert_lora import ExpertFactors
from batchgen.kernels.lora.lora import (
    LoRAPart,
    LoRAProducts,
    StackedFactors,
    add_lora_,
    add_lora_columns_,
    output_blocks,
)
from batchgen.kernels.lora.lora_tokens import LoRATokens


class InSlots(Protocol):
    """What a layer has of the adapters in the adapter slots."""

    num_bytes: int

    @property
    def addresses(self) -> tuple[int, ...]: ...

    def load(self, slot: int, adapter: int) -> None: ...


@dataclass
class LoRAState:
    """The adapters of a model, which of them are in its adapter slots, and those of the tokens of
    the forward that runs.

    Attributes:
        names: the adapters, which are numbered from 1 on; 0 is the model without one.
        ranks: the highest rank of each.
        default: the adapter of rows that ask for none; None: they have none.
        in_slots: the number of the adapter in each slot; slots are numbered from 1 on, too.
        layers: the products that have adapters.
        num_bytes: what the adapters take of the device's memory.
        tokens: which adapters the tokens have; None if no token has any.
        outputs: the same of the tokens whose results are wanted, which are all that the end of the
            last layer computes; None if their number is that of all tokens.
    """

    names: tuple[str, ...]
    ranks: tuple[int, ...]
    default: str | None
    in_slots: list[int]
    layers: list[InSlots] = field(default_factory=list, repr=False)
    tokens: LoRATokens | None = field(default=None, repr=False)
    outputs: LoRATokens | None = field(default=None, repr=False)

    @property
    def numbers(self) -> dict[str | None, int]:
        """The number of each adapter by the name that rows ask for it by."""
        by_name: dict[str | None, int] = {name: number for number, name in enumerate(self.names, 1)}
        return {None: 0 if self.default is None else by_name[self.default], BASE: 0, **by_name}

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

    def tokens_of(self, count: int) -> LoRATokens | None:
        """The adapters of a layer's tokens, which are all of the forward, or the output tokens;
        None if no token has any."""
        tokens, outputs = self.tokens, self.outputs
        if tokens is not None and outputs is not None and len(outputs.slots) == count:
            tokens = outputs
        is_all = tokens is None or len(tokens.slots) == count
        assert is_all, "the rows of this layer are not the forward's tokens"
        return tokens

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
    """The adapters of one product of a layer, or of the experts of a layer.

    Args:
        factors: for each adapter what it adds, by the target's name; an adapter need not have all
            targets.
        state: shared by all layers of the model.
        dtype: of the activations.
    """

    def __init__(
        self,
        site: LoRASite,
        factors: Sequence[Mapping[str, Factors]],
        state: LoRAState,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self._state, self._site = state, site
        self._products: list[dict[int, list[LoRAProducts]]] = []
        self._cut: list[list[_Cut]] = []
        # On the host: what goes into an adapter slot, if there are more adapters than slots.
        self._apart: list[tuple[Tensor, Tensor]] = []
        parts = site.adapted_parts(factors)
        stacked = stacks(device)
        self._blocks, self._multiple = output_blocks(parts, stacked_rank(state.ranks), device)
        self._down, self._up = self._empty(parts, dtype, device, stacked)
        for index, pairs in enumerate(factors):
            cut = [
                _Cut(target.expert, target.part, *own_factors(target, pairs[target.name], dtype))
                for target in site.targets
                if target.name in pairs and target.expert is not None
            ]
            if not stacked:
                self._cut.append(cut)
            elif state.swaps:
                self._apart.append(self._on_host(parts, cut))
            else:
                _stack(parts, cut, self._down[index], self._up[index])
        if self._apart:
            for slot, number in enumerate(state.in_slots, 1):
                self.load(slot, number)
        self.num_bytes = self._down.nbytes + self._up.nbytes
        self.num_bytes += sum(one.num_bytes for cut in self._cut for one in cut)
        state.layers.append(self)

    def _empty(
        self, parts: Sequence[LoRAPart], dtype: torch.dtype, device: torch.device, stacked: bool
    ) -> tuple[Tensor, Tensor]:
        """Make the factors for a GPU, all zeros; a CPU computes with those of each adapter."""
        site, rank = self._site, stacked_rank(self._state.ranks)
        lead = (self._state.num_slots if stacked else 0, site.experts)
        return (
            torch.zeros((*lead, len(parts) * rank, site.depth), dtype=dtype, device=device),
            torch.zeros((*lead, site.width, rank), dtype=dtype, device=device),
        )

    def _on_host(self, parts: list[LoRAPart], cut: Sequence[_Cut]) -> tuple[Tensor, Tensor]:
        """Return an adapter's factors as an adapter slot has them, in memory that a GPU reads while
        the host goes on."""
        down, up = (
            torch.zeros(t.shape[1:], dtype=t.dtype, pin_memory=t.is_cuda)
            for t in (self._down, self._up)
        )
        _stack(parts, cut, down, up)
        return down, up

    def load(self, slot: int, adapter: int) -> None:
        """Put the adapter of this number into a slot, see `LoRAState.load`. A CPU has all of them
        in memory, and reads which are in slots."""
        if self._apart:
            down, up = self._apart[adapter - 1]
            self._down[slot - 1].copy_(down, non_blocking=True)
            self._up[slot - 1].copy_(up, non_blocking=True)

    @property
    def addresses(self) -> tuple[int, ...]:
        """Where the device has the factors of the slots, which a CUDA graph has written into it."""
        return self._down.data_ptr(), self._up.data_ptr()

    def pack(self, products: ChoosesProduct) -> None:
        """Choose how a CPU computes, so that a token's bits do not depend on the batch."""
        for cut in self._cut:
            by_expert: dict[int, list[LoRAProducts]] = {}
            for one in cut:
                down, up = self._laid_out(one.down, products), packed_product(one.up, products)
                by_expert.setdefault(one.expert, []).append(LoRAProducts(one.part, down, up))
            self._products.append(by_expert)
        self._cut = []

    def _laid_out(self, down: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
        """Return what computes A·x."""
        return packed_product(down, products)

    @property
    def _stacked(self) -> StackedFactors:
        down, up = self._down.flatten(0, 1), self._up.flatten(0, 1)
        return StackedFactors(down, up, self._blocks, self._multiple)

    def _in_slots(self) -> list[dict[int, list[LoRAProducts]]]:
        """The products of each slot on a CPU, by the expert."""
        return [self._products[number - 1] for number in self._state.in_slots if self._products]

    def of_experts(self) -> ExpertFactors:
        """Return the factors of the experts of a layer in the slots."""
        return ExpertFactors(self._stacked, self._in_slots())

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """Add what the tokens' adapters make of x [T, in_features] to `out` [T, out_features] in
        place, and return it; x may be of the output tokens alone."""
        tokens = self._state.tokens_of(len(x))
        if tokens is None:
            return out
        return add_lora_(
            out, x, tokens, self._stacked, [products.get(0, ()) for products in self._in_slots()]
        )


class EmbeddingLoRA(LayerLoRA):
    """The adapters of a table of vectors, which read columns of A where others compute A·x."""

    def _laid_out(self, down: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
        return partial(F.embedding, weight=down.t().contiguous())

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """Add what adapters make of token ids x [T] to their vectors `out` [T, out_features] in
        place, and return these."""
        tokens = self._state.tokens_of(len(x))
        if tokens is None or not self._down.numel():
            return super().add_(out, x)
        return add_lora_columns_(out, x, tokens, self._stacked)


@dataclass(frozen=True, slots=True)
class _Cut:
    """A part of a layer with this rank's A and scale · B of one adapter."""

    expert: int
    part: LoRAPart
    down: Tensor
    up: Tensor

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


def stacks(device: torch.device) -> bool:
    """Whether a device computes with the factors of all adapter slots in one launch."""
    return device.type != "cpu"


def num_slots(num_adapters: int, slots: int | None) -> int:
    """Return how many adapter slots there are if `slots` are asked for."""
    return num_adapters if slots is None else min(slots, num_adapters)


def _stack(parts: list[LoRAPart], cut: Sequence[_Cut], down: Tensor, up: Tensor) -> None:
    """Write an adapter's factors into those of a slot, [E, P · R, in_features] and [E,
    out_features, R], which are zeros."""
    rank = up.shape[2]
    for one in cut:
        at, part = parts.index(one.part) * rank, one.part
        down[one.expert, at : at + len(one.down)].copy_(one.down)
        up[one.expert, part.start : part.start + part.size, : one.up.shape[1]].copy_(one.up)


def packed_product(weight: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
    """Lay a weight out for a CPU, and return the product with it."""
    chosen = products.choose(weight, None)
    laid_out = pack_weight(weight) if chosen.packed else weight
    return partial(linear, weight=laid_out, bias=None, most_rows=chosen.most_rows)
