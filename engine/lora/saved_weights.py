"""Weights of an embedding or lm_head that adapters bring as a whole (PEFT's modules_to_save).
`Embedding` and `LogitsLayer` use them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from batchgen.engine.lora.layer_lora import ChoosesProduct, LoRAState, packed_product, stacks


class SavedWeights:
    """The weights [N, K] that some adapters use instead of the layer's weight.

    Adapters and slots are numbered from 1. A slot holds, on the device, the weight of an adapter
    that rows may currently use; slot 0 is for tokens without an adapter (see `LoRAState`).

    Args:
        weights: the weights of each adapter, on the host; None for an adapter that uses the
            layer's.
        state: the model's state, shared by all layers.
    """

    def __init__(
        self, weights: Sequence[Tensor | None], state: LoRAState, device: torch.device
    ) -> None:
        self._state, self._weights = state, list(weights)
        self._products: list[Callable[[Tensor], Tensor] | None] = []
        self.num_bytes = sum(weight.nbytes for weight in weights if weight is not None)
        self._stacked: Tensor | None = None  # [slots, N, K], on a GPU
        if stacks(device):
            (shape,) = {weight.shape for weight in weights if weight is not None}
            dtype = next(weight.dtype for weight in weights if weight is not None)
            count = state.num_slots
            self._stacked = torch.zeros((count, *shape), dtype=dtype, device=device)
            self._has = torch.zeros(count + 1, dtype=torch.bool, device=device)
            self.num_bytes = self._stacked.nbytes
            if state.swaps and device.type == "cuda":
                self._weights = [
                    weight if weight is None else weight.pin_memory() for weight in weights
                ]
            for slot, number in enumerate(state.in_slots, 1):
                self.load(slot, number)
        state.layers.append(self)

    def load(self, slot: int, adapter: int) -> None:
        """Put the weight of the adapter of this number into a slot (see `LoRAState.load`)."""
        if self._stacked is not None:
            weight = self._weights[adapter - 1]
            self._has[slot].fill_(weight is not None)
            if weight is not None:
                self._stacked[slot - 1].copy_(weight, non_blocking=True)

    @property
    def addresses(self) -> tuple[int, ...]:
        """The device address of the slots' weights; empty on a CPU."""
        return () if self._stacked is None else (self._stacked.data_ptr(),)

    def pack(self, products: ChoosesProduct) -> None:
        """Choose how products are computed on a CPU, so that a token's bits do not depend on the
        batch. On other devices nothing happens."""
        if self._stacked is None:
            self._products = [
                None if weight is None else packed_product(weight, products)
                for weight in self._weights
            ]

    def replace_products_(self, out: Tensor, x: Tensor) -> Tensor:
        """Write x·Wᵀ to the rows of `out` [T, ≥ N] whose token's adapter has its own weight W.
        Returns `out`.

        A CUDA graph cannot contain this, because the host looks up which adapters are in the slots.

        Args:
            x: [T, K].
        """
        tokens = self._state.tokens_of(len(x))
        if tokens is None:
            return out
        for slot, number in enumerate(self._state.in_slots, 1):
            weight = self._weights[number - 1]
            if weight is None:
                continue
            is_in_slot, products = tokens.slots == slot, out[:, : len(weight)]
            if self._stacked is not None:
                replaced = x @ self._stacked[slot - 1].t()
                products.copy_(torch.where(is_in_slot.unsqueeze(1), replaced, products))
                continue
            index, product = is_in_slot.nonzero().squeeze(1), self._products[number - 1]
            if len(index) and product is not None:
                products[index] = product(x.index_select(0, index))
        return out

    def replace_rows_(self, out: Tensor, ids: Tensor) -> Tensor:
        """Replace `out[t]` by row `ids[t]` of W for each token t whose adapter has its own weight
        W. Returns `out` [T, K], changed in place on a CPU and new elsewhere."""
        tokens = self._state.tokens_of(len(ids))
        if tokens is None:
            return out
        if self._stacked is not None:
            # Slot 0 becomes index -1: tokens without an adapter read the last slot, and the result
            # is not used.
            replaced = self._stacked[tokens.slots - 1, ids]
            return torch.where(self._has[tokens.slots].unsqueeze(1), replaced, out)
        for slot, number in enumerate(self._state.in_slots, 1):
            if (weight := self._weights[number - 1]) is not None:
                index = (tokens.slots == slot).nonzero().squeeze(1)
                out[index] = weight[ids[index]]
        return out
