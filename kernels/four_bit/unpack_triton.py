"""Unpacks 4-bit weights to 16-bit floats in registers, in Triton. The product kernels call
`load_scales`, `unpack_panel` and `times_factors`.

A word holds two 16-bit halves, and each operation works on one value in each half. `fp4_layout.py`
and `int4_layout.py` describe the layouts.

int4: the lowest mantissa bit of 128 in bfloat16, and of 1024 in float16, has the value 1. So
writing a code (0 to 15) into the low bits of that number's mantissa gives number + code. Adding
-(number + zero point) leaves the exact integer code - zero point, and one multiplication by the
scale rounds once.

MXFP4: a code is e2m1. Shifts and masks move its sign, exponent and mantissa to the sign, the last
two exponent bits and the first mantissa bit of bfloat16. The result is the value times 2**-126
(subnormal for ±0.5). Multiplying by scale · 2**126, a power of two, restores the value; nothing is
rounded.

NVFP4: as MXFP4, but the factor is scale · 2**118 with an e4m3 scale: its bits are the scale's byte
shifted, plus a constant. A code has 2 significant bits and a scale 4, so the product is exact. The
missing 2**8 is part of each row's own factor, by which `times_factors` multiplies the sums.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIGNS = tl.constexpr(-0x7FFF8000)
"""The signs of two values, 0x80008000 as a signed integer; alone, two negative zeros."""
_REST = tl.constexpr(0x01C001C0)
"""The other three bits of two codes: the last two exponent bits and the first mantissa bit."""
_ALL = tl.constexpr(-0x7FFF8000 | 0x01C001C0)
"""Both."""
_POWERS = tl.constexpr(0x00800080)
"""Multiplying by it turns an exponent into a pair of bfloat16 powers of two."""
_TWICE = tl.constexpr(0x00100010)
"""Multiplying by it copies a scale's byte to both halves, as the last exponent bits and the first
mantissa bits."""
_EXPONENTS = tl.constexpr(0x75807580)
"""235 in both exponents: 127 - 10 of `fp4_layout.py`, and 118."""


@triton.jit
def scale_rows(panels, CODE: tl.constexpr, GROUP: tl.constexpr):
    """Return how many words of scales a row of `panels` panels has."""
    if CODE == "mxfp4":
        count = tl.cdiv(panels, 2)
    elif CODE == "nvfp4":
        count = panels + 1
    elif GROUP == 128:
        count = panels // 2
    else:
        count = panels * (64 // GROUP)
    return count


@triton.jit
def load_scales(source, offset, step, last, stride, CODE: tl.constexpr, GROUP: tl.constexpr):
    """Load the scales that `unpack_panel` needs for the 128 columns of a step.

    The rows are at `source` + `offset`; `last` is the index of the last panel."""
    if CODE == "mxfp4":
        scales: tl.tuple = (tl.load(source + step * stride + offset),)
    elif CODE == "nvfp4":
        low = tl.load(source + step * 2 * stride + offset)
        scales = (low, tl.load(source + tl.minimum(step * 2 + 1, last) * stride + offset))
    elif GROUP == 128:
        word = tl.load(source + step * stride + offset)
        scales = (word, word, word, word)
    else:
        # Past the last panel weights are multiplied by zeros, so any scale will do.
        low = source + step * 2 * (64 // GROUP) * stride + offset
        high = source + tl.minimum(step * 2 + 1, last) * (64 // GROUP) * stride + offset
        first, third = tl.load(low), tl.load(high)
        if GROUP == 64:
            scales = (first, first, third, third)
        else:
            scales = (first, tl.load(low + stride), third, tl.load(high + stride))
    return scales


@triton.jit
def unpack_panel(
    words, scales, HALF: tl.constexpr, CODE: tl.constexpr, DTYPE: tl.constexpr, ROWS: tl.constexpr,
    INTERPRETED: tl.constexpr,
):  # fmt: skip
    """Turn the words [ROWS, 8] of a panel into weights [ROWS, 64] in DTYPE.

    The panel is the first (HALF = 0) or second half of the 128 columns that `scales` belong to. The
    interpreter gets float32, because it multiplies the bits of bfloat16 as integers.
    """
    if CODE == "mxfp4":
        weights = _unpack_mxfp4(words, scales[0], HALF, ROWS, INTERPRETED)
    elif CODE == "nvfp4":
        weights = _unpack_nvfp4(words, scales[HALF], ROWS, INTERPRETED)
    elif INTERPRETED:
        weights = _interpret_int4(words, scales[2 * HALF], scales[2 * HALF + 1], DTYPE, ROWS)
    else:
        weights = _unpack_int4(words, scales[2 * HALF], scales[2 * HALF + 1], DTYPE, ROWS)
    return weights


@triton.jit
def times_factors(sums, scales, panels, stride, CODE: tl.constexpr):
    """Multiply sums [ROWS, …] of products by each row's factor, which only NVFP4 has.

    `scales` [ROWS] points to the scales of the rows in the first panel. The factors follow those of
    the last panel.
    """
    if CODE == "nvfp4":
        factors = tl.load(scales + panels * stride).to(tl.float32, bitcast=True)
        sums = sums.to(tl.float32) * factors[:, None]
    return sums


@triton.jit
def _of_lanes(first, second, ROWS: tl.constexpr):
    """Broadcast one value [ROWS] per group of 32 columns to the groups' words [ROWS, 4, 2]."""
    return tl.broadcast_to(tl.join(first, second).reshape([ROWS, 1, 2]), [ROWS, 4, 2])


