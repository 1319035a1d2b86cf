"""How a GPU keeps weights in int4: in the panels of `mxfp4_layout.py`, with other words.

In the halves of a word, a value of the i-th step of 8 columns has the bits 4·i to 4·i + 3, so one
shift and one mask yield two codes where 16-bit floats have the last bits of their mantissa.

A word of scales has what a group of a row is multiplied by: its scale as a 16-bit float in the low
half, and what is added to the codes before in the high one (`unpack_triton.py`).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.four_bit.int4_weight import Int4Weight
from batchgen.kernels.four_bit.mxfp4_layout import (
    PANEL_WORDS,
    codes_of_lanes,
    lanes_of_words,
    words_of_lanes,
)
from batchgen.kernels.four_bit.mxfp4_weight import pack_codes
from batchgen.kernels.moe.tiled_layout import PANEL

GROUPS = (128, 64, 32)
"""Columns that share a scale in panels; larger groups repeat theirs."""
_MINUS_MAGIC = {torch.bfloat16: 0xC300, torch.float16: 0xE400}
"""The bits of -128 and of -1024. Their last four bits are those of the ones of an integer."""
_STEPS = 4


class Int4Panels(NamedTuple):
    """Weights [E, N, K] in int4 as kernels read them; 64 and the group divide K."""

    words: Tensor  # [E, K/64, N, 8] int32
    scales: Tensor  # [E, K/group, N] int32
    group: int  # columns that share a scale: 128, 64 or 32
    dtype: torch.dtype  # of the scales, and of the tokens: bfloat16 or float16

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, panels, rows, _ = self.words.shape
        return experts, rows, panels * PANEL

    @property
    def constants(self) -> dict[str, int | str]:
        """What kernels are compiled with."""
        return {"CODE": "int4", "GROUP": self.group}

    def rows(self, start: int, end: int) -> Int4Panels:
        """View some rows of all experts."""
        return self._replace(words=self.words[:, :, start:end], scales=self.scales[..., start:end])

    def experts(self, start: int, end: int) -> Int4Panels:
        """View some experts."""
        return self._replace(words=self.words[start:end], scales=self.scales[start:end])


def group_in_panels(dtype: torch.dtype, columns: int, group: int) -> int | None:
    """Return the columns that share a scale in panels of a weight with this K and these groups, for
    tokens of this dtype; None if it cannot be kept in int4."""
    if dtype not in _MINUS_MAGIC or columns % PANEL:
        return None
    return next((own for own in GROUPS if columns % own == group % own == 0), None)


def empty_int4_panels(
    experts: int, rows: int, columns: int, group: int, dtype: torch.dtype, *, device: torch.device
) -> Int4Panels:
    """Make room for weights [E, N, K]; 64 and the group divide K."""
    assert columns % PANEL == columns % group == 0 and group in GROUPS and dtype in _MINUS_MAGIC
    words = (experts, columns // PANEL, rows, PANEL_WORDS)
    scales = (experts, columns // group, rows)
    return Int4Panels(
        torch.empty(words, dtype=torch.int32, device=device),
        torch.empty(scales, dtype=torch.int32, device=device),
        group,
        dtype,
    )


def pack_int4_panels(weight: Int4Weight, into: Int4Panels) -> None:
    """Lay out weights [E, N, K], one expert after another, on the device of `into`. Scales are
    rounded to the dtype of `into`.

    Raises ValueError if a scale is not finite there.
    """
    device, own = into.words.device, weight.regrouped(into.group)
    for words, scales, values, factors, zeros in zip(*into[:2], *own, strict=True):
        rounded = factors.to(device, into.dtype)
        if not rounded.isfinite().all():
            name = str(into.dtype).removeprefix("torch.")
            raise ValueError(f"has scales that are not finite in {name}")
        words.copy_(_words(values.to(device)))
        added = zeros.to(device).int() | _MINUS_MAGIC[into.dtype]
        bits = rounded.view(torch.int16).int() & 0xFFFF
        scales.copy_(((added << 16) | bits).t())


def unpack_int4_panels(panels: Int4Panels) -> Int4Weight:
    """Return the weights [E, N, K] that were laid out."""
    halves = lanes_of_words(panels.words)
    codes = torch.stack([(halves >> (4 * step)) & 15 for step in range(_STEPS)], -3)
    groups = panels.scales.transpose(1, 2)
    scales = (groups & 0xFFFF).to(torch.int16).view(panels.dtype)
    zeros = ((groups >> 16) & 15).to(torch.uint8)
    return Int4Weight(pack_codes(codes.to(torch.uint8).flatten(2)), scales, zeros)


def _words(values: Tensor) -> Tensor:
    """Lay out the values [N, K/2] of one expert as words [K/64, N, 8]."""
    codes = codes_of_lanes(values)
    halves = torch.zeros_like(codes[:, :, :, 0])
    for step in range(_STEPS):
        halves |= codes[:, :, :, step] << (4 * step)
    return words_of_lanes(halves)
