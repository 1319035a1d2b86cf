"""`FourBitPanels`: 4-bit weights in the layout that kernels read, the same for all formats.

A weight [N, K] is cut into panels of 64 columns, as in `moe/tiled_layout.py`. A row of a panel is 8
words of 32 bits. Word 2c + g, for c = 0 … 3 and g = 0, 1, holds the values of these 8 columns of
the panel:

    32·g + 8·s + 2·c + h,  s = 0 … 3,  h = 0 in the word's low 16 bits and h = 1 in the high ones

A matrix instruction multiplies 16 columns, and four lanes of a warp share a row: lane c holds
columns 2c, 2c + 1, 2c + 8 and 2c + 9. These are the columns of words 2c and 2c + 1. So a lane loads
8 bytes for a row of a panel, and no value moves to another lane.

The bits of a value within its half word, and the contents of a word of scales, depend on the
format: see `int4_layout.py` and `fp4_layout.py`. `unpack_triton.py` reads both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from batchgen.kernels.four_bit.fp4_weight import unpack_codes
from batchgen.kernels.moe.tiled_layout import PANEL

Code = Literal["int4", "mxfp4", "nvfp4"]
WORD_VALUES = 8
"""Values in a word."""
PANEL_WORDS = PANEL // WORD_VALUES
"""Words per row of a panel."""
STEP_COLUMNS = 128
"""Columns of two panels, which the product kernels take per step."""
_WORD_BYTES = 4


class Layout(NamedTuple):
    """The format of 4-bit weights: all that a kernel must know besides their sizes."""

    code: Code
    group: int  # columns that share a scale
    dtype: torch.dtype  # of the tokens that the weights are multiplied by

    def scale_rows(self, columns: int) -> int:
        """Return the number of words of scales per row of this many columns.

        int4 has one word per group, MXFP4 one per 128 columns, NVFP4 one per panel and one for the
        row's factor.
        """
        if self.code == "int4":
            return columns // self.group
        return -(-columns // STEP_COLUMNS) if self.code == "mxfp4" else columns // PANEL + 1

    @property
    def value_bytes(self) -> float:
        """Bytes per value, including its share of the bytes of its group's scale."""
        scale = _WORD_BYTES if self.code == "int4" else 1
        return _WORD_BYTES / WORD_VALUES + scale / self.group


class FourBitPanels(NamedTuple):
    """Weights [E, N, K] in 4 bits as kernels read them. K is a multiple of 64 and of the group
    size."""

    words: Tensor  # [E, K/64, N, 8] int32
    scales: Tensor  # [E, S, N] int32; S from `Layout.scale_rows`
    layout: Layout

    @property
    def sizes(self) -> tuple[int, int, int]:
        """E, N and K."""
        experts, panels, rows, _ = self.words.shape
        return experts, rows, panels * PANEL

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the tokens that the weights are multiplied by."""
        return self.layout.dtype

    @property
    def constants(self) -> dict[str, int | str]:
        """The constants of the weight's format that kernels are compiled with."""
        return {"CODE": self.layout.code, "GROUP": self.layout.group}

    def rows(self, start: int, end: int) -> FourBitPanels:
        """Return a view of the rows [start, end) of all experts."""
        return self._replace(words=self.words[:, :, start:end], scales=self.scales[..., start:end])

    def experts(self, start: int, end: int) -> FourBitPanels:
        """Return a view of the experts [start, end)."""
        return self._replace(words=self.words[start:end], scales=self.scales[start:end])


def empty_panels(sizes: Sequence[int], layout: Layout, *, device: torch.device) -> FourBitPanels:
    """Allocate panels for weights [E, N, K]. K is a multiple of 64 and of the group size."""
    experts, rows, columns = sizes
    assert columns % PANEL == columns % layout.group == 0
    words = (experts, columns // PANEL, rows, PANEL_WORDS)
    scales = (experts, layout.scale_rows(columns), rows)
    return FourBitPanels(
        torch.empty(words, dtype=torch.int32, device=device),
        torch.empty(scales, dtype=torch.int32, device=device),
        layout,
    )


def codes_of_lanes(values: Tensor) -> Tensor:
    """Unpack the values of one expert, uint8 [N, K/2] with two codes a byte, into int32 codes
    [N, K/64, 2, 4, 4, 2]: row, panel, and then g, s, c and h as above."""
    codes: Tensor = unpack_codes(values).int().unflatten(-1, (-1, 2, 4, 4, 2))
    return codes


def words_of_lanes(halves: Tensor) -> Tensor:
    """Join half words, int32 [N, K/64, 2, 4, 2] with axes row, panel, g, c and h, into words [K/64,
    N, 8]."""
    words = halves[..., 0] | (halves[..., 1] << 16)
    return words.permute(1, 0, 3, 2).flatten(-2)


def lanes_of_words(words: Tensor) -> Tensor:
    """Split words [E, K/64, N, 8] into half words [E, N, K/64, 2, 4, 2], the inverse of
    `words_of_lanes`."""
    lanes = words.unflatten(-1, (4, 2)).permute(0, 2, 1, 4, 3)
    return torch.stack((lanes & 0xFFFF, (lanes >> 16) & 0xFFFF), -1)
