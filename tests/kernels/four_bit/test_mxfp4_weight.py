"""The format MXFP4, against transformers, and how a GPU keeps it."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from batchgen.kernels.four_bit.dequantise_triton import dequantise_panels
from batchgen.kernels.four_bit.fp4_layout import LARGEST_SCALE, MXFP4
from batchgen.kernels.four_bit.fp4_weight import (
    MXFP4_GROUP,
    VALUES,
    MXFP4Weight,
    pack_codes,
    quantise_mxfp4,
    unpack_codes,
)
from batchgen.kernels.four_bit.layouts import pack_panels, unpack_panels
from batchgen.kernels.four_bit.panels import FourBitPanels, empty_panels
from batchgen.kernels.moe.tiled_layout import rows_of_panels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def every_pair(scales: int = 256) -> MXFP4Weight:
    """A weight [1, S, 64] with every code in both halves of a byte, for each scale."""
    codes = torch.arange(64, dtype=torch.uint8) % 16
    codes[32:] = codes[32:].flip(0)
    values = pack_codes(codes).repeat(1, scales, 1)
    return MXFP4Weight(values, torch.arange(scales).to(torch.uint8)[None, :, None].repeat(1, 1, 2))


def random_weight(*shape: int, least: int = 100, most: int = LARGEST_SCALE) -> MXFP4Weight:
    generator = torch.Generator().manual_seed(0)
    *left, columns = shape
    values = torch.randint(256, (*left, columns // 2), generator=generator)
    scales = torch.randint(least, most + 1, (*left, columns // MXFP4_GROUP), generator=generator)
    return MXFP4Weight(values.to(torch.uint8), scales.to(torch.uint8))


def panels_of(weight: MXFP4Weight) -> FourBitPanels:
    panels = empty_panels(weight.shape, MXFP4, device=torch.device(DEVICE))
    pack_panels(weight, panels)
    return panels


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_code_with_every_scale_is_what_transformers_and_arithmetic_say(
    dtype: torch.dtype,
) -> None:
    weight = every_pair()
    found = weight.dequantise(dtype)[0]
    blocks = weight.values.unflatten(-1, (-1, MXFP4_GROUP // 2))
    theirs = convert_moe_packed_tensors(blocks, weight.scales, dtype=dtype)[0].T
    assert found[255].isnan().all()
    assert torch.equal(found[:255], theirs[:255])
    assert torch.equal(found[:255].signbit(), theirs[:255].signbit())
    codes = unpack_codes(weight.values)[0, 0].tolist()
    for scale, column in product(range(255), range(64)):
        exact = VALUES[codes[column]] * 2.0 ** (scale - 127)
        largest = float(torch.finfo(dtype).max)
        expected = exact if abs(exact) <= largest else math.copysign(math.inf, exact)
        assert float(found[scale, column]) == expected


def test_half_precision_rounds_and_overflows_where_it_must() -> None:
    found = every_pair().dequantise(torch.float16)[0]
    exact = every_pair().dequantise(torch.float64)[0]
    assert torch.equal(found[:255].double(), exact[:255].half().double())
    assert found[143].abs().max() == torch.inf and found[140].abs().max() == 6 * 2**13


def test_a_weight_is_dequantised_in_place_and_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    from batchgen.kernels.four_bit import fp4_weight

    weight = random_weight(3, 4, 64)
    whole = weight.dequantise()
    monkeypatch.setattr(fp4_weight, "_PIECE", 64)
    out = torch.full((3, 64, 4), torch.nan, dtype=torch.bfloat16).transpose(1, 2)
    assert weight.dequantise(out=out) is out
    assert torch.equal(out.float(), whole)


@given(
    st.lists(
        st.floats(-(2.0**100), 2.0**100, width=32) | st.sampled_from([0.25, 2.5, -5.0, 3.5, 7.0]),
        min_size=MXFP4_GROUP,
        max_size=MXFP4_GROUP,
    )
)
def test_rounding_takes_the_nearest_value_and_keeps_what_is_exact(values: list[float]) -> None:
    user_values = torch.tensor([values], dtype=torch.float64).float()
    weight = quantise_mxfp4(user_values)
    found, scale = weight.dequantise()[0].double(), 2.0 ** (int(weight.scales) - 127)
    table = torch.tensor(VALUES, dtype=torch.float64) * scale
    errors = (user_values[0].double()[:, None] - table).abs()
    assert torch.equal((user_values[0].double() - found).abs(), errors.amin(1))
    largest = user_values.abs().max()
    assert largest == 0 or int(weight.scales) == 0 or 4 * scale <= largest < 8 * scale
    again = quantise_mxfp4(found[None].float())
    assert torch.equal(again.dequantise()[0].double(), found)


def test_ties_go_to_even_mantissas() -> None:
    ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0, 6.0]).repeat(MXFP4_GROUP // 8)[None]
    expected = [0.0, 1.0, 1.0, 2.0, 2.0, 4.0, 4.0, 6.0]
    assert quantise_mxfp4(ties).dequantise()[0, :8].tolist() == expected
    assert quantise_mxfp4(-ties).dequantise()[0, :8].tolist() == [-value for value in expected]


@pytest.mark.parametrize("columns", [64, 128, 192])
def test_panels_hold_the_weight(columns: int) -> None:
    weight = random_weight(2, 5, columns, least=0)
    again = unpack_panels(panels_of(weight))
    assert torch.equal(again.values.cpu(), weight.values)
    assert torch.equal(again.scales.cpu(), weight.scales)


def test_each_value_stands_where_a_matrix_instruction_takes_it() -> None:
    def places(column: int) -> tuple[tuple[int, ...], bool]:
        codes = torch.zeros((1, 1, 64), dtype=torch.uint8)
        codes[..., column] = 15
        values = MXFP4Weight(pack_codes(codes), torch.zeros((1, 1, 2), dtype=torch.uint8))
        words = panels_of(values).words.flatten().cpu()
        return tuple(i for i in range(8) if int(words[i])), int(words[words != 0]) & 0xFFFF != 0

    for column in range(64):
        (word,), is_low = places(column)
        assert word // 2 == column % 8 // 2  # the lane
        assert word % 2 == column // 32  # the group
        assert is_low == (column % 2 == 0)


def test_scales_that_kernels_cannot_multiply_by_are_refused() -> None:
    with pytest.raises(ValueError, match=r"scale 2\*\*2, and kernels"):
        panels_of(random_weight(1, 8, 64, least=129, most=129))


@pytest.mark.parametrize("columns", [64, 192])
def test_kernels_unpack_every_code_with_every_scale_exactly(columns: int) -> None:
    pairs = every_pair(LARGEST_SCALE + 1)
    weight = MXFP4Weight(
        pairs.values.repeat(2, 1, columns // 64), pairs.scales.repeat(2, 1, columns // 64)
    )
    found = rows_of_panels(dequantise_panels(panels_of(weight))).flatten(2).cpu()
    expected = weight.dequantise(torch.bfloat16)
    # The interpreter has no subnormal numbers in bfloat16.
    first = 0 if DEVICE == "cuda" else 2
    assert torch.equal(found[:, first:].view(torch.int16), expected[:, first:].view(torch.int16))
