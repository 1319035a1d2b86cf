"""The configurations of vision towers, one class per kind of tower, and of how images are
represented in prompts. `make_tower` selects the tower by the class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batchgen.engine.vision.image_span import ImageRules


class Colours(NamedTuple):
    """The normalisation of red, green and blue values in [0, 1]: the mean that is subtracted and
    the standard deviation that divides the result."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


HALVES = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
"""Maps [0, 1] to [-1, 1]."""
CLIP = Colours((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""The mean and standard deviation of the images on which CLIP was trained (Radford et al. 2021)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """The settings that all vision towers have, and how their images are represented in prompts."""

    rules: ImageRules
    patch_size: int  # the side of a patch, in pixels
    temporal_size: int = 1  # how many frames a patch spans; those of an image are copies
    merge_size: int  # the side of a token's square, in patches
    depth: int  # the number of blocks
    width: int  # the hidden size of the tower
    num_heads: int
    mlp_size: int
    out_size: int  # the hidden size of the decoder
    # How many of the decoder's rotary frequencies rotate by a token's time, row and column. None:
    # image tokens are rotated by their index, like text tokens.
    mrope_sections: tuple[int, int, int] | None = None
    mrope_interleaved: bool = True  # whether the three kinds alternate, or follow one another
    colours: Colours = HALVES

    @property
    def head_dim(self) -> int:
        """The size of a head of the tower's attention."""
        return self.width // self.num_heads

    @property
    def patch_values(self) -> int:
        """The number of values of a patch, over all its frames and colours."""
        return 3 * self.temporal_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepstackConfig(VisionConfig):
    """The configuration of a `DeepstackTower` (Qwen3-VL)."""

    rope_theta: float
    table_side: int  # the side of the square grid of learned positions
    # Blocks of the tower. The features after the i-th of them are added to the output of layer i of
    # the decoder (DeepStack, Meng et al. 2024). Empty in most models.
    deepstack: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedConfig(VisionConfig):
    """The configuration of a `WindowedTower` (Qwen2.5-VL)."""

    rope_theta: float
    window_side: int  # the side of an attention window, in tokens
    full_blocks: tuple[int, ...]  # the blocks in which a patch sees its whole image


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialConfig(VisionConfig):
    """The configuration of an `AxialTower` (Gemma 4). Images have as many tokens as a budget
    allows."""

    rope_theta: float
    values_per_head: int  # the size of a head
    table_size: int  # the number of learned positions, for rows and for columns each
    norm_eps: float
    clips: bool  # whether the linear layers of blocks clamp their inputs and outputs
    standardises: bool  # whether features are shifted and scaled by values of the checkpoint

    @property
    def head_dim(self) -> int:
        return self.values_per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareConfig(VisionConfig):
    """The configuration of a `SquareTower` (Gemma 3), for images of one size."""

    grid_side: int  # the side of an image, in patches