@triton.jit
def _in_columns(step_0, step_1, step_2, step_3):
    """Put the values [ROWS, 4, 2] of the steps of words in the order of columns."""
    even, odd = tl.join(step_0, step_2), tl.join(step_1, step_3)
    return tl.join(even, odd).permute(0, 2, 3, 4, 1)  # [row, group, step (2, 2), lane]


@triton.jit
def _unpack_int4(words, first, second, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """Unpack a panel; `first` and `second` [ROWS] are the words of scales of its two halves of 32
    columns."""
    IS_BF16: tl.constexpr = DTYPE == tl.bfloat16
    MAGIC: tl.constexpr = 0x43004300 if IS_BF16 else 0x64006400
    ONES: tl.constexpr = 0x3F803F80 if IS_BF16 else 0x3C003C00
    scales = _of_lanes(first, second, ROWS)
    # The high half of each word (what is added) in both halves, and the low half (the scale).
    added = (scales & -0x10000) | ((scales >> 16) & 0xFFFF)
    factors = (scales & 0xFFFF) | (scales << 16)
    words = words.reshape([ROWS, 4, 2])
    bits = _in_columns(
        _with_codes(words, MAGIC),
        _with_codes(words >> 4, MAGIC),
        _with_codes(words >> 8, MAGIC),
        _with_codes(words >> 12, MAGIC),
    )
    added = _in_columns(added, added, added, added)
    factors = _in_columns(factors, factors, factors, factors)
    integers = _fma(bits, tl.full(bits.shape, ONES, tl.int32), added, IS_BF16)
    both = _fma(integers, factors, tl.full(bits.shape, _SIGNS, tl.int32), IS_BF16)
    low = both.to(tl.int16).to(DTYPE, bitcast=True)
    high = (both >> 16).to(tl.int16).to(DTYPE, bitcast=True)
    return tl.join(low, high).reshape([ROWS, 64])


@triton.jit
def _with_codes(words, MAGIC: tl.constexpr):
    """Return (words & 0x000F000F) | MAGIC in one instruction. Some assemblers would emit two."""
    codes = tl.full(words.shape, 0x000F000F, tl.int32)
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, $3, 0xEA;", "=r,r,r,r",
        [words, codes, tl.full(words.shape, MAGIC, tl.int32)], dtype=tl.int32, is_pure=True, pack=1,
    )  # fmt: skip


