"""Images of Gemma's models: sizes, pixels and prompts are those of transformers' processors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.models.gemma_towers import axial_tower, square_tower
from batchgen.engine.vision.vision_config import AxialConfig
from batchgen.inputs.images.decode_image import decode_image, image_size
from batchgen.inputs.images.image_sizes import BudgetSizes, FixedSizes, image_sizes
from batchgen.util.errors import ConfigError
from tests.support.jobs.gemma_job import save_gemma
from tests.support.jobs.image_job import IMAGE_ID, DecodingEngine, arguments, opened, picture, run
from tests.support.jobs.image_job import write_rows as written
from tests.support.jobs.real_job import run as run_real

SIDES = st.integers(1, 3000)


def vision(folder: Path) -> AxialConfig:
    return axial_tower(transformers.AutoConfig.from_pretrained(folder))


@given(SIDES, SIDES, st.sampled_from([70, 280, 1120]))
def test_sizes_by_a_budget_are_those_of_transformers(height: int, width: int, budget: int) -> None:
    rules = BudgetSizes(48, budget * 48**2, budget * 48**2)
    expected = get_aspect_ratio_preserving_size(height, width, 16, budget * 9, 3)
    assert rules.size(height, width) == expected
    assert 0 < rules.tokens(*expected) <= budget
    with pytest.raises(RequestError, match="at least 1"):
        rules.size(height, 0)


@pytest.mark.parametrize(("width", "height"), [(640, 480), (9, 1201), (33, 31)])
def test_pixels_by_a_budget_are_those_of_transformers(width: int, height: int) -> None:
    data = picture(width, height, seed=width)
    image: Pillow.Image = Pillow.open(io.BytesIO(data))
    processor = Gemma4ImageProcessorPil(max_soft_tokens=70)
    rules = BudgetSizes(48, 70 * 48**2, 70 * 48**2)
    own = decode_image(data, *rules.size(*image_size(data)), rules.resampling)
    theirs = processor(images=[image], return_tensors="np")
    only = processor(images=[own], do_resize=False, return_tensors="np")
    assert rules.tokens(*own.shape[:2]) == theirs["num_soft_tokens_per_image"][0]
    assert np.array_equal(only["pixel_values"], theirs["pixel_values"])


@pytest.mark.parametrize(
    ("says", "why"),
    [
        ({"do_normalize": True}, "do_normalize=True; supported: False"),
        ({"resample": 2}, "resample=2"),
        ({"max_soft_tokens": 100}, "supported are 70, 140"),
        ({"pooling_kernel_size": 3}, "tokens of 8 pixels"),
        ({"max_soft_tokens": 280}, "position_embedding_size=300, .* 560 patches"),
    ],
)
def test_a_processor_of_another_kind_is_refused(
    says: dict[str, Any], why: str, tmp_path: Path
) -> None:
    save_gemma(tmp_path, **says)
    with pytest.raises(ConfigError, match=why):
        image_sizes(tmp_path, vision(tmp_path), None)


def test_a_job_chooses_a_budget_of_the_model(tmp_path: Path) -> None:
    tower = vision(save_gemma(tmp_path))
    assert image_sizes(tmp_path, tower, None).max_pixels == 70 * 64
    assert image_sizes(tmp_path, tower, 200 * 64).max_pixels == 140 * 64
    with pytest.raises(ConfigError, match="smallest budget of this model, 70 tokens"):
        image_sizes(tmp_path, tower, 69 * 64)


@given(SIDES, SIDES)
def test_images_of_one_size(height: int, width: int) -> None:
    rules = FixedSizes(56, 896**2, 896**2)
    assert rules.size(height, width) == (896, 896) and rules.tokens(896, 896) == 256
    with pytest.raises(RequestError, match="at least 1"):
        rules.size(0, width)


def test_pixels_of_one_size_are_those_of_transformers() -> None:
    data = picture(97, 1201)
    image: Pillow.Image = Pillow.open(io.BytesIO(data))
    processor = Gemma3ImageProcessorPil(size={"height": 56, "width": 56})
    own = decode_image(data, 56, 56, FixedSizes(28, 56**2, 56**2).resampling)
    theirs = processor(images=[image], return_tensors="np")
    only = processor(images=[own], do_resize=False, return_tensors="np")
    assert np.array_equal(only["pixel_values"], theirs["pixel_values"])


@pytest.mark.parametrize(
    ("says", "max_pixels", "why"),
    [
        ({"do_pan_and_scan": True}, None, "do_pan_and_scan=true, .* set it to false"),
        ({"resample": 3}, None, "resample=3; supported: 2"),
        ({"size": {"height": 28, "width": 28}}, None, "size=.*28"),
        ({"image_mean": [0.0] * 3}, None, "image_mean"),
        ({}, 4096, r"prompt\.max_pixels: all images have 32×32 pixels"),
    ],
)
def test_a_processor_of_squares_of_another_kind_is_refused(
    says: dict[str, Any], max_pixels: int | None, why: str, tmp_path: Path
) -> None:
    save_gemma(tmp_path, "gemma3", **says)
    tower = square_tower(transformers.AutoConfig.from_pretrained(tmp_path))
    with pytest.raises(ConfigError, match=why):
        image_sizes(tmp_path, tower, max_pixels)


@pytest.mark.parametrize(
    ("key", "value", "why"),
    [
        ("vision_use_head", True, "vision_use_head is True, and must be False"),
        ("layer_norm_eps", 1e-5, "layer_norm_eps is 1e-05"),
        ("image_size", 33, "image of 33 pixels a side cannot be cut"),
        ("hidden_act", "gelu", "hidden_act is 'gelu'"),
    ],
)
def test_towers_of_squares_that_are_not_supported(
    key: str, value: Any, why: str, tmp_path: Path
) -> None:
    config = transformers.AutoConfig.from_pretrained(save_gemma(tmp_path, "gemma3"))
    setattr(config.vision_config, key, value)
    with pytest.raises(ValueError, match=why):
        square_tower(config)


OURS = {"gemma4": (80, 48, 60), "gemma3": (32, 32, 16)}
"""Width, height and tokens of the image of the next test."""


@pytest.mark.parametrize("kind", OURS)
@torch.inference_mode()
def test_a_job_answers_as_transformers_does(kind: str, tmp_path: Path) -> None:
    """From a file to the tokens, by a chat template that writes one mark for an image."""
    model = save_gemma(tmp_path / "model", kind)
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    rows = written(tmp_path / "r.jsonl", [{"question": "Hi", "image": "a.png"}, {"question": "o"}])
    given = arguments(model, rows, tmp_path / "out", "output.columns=[prompt_token_ids]")
    assert run_real(given).exit_code == 0
    (row, text) = pq.read_table(tmp_path / "out" / "data", partitioning=None).to_pylist()
    (said,) = row["prompt_images"]
    assert (said["width"], said["height"], said["tokens"]) == OURS[kind]
    assert IMAGE_ID not in text["prompt_token_ids"] and text["prompt_images"] == []
    ids, count = row["prompt_token_ids"], OURS[kind][2]
    start = ids.index(IMAGE_ID)
    assert ids[start : start + count] == [IMAGE_ID] * count == [x for x in ids if x == IMAGE_ID]
    margin = [10, 10] if kind == "gemma3" else []
    before, behind = [*margin, 259], [260, *margin]
    assert ids[start - len(before) : start] == before
    assert ids[start + count :][: len(behind)] == behind
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    whole = torch.tensor([ids + row["token_ids"]])
    image: Pillow.Image = Pillow.open(tmp_path / "a.png")
    marks = (whole == IMAGE_ID).int()
    if kind == "gemma3":
        halves: dict[str, Any] = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3}
        squares = Gemma3ImageProcessorPil(size={"height": 32, "width": 32}, **halves)
        found = squares(images=[image], return_tensors="pt")
        inputs = {"pixel_values": found["pixel_values"], "token_type_ids": marks}
    else:
        says: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
        found = Gemma4ImageProcessorPil(**says)(images=[image], return_tensors="pt")
        inputs = {key: found[key] for key in ("pixel_values", "image_position_ids")}
        inputs["mm_token_type_ids"] = marks
    logits = theirs(input_ids=whole, **inputs).logits[0, len(ids) - 1 : -1]
    logits[:, 259:262] = -torch.inf
    if kind == "gemma4":
        logits[:, 262] = -torch.inf
    assert logits.argmax(-1).tolist() == row["token_ids"]


def test_a_text_that_writes_a_mark_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(picture(96, 64))
    rows = written(tmp_path / "r.jsonl", [{"question": "<|image_pad|>", "image": "a"}])
    given = arguments(save_gemma(tmp_path / "model"), rows, tmp_path / "out")
    parts = opened(given, DecodingEngine(side=8))
    (row,) = parts.source.rows()
    with pytest.raises(RequestError, match="wrote 2 image placeholders for the row's 1 images"):
        parts.prompt.token_ids(row)
    assert run(given, DecodingEngine(side=8)).exit_code == 3
