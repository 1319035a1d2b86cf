"""The configuration of a model's vision part: its tower, and how its images stand among tokens."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.engine.vision.image_span import ImageRules


@dataclass(frozen=True, slots=True, kw_only=True)
class VisionConfig:
    """A vision tower of Qwen3-VL's form, and the token ids and positions of its images."""

    rules: ImageRules
    patch_size: int  # pixels of a patch's side
    temporal_size: int  # how many frames a patch spans; an image's are all alike
    merge_size: int  # patches of a token's side
    depth: int  # the number of blocks
    width: int  # values of a patch
    num_heads: int
    mlp_size: int
    out_size: int  # the hidden size of the decoder
    table_side: int  # the learned positions are a square of this side
    rope_theta: float
    # The blocks behind which features are taken that the first layers of the decoder add to what
    # they yield, one block for each layer (DeepStack, Meng et al. 2024). Empty in most models.
    deepstack: tuple[int, ...]
    # How many of the decoder's rotary frequencies turn by a token's time, row and column.
    mrope_sections: tuple[int, int, int]

    @property
    def patch_values(self) -> int:
        """The number of values of a patch, of all its frames and colours."""
        return 3 * self.temporal_size * self.patch_size**2
