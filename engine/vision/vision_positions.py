"""The order of an image's patches, and their positions in the vision towers.

Everything here is computed on the host, per size of an image, in NumPy: torch would use all cores
for a few thousand values, and waking them takes longer than the work.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.vision.vision_config import HALVES, Colours

_SIZES = 16
"""How many sizes of images have their positions kept: a job's are often alike, and those of a
thousand tokens take a megabyte and some milliseconds."""


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class PatchPositions(NamedTuple):
    """The positions of an image's N patches in Qwen3-VL's tower."""

    taps: Ints  # [N, 4], the learned positions around each patch
    weights: Floats  # [N, 4], their shares by bilinear interpolation
    cos_sin: Floats  # [N, D], of the angles of a head's D/2 pairs, as for `apply_rotary`


@lru_cache(_SIZES)
def patch_positions(
    rows: int, columns: int, merge: int, *, side: int, head_dim: int, theta: float
) -> PatchPositions:
    """Compute the positions of a grid of patches. The patches of one token are neighbours.

    `side` is that of the square of learned positions, which is stretched over the grid, corner on
    corner. Half of a head's pairs turn by a patch's row, the others by its column.
    """
    row, column = _grid(rows, columns, merge)
    row_taps, row_weights = _taps(row, rows, side)
    column_taps, column_weights = _taps(column, columns, side)
    taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).reshape(-1, 4)
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4)
    return PatchPositions(taps, weights, _cos_sin(row, column, head_dim, theta))


def _cos_sin(row: Ints, column: Ints, head_dim: int, theta: float) -> Floats:
    """Return the cosines, then the sines, [N, head_dim], that rotate the pairs of a head of the
    patches at these rows and columns [N]: half of the pairs by the row, half by the column."""
    exponents = torch.arange(0, head_dim // 2, 2, device="cpu").float() / (head_dim // 2)
    frequencies = 1.0 / theta**exponents
    # Of each row or column once; all patches would be two orders of magnitude more.
    sides = torch.arange(1 + max(row.max(), column.max()), device="cpu").float()
    angles = sides[:, None] * frequencies
    cos, sin = angles.cos().numpy(), angles.sin().numpy()
    return np.concatenate((cos[row], cos[column], sin[row], sin[column]), axis=1)


def grid_places(rows: int, columns: int, merge: int) -> Ints:
    """Return the index of each patch, counted row by row, [N]. The patches of one token are
    neighbours."""
    row, column = _grid(rows, columns, merge)
    return row * columns + column


class AxialPositions(NamedTuple):
    """The positions of an image's N patches in Gemma 4's tower."""

    rows: Ints  # [N]
    columns: Ints  # [N]
    cos_sin: Floats  # [N, D], as `PatchPositions` has it


@lru_cache(_SIZES)
def axial_positions(
    rows: int, columns: int, merge: int, *, head_dim: int, theta: float
) -> AxialPositions:
    """Compute the positions of a grid of patches. The patches of one token are neighbours. Half of
    a head's pairs turn by a patch's column, the others by its row."""
    row, column = _grid(rows, columns, merge)
    return AxialPositions(row, column, _cos_sin(column, row, head_dim, theta))


class WindowPositions(NamedTuple):
    """The order and the positions of an image's N patches in Qwen2.5-VL's tower."""

    order: Ints  # [N / merge²], the tokens one window after another
    lengths: tuple[int, ...]  # the patches of each window
    cos_sin: Floats  # [N, D], in that order, as `PatchPositions` has it


@lru_cache(_SIZES)
def window_positions(
    rows: int, columns: int, merge: int, *, window: int, head_dim: int, theta: float
) -> WindowPositions:
    """Cut a grid of patches into windows of `window` tokens each way, from its first corner on;
    the last ones of a row or column of windows are smaller. The patches of one token are
    neighbours."""
    across = columns // merge
    index = np.arange(rows // merge * across)
    row, column = index // across, index % across
    window_index = row // window * -(-across // window) + column // window
    order = window_index.argsort(kind="stable")
    lengths = tuple((np.bincount(window_index) * merge**2).tolist())
    cos_sin = _cos_sin(*_grid(rows, columns, merge), head_dim, theta)
    in_windows = cos_sin.reshape(-1, merge**2, head_dim)[order].reshape(-1, head_dim)
    return WindowPositions(order, lengths, in_windows)


def _grid(rows: int, columns: int, merge: int) -> tuple[Ints, Ints]:
    """Return the row and the column of each patch [N], in the order of the patches."""
    block = (rows // merge, merge, columns // merge, merge)
    row, column = (
        axis.reshape(block).swapaxes(1, 2).ravel() for axis in np.indices((rows, columns))
    )
    return row, column


def _taps(index: Ints, size: int, side: int) -> tuple[Ints, Floats]:
    """Return the two learned positions around each index [N] on an axis of `size` patches, and
    their shares, both [N, 2]. The axis has `side` learned positions."""
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    upper = source - floor
    taps = np.stack((floor, floor + 1), axis=1).astype(np.int64)
    return np.minimum(taps, side - 1), np.stack((1 - upper, upper), axis=1)


def patches(pixels: Tensor, values: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Cut pixels [height, width, 3] uint8 into patches [N, 3 · frames · patch²], whose values are
    `values` [3, 256] of the pixels' colours. All frames of a patch are alike."""
    height, width, _ = pixels.shape
    block = (height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3)
    colour = torch.arange(3, device=values.device)
    cut = values[colour, pixels.long()].reshape(block).permute(0, 3, 1, 4, 6, 2, 5)
    # [rows, columns, merge, merge, colour, patch, patch]
    cut = cut.unsqueeze(5).expand(*cut.shape[:5], frames, patch, patch)
    return cut.reshape(-1, 3 * frames * patch**2)


def normalised_values(colours: Colours = HALVES) -> Tensor:
    """Return what each value of a pixel becomes in each colour, [3, 256] float32 on the CPU:
    (u/255 - mean)/std. The table has the same bits on every device; a GPU would multiply by a
    rounded 1/255."""
    mean, std = (torch.tensor(each, device="cpu")[:, None] for each in colours)
    return (torch.arange(256, device="cpu").float() / 255 - mean) / std
