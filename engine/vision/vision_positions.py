"""The order of an image's patches and their positions, for the vision towers.

Positions are computed on the host, once per image size, in NumPy. torch would use all cores for a
few thousand values, and waking the cores takes longer than the work.
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
"""The number of image sizes whose positions are cached. The images of a job often have few sizes;
the positions of an image of a thousand tokens take a megabyte and some milliseconds."""


Ints = npt.NDArray[np.int64]
Floats = npt.NDArray[np.float32]


class PatchPositions(NamedTuple):
    """The positions of an image's N patches in `DeepstackTower`."""

    taps: Ints  # [N, 4], the indices of the four learned positions around each patch
    weights: Floats  # [N, 4], their weights in the bilinear interpolation
    cos_sin: Floats  # [N, D], cosines, then sines, of a head's D/2 angles, as for `apply_rotary`


@lru_cache(_SIZES)
def patch_positions(
    rows: int, columns: int, merge: int, *, side: int, head_dim: int, theta: float
) -> PatchPositions:
    """Compute the positions of a grid of rows × columns patches. The merge² patches of one token
    are adjacent.

    The grid of learned positions is stretched over the grid of patches, corner to corner. Half of a
    head's pairs rotate by a patch's row, the others by its column.

    Args:
        side: the side of the square grid of learned positions.
    """
    row, column = _grid(rows, columns, merge)
    row_taps, row_weights = _taps(row, rows, side)
    column_taps, column_weights = _taps(column, columns, side)
    taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).reshape(-1, 4)
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).reshape(-1, 4)
    return PatchPositions(taps, weights, _cos_sin(row, column, head_dim, theta))


def _cos_sin(row: Ints, column: Ints, head_dim: int, theta: float) -> Floats:
    """Return the cosines, then the sines, that rotate the pairs of a head, [N, head_dim]. Half of
    the pairs rotate by the patches' rows [N], half by their columns [N]."""
    exponents = torch.arange(0, head_dim // 2, 2, device="cpu").float() / (head_dim // 2)
    frequencies = 1.0 / theta**exponents
    # Computed once per row or column number; there are a hundred times as many patches.
    numbers = torch.arange(1 + max(row.max(), column.max()), device="cpu").float()
    angles = numbers[:, None] * frequencies
    cos, sin = angles.cos().numpy(), angles.sin().numpy()
    return np.concatenate((cos[row], cos[column], sin[row], sin[column]), axis=1)


def grid_places(rows: int, columns: int, merge: int) -> Ints:
    """Return the row-major index of each patch, [N], in the order in which the patches of one token
    are adjacent."""
    row, column = _grid(rows, columns, merge)
    return row * columns + column


class AxialPositions(NamedTuple):
    """The positions of an image's N patches in `AxialTower`."""

    rows: Ints  # [N]
    columns: Ints  # [N]
    cos_sin: Floats  # [N, D], as in `PatchPositions`


@lru_cache(_SIZES)
def axial_positions(
    rows: int, columns: int, merge: int, *, head_dim: int, theta: float
) -> AxialPositions:
    """Compute the positions of a grid of patches. The merge² patches of one token are adjacent.
    Half of a head's pairs rotate by a patch's column, the others by its row."""
    row, column = _grid(rows, columns, merge)
    return AxialPositions(row, column, _cos_sin(column, row, head_dim, theta))


class WindowPositions(NamedTuple):
    """The order and the positions of an image's N patches in `WindowedTower`."""

    order: Ints  # [N / merge²], token indices, one window after another
    lengths: tuple[int, ...]  # the number of patches of each window
    cos_sin: Floats  # [N, D], in the order of the windows, otherwise as in `PatchPositions`


@lru_cache(_SIZES)
def window_positions(
    rows: int, columns: int, merge: int, *, window: int, head_dim: int, theta: float
) -> WindowPositions:
    """Divide a grid of patches into windows of `window` × `window` tokens, starting at the top left
    corner. Windows at the right and bottom edges may be smaller. The merge² patches of one token
    are adjacent."""
    columns_of_tokens = columns // merge
    index = np.arange(rows // merge * columns_of_tokens)
    row, column = index // columns_of_tokens, index % columns_of_tokens
    window_index = row // window * -(-columns_of_tokens // window) + column // window
    order = window_index.argsort(kind="stable")
    lengths = tuple((np.bincount(window_index) * merge**2).tolist())
    cos_sin = _cos_sin(*_grid(rows, columns, merge), head_dim, theta)
    in_windows = cos_sin.reshape(-1, merge**2, head_dim)[order].reshape(-1, head_dim)
    return WindowPositions(order, lengths, in_windows)


def _grid(rows: int, columns: int, merge: int) -> tuple[Ints, Ints]:
    """Return the row and the column of each patch, [N] each. The merge² patches of one token are
    adjacent."""
    block = (rows // merge, merge, columns // merge, merge)
    row, column = (
        axis.reshape(block).swapaxes(1, 2).ravel() for axis in np.indices((rows, columns))
    )
    return row, column


def _taps(index: Ints, size: int, side: int) -> tuple[Ints, Floats]:
    """Find the two learned positions around each patch on one axis.

    Returns their indices and their weights, both [N, 2].

    Args:
        index: [N], the patches' row (or column) numbers.
        size: the number of patches along the axis.
        side: the number of learned positions along the axis.
    """
    source = index.astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    floor = np.floor(source)
    upper = source - floor
    taps = np.stack((floor, floor + 1), axis=1).astype(np.int64)
    return np.minimum(taps, side - 1), np.stack((1 - upper, upper), axis=1)


def patches(pixels: Tensor, values: Tensor, patch: int, merge: int, frames: int) -> Tensor:
    """Cut an image into patches [N, 3 · frames · patch²], with equal values in all frames. The
    merge² patches of one token are adjacent, and tokens are in row-major order.

    Args:
        pixels: [height, width, 3] uint8.
        values: [3, 256], the normalised value of each colour value, from `normalised_values`.
        patch: the side of a patch in pixels.
        merge: the side of a token's square in patches.
        frames: the number of frames of a patch.
    """
    height, width, _ = pixels.shape
    block = (height // patch // merge, merge, patch, width // patch // merge, merge, patch, 3)
    colour = torch.arange(3, device=values.device)
    cut = values[colour, pixels.long()].reshape(block).permute(0, 3, 1, 4, 6, 2, 5)
    # [rows, columns, merge, merge, colour, patch, patch]
    cut = cut.unsqueeze(5).expand(*cut.shape[:5], frames, patch, patch)
    return cut.reshape(-1, 3 * frames * patch**2)


def normalised_values(colours: Colours = HALVES) -> Tensor:
    """Return the normalised value (u/255 - mean)/std of each colour value u: [3, 256] float32, on
    the CPU.

    The table has the same bits on every device; a GPU would multiply by a rounded 1/255.
    """
    mean, std = (torch.tensor(values, device="cpu")[:, None] for values in colours)
    return (torch.arange(256, device="cpu").float() / 255 - mean) / std
