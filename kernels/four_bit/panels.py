"""Weights in 4 bits in the layout that kernels read: words in panels, whatever their codes are.

A weight [N, K] is cut into panels of 64 columns, as `moe/tiled_layout.py` has them. A row of a
panel is 8 words of 32 bits. In a matrix instruction of 16 columns, four lanes of a warp share a
row: lane c holds the columns 2c, 2c + 1, 2c + 8 and 2c + 9 of each. So words 2c and 2c + 1 have
what lane c needs of the two groups of 32 columns of a panel: a lane loads 8 bytes, and its values
never move to another one. In a word, the two halves of 16 bits have neighbouring columns, and each
half a value of every step of 8 columns.

Where its bits are, and what a word of scales holds, is chosen for `unpack_triton.py` by the layout
of each code: `int4_layout.py`, `fp4_layout.py`.
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
"""Words of a row of a panel."""
STEP_COLUMNS = 128
"""Columns of two panels, which a step of the products reads."""
_WORD_BYTES = 4


class Layout(NamedTuple):
    """What a kernel knows of weights in 4 bits besides their sizes."""

    code: Code
    group: int  # columns that share a scale
    dtype: torch.dtype  # of the tokens that they are multiplied by

    def scale_rows(self, columns: int) -> int:
        """How many words of scales a row of this many columns has."""
        if self.code == "int4":
            return columns // self.group
        return -(-columns // STEP_COLUMNS) if self.code == "mxfp4" else columns // PANEL + 1

    @property
    def value_bytes(self) -> float:
        """Bytes of a value, with its share of the scale of a group."""
        scale = _WORD_BYTES if self.code == "int4" else 1
        return _WORD_BYTES / WORD_VALUES + scale / self.group


class FourBitPanels(NamedTuple):
    """Weights [E, N, K] in 4 bits as kernels read them; 64 and the group divide K."""

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
        """The dtype of the tokens that it is multiplied by."""
        return self.layout.dtype

    @property
    def constants(self) -> dict[str, int | str]:
        """What kernels are compiled with."""
        return {"CODE": self.layout.code, "GROUP": self.layout.group}

    def rows(self, start: int, end: int) -> FourBitPanels:
        """View some rows of all experts."""
        return self._replace(words=self.words[:, :, start:end], scales=self.scales[..., start:end])

    def experts(self, start: int, end: int) -> FourBitPanels:
        """View some experts."""
        return self._replace(words=self.words[start:end], scales=self.scales[start:end])


def empty_panels(sizes: Sequence[int], layout: Layout, *, device: torch.device) -> FourBitPanels:
    """Make room for weights [E, N, K]; 64 and the group divide K."""
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
