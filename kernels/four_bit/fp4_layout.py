"""The GPU layout of e2m1 weights, MXFP4 and NVFP4, in the words of `panels.py`.

MXFP4: a word of scales holds the four scales of 128 columns of a row, the first in the lowest byte.
126 is added to each: these are the bfloat16 exponents that unpacked values are multiplied by.

NVFP4: a word of scales holds the four scales of a panel's row, the first in the lowest byte. A byte
has 3 bits of mantissa and 5 of exponent, so that every e4m3 number is a normal one; its exponent is
10 larger than that of the scale. One more word per row holds the row's factor as a float32, times
2**8, because unpacked values are multiplied by 2**-8 times their scales.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.four_bit.fp4_weight import (
    MXFP4_GROUP,
    NVFP4_GROUP,
    MXFP4Weight,
    NVFP4Weight,
    pack_codes,
)
from batchgen.kernels.four_bit.panels import (
    STEP_COLUMNS,
    FourBitPanels,
    Layout,
    codes_of_lanes,
    lanes_of_words,
    words_of_lanes,
)
from batchgen.kernels.moe.tiled_layout import PANEL

MXFP4 = Layout("mxfp4", MXFP4_GROUP, torch.bfloat16)
NVFP4 = Layout("nvfp4", NVFP4_GROUP, torch.bfloat16)
LARGEST_SCALE = 128
"""The largest MXFP4 scale, a factor of 2, that kernels can multiply by: a larger one has no
bfloat16 exponent after the shift by 126."""
_MXFP4_BIAS = 126
"""What is added to the exponent of an MXFP4 scale."""
_NVFP4_BIAS, _NVFP4_POWER = 10, 8
"""What is added to the exponent of an NVFP4 scale, and to that of a row's factor."""
_SIGN_BITS = (15, 12, 14, 13)
_FIRST_BITS = (6, 3, 9, 0)
"""The bit positions of the sign and of the other three bits, for the four values in half a word."""


def takes_fp4(dtype: torch.dtype, *widths: int) -> bool:
    """Return whether tokens of this dtype can be multiplied by e2m1 weights with these numbers of
    columns K: bfloat16, and each K a multiple of a panel's 64 columns."""
    return dtype == torch.bfloat16 and all(width % PANEL == 0 for width in widths)


def mxfp4_words(weight: MXFP4Weight) -> tuple[Tensor, Tensor]:
    """Lay out the weight [N, K] of one expert: words [K/64, N, 8], and words of scales
    [⌈K/128⌉, N].

    Raises ValueError if a scale is above 2.
    """
    values, scales = weight
    if scales.numel() and int(scales.max()) > LARGEST_SCALE:
        exponent = int(scales.max()) - 127
        raise ValueError(
            f"has the scale 2**{exponent}, and kernels for MXFP4 take scales up to 2: load the "
            "model in float32, or on a CPU"
        )
    missing = -scales.shape[-1] % (STEP_COLUMNS // MXFP4_GROUP)
    exponents = F.pad(scales.int() + _MXFP4_BIAS, (0, missing))
    return _words(codes_of_lanes(values)), _four_in_a_word(exponents)


def unpack_mxfp4(panels: FourBitPanels) -> MXFP4Weight:
    """Return the weights [E, N, K] that `mxfp4_words` laid out."""
    values = _values(panels)
    exponents = _bytes_of_words(panels.scales) - _MXFP4_BIAS
    scales = exponents[..., : 2 * values.shape[-1] // MXFP4_GROUP]
    return MXFP4Weight(values, scales.to(torch.uint8))


def nvfp4_words(weight: NVFP4Weight) -> tuple[Tensor, Tensor]:
    """Lay out the weight [N, K] of one expert: words [K/64, N, 8], and words of scales
    [K/64 + 1, N]. Values whose scale is 0 become zeros.

    Raises ValueError if a scale or factor is negative or not finite.
    """
    values, scales, factors = weight
    wide, rows = scales.float(), factors[..., 0].float() * 2.0**_NVFP4_POWER
    for part in (wide, rows):
        if not (part.isfinite() & (part >= 0)).all():
            raise ValueError("has scales that are negative or not finite")
    mantissas, exponents = torch.frexp(wide)  # mantissas from 1/2 on, of 4 bits
    scale_bytes = ((exponents - 1 + _NVFP4_BIAS) << 3) | ((mantissas * 16).int() - 8)
    is_zero = wide == 0
    # Codes are [row, panel, group of 32, step of 8, lane, one of two].
    no_codes = is_zero.unflatten(-1, (-1, 2, 2)).repeat_interleave(2, -1)[..., None, None]
    codes = codes_of_lanes(values).masked_fill(no_codes, 0)
    words = _four_in_a_word(scale_bytes.masked_fill(is_zero, 0))
    return _words(codes), torch.cat((words, rows.view(torch.int32)[None]))


def unpack_nvfp4(panels: FourBitPanels) -> NVFP4Weight:
    """Return the weights [E, N, K] that `nvfp4_words` laid out."""
    scale_bytes = _bytes_of_words(panels.scales[:, :-1])
    scales = torch.ldexp((scale_bytes & 7) / 8 + 1, (scale_bytes >> 3) - _NVFP4_BIAS)
    scales = scales.masked_fill(scale_bytes == 0, 0).to(torch.float8_e4m3fn)
    factors = panels.scales[:, -1].view(torch.float32) * 2.0**-_NVFP4_POWER
    return NVFP4Weight(_values(panels), scales, factors.double().unsqueeze(-1).expand(scales.shape))


def _words(codes: Tensor) -> Tensor:
    """Lay out codes, as `codes_of_lanes` returns them, as words [K/64, N, 8]."""
    halves = torch.zeros_like(codes[:, :, :, 0])
    for step, (sign, first) in enumerate(zip(_SIGN_BITS, _FIRST_BITS, strict=True)):
        of_step = codes[:, :, :, step]
        halves |= ((of_step >> 3) << sign) | ((of_step & 7) << first)
    return words_of_lanes(halves)


def _values(panels: FourBitPanels) -> Tensor:
    """Return the values [E, N, K/2] that `_words` laid out."""
    halves = lanes_of_words(panels.words)
    steps = [
        ((halves >> sign & 1) << 3) | (halves >> first & 7)
        for sign, first in zip(_SIGN_BITS, _FIRST_BITS, strict=True)
    ]
    return pack_codes(torch.stack(steps, -3).to(torch.uint8).flatten(2))


def _four_in_a_word(scale_bytes: Tensor) -> Tensor:
    """Lay out bytes [N, G] as words [G/4, N]."""
    fours = scale_bytes.unflatten(-1, (-1, 4))
    words = sum(fours[..., byte] << (8 * byte) for byte in range(4))
    assert isinstance(words, Tensor)
    return words.t()


def _bytes_of_words(words: Tensor) -> Tensor:
    """Undo `_four_in_a_word` for words [E, G/4, N]: [E, N, G] int32."""
    return (
        torch.stack([(words >> shift) & 255 for shift in range(0, 32, 8)], -1)
        .transpose(1, 2)
        .flatten(2)
    )
