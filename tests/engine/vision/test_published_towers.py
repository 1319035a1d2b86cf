"""The towers of published checkpoints, by the values of their config.json."""

from __future__ import annotations

import transformers

from batchgen.engine.models.gemma_towers import (
    axial_tower,
    is_of_gemma_tower,
    piece_beside_gemma_tower,
    square_tower,
)


def test_gemma_3() -> None:
    """4B, 12B and 27B have one tower."""
    tower = {
        "hidden_size": 1152, "image_size": 896, "intermediate_size": 4304, "patch_size": 14,
        "num_attention_heads": 16, "num_hidden_layers": 27, "vision_use_head": False,
    }  # fmt: skip
    config = transformers.Gemma3Config(text_config={"hidden_size": 2560}, vision_config=tower)
    found = square_tower(config)
    assert found.rules.num_tokens(896, 896) == 256 and found.head_dim == 72
    assert (found.grid_side, found.merge_size, found.out_size) == (64, 4, 2560)
    assert found.rules.never_sampled == (255999, 256000, 262144)


def test_gemma_4() -> None:
    """The sizes of E2B and E4B, and whose image tokens see each other."""
    for sees in (None, "vision"):
        text = {"use_bidirectional_attention": sees}
        found = axial_tower(transformers.Gemma4Config(text_config=text, vision_config={}))
        assert found.rules.pixels_per_token == 48 and found.rules.sees_whole == (sees is not None)
        assert (found.depth, found.width, found.head_dim) == (16, 768, 64)
        assert found.rules.never_sampled == (255999, 256000, *range(258880, 258885))


def test_names_of_tensors() -> None:
    names = {
        "vision_tower.vision_model.encoder.layers.3.mlp.fc1.bias": "encoder.layers.3.mlp.fc1.bias",
        "model.vision_tower.embeddings.patch_embedding.weight": "embeddings.patch_embedding.weight",
        "multi_modal_projector.mm_soft_emb_norm.weight": (
            "multi_modal_projector.mm_soft_emb_norm.weight"
        ),
        "model.vision_tower.encoder.layers.0.self_attn.q_proj.linear.weight": (
            "encoder.layers.0.self_attn.q_proj.weight"
        ),
        "model.vision_tower.encoder.layers.0.mlp.up_proj.input_max": (
            "encoder.layers.0.mlp.up_proj.input_max"
        ),
        "model.embed_vision.embedding_projection.weight": (
            "embed_vision.embedding_projection.weight"
        ),
    }
    for name, piece in names.items():
        assert is_of_gemma_tower(name)
        assert piece_beside_gemma_tower(name) == f"visual.{piece}"
    name = "model.language_model.layers.0.mlp.up_proj.weight"
    assert not is_of_gemma_tower(name) and not is_of_gemma_tower("model.embed_audio.weight")
    assert piece_beside_gemma_tower(name) == "model.layers.0.mlp.up_proj.weight"
