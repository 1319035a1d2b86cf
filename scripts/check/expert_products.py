"""Check the kernels of a mixture of experts by themselves, at each line of their table."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.kernels.moe.experts import grouped_mlp_reference
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton
from batchgen.kernels.moe.moe_align_triton import FEW_SLOTS
from batchgen.kernels.moe.moe_tiles import TABLE, ProductTiles, Tiles
from batchgen.kernels.moe.router.routing import route_reference
from batchgen.kernels.moe.router.routing_triton import route_triton
from batchgen.kernels.moe.tiled_layout import keeps_panels, to_panels

EXPERTS, K = 6, 3
IN_PANELS, IN_ROWS = (320, 192), (136, 72)
"""H and I of experts whose weights a GPU keeps in panels if they have 16 bits, and of others; most
tiles of the table divide neither."""
_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 0.03}
"""How far the norm of a result may be from the reference's, in units of that: for bfloat16, three
roundings."""
_PERSISTENT = Tiles(64, ProductTiles(64, 64, 4, 3), ProductTiles(64, 64, 4, 3, persistent=True))
"""A way to cut that no line of the table may have at present."""


def token_counts() -> Iterator[int]:
    """How many tokens to compute: for each line of the table, and for slots sorted in two ways."""
    least = 0.0
    for most, _ in TABLE:
        yield math.floor(min(most, least + 20) * EXPERTS / K)
        least = most
    yield FEW_SLOTS // K + 1


def check_experts(device: torch.device) -> list[str]:
    """Compare routing and products with the references on the CPU; returns the differences."""
    runs: list[tuple[torch.dtype, tuple[int, int], int, Tiles | None]] = [
        (dtype, sizes, tokens, None)
        for dtype in _CLOSE
        for sizes in (IN_PANELS, IN_ROWS)
        for tokens in token_counts()
    ]
    runs.append((torch.bfloat16, IN_PANELS, 200, _PERSISTENT))
    return [
        f"experts, {str(dtype).removeprefix('torch.')}, {sizes}, {tokens} tokens: {problem}"
        for dtype, sizes, tokens, tiles in runs
        for problem in differences(tokens, dtype, sizes, device, tiles)
    ]


def differences(
    tokens: int,
    dtype: torch.dtype,
    sizes: tuple[int, int],
    device: torch.device,
    tiles: Tiles | None = None,
) -> Iterator[str]:
    """Yield how results for so many random tokens differ from those of the references.

    `sizes` are H and I, and `tiles` those of the products; None takes them from the table.
    """
    hidden, inner = sizes
    generator = torch.Generator().manual_seed(tokens)

    def normal(*shape: int) -> Tensor:
        return torch.empty(shape).normal_(generator=generator).to(dtype)

    # Multiples of 1/8 in float32 differ by more than kernels round.
    logits = (normal(tokens, EXPERTS).float() * 8).round() / 8
    x = normal(tokens, hidden)
    gate_up = normal(EXPERTS, 2 * inner, hidden) / hidden**0.5
    down = normal(EXPERTS, hidden, inner) / inner**0.5
    ids, weights = route_reference(logits, K, renormalise=True)
    found_ids, found_weights = route_triton(logits.to(device), K, renormalise=True)
    if not torch.equal(found_ids.cpu(), ids):
        yield "other experts"
    if not torch.allclose(found_weights.cpu(), weights, rtol=1e-5, atol=1e-12):
        yield "other weights"
    expected = grouped_mlp_reference(x.float(), gate_up.float(), down.float(), ids, weights)
    if keeps_panels(device, dtype, *sizes):
        gate_up, down = to_panels(gate_up), to_panels(down)
    moved = [part.to(device) for part in (x, gate_up, down, ids, weights)]
    found = grouped_mlp_triton(*moved, tiles=tiles).float().cpu()
    error = float((found - expected).norm() / expected.norm())
    if not error < _CLOSE[dtype]:
        yield f"products differ by {error:.2g}"
