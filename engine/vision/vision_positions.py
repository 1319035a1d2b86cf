"""The order of an image's patches, and the positions that the vision tower gives them."""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from batchgen.engine.vision.vision_config import HALVES, Colours

_SIZES = 16
"""How many sizes of images have their positions kept: a job's are often alike, and those of a
thousand tokens take a megabyte and some milliseconds."""


class PatchPositions(NamedTuple):
    """The positions of an image's N patches in Qwen3-VL's tower, on the CPU."""

    taps: Tensor  # [N, 4] int64, the learned positions around each patch
    weights: Tensor  # [N, 4] float32, their shares by bilinear interpolation
    cos_sin: Tensor  # [N, D] float32, of the angles of a head's D/2 pairs, as for `apply_rotary`


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
    taps = (row_taps[:, :, None] * side + column_taps[:, None, :]).flatten(1)
    weights = (row_weights[:, :, None] * column_weights[:, None, :]).flatten(1)
    return PatchPositions(taps, weights, _cos_sin(row, column, head_dim, theta))


def _cos_sin(row: Tensor, column: Tensor, head_dim: int, theta: float) -> Tensor:
    """Return what turns the patches [N] at these rows and columns: [N, head_dim] float32, the
    cosines and the sines of a head's pairs, half of which turn by the row, the others by the
    column."""
    exponents = torch.arange(0, head_dim // 2, 2, device="cpu").float() / (head_dim // 2)
    frequencies = 1.0 / theta**exponents
    angles = torch.cat((row[:, None] * frequencies, column[:, None] * frequencies), dim=1)
    return torch.cat((angles.cos(), angles.sin()), dim=1)


def grid_places(rows: int, columns: int, merge: int) -> Tensor:
    """Return the place of each patch, counted row by row, [N] int64 on the CPU. The patches of one
    token are neighbours."""
    row, column = _grid(rows, columns, merge)
    return row.long() * columns + column.long()


class AxialPositions(NamedTuple):
    """The positions of an image's N patches in Gemma 4's tower, on the CPU."""

    rows: Tensor  # [N] int64
    columns: Tensor  # [N] int64
    cos_sin: Tensor  # [N, D] float32, as `PatchPositions` has it


@lru_cache(_SIZES)
def axial_positions(
    rows: int, columns: int, merge: int, *, head_dim: int, theta: float
) -> AxialPositions:
    """Compute the positions of a grid of patches. The patches of one token are neighbours. Half of
    a head's pairs turn by a patch's column, the others by its row."""
    row, column = _grid(rows, columns, merge)
    return AxialPositions(row.long(), column.long(), _cos_sin(column, row, head_dim, theta))


class WindowPositions(NamedTuple):
    """The order and the positions of an image's N patches in Qwen2.5-VL's tower, on the CPU."""

    order: Tensor  # [N / merge²] int64, the tokens one window after another
    lengths: tuple[int, ...]  # the patches of each window
    cos_sin: Tensor  # [N, D] float32, in that order, as `PatchPositions` has it


@lru_cache(_SIZES)
def window_positions(
    rows: int, columns: int, merge: int, *, window: int, head_dim: int, theta: float
) -> WindowPositions:
    """Cut a grid of patches into windows of `window` tokens each way, from its first corner on;
    the last ones of a row or column of windows are smaller. The patches of one token are
    neighbours."""
    across = columns // merge
    index = torch.arange(rows // merge * across, device="cpu")
    row, column = index // across, index % across
    window_index = row // window * -(-across // window) + column // window
    order = window_index.argsort(stable=True)
    lengths = tuple((window_index.bincount() * merge**2).tolist())
    cos_sin = _cos_sin(*_grid(rows, columns, merge), head_dim, theta)
    turned = cos_sin.unflatten(0, (-1, merge**2))[order].flatten(0, 1)
    return WindowPositions(order, lengths, turned)


def _grid(rows: int, columns: int, merge: int) -> tuple[Tensor, Tensor]:
    """Return the row and the column of each patch [N] float32, in the order of the patches."""
    block = (rows // merge, merge, columns // merge, merge)
    row = torch.arange(rows, device="cpu").float()[:, None].expand(rows, columns)
    column = torch.arange(columns, device="cpu").float().expand(rows, columns)
    return (
        row.reshape(block).transpose(1, 2).flatten(),
        column.reshape(block).transpose(1, 2).flatten(),
    )


def _taps(index: Tensor, size: int, side: int) -> tuple[Tensor, Tensor]:
    """Return the two learned positions beside each place [N] on an axis of this size, and their
    shares, both [N, 2]."""
    source = index * (side - 1) / max(size - 1, 1)
    floor = source.floor()
    upper = source - floor
    taps = torch.stack((floor, floor + 1), dim=1).long().clamp(max=side - 1)
    return taps, torch.stack((1 - upper, upper), dim=1)


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
