"""The vision tower and the positions of images against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.engine.loading.loader import load_model
from batchgen.engine.vision.image import Image
from batchgen.engine.vision.image_span import find_spans, rope_positions, rope_shift
from batchgen.engine.vision.vision_config import CLIP, HALVES, Colours
from batchgen.engine.vision.vision_positions import normalised_values, patches
from tests.support.engine.vision_models import (
    KINDS,
    RULES,
    SIDE,
    picture,
    picture_for,
    prompt,
    their_inputs,
    their_logits,
    theirs,
    vision_folder,
)

CPU = torch.device("cpu")
SIZES = [(2, 3), (1, 1), (5, 2)]
IMAGES = [picture(seed, *size) for seed, size in enumerate(SIZES)]


def pixels(number: int, kind: str = "") -> torch.Tensor:
    return torch.from_numpy(images_for(kind)[number].load())


def images_for(kind: str) -> list[Image]:
    return [picture_for(kind, seed, *size) for seed, size in enumerate(SIZES)]


@pytest.mark.parametrize(("kind", "colours"), [("qwen3_vl", HALVES), ("qwen2_5_vl", CLIP)])
def test_patches_have_the_bits_of_transformers_processor(kind: str, colours: Colours) -> None:
    values = normalised_values(colours)
    ours = torch.cat([patches(pixels(i), values, 4, 2, 2) for i in range(3)])
    assert torch.equal(ours, their_inputs([], IMAGES, kind)["pixel_values"])


def test_patches_of_gemma_have_the_bits_of_transformers_processor() -> None:
    """Their patches stand row by row and have the colours last; their model shifts the values."""
    theirs = iter(their_inputs([], IMAGES, "gemma4_small")["pixel_values"])
    for (height, width), padded in zip(SIZES, theirs, strict=True):
        found = 2 * (padded[: height * width * 4] - 0.5)
        squares = found.unflatten(0, (height, 2, width, 2)).transpose(1, 2).flatten(0, 3)
        expected = squares.unflatten(1, (-1, 3)).transpose(1, 2).flatten(1)
        own = patches(pixels(SIZES.index((height, width))), normalised_values(), 4, 2, 1)
        assert torch.equal(own, expected)


def their_features(kind: str) -> list[torch.Tensor]:
    """The planes of features of `IMAGES`."""
    inputs, model = their_inputs([], images_for(kind), kind), theirs(kind).model
    if kind == "gemma3":
        return [model.get_image_features(inputs["pixel_values"]).pooler_output.flatten(0, 1)]
    if kind.startswith("gemma"):
        places = [inputs[key] for key in ("image_position_ids",) if key in inputs]
        return [torch.cat(model.get_image_features(inputs["pixel_values"], *places).pooler_output)]
    found = model.visual(inputs["pixel_values"], grid_thw=inputs["image_grid_thw"])
    return [found.pooler_output, *(found.get("deepstack_features") or [])]


@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_features_equal_transformers(kind: str) -> None:
    model = load_model(vision_folder(kind), device=CPU, vision=True)
    model.pack()
    assert model.visual is not None
    ours = model.visual([pixels(i, kind) for i in range(3)])
    expected = their_features(kind)
    assert len(expected) == (3 if kind.startswith("qwen3_vl") else 1)
    torch.testing.assert_close(ours, torch.stack(expected), atol=2e-5, rtol=1e-5)
    alone = [model.visual([pixels(i, kind)]) for i in range(3)]
    assert torch.equal(torch.cat(alone, dim=1), ours)  # an image's bits are its own
    assert torch.equal(
        model.visual([pixels(2, kind), pixels(0, kind)]), torch.cat([alone[2], alone[0]], 1)
    )


def _features_on(device: torch.device, kind: str, dtype: torch.dtype) -> torch.Tensor:
    model = load_model(vision_folder(kind), device=device, dtype=dtype, vision=True)
    model.pack()
    assert model.visual is not None
    features: torch.Tensor = model.visual([pixels(i, kind).to(device) for i in range(3)])
    return features.cpu().float()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_features_on_a_gpu(kind: str) -> None:
    gpu = torch.device("cuda")
    expected = _features_on(CPU, kind, torch.float32)
    of_gpu = _features_on(gpu, kind, torch.float32)
    assert (of_gpu - expected).norm() < 1e-4 * expected.norm()
    # How far bfloat16 is from float32 depends on the model: 0.5% to 18%.
    most = 2 * (_features_on(CPU, kind, torch.bfloat16) - expected).norm()
    assert (_features_on(gpu, kind, torch.bfloat16) - expected).norm() < most


def test_positions_equal_transformers() -> None:
    ids = prompt([1, 2], IMAGES[0], [7, 8, 9], IMAGES[1], IMAGES[2], [10])
    inputs = their_inputs(ids, IMAGES)
    expected, delta = theirs("qwen3_vl").model.get_rope_index(
        inputs["input_ids"], inputs["mm_token_type_ids"], inputs["image_grid_thw"]
    )
    spans = find_spans(ids, IMAGES, RULES)
    assert rope_shift(spans) == int(delta)
    whole = rope_positions(spans, 0, len(ids))
    np.testing.assert_array_equal(whole.T, expected[:, 0].numpy())
    for start in range(len(ids)):
        for end in range(start, len(ids) + 1):
            np.testing.assert_array_equal(rope_positions(spans, start, end), whole[start:end])
    after = rope_positions(spans, len(ids), len(ids) + 2)
    np.testing.assert_array_equal(after[:, 0], np.arange(len(ids), len(ids) + 2) + int(delta))


@pytest.mark.parametrize("kind", ["qwen3_vl", "qwen2_5_vl", "qwen3_vl_moe"])
def test_without_the_tower_it_is_a_text_model(
    kind: str, run_paged: Callable[..., torch.Tensor]
) -> None:
    model = load_model(vision_folder(kind), device=CPU)
    assert model.skipped_parts == ("the vision tower",) and model.tower is None
    assert not any("visual" in name for name, _ in model.named_parameters())
    ids = [(7 * i * i + 3 * i) % 119 for i in range(40)]
    logits = run_paged(model, ids, [16, 16, 8])
    torch.testing.assert_close(logits, their_logits(kind, ids, []), atol=1e-4, rtol=1e-4)


def test_experts_of_published_checkpoints_are_the_other_way_round(tmp_path: Path) -> None:
    folder = copied(vision_folder("qwen3_vl_moe"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for name in [name for name in tensors if "mlp.experts." in name]:
        tensors[name] = tensors[name].transpose(1, 2).contiguous()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    ours = dict(load_model(folder, device=CPU).named_parameters())
    for name, parameter in load_model(vision_folder("qwen3_vl_moe"), device=CPU).named_parameters():
        assert torch.equal(parameter, ours[name]), name


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ("", "image_token_id", 128, "id 128 of images or videos is not in the vocabulary of 128"),
        ("vision_config", "out_hidden_size", 32, "tower is 32, and the decoder's hidden_size 64"),
        ("vision_config", "hidden_act", "gelu", "has hidden_act 'gelu'"),
        ("vision_config", "num_position_embeddings", 24, "is 24, and must be a square"),
        ("vision_config", "deepstack_visual_indexes", [2, 9], "2, 9.*, and must be ascending"),
        ("vision_config", "deepstack_visual_indexes", [0, 1, 2], "must have fewer than"),
        ("text_config", "rope_parameters", {"rope_type": "default", "rope_theta": 1e4}, "mrope"),
    ],
)
def test_towers_that_cannot_be_loaded(
    place: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    _load_without("qwen3_vl", place, key, value, message, tmp_path)


@pytest.mark.parametrize(
    ("place", "key", "value", "message"),
    [
        ("vision_config", "window_size", 20, "window_size is 20, .* multiple of the 8 pixels"),
        ("vision_config", "window_size", 4, "window_size is 4, .* multiple of the 8 pixels"),
        ("vision_config", "fullatt_block_indexes", [1, 7], "fullatt_block_indexes is .*ascending"),
        ("vision_config", "hidden_act", "gelu", "has hidden_act 'gelu'"),
        (
            "text_config",
            "rope_parameters",
            {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [3, 3, 3]},
            "must add up to 8",
        ),
    ],
)
def test_towers_with_windows_that_cannot_be_loaded(
    place: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    _load_without("qwen2_5_vl", place, key, value, message, tmp_path)


def _load_without(
    kind: str, place: str, key: str, value: Any, message: str, tmp_path: Path
) -> None:
    """The decoder loads without the tower, and says why there is none."""
    folder = copied(vision_folder(kind), tmp_path)
    values = json.loads((folder / "config.json").read_text())
    (values[place] if place else values)[key] = value
    (folder / "config.json").write_text(json.dumps(values))
    load_model(folder, device=CPU)
    with pytest.raises(ValueError, match=f"reads no images: .*{message}"):
        load_model(folder, device=CPU, vision=True)


def copied(folder: Path, into: Path) -> Path:
    shutil.copytree(folder, into / "model")
    return into / "model"


def test_prompts_that_do_not_fit_their_images() -> None:
    ids = prompt([1], IMAGES[0], [2])
    with pytest.raises(ValueError, match="has 6 image tokens, and its 2 images take 7"):
        find_spans(ids, IMAGES[:2], RULES)
    ids.insert(5, 9)
    with pytest.raises(ValueError, match="6 tokens of image 1 are not consecutive"):
        find_spans(ids, IMAGES[:1], RULES)
    assert IMAGES[0].width % (2 * SIDE)
