"""The low-rank products that adapters (LoRA) add to the products of MoE experts.

Each token has an adapter and goes through several experts, and an adapter has its own factors for
each expert. A slot here is one of the k choices of a token, as in `moe`, and an adapter slot has
the factors of E experts. Slots are sorted by pairs of adapter and expert, so that one launch
computes the products of all pairs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from batchgen.kernels.lora.lora import LoRAProducts, StackedFactors
from batchgen.kernels.lora.lora_tokens import BLOCK_M
from batchgen.kernels.lora.lora_triton import add_lora_triton_
from batchgen.kernels.moe.moe_align_triton import Alignment, moe_align

_SLOTS = 256
"""Slots per program."""


class ExpertFactors(NamedTuple):
    """What the adapters in the adapter slots add to one product of E experts."""

    stacked: StackedFactors  # those of expert e in adapter slot s under (s − 1) · E + e
    # On a CPU: the products of each adapter slot, by the expert.
    products: Sequence[Mapping[int, Sequence[LoRAProducts]]]


class ExpertAdapters(NamedTuple):
    """The adapters of the T tokens of a call of experts; k experts compute each token."""

    adapter_slots: Tensor  # [T] int64; 0: the model without an adapter
    ids: Tensor  # [T, k] int32, contiguous; E or more: an expert elsewhere
    num_experts: int  # E
    gate_up: ExpertFactors | None  # None: nothing is added to this product
    down: ExpertFactors | None

    def add_gate_up_(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add to the first product on a CPU, as `AdaptsExperts` says."""
        self._add_(self.gate_up, out, x, slots)

    def add_down_(self, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add to the second product on a CPU, as `AdaptsExperts` says."""
        self._add_(self.down, out, x, slots)

    def _add_(self, factors: ExpertFactors | None, out: Tensor, x: Tensor, slots: Tensor) -> None:
        """Add the products of `factors` to `out`, one pair of adapter and expert after another."""
        if factors is None:
            return
        adapter_slots = self.adapter_slots[slots // self.ids.shape[1]]
        pairs = adapter_slots * self.num_experts + self.ids.flatten()[slots]
        for pair in pairs[adapter_slots > 0].unique().tolist():
            slot, expert = divmod(pair, self.num_experts)
            index = (pairs == pair).nonzero().squeeze(1)
            for part, down, up in factors.products[slot - 1].get(expert, ()):
                added = up(down(x.index_select(0, index)))
                out[:, part.start : part.start + part.size].index_add_(0, index, added)

    def sort(self, alignment: Alignment) -> PairedSlots:
        """Sort the slots by pairs, as `AdaptsExperts` says."""
        ids, count = self.ids, self.ids.numel()
        factors = self.gate_up or self.down
        assert factors is not None
        pairs, sorted_indices = torch.empty((2, *ids.shape), dtype=torch.int32, device=ids.device)
        num_pairs = len(factors.stacked.down)
        _pair_slots[(triton.cdiv(count, _SLOTS),)](
            ids, self.adapter_slots, alignment.slots, alignment.tile_ends, alignment.num_tiles,
            pairs, sorted_indices, count, ids.shape[1], self.num_experts, num_pairs,
            BLOCK=_SLOTS, num_warps=4,
        )  # fmt: skip
        aligned = moe_align(pairs, num_pairs, BLOCK_M, some_elsewhere=True)
        return PairedSlots(self, aligned, sorted_indices.flatten())


class PairedSlots(NamedTuple):
    """The N = T·k slots of a call of experts on a GPU, sorted by adapter and expert."""

    adapters: ExpertAdapters
    pairs: Alignment  # as expert: the index of the pair in `StackedFactors`
    sorted_indices: Tensor  # [N] int32, the index of each slot among those sorted by expert

    def gate_up(self, x: Tensor, width: int) -> Tensor | None:
        """Compute what is added to the first product, as `SortedAdapters` says."""
        factors, k = self.adapters.gate_up, self.adapters.ids.shape[1]
        if factors is None:
            return None
        out = torch.zeros((len(self.sorted_indices), width), dtype=x.dtype, device=x.device)
        return add_lora_triton_(out, x, self.pairs, *factors.stacked, rows=k)

    def add_down_(self, parts: Tensor, activated: Tensor, weights: Tensor) -> None:
        """Add to the second product, as `SortedAdapters` says."""
        if (factors := self.adapters.down) is not None:
            add_lora_triton_(
                parts,
                activated,
                self.pairs,
                *factors.stacked,
                rows=self.sorted_indices,
                weights=weights,
            )


@triton.jit(do_not_specialize=["count", "slots_per_token", "num_experts", "num_pairs"])
def _pair_slots(
    ids_ptr, adapter_slots_ptr, sorted_ptr, tile_ends_ptr, num_tiles_ptr, pairs_ptr, indices_ptr,
    count, slots_per_token, num_experts, num_pairs, BLOCK: tl.constexpr,
):  # fmt: skip
    """Each program writes the pairs of some slots, `num_pairs` for one without an adapter or whose
    expert is elsewhere, and the indices of some sorted slots."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < count
    expert = tl.load(ids_ptr + index, mask=inside, other=0)
    adapter = tl.load(adapter_slots_ptr + index // slots_per_token, mask=inside, other=0)
    adapter = adapter.to(tl.int32)
    pair = (adapter - 1) * num_experts + expert
    pair = tl.where((adapter > 0) & (expert < num_experts), pair, num_pairs)
    tl.store(pairs_ptr + index, pair, mask=inside)
    # Sorted slots behind the last tile are of experts elsewhere, and mean nothing.
    num_tiles = tl.load(num_tiles_ptr)
    here = tl.load(tile_ends_ptr + tl.maximum(num_tiles - 1, 0), mask=num_tiles > 0, other=0)
    slot = tl.load(sorted_ptr + index, mask=index < here, other=0)
    tl.store(indices_ptr + slot, index, mask=index < here)
