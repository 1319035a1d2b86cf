"""Checkpoints that say that the embedding and the layer for logits share a weight."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from tests.support.engine.edited_models import edit_config, edit_weights
from tests.support.engine.families import TEXT
from tests.support.engine.qwen_mtp import TheirHead

CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(40)]


def the_embedding(tensors: dict[str, Tensor]) -> str:
    ends = ("embed_tokens.weight", "embeddings.weight")
    (name,) = (name for name in tensors if name.endswith(ends))
    return name


def add_another_head(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors[the_embedding(tensors)].flip(0).contiguous()


def rename_embedding(tensors: dict[str, Tensor]) -> None:
    tensors["lm_head.weight"] = tensors.pop(the_embedding(tensors))


@pytest.mark.quick(4, thorough=10)
@pytest.mark.parametrize("change", [add_another_head, rename_embedding])
@pytest.mark.parametrize("kind", TEXT)
def test_logits_equal_transformers(
    kind: str,
    change: Callable[[dict[str, Tensor]], None],
    tiny_model: Callable[..., Path],
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
    tmp_path: Path,
) -> None:
    """Two weights that differ are both used, and one that is there under either name is shared."""
    folder = edit_weights(tiny_model(kind, tie_word_embeddings=True), tmp_path / "m", change)
    model = load_model(folder, device=CPU)
    assert model.config.untied == (change is add_another_head)
    assert model.lm_head is not None
    assert (model.lm_head.weight is model.model.embed_tokens.weight) != model.config.untied
    if kind == "nemotron_h" and change is rename_embedding:
        return  # transformers initialises the embedding of this class at random
    reference = reference_logits(folder, IDS)
    assert (run_paged(model, IDS, [40]) - reference).abs().max() / reference.abs().max() < 1e-3


@pytest.mark.parametrize("kind", ["sdar", "sdar_moe"])
def test_diffusion_models_use_both(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model(kind, tie_word_embeddings=True)
    model = load_model(edit_weights(source, tmp_path / "m", add_another_head), device=CPU)
    assert model.lm_head is not None
    assert torch.equal(model.lm_head.weight, model.model.embed_tokens.weight.flip(0))


def test_the_head_drafts_with_the_weights_that_the_model_uses(tmp_path: Path) -> None:
    folder = TheirHead("qwen3_5", tie_word_embeddings=True).save(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    add_another_head(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    model = load_model(folder, device=CPU, heads=("mtp",))
    states = torch.randn(3, model.hidden_size)
    torch.testing.assert_close(
        model.heads["mtp"].compute_logits(states), states @ tensors["lm_head.weight"].T
    )


@pytest.mark.parametrize("part", ["embed_tokens", "shared_head.head"])
def test_a_head_that_shares_nothing_is_refused(part: str, tmp_path: Path) -> None:
    """Without the head the model is as good as any."""
    folder = TheirHead("deepseek_v3").save(tmp_path / "m")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"model.layers.2.{part}.weight"] += 1
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=rf"m: model\.layers\.2\.{part}\.weight differs from"):
        load_model(folder, device=CPU, heads=("mtp",))
    load_model(folder, device=CPU)


def test_weights_are_not_looked_at_where_none_are_read(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    source = tiny_model("llama", tie_word_embeddings=True)
    folder = edit_weights(source, tmp_path / "m", add_another_head)
    assert not load_model_config(folder, "dummy").untied
    (folder / "model.safetensors").unlink()
    assert load_model_config(folder, "dummy").tie_word_embeddings


def test_a_folder_without_weights_has_a_configuration(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    folder = edit_config(tiny_model("llama", tie_word_embeddings=True), tmp_path / "m")
    config = load_model_config(folder)
    assert config.tie_word_embeddings and not config.untied