@triton.jit
def _interpret_int4(words, first, second, DTYPE: tl.constexpr, ROWS: tl.constexpr):
    """`_unpack_int4` in float32, rounded to DTYPE."""
    scales = _of_lanes(first, second, ROWS)
    zeros = ((scales >> 16) & 15).to(tl.float32)
    if DTYPE == tl.bfloat16:
        factors = (scales << 16).to(tl.float32, bitcast=True)
    else:
        factors = scales.to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    words = words.reshape([ROWS, 4, 2])
    codes = _in_columns(words, words >> 4, words >> 8, words >> 12)
    zeros = _in_columns(zeros, zeros, zeros, zeros)
    factors = _in_columns(factors, factors, factors, factors)
    low = ((codes & 15).to(tl.float32) - zeros) * factors
    high = (((codes >> 16) & 15).to(tl.float32) - zeros) * factors
    return tl.join(low, high).reshape([ROWS, 64]).to(DTYPE).to(tl.float32)


@triton.jit
def _fma(a, b, c, IS_BF16: tl.constexpr):
    """a · b + c of pairs of 16-bit floats in words."""
    if IS_BF16:
        result = tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    else:
        result = tl.inline_asm_elementwise(
            "fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.int32, is_pure=True,
            pack=1,
        )  # fmt: skip
    return result


@triton.jit
def _unpack_mxfp4(words, scales, HALF: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack a panel to weights; `scales` [ROWS] holds the scales of its step of 128 columns."""
    groups = tl.join((scales >> (16 * HALF)) & 0xFF, (scales >> (16 * HALF + 8)) & 0xFF)
    powers = tl.broadcast_to((groups * _POWERS).reshape([ROWS, 1, 2]), [ROWS, 4, 2])
    bits = _code_bits(words, ROWS)
    powers = _in_columns(powers, powers, powers, powers)
    return _scaled_codes(bits, powers, ROWS, INTERPRETED)


@triton.jit
def _unpack_nvfp4(words, scales, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Unpack a panel; `scales` [ROWS] holds the scales of its four groups of 16 columns.

    The weights still lack their rows' factors, and are 2**-8 times too small.
    """
    first = _of_lanes(_scale_bits(scales, 0), _scale_bits(scales, 16), ROWS)
    second = _of_lanes(_scale_bits(scales, 8), _scale_bits(scales, 24), ROWS)
    bits = _code_bits(words, ROWS)
    factors = _in_columns(first, first, second, second)
    return _scaled_codes(bits, factors, ROWS, INTERPRETED)


@triton.jit
def _scale_bits(scales, SHIFT: tl.constexpr):
    """Turn one byte of each word into a pair of bfloat16 numbers, each 2**118 times the scale."""
    return ((scales >> SHIFT) & 0xFF) * _TWICE + _EXPONENTS


@triton.jit
def _code_bits(words, ROWS: tl.constexpr):
    """Turn words [ROWS, 8] of e2m1 codes into pairs of bfloat16, 2**-126 times the values."""
    words = words.reshape([ROWS, 4, 2])  # of four lanes, in two groups
    steps_0 = words & _ALL
    steps_1 = (words << 3) & _ALL
    steps_2 = ((words << 1) & _SIGNS) | ((words >> 3) & _REST)
    steps_3 = ((words << 2) & _SIGNS) | ((words << 6) & _REST)
    return _in_columns(steps_0, steps_1, steps_2, steps_3)


@triton.jit
def _scaled_codes(bits, powers, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Multiply pairs of bfloat16 [ROWS, 2, 4, 4] by the pairs `powers`, and return values [ROWS,
    64]."""
    if INTERPRETED:
        low = (bits << 16).to(tl.float32, bitcast=True) * (powers << 16).to(
            tl.float32, bitcast=True
        )
        high = (bits & -0x10000).to(tl.float32, bitcast=True) * (powers & -0x10000).to(
            tl.float32, bitcast=True
        )
    else:
        # -0 is added, which changes nothing: GPUs before Hopper only have a fused multiply-add for
        # pairs.
        both = _fma(bits, powers, tl.full(bits.shape, _SIGNS, tl.int32), IS_BF16=True)
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high).reshape([ROWS, 64])
