"""Check the kernels in FP8 by themselves, at each line of their tables."""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from batchgen.kernels.fp8.fp8_experts import fp8_grouped_mlp_reference
from batchgen.kernels.fp8.fp8_experts_triton import fp8_grouped_mlp_triton
from batchgen.kernels.fp8.fp8_linear import fp8_linear_reference
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.fp8_tiles import EXPERTS, LINEAR
from batchgen.kernels.fp8.fp8_weight import BLOCK, FP8, FP8Weight, quantise_weight
from batchgen.kernels.fp8.quantise import FP8Rows, quantise_rows
from batchgen.kernels.fp8.quantise_triton import (
    quantise_rows_triton,
    rms_norm_quantised_triton,
    silu_and_mul_quantised_triton,
)
from batchgen.kernels.layers.activation import silu_and_mul_reference
from batchgen.kernels.layers.rms_norm import rms_norm_of_sum, rms_norm_reference
from batchgen.kernels.layers.shared_part import SharedPart
from batchgen.kernels.moe.tiled_layout import panel_columns, to_panels

WIDTHS = ((200, 1168), (200, 1203))
"""Sizes that no tile divides; the copy engine reads rows of the first only."""
_EXPERTS, _K = 6, 3
IN_PANELS, IN_ROWS = (640, 384), (272, 144)
"""H and I of experts whose weights fit panels, and of others. No tile divides them."""
_CLOSE = 2.0**-6
"""How far the norm of a result may be from the reference's, in units of that. The matrix units keep
about 14 bits of a sum, and what is quantised may be rounded to the other neighbour, 2**-3 apart."""


def linear_rows() -> list[int]:
    """A number of rows for each line of the table."""
    return [int(min(most, 600)) for most, _ in LINEAR]


def expert_tokens() -> list[int]:
    """A number of tokens for each line of the table."""
    return [math.floor(min(most, 100) * _EXPERTS / _K) for most, _ in EXPERTS]


def check_fp8(device: torch.device) -> list[str]:
    """Compare all kernels with the references on the CPU; returns the differences."""
    problems = list(rounding_differences(device))
    for rows in linear_rows():
        problems += linear_differences(rows, device)
    for tokens in expert_tokens():
        for sizes in (IN_PANELS, IN_ROWS):
            problems += expert_differences(tokens, sizes, device)
    return [f"FP8, {problem}" for problem in problems]


def rounding_differences(device: torch.device) -> Iterator[str]:
    """Yield which of the kernels that quantise rows differ from their references."""
    x, weight = _normal(7, 7, 400), _normal(1, 400)
    on = x.to(device)
    activated = silu_and_mul_reference(x)
    normed = rms_norm_reference(x, weight, 1e-6)
    parts, values, gate = _normal(8, 3, 7, 400), _normal(9, 7, 400), _normal(10, 7, 1)
    of_sum = rms_norm_of_sum(x.clone(), parts, SharedPart(values, gate), weight, 1e-6)
    there = parts.to(device), SharedPart(values.to(device), gate.to(device))
    for powers in (False, True):
        added = _norm_of_sum(on.clone(), weight.to(device), powers, *there)
        for what, found, expected in (
            ("rows", quantise_rows_triton(on, powers), x),
            ("SiLU·up", silu_and_mul_quantised_triton(on, powers), activated),
            ("norm", rms_norm_quantised_triton(on, weight.to(device), 1e-6, powers), normed),
            ("norm of a sum", added, of_sum),
        ):
            rows = FP8Rows(*found, 7).dequantise().cpu()
            exact = quantise_rows(expected, powers_of_two=powers).dequantise()
            if not _error(rows, exact) < _CLOSE:
                yield f"quantised {what} differ by {_error(rows, exact):.2g}"


def _norm_of_sum(
    x: Tensor, weight: Tensor, powers: bool, parts: Tensor, shared: SharedPart
) -> tuple[Tensor, Tensor]:
    """Return the quantised norm of x, parts and what is shared, of which the kernel writes the rows
    before they are rounded as well."""
    plain = torch.empty_like(x)
    return rms_norm_quantised_triton(x, weight, 1e-6, powers, parts=parts, shared=shared, out=plain)


def linear_differences(rows: int, device: torch.device) -> Iterator[str]:
    """Yield how products of so many rows differ from those of the reference."""
    for width, depth in WIDTHS:
        x, weight = (
            quantise_rows(_normal(rows, rows, depth)),
            quantise_weight(_normal(1, width, depth)),
        )
        expected, values, scales = fp8_linear_reference(x, weight), x.values, x.scales
        for form in (weight, weight.by_row()):
            out = torch.empty((rows, width), device=device)
            moved = FP8Weight(*(part.to(device) for part in form))
            fp8_linear_triton(values.to(device), scales.to(device), moved, out)
            error = _error(out.cpu(), expected)
            if not error < _CLOSE:
                yield f"{rows} rows × {depth}, {form.scale_rows} rows to a scale: {error:.2g} apart"


def expert_differences(tokens: int, sizes: tuple[int, int], device: torch.device) -> Iterator[str]:
    """Yield how experts' results for so many tokens differ from those of the reference.

    `sizes` are H and I.
    """
    hidden, inner = sizes
    x = _normal(tokens, tokens, hidden)
    gate_up = quantise_weight(_normal(2, _EXPERTS, 2 * inner, hidden) / hidden**0.5)
    if inner % BLOCK:
        gate_up = gate_up.by_row()
    down = quantise_weight(_normal(3, _EXPERTS, hidden, inner) / inner**0.5)
    ids = _normal(4, tokens, _EXPERTS).topk(_K).indices.int()
    weights = _normal(5, tokens, _K).abs()
    expected = fp8_grouped_mlp_reference(x, gate_up, down, ids, weights)
    if all(size % panel_columns(FP8) == 0 for size in sizes):
        gate_up, down = (w._replace(values=to_panels(w.values)) for w in (gate_up, down))
    wide, narrow = (FP8Weight(*(part.to(device) for part in w)) for w in (gate_up, down))
    moved = x.to(device), wide, narrow, ids.to(device), weights.to(device)
    error = _error(fp8_grouped_mlp_triton(*moved).cpu(), expected)
    if not error < _CLOSE:
        yield f"experts, {sizes}, {tokens} tokens: {error:.2g} apart"


def _normal(seed: int, *shape: int) -> Tensor:
    return torch.empty(shape).normal_(generator=torch.Generator().manual_seed(seed))


def _error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())
