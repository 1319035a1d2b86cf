"""The routed experts of an MoE layer: E gated MLPs (H → I → H), of which each token goes through k.

`grouped_mlp` computes them. A *slot* is one of the k choices of a token: slot t·k + j is choice j
of token t. `PlainExperts` has weights in the dtype of the tokens; other formats have folders of
their own.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.layers.shared_part import SharedPart, add_up
from batchgen.kernels.moe.epilogues import PLAIN, Epilogues, gated
from batchgen.kernels.moe.experts_cpu import ExpertProducts, grouped_mlp_cpu
from batchgen.kernels.moe.experts_triton import (
    ExpertWeights,
    grouped_mlp_triton,
    grouped_parts_triton,
)
from batchgen.kernels.moe.grouped_product_triton import down_product, gate_up_product
from batchgen.kernels.moe.moe_align_triton import Alignment
from batchgen.kernels.moe.moe_tiles import MoETiles, choose_moe_tiles
from batchgen.kernels.moe.tiled_layout import are_panels, matrix_sizes


def grouped_mlp(
    x: Tensor,  # [T, H]
    experts: ExpertWeights,
    ids: Tensor,  # [T, k] int32, each in [0, E)
    weights: Tensor,  # [T, k] float32
    residual: Tensor | None = None,  # [T, H], dtype of x
    *,
    epilogues: Epilogues = PLAIN,
    shared: Callable[[], SharedPart] | None = None,
    num_routed: int | None = None,  # None means E
) -> Tensor:
    """Compute y_t = Σ_j w_tj · down_e · (silu(gate_e · x_t) · (up_e · x_t)) with e = ids[t, j], or
    with biases, another gate or none as `epilogues` say.

    The float32 sum over j has an order that depends on the token alone: j ascends on a GPU, and the
    expert e on a CPU. A NaN in x or weights stays in its row.

    Args:
        experts: the weights of the E experts on this rank, in any format.
        residual: contiguous; the result is added to it in place. None: the result is a new tensor.
        shared: computes the output of the layer's shared expert. It is called once, after the
            routed experts, and its result is added too. A GPU rounds the sum of all once.
        num_routed: the number of experts that tokens choose from. If it is above E, the others are
            on other ranks: all of them have the id E here, and are left out.

    Returns:
        [T, H]: `residual`, or a new tensor if that is None.
    """
    if weights.is_cuda:
        return grouped_mlp_triton(
            x,
            experts,
            ids,
            weights,
            residual,
            epilogues=epilogues,
            shared=shared,
            num_routed=num_routed,
        )
    return add_up(experts.on_cpu(x, ids, weights, epilogues), residual, shared)


def grouped_parts(
    x: Tensor,
    experts: ExpertWeights,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor | None:
    """Compute the parts that `grouped_mlp` adds up, for a caller whose next kernel adds them:
    [k, T, H], dtype of x, the last axis contiguous. None on a CPU, and if there are no tokens."""
    if not weights.is_cuda or not len(weights):
        return None
    parts = grouped_parts_triton(x, experts, ids, weights, epilogues=epilogues)
    return parts.view(*weights.shape, -1).transpose(0, 1)


class PlainExperts(NamedTuple):
    """The weights of E experts in the dtype of the tokens: an `ExpertWeights`. On a GPU they may be
    in panels, a layout in memory (`tiled_layout.py`)."""

    gate_up: Tensor  # [E, 2·I, H]: the I rows of gate, then of up; [E, I, H] without a gate
    down: Tensor  # [E, H, I]

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, H and I."""
        return matrix_sizes(self.down)

    def tiles(self, num_slots: int) -> MoETiles:
        """Look up how to cut the products of this many slots."""
        return choose_moe_tiles(num_slots, self.gate_up)

    def multiply(
        self,
        x: Tensor,
        alignment: Alignment,
        tiles: MoETiles,
        weights: Tensor,
        epilogues: Epilogues,
        parts: Tensor,
    ) -> None:
        """Compute both products, as `ExpertWeights.multiply` says."""
        (experts, hidden, inner), slots = self.sizes, len(parts)
        assert matrix_sizes(self.gate_up) == (experts, epilogues.parts * inner, hidden)
        assert self.gate_up.is_contiguous() and self.down.is_contiguous()
        assert are_panels(self.gate_up) == are_panels(self.down)
        assert x.dtype == self.gate_up.dtype == self.down.dtype
        activated = torch.empty((slots, inner), dtype=x.dtype, device=x.device)
        k, bias = weights.shape[1], epilogues.down_bias
        adapters = epilogues.sorted_adapters(alignment)
        added = None if adapters is None else adapters.gate_up(x, epilogues.parts * inner)
        gate_up_product(x, self.gate_up, alignment, tiles.gate_up, k, activated, epilogues, added)
        down_product(activated, self.down, weights, alignment, tiles.down, parts, bias)
        if adapters is not None:
            adapters.add_down_(parts, activated, weights)

    def on_cpu(self, x: Tensor, ids: Tensor, weights: Tensor, epilogues: Epilogues) -> Tensor:
        """Compute `grouped_mlp` of plain rows on a CPU."""
        products = (
            ExpertProducts(self.gate_up.unbind(), bias=epilogues.gate_up_bias),
            ExpertProducts(self.down.unbind(), bias=epilogues.down_bias),
        )
        return grouped_mlp_cpu(x, *products, ids, weights, epilogues)


def grouped_mlp_reference(
    x: Tensor,
    gate_up: Tensor,
    down: Tensor,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues = PLAIN,
) -> Tensor:
    """Compute `grouped_mlp` in PyTorch, one expert after another, for weights [E, 2·I, H] and [E,
    H, I]."""

    def product(weight: Tensor, rows: Tensor, expert: int) -> Tensor:
        return rows @ weight[expert].t()

    first, second = partial(product, gate_up), partial(product, down)
    return mlp_of_products(x, first, second, len(gate_up), ids, weights, epilogues)


def mlp_of_products(
    x: Tensor,
    gate_up: Callable[[Tensor, int], Tensor],
    down: Callable[[Tensor, int], Tensor],
    num_experts: int,
    ids: Tensor,
    weights: Tensor,
    epilogues: Epilogues,
) -> Tensor:
    """Compute `grouped_mlp_reference` with any format of weights: gate_up(rows, expert) and
    down(rows, expert) multiply rows [R, K] by that expert's weight [N, K] and return [R, N]."""
    slot_results = x.new_zeros((*ids.shape, x.shape[1]))
    for expert in ids[ids < num_experts].unique().tolist():
        token, choice = (ids == expert).nonzero(as_tuple=True)
        wide = gate_up(x[token], expert)
        if epilogues.gate_up_bias is not None:
            wide += epilogues.gate_up_bias[expert]
        slots = token * ids.shape[1] + choice
        if epilogues.adapters is not None:
            epilogues.adapters.add_gate_up_(wide, x[token], slots)
        inner = gated(wide, epilogues.clamped, epilogues.function)
        narrow = down(inner, expert)
        if epilogues.down_bias is not None:
            narrow += epilogues.down_bias[expert]
        if epilogues.adapters is not None:
            epilogues.adapters.add_down_(narrow, inner, slots)
        slot_results[token, choice] = narrow.to(x.dtype)
    out = torch.zeros(x.shape, dtype=torch.float32, device=x.device)
    for values, weight in zip(slot_results.unbind(1), weights.unbind(1), strict=True):
        out += values.float() * weight.unsqueeze(1)
    return out.to(x.dtype)
