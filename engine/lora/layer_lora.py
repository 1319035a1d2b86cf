"""Low-rank adapters of the layers of a model (LoRA, Hu et al. 2021): each adds B·(A·x) to a layer's
result for x.

The factors A and B of the adapters that rows may currently use are on the device, in *adapter
slots*. Layers make a `LayerLoRA` in `add_lora`; `LoRAState` is shared by all layers of a model.
"""

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
    """A layer's part of the adapters in the adapter slots."""

    num_bytes: int

    @property
    def addresses(self) -> tuple[int, ...]: ...

    def load(self, slot: int, adapter: int) -> None: ...


@dataclass
class LoRAState:
    """The adapters of a model, which of them are in the adapter slots, and the adapters of the
    current forward's tokens.

    Attributes:
        names: the adapters' names; adapters are numbered from 1, and 0 means none.
        ranks: the highest rank of each adapter.
        default: the adapter of rows that name none; None: no adapter.
        in_slots: the number of the adapter in each slot; slots are also numbered from 1.
        layers: the products that have adapters.
        tokens: the adapters of the forward's tokens; None if no token has one.
        outputs: the adapters of the output tokens, to which the last layer is restricted; None if
            all tokens are output tokens.
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
        """The number of each adapter, by the name with which rows ask for it."""
        by_name: dict[str | None, int] = {name: number for number, name in enumerate(self.names, 1)}
        return {None: 0 if self.default is None else by_name[self.default], BASE: 0, **by_name}

    @property
    def num_slots(self) -> int:
        """The most different adapters in one forward."""
        return len(self.in_slots)

    @property
    def swaps(self) -> bool:
        """Whether there are more adapters than slots."""
        return len(self.names) > self.num_slots

    @property
    def num_bytes(self) -> int:
        """The bytes that the adapters take on the device."""
        return sum(layer.num_bytes for layer in self.layers)

    def tokens_of(self, count: int) -> LoRATokens | None:
        """Return the adapters of a layer's `count` tokens, which are all of the forward's tokens or
        the output tokens. Returns None if no token has an adapter."""
        tokens, outputs = self.tokens, self.outputs
        if tokens is not None and outputs is not None and len(outputs.slots) == count:
            tokens = outputs
        is_all = tokens is None or len(tokens.slots) == count
        assert is_all, "the rows of this layer are not the forward's tokens"
        return tokens

    def load(self, slot: int, adapter: int) -> None:
        """Put the adapter of this number into a slot, for all later forwards, without waiting for
        the device."""
        self.in_slots[slot - 1] = adapter
        for layer in self.layers:
            layer.load(slot, adapter)


class ChoosesProduct(Protocol):
    """Chooses the method for products with a weight on a CPU (`CPUProducts`)."""

    def choose(self, weight: Tensor, bias: Tensor | None) -> CPUProduct: ...


class LayerLoRA:
    """The adapters of one product of a layer, or of a layer's experts.

    Args:
        site: the product.
        factors: for each adapter, its factors by target name. An adapter need not have all targets.
        state: the model's state, shared by all layers.
        dtype: the dtype of the activations.
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
        # On a CPU, of each adapter: its factors, and, after `pack`, its products by expert.
        self._products: list[dict[int, list[LoRAProducts]]] = []
        self._pieces: list[list[_Cut]] = []
        # Adapters in the host's memory, in the layout of a slot; empty if there are enough slots
        # for all.
        self._host_factors: list[tuple[Tensor, Tensor]] = []
        parts = site.adapted_parts(factors)
        stacked = stacks(device)
        # `StackedFactors.blocks` and `multiple`: the output columns of each part, for the kernels.
        self._blocks, self._multiple = output_blocks(parts, stacked_rank(state.ranks), device)
        self._down, self._up = self._empty(parts, dtype, device, stacked)
        for index, pairs in enumerate(factors):
            cut = [
                _Cut(target.expert, target.part, *own_factors(target, pairs[target.name], dtype))
                for target in site.targets
                if target.name in pairs and target.expert is not None
            ]
            if not stacked:
                self._pieces.append(cut)
            elif state.swaps:
                self._host_factors.append(self._on_host(parts, cut))
            else:
                _stack(parts, cut, self._down[index], self._up[index])
        if self._host_factors:
            for slot, number in enumerate(state.in_slots, 1):
                self.load(slot, number)
        self.num_bytes = self._down.nbytes + self._up.nbytes
        self.num_bytes += sum(one.num_bytes for cut in self._pieces for one in cut)
        state.layers.append(self)

    def _empty(
        self, parts: Sequence[LoRAPart], dtype: torch.dtype, device: torch.device, stacked: bool
    ) -> tuple[Tensor, Tensor]:
        """Allocate the slots' factors on a GPU, filled with zeros: A [slots, E, P · R, in_features]
        of P parts and B [slots, E, out_features, R]. A CPU uses the factors of each adapter
        directly, and the tensors are empty."""
        site, rank = self._site, stacked_rank(self._state.ranks)
        lead = (self._state.num_slots if stacked else 0, site.experts)
        return (
            torch.zeros((*lead, len(parts) * rank, site.depth), dtype=dtype, device=device),
            torch.zeros((*lead, site.width, rank), dtype=dtype, device=device),
        )

    def _on_host(self, parts: list[LoRAPart], cut: Sequence[_Cut]) -> tuple[Tensor, Tensor]:
        """Return an adapter's factors in the layout of a slot, in pinned memory, from which a GPU
        copies while the host continues."""
        down, up = (
            torch.zeros(t.shape[1:], dtype=t.dtype, pin_memory=t.is_cuda)
            for t in (self._down, self._up)
        )
        _stack(parts, cut, down, up)
        return down, up

    def load(self, slot: int, adapter: int) -> None:
        """Put the adapter of this number into a slot (see `LoRAState.load`). On a CPU all adapters
        are in memory, so nothing is copied."""
        if self._host_factors:
            down, up = self._host_factors[adapter - 1]
            self._down[slot - 1].copy_(down, non_blocking=True)
            self._up[slot - 1].copy_(up, non_blocking=True)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The device addresses of the slots' factors, which CUDA graphs contain."""
        return self._down.data_ptr(), self._up.data_ptr()

    def pack(self, products: ChoosesProduct) -> None:
        """Choose how products are computed on a CPU, so that a token's bits do not depend on the
        batch."""
        for pieces in self._pieces:
            by_expert: dict[int, list[LoRAProducts]] = {}
            for piece in pieces:
                down, up = self._laid_out(piece.down, products), packed_product(piece.up, products)
                by_expert.setdefault(piece.expert, []).append(LoRAProducts(piece.part, down, up))
            self._products.append(by_expert)
        self._pieces = []

    def _laid_out(self, down: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
        """Return a function that computes A·x."""
        return packed_product(down, products)

    @property
    def _stacked(self) -> StackedFactors:
        down, up = self._down.flatten(0, 1), self._up.flatten(0, 1)
        return StackedFactors(down, up, self._blocks, self._multiple)

    def _in_slots(self) -> list[dict[int, list[LoRAProducts]]]:
        """Return the products of each slot on a CPU, by expert."""
        return [self._products[number - 1] for number in self._state.in_slots if self._products]

    def of_experts(self) -> ExpertFactors:
        """Return the factors of the experts in the slots."""
        return ExpertFactors(self._stacked, self._in_slots())

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' results for x [T, in_features] to `out` [T, out_features] in place, and
        return `out`. The tokens may be only the output tokens."""
        tokens = self._state.tokens_of(len(x))
        if tokens is None:
            return out
        return add_lora_(
            out, x, tokens, self._stacked, [products.get(0, ()) for products in self._in_slots()]
        )


class EmbeddingLoRA(LayerLoRA):
    """The adapters of a table of vectors: columns of A are looked up instead of computing A·x."""

    def _laid_out(self, down: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
        return partial(F.embedding, weight=down.t().contiguous())

    def add_(self, out: Tensor, x: Tensor) -> Tensor:
        """Add the adapters' vectors for token ids x [T] to `out` [T, out_features] in place, and
        return `out`."""
        tokens = self._state.tokens_of(len(x))
        if tokens is None or not self._down.numel():
            return super().add_(out, x)
        return add_lora_columns_(out, x, tokens, self._stacked)


@dataclass(frozen=True, slots=True)
class _Cut:
    """This rank's A and scale · B of one adapter, for one part of a layer."""

    expert: int
    part: LoRAPart
    down: Tensor
    up: Tensor

    @property
    def num_bytes(self) -> int:
        return self.down.nbytes + self.up.nbytes


def stacks(device: torch.device) -> bool:
    """Return whether a device computes all adapter slots in one launch."""
    return device.type != "cpu"


def num_slots(num_adapters: int, slots: int | None) -> int:
    """Return the number of adapter slots if the user asks for `slots` (None: one per adapter)."""
    return num_adapters if slots is None else min(slots, num_adapters)


def _stack(parts: list[LoRAPart], pieces: Sequence[_Cut], down: Tensor, up: Tensor) -> None:
    """Write an adapter's factors into a slot of zeros: `down` [E, P · R, in_features] and `up` [E,
    out_features, R]."""
    rank = up.shape[2]
    for piece in pieces:
        start, part = parts.index(piece.part) * rank, piece.part
        down[piece.expert, start : start + len(piece.down)].copy_(piece.down)
        up[piece.expert, part.start : part.start + part.size, : piece.up.shape[1]].copy_(piece.up)


def packed_product(weight: Tensor, products: ChoosesProduct) -> Callable[[Tensor], Tensor]:
    """Lay a weight out for a CPU, and return a function that multiplies by it."""
    chosen = products.choose(weight, None)
    laid_out = pack_weight(weight) if chosen.packed else weight
    return partial(linear, weight=laid_out, bias=None, most_rows=chosen.most_rows)
