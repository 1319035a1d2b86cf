"""How a GPU keeps weights in MXFP4: in the order in which a matrix unit's registers take them.

A weight [N, K] is cut into panels of 64 columns, as `moe/tiled_layout.py` has them. A row of a
panel is 8 words of 32 bits. In a matrix instruction of 16 columns, four lanes of a warp share a
row: lane c holds the columns 2c, 2c + 1, 2c + 8 and 2c + 9 of each. So words 2c and 2c + 1 have
what lane c needs of the two groups of 32 columns that have a scale each: a lane loads 8 bytes, and
its values never move to another one.

In a word, the two halves of 16 bits have neighbouring columns, and each half a value of every step
of 8 columns. Where its bits are is chosen for `unpack_triton.py`. A word of scales has those of 128
columns of a row, from the lowest byte on, with 126 added: the exponents of bfloat16 by which
unpacked values are multiplied.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from batchgen.kernels.four_bit.mxfp4_weight import GROUP, MXFP4Weight, pack_codes, unpack_codes
from batchgen.kernels.moe.tiled_layout import PANEL

WORD_VALUES = 8
"""Values in a word."""
PANEL_WORDS = PANEL // WORD_VALUES
"""Words of a row of a panel."""
SCALE_COLUMNS = 128
"""Columns whose scales are in one word."""
LARGEST_SCALE = 128
"""The largest scale, 2, of which the exponent of bfloat16 that the kernels multiply by exists."""
_BIAS = 126
_SIGN_BITS = (15, 12, 14, 13)
_FIRST_BITS = (6, 3, 9, 0)
"""Where the sign and the other three bits of the four values in half a word are."""


class MXFP4Panels(NamedTuple):
    """The weights [E, N, K] of experts in MXFP4 as kernels read them; K is a multiple of 64."""

    words: Tensor  # [E, K/64, N, 8] int32
    scales: Tensor  # [E, ⌈K/128⌉, N] int32

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, panels, rows, _ = self.words.shape
        return experts, rows, panels * PANEL

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tokens that it is multiplied by."""
        return torch.bfloat16

    @property
    def constants(self) -> dict[str, int | str]:
        """What kernels are compiled with."""
        return {"CODE": "mxfp4", "GROUP": GROUP}


def takes_mxfp4(dtype: torch.dtype, *widths: int) -> bool:
    """Whether tokens of this dtype are multiplied by weights of these widths K in MXFP4: bfloat16,
    if panels divide the widths."""
    return dtype == torch.bfloat16 and all(width % PANEL == 0 for width in widths)


def empty_panels(experts: int, rows: int, columns: int, *, device: torch.device) -> MXFP4Panels:
    """Make room for the weights [E, N, K] of experts; K is a multiple of 64."""
    assert columns % PANEL == 0
    words = (experts, columns // PANEL, rows, PANEL_WORDS)
    scales = (experts, -(-columns // SCALE_COLUMNS), rows)
    return MXFP4Panels(
        torch.empty(words, dtype=torch.int32, device=device),
        torch.empty(scales, dtype=torch.int32, device=device),
    )


def pack_panels(weight: MXFP4Weight, into: MXFP4Panels) -> None:
    """Lay out the weights [E, N, K] of experts, one after another, on the device of `into`.

    Raises ValueError if a scale is above 2.
    """
    device = into.words.device
    for words, scales, values, given in zip(*into, *weight, strict=True):
        if given.numel() and int(given.max()) > LARGEST_SCALE:
            exponent = int(given.max()) - 127
            raise ValueError(
                f"has the scale 2**{exponent}, and kernels for MXFP4 take scales up to 2: load the "
                "model in float32, or on a CPU"
            )
        words.copy_(_words(values.to(device)))
        scales.copy_(_scale_words(given.to(device)))


def unpack_panels(panels: MXFP4Panels) -> MXFP4Weight:
    """Return the weights [E, N, K] that were laid out."""
    halves = lanes_of_words(panels.words)
    steps = [
        ((halves >> sign & 1) << 3) | (halves >> first & 7)
        for sign, first in zip(_SIGN_BITS, _FIRST_BITS, strict=True)
    ]
    codes = torch.stack(steps, -3).to(torch.uint8).flatten(2)
    bytes_ = torch.stack([(panels.scales >> shift) & 255 for shift in range(0, 32, 8)], -1)
    exponents = bytes_.transpose(1, 2).flatten(2)[..., : codes.shape[-1] // GROUP] - _BIAS
    return MXFP4Weight(pack_codes(codes), exponents.to(torch.uint8))


def _words(values: Tensor) -> Tensor:
    """Lay out the values [N, K/2] of one expert as words [K/64, N, 8]."""
    codes = codes_of_lanes(values)
    halves = torch.zeros_like(codes[:, :, :, 0])
    for step, (sign, first) in enumerate(zip(_SIGN_BITS, _FIRST_BITS, strict=True)):
        of_step = codes[:, :, :, step]
        halves |= ((of_step >> 3) << sign) | ((of_step & 7) << first)
    return words_of_lanes(halves)


def codes_of_lanes(values: Tensor) -> Tensor:
    """Turn the values [N, K/2] of one expert into codes [row, panel, group of 32 columns, step of 8
    columns, lane, one of two]."""
    codes: Tensor = unpack_codes(values).int().unflatten(-1, (-1, 2, 4, 4, 2))
    return codes


def words_of_lanes(halves: Tensor) -> Tensor:
    """Turn the halves of words [row, panel, group, lane, one of two] into words [K/64, N, 8]."""
    words = halves[..., 0] | (halves[..., 1] << 16)
    return words.permute(1, 0, 3, 2).flatten(-2)


def lanes_of_words(words: Tensor) -> Tensor:
    """Undo `words_of_lanes` for words [E, K/64, N, 8]: halves [E, row, panel, group, lane, 2]."""
    lanes = words.unflatten(-1, (4, 2)).permute(0, 2, 1, 4, 3)
    return torch.stack((lanes & 0xFFFF, (lanes >> 16) & 0xFFFF), -1)


def _scale_words(scales: Tensor) -> Tensor:
    """Lay out the scales [N, K/32] of one expert as words [⌈K/128⌉, N]."""
    missing = -scales.shape[-1] % (SCALE_COLUMNS // GROUP)
    exponents = F.pad(scales.int() + _BIAS, (0, missing)).unflatten(-1, (-1, 4))
    words = sum(exponents[..., place] << (8 * place) for place in range(4))
    assert isinstance(words, Tensor)
    return words.t()
