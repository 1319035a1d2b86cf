"""The configurations of vision parts: a tower, and how a model's images stand among tokens."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from batchgen.engine.vision.image_span import ImageRules


class Colours(NamedTuple):
    """What is subtracted from the shares of red, green and blue, and what divides the rest."""

    mean: tuple[float, float, float]
    std: tuple[float, float, float]


HALVES = Colours((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
CLIP = Colours((0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711))
"""The mean and the deviation of the pictures that CLIP was trained with (Radford et al. 2021)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """What all vision towers have, and the token ids and positions of their images."""

    rules: ImageRules
    patch_size: int  # pixels of a patch's side
    temporal_size: int = 1  # how many frames a patch spans; an image's are all alike
    merge_size: int  # patches of a token's side
    depth: int  # the number of blocks
    width: int  # values of a patch
    num_heads: int
    mlp_size: int
    out_size: int  # the hidden size of the decoder
    # How many of the decoder's rotary frequencies turn by a token's time, row and column, which
    # take turns or follow each other. None: tokens of images turn by their positions, as others do.
    mrope_sections: tuple[int, int, int] | None = None
    mrope_interleaved: bool = True
    colours: Colours = HALVES

    @property
    def head_dim(self) -> int:
        """The number of values of a head of the tower's attention."""
        return self.width // self.num_heads

    @property
    def patch_values(self) -> int:
        """The number of values of a patch, of all its frames and colours."""
        return 3 * self.temporal_size * self.patch_size**2


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepstackConfig(VisionConfig):
    """A vision tower of Qwen3-VL's form."""

    rope_theta: float
    table_side: int  # the learned positions are a square of this side
    # The blocks behind which features are taken that the first layers of the decoder add to what
    # they yield, one block for each layer (DeepStack, Meng et al. 2024). Empty in most models.
    deepstack: tuple[int, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class WindowedConfig(VisionConfig):
    """A vision tower of Qwen2.5-VL's form."""

    rope_theta: float
    window_side: int  # tokens of the side of a window, in which patches see each other
    full_blocks: tuple[int, ...]  # the blocks in which a patch sees all of its image


@dataclass(frozen=True, slots=True, kw_only=True)
class AxialConfig(VisionConfig):
    """A vision tower of Gemma 4's form. Images have as many tokens as a budget allows."""

    rope_theta: float
    values_per_head: int
    table_size: int  # the learned positions of rows, and as many of columns
    norm_eps: float
    clips: bool  # the products of blocks have bounds for what they read and for what they yield
    standardises: bool  # features are shifted and scaled by values of the checkpoint

    @property
    def head_dim(self) -> int:
        return self.values_per_head


@dataclass(frozen=True, slots=True, kw_only=True)
class SquareConfig(VisionConfig):
    """A vision tower of Gemma 3's form, for images of one size."""

    grid_side: int  # patches of an image's side
