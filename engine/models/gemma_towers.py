"""Reads the configurations of Gemma's vision towers, and translates the names of their tensors.

Gemma 3's tower takes square images of one size, and Gemma 4's images of any aspect ratio, with
positions on two axes. `with_tower` calls `square_tower` and `axial_tower`.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING

from batchgen.engine.models.model_config import check_positive
from batchgen.engine.models.vision_part import piece_beside_tower, tower_theta
from batchgen.engine.vision.image_span import ImageRules
from batchgen.engine.vision.vision_config import AxialConfig, SquareConfig

if TYPE_CHECKING:
    from transformers import PretrainedConfig

_TOWER = re.compile(r"(model\.)?vision_tower\.(vision_model\.)?(?=\w)")
_EMBEDDER = re.compile(r"(model\.)?(?=(embed_vision|multi_modal_projector)\.)")
_SQUARE_EPS = 1e-6


def axial_tower(hf: PretrainedConfig) -> AxialConfig:
    """Read the configuration of Gemma 4's tower. Raises ValueError if it is not supported."""
    tower = _tower(hf)
    check_positive(
        patch_size=tower.patch_size,
        pooling_kernel_size=tower.pooling_kernel_size,
        vision_num_hidden_layers=tower.num_hidden_layers,
        vision_hidden_size=tower.hidden_size,
        vision_num_attention_heads=tower.num_attention_heads,
        vision_head_dim=tower.head_dim,
        vision_intermediate_size=tower.intermediate_size,
        position_embedding_size=tower.position_embedding_size,
    )
    if tower.hidden_activation != "gelu_pytorch_tanh" or tower.attention_bias:
        raise ValueError(
            f"the vision tower has hidden_activation {tower.hidden_activation!r:.60} and "
            f"attention_bias {tower.attention_bias!r:.60}; supported are 'gelu_pytorch_tanh' and "
            "false"
        )
    if tower.num_key_value_heads != tower.num_attention_heads or tower.head_dim % 4:
        raise ValueError(
            f"the vision tower has {tower.num_attention_heads} heads of {tower.head_dim} values "
            f"and {tower.num_key_value_heads} of keys: their numbers must be equal, and the values "
            "a multiple of 4"
        )
    if (kind := (tower.rope_parameters or {}).get("rope_type", "axial")) != "axial":
        raise ValueError(f"the vision tower's rope_type is {kind!r:.60}, and must be 'axial'")
    others = (hf.video_token_id, hf.audio_token_id, hf.boa_token_id, hf.eoa_token_index)
    vocabulary = range(hf.text_config.vocab_size)
    rules = ImageRules(
        hf.image_token_id,
        hf.boi_token_id,
        hf.eoi_token_id,
        tower.patch_size * tower.pooling_kernel_size,
        other_ids=tuple(each for each in others if each in vocabulary),
        mark_id=hf.image_token_id,
        has_axes=False,
        sees_whole=hf.text_config.use_bidirectional_attention == "vision",
    )
    return AxialConfig(
        rules=rules,
        patch_size=tower.patch_size,
        merge_size=tower.pooling_kernel_size,
        depth=tower.num_hidden_layers,
        width=tower.hidden_size,
        num_heads=tower.num_attention_heads,
        values_per_head=tower.head_dim,
        mlp_size=tower.intermediate_size,
        out_size=hf.text_config.hidden_size,
        rope_theta=tower_theta(tower.rope_parameters),
        table_size=tower.position_embedding_size,
        norm_eps=tower.rms_norm_eps,
        clips=bool(tower.use_clipped_linears),
        standardises=bool(tower.standardize),
    )


def square_tower(hf: PretrainedConfig) -> SquareConfig:
    """Read the configuration of Gemma 3's tower. Raises ValueError if it is not supported."""
    tower, tokens = _tower(hf), hf.mm_tokens_per_image
    sizes = {
        "image_size": tower.image_size,
        "patch_size": tower.patch_size,
        "vision_num_hidden_layers": tower.num_hidden_layers,
        "vision_hidden_size": tower.hidden_size,
        "vision_num_attention_heads": tower.num_attention_heads,
        "vision_intermediate_size": tower.intermediate_size,
        "mm_tokens_per_image": tokens,
    }
    check_positive(**sizes)
    supported = ("siglip_vision_model", "gelu_pytorch_tanh", 3, _SQUARE_EPS, False)
    keys = ("model_type", "hidden_act", "num_channels", "layer_norm_eps", "vision_use_head")
    for key, expected in zip(keys, supported, strict=True):
        if (value := getattr(tower, key, expected)) != expected:
            raise ValueError(f"the vision tower's {key} is {value!r:.60}, and must be {expected!r}")
    grid, rest = divmod(tower.image_size, tower.patch_size)
    side = math.isqrt(tokens)
    if rest or side**2 != tokens or grid % side or tower.hidden_size % tower.num_attention_heads:
        raise ValueError(
            f"an image of {tower.image_size} pixels a side cannot be cut into patches of "
            f"{tower.patch_size} pixels and {tokens} tokens, or {tower.hidden_size} values into "
            f"{tower.num_attention_heads} heads"
        )
    rules = ImageRules(
        hf.image_token_id,
        hf.boi_token_id,
        hf.eoi_token_id,
        tower.image_size // side,
        mark_id=hf.boi_token_id,
        margin="\n\n",
        image_side=tower.image_size,
        has_axes=False,
        sees_whole=True,
    )
    return SquareConfig(
        rules=rules,
        patch_size=tower.patch_size,
        merge_size=grid // side,
        depth=tower.num_hidden_layers,
        width=tower.hidden_size,
        num_heads=tower.num_attention_heads,
        mlp_size=tower.intermediate_size,
        out_size=hf.text_config.hidden_size,
        grid_side=grid,
    )


def _tower(hf: PretrainedConfig) -> PretrainedConfig:
    """Return the tower's part of a configuration. Raises ValueError if there is none."""
    if hf.vision_config is None:
        raise ValueError("config.json has no vision_config")
    tower: PretrainedConfig = hf.vision_config
    return tower


def is_of_gemma_tower(name: str) -> bool:
    """Return whether a checkpoint's tensor belongs to the vision tower or to the projection after
    it."""
    return _TOWER.match(name) is not None or _EMBEDDER.match(name) is not None


def piece_beside_gemma_tower(name: str) -> str:
    """Translate a tensor name of a checkpoint with a vision tower to that of weight slots, by
    removing the prefixes of decoder and tower."""
    if not is_of_gemma_tower(name):
        return piece_beside_tower(name)
    inside = _EMBEDDER.sub("visual.", _TOWER.sub("visual.", name, count=1), count=1)
    return inside.replace(".linear.weight", ".weight")
