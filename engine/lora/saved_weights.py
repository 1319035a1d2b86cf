"""Weights of an embedding or of lm_head that adapters bring as a whole (PEFT's modules_to_save)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen.engine.lora.layer_lora import ChoosesProduct, LoRAState, packed_product, stacks


class SavedWeights:
    """The weights [N, K] that some adapters compute with instead of the layer's.

    Adapters are numbered from 1 on. So are the slots, the places on the device for the adapters
    that rows may have now; slot 0 is that of tokens without an adapter. See `LoRAState`.

    Args:
        weights: those of each adapter, on the host; None for one that uses the layer's own weight.
        state: shared by all layers of the model.
    """

    def __init__(
        self, weights: Sequence[Tensor | None], state: LoRAState, device: torch.device
    ) -> None:
        self._state, self._weights = state, list(weights)
        self._products: list[Callable[[Tensor], Tensor] | None] = []
        self.num_bytes = sum(each.nbytes for each in weights if each is not None)
        self._stacked: Tensor | None = None  # [slots, N, K], on a GPU
        if stacks(device):
            (shape,) = {each.shape for each in weights if each is not None}
            dtype = next(each.dtype for each in weights if each is not None)
            count = state.num_slots
            self._stacked = torch.zeros((count, *shape), dtype=dtype, device=device)
            self._has = torch.zeros(count + 1, dtype=torch.bool, device=device)
            self.num_bytes = self._stacked.nbytes
            if state.swaps and device.type == "cuda":
                self._weights = [each if each is None else each.pin_memory() for each in weights]
            for slot, number in enumerate(state.in_slots, 1):
                self.load(slot, number)
        state.layers.append(self)

    def load(self, slot: int, adapter: int) -> None:
        """Put the weight of the adapter of this number into a slot, see `LoRAState.load`."""
        if self._stacked is not None:
            weight = self._weights[adapter - 1]
            self._has[slot].fill_(weight is not None)
            if weight is not None:
                self._stacked[slot - 1].copy_(weight, non_blocking=True)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The address of the slots' weights in device memory; empty on a CPU."""
        return () if self._stacked is None else (self._stacked.data_ptr(),)

    def pack(self, products: ChoosesProduct) -> None:
        """Choose how a CPU computes the products, so that a token's bits do not depend on the
        batch. On other devices nothing is chosen."""
        if self._stacked is None:
            self._products = [
                None if each is None else packed_product(each, products) for each in self._weights
            ]

    def replace_products_(self, out: Tensor, x: Tensor) -> Tensor:
        """Write x·Wᵀ into the rows of `out` [T, ≥ N] of tokens whose adapter has a weight W of its
        own, and return `out`; x is [T, K]. A CUDA graph cannot contain this, because the host looks
        which adapters are in the slots."""
        tokens = self._state.tokens_of(len(x))
        for slot, number in enumerate(self._state.in_slots if tokens is not None else (), 1):
            weight = self._weights[number - 1]
            if tokens is None or weight is None:
                continue
            mine, products = tokens.slots == slot, out[:, : len(weight)]
            if self._stacked is not None:
                its = x @ self._stacked[slot - 1].t()
                products.copy_(torch.where(mine.unsqueeze(1), its, products))
                continue
            index, product = mine.nonzero().squeeze(1), self._products[number - 1]
            if len(index) and product is not None:
                products[index] = product(x.index_select(0, index))
        return out

    def replace_rows_(self, out: Tensor, ids: Tensor) -> Tensor:
        """Return `out` [T, K], in which token t has row `ids[t]` of W if its adapter has a weight W
        of its own. On a CPU `out` itself is changed, elsewhere a new tensor is returned."""
        tokens = self._state.tokens_of(len(ids))
        if tokens is None:
            return out
        if self._stacked is not None:
            # Slot 0 has index -1: tokens without an adapter read the last slot in vain.
            its = self._stacked[tokens.slots - 1, ids]
            return torch.where(self._has[tokens.slots].unsqueeze(1), its, out)
        for slot, number in enumerate(self._state.in_slots, 1):
            if (weight := self._weights[number - 1]) is not None:
                index = (tokens.slots == slot).nonzero().squeeze(1)
                out[index] = weight[ids[index]]
        return out
