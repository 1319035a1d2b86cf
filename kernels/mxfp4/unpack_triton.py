"""Weights in MXFP4 become bfloat16 in registers, in Triton.

Each operation works on the two values in the halves of a word (`mxfp4_layout.py`). Shifted and
masked, a code's sign and its three other bits stand where bfloat16 has its sign, the last two bits
of its exponent and the first one of its mantissa. That is the value times 2**-126, a subnormal
number for ±0.5. One multiplication by a power of two scales it and takes this factor back; nothing
is rounded.
"""

from __future__ import annotations

import triton
import triton.language as tl

_SIGNS = tl.constexpr(-0x7FFF8000)
"""The signs of two values, 0x80008000 as a signed integer; alone, two negative zeros."""
_REST = tl.constexpr(0x01C001C0)
_ALL = tl.constexpr(-0x7FFF8000 | 0x01C001C0)
_POWERS = tl.constexpr(0x00800080)
"""What turns an exponent into two powers of two."""


@triton.jit
def unpack_panel(words, scales, HALF: tl.constexpr, ROWS: tl.constexpr, INTERPRETED: tl.constexpr):
    """Turn the words [ROWS, 8] of a panel into weights [ROWS, 64].

    The panel is the first or the second HALF of the 128 columns of which `scales` [ROWS] has the
    scales. The interpreter gets float32, because it multiplies the bits of bfloat16 as integers.
    """
    groups = tl.join((scales >> (16 * HALF)) & 0xFF, (scales >> (16 * HALF + 8)) & 0xFF)
    powers = tl.broadcast_to((groups * _POWERS).reshape([ROWS, 1, 2]), [ROWS, 4, 2])
    words = words.reshape([ROWS, 4, 2])  # of four lanes, in two groups
    steps_0 = words & _ALL
    steps_1 = (words << 3) & _ALL
    steps_2 = ((words << 1) & _SIGNS) | ((words >> 3) & _REST)
    steps_3 = ((words << 2) & _SIGNS) | ((words << 6) & _REST)
    even = tl.join(steps_0, steps_2)
    odd = tl.join(steps_1, steps_3)
    powers = tl.join(powers, powers)
    bits = tl.join(even, odd).permute(0, 2, 3, 4, 1)  # [row, group, step (2, 2), lane]
    powers = tl.join(powers, powers).permute(0, 2, 3, 4, 1)
    if INTERPRETED:
        low = (bits << 16).to(tl.float32, bitcast=True) * (powers << 16).to(
            tl.float32, bitcast=True
        )
        high = (bits & -0x10000).to(tl.float32, bitcast=True) * (powers & -0x10000).to(
            tl.float32, bitcast=True
        )
    else:
        both = _multiply(bits, powers)
        low = both.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (both >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high).reshape([ROWS, 64])


@triton.jit
def _multiply(pairs, powers):
    """Multiply pairs of bfloat16 values in words; -0 is added, which changes nothing, because GPUs
    before Hopper have no product of pairs without a sum."""
    return tl.inline_asm_elementwise(
        "fma.rn.bf16x2 $0, $1, $2, $3;",
        "=r,r,r,r",
        [pairs, powers, tl.full(pairs.shape, _SIGNS, tl.int32)],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
