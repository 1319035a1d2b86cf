"""Images of Gemma's models: sizes, pixels and prompts are those of transformers' processors."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image as Pillow
from transformers.models.gemma4.image_processing_pil_gemma4 import (
    Gemma4ImageProcessorPil,
    get_aspect_ratio_preserving_size,
)

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.models.gemma_towers import axial_tower
from batchgen.engine.vision.vision_config import AxialConfig
from batchgen.inputs.images.decode_image import decode_image, image_size
from batchgen.inputs.images.image_sizes import BudgetSizes, image_sizes
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
        ({"do_normalize": True}, "do_normalize=True; supported is False"),
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


@torch.inference_mode()
def test_a_job_answers_as_transformers_does(tmp_path: Path) -> None:
    """From a file to the tokens, by a chat template that writes one mark for an image."""
    model = save_gemma(tmp_path / "model")
    (tmp_path / "a.png").write_bytes(picture(96, 64))
    rows = written(tmp_path / "r.jsonl", [{"question": "Hi", "image": "a.png"}, {"question": "o"}])
    given = arguments(model, rows, tmp_path / "out", "output.columns=[prompt_token_ids]")
    assert run_real(given).exit_code == 0
    import pyarrow.parquet as pq

    (row, text) = pq.read_table(tmp_path / "out" / "data", partitioning=None).to_pylist()
    (said,) = row["prompt_images"]
    assert (said["width"], said["height"], said["tokens"]) == (80, 48, 60)
    assert IMAGE_ID not in text["prompt_token_ids"] and text["prompt_images"] == []
    ids = row["prompt_token_ids"]
    assert ids.count(IMAGE_ID) == 60 and ids[ids.index(IMAGE_ID) - 1] == 259
    assert ids[ids.index(IMAGE_ID) + 60] == 260
    theirs = transformers.AutoModelForImageTextToText.from_pretrained(model, dtype=torch.float32)
    says: dict[str, Any] = {"patch_size": 4, "pooling_kernel_size": 2, "max_soft_tokens": 70}
    image: Pillow.Image = Pillow.open(tmp_path / "a.png")
    inputs = Gemma4ImageProcessorPil(**says)(images=[image], return_tensors="pt")
    whole = torch.tensor([ids + row["token_ids"]])
    logits = theirs(
        input_ids=whole,
        mm_token_type_ids=(whole == IMAGE_ID).int(),
        pixel_values=inputs["pixel_values"],
        image_position_ids=inputs["image_position_ids"],
    ).logits[0, len(ids) - 1 : -1]
    logits[:, 259:263] = -torch.inf
    assert logits.argmax(-1).tolist() == row["token_ids"]


def test_a_text_that_writes_a_mark_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(picture(96, 64))
    rows = written(tmp_path / "r.jsonl", [{"question": "<|image_pad|>", "image": "a"}])
    given = arguments(save_gemma(tmp_path / "model"), rows, tmp_path / "out")
    parts = opened(given, DecodingEngine(side=8))
    (row,) = parts.source.rows()
    with pytest.raises(RequestError, match="has made 2 places for the row's 1 images"):
        parts.prompt.token_ids(row)
    assert run(given, DecodingEngine(side=8)).exit_code == 3
