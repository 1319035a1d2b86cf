"""The pictures and problems of nano_vl, and the batch's way through transformers' modules."""

from __future__ import annotations

import itertools
import json
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
import torch
from nano_pictures import COLOURS, SHAPES, draw, held_out_problems, picture_problems
from nano_reading import Rows, encode, make_arrays
from nano_vl import IMAGE_ID, PROCESSOR, PictureModel, build_tokenizer

import batchgen

SMALL = {"hidden_size": 64, "layers": 3, "width": 32, "depth": 3, "seed": 0}


def test_problems_are_right_and_long_held_out_numbers_are_not_in_training() -> None:
    streams = [picture_problems("train", shape, "0") for shape in SHAPES]
    train = [each for stream in streams for each in itertools.islice(stream, 60)]
    held_out = held_out_problems(200, 0)
    seen = {p.digits for each in train for p in each.pictures if len(p.digits) > 2}
    assert not seen & {p.digits for each in held_out for p in each.pictures}
    assert {each.kind for each in held_out} == {"read", "colour", "sum", "larger", "add"}
    for each in [*train, *held_out]:
        numbers = [int(picture.digits) for picture in each.pictures]
        assert each.text.count("\0") == len(numbers)
        assert each.answer.endswith(f"Answer: {each.final}")
        if each.kind == "read":
            assert each.final == each.pictures[0].digits
        elif each.kind == "sum":
            assert int(each.final) == sum(numbers)
        elif each.kind == "larger":
            assert numbers["second" == each.final] > numbers["first" == each.final]
        elif each.kind == "colour":
            assert each.final in COLOURS and each.final in each.pictures[0].colours


def test_a_batch_is_computed_as_transformers_computes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Positions, tower, deepstack and the chat template, with two pictures of different sizes."""
    learner, tokenizer = PictureModel(Namespace(**SMALL)), build_tokenizer()
    learner.module.eval()
    problems = picture_problems("train", ((32, 64), (64, 96)), "1")
    rows = [*itertools.islice(problems, 3)]
    levels, *arrays = make_arrays(rows)
    batch = Rows([0 * levels, *arrays], torch.device("cpu"))[torch.arange(3)]
    with torch.inference_mode():
        logits = learner.logits(batch)
        for index, problem in enumerate(rows):
            texts = [{"type": "text", "text": text} for text in problem.text.split("\0")]
            parts: list[Any] = [texts[0], {"type": "image"}, texts[1], {"type": "image"}, texts[2]]
            messages: Any = [{"role": "user", "content": parts}]
            asked = tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=True
            )
            assert isinstance(asked, str)
            for size in ("2", "6"):
                asked = asked.replace("<|image_pad|>", "#" * int(size), 1)
            ids = tokenizer.encode(asked.replace("#", "<|image_pad|>"), add_special_tokens=False)
            assert ids == encode(problem)[0][: len(ids)] and len(ids) == batch.prompt_lens[index]
            grids = torch.tensor([[1, 2, 4], [1, 4, 6]])
            pixels = torch.cat([_patches(np.asarray(draw(p))) for p in problem.pictures])
            given = torch.tensor([ids])
            monkeypatch.setattr(
                learner.module.model.visual.config, "_attn_implementation_internal", "sdpa"
            )
            expected = learner.module(
                input_ids=given,
                pixel_values=pixels,
                image_grid_thw=grids,
                mm_token_type_ids=(given == IMAGE_ID).int(),
            ).logits[0]
            assert torch.allclose(logits[index, : len(ids)], expected, atol=2e-5)


def _patches(pixels: npt.NDArray[np.uint8]) -> torch.Tensor:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import (
        Qwen2VLImageProcessorPil,
    )

    processor = Qwen2VLImageProcessorPil(
        patch_size=16,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        size={"shortest_edge": 1024, "longest_edge": 65536},
    )
    patches: torch.Tensor = processor(images=[pixels], return_tensors="pt")["pixel_values"]
    return patches


def test_what_is_shipped_is_what_the_tool_makes() -> None:
    """Its configuration and problems; pictures may differ where Pillow draws otherwise."""
    folder = Path(batchgen.__file__).parent / "data" / "nano_vl"
    told = json.loads((folder / "training.json").read_text())
    learner = PictureModel(Namespace(**told["arguments"]))
    assert learner.config == json.loads((folder / "config.json").read_text())
    assert json.loads((folder / "preprocessor_config.json").read_text()) == PROCESSOR
    parameters = sum(p.numel() for p in learner.module.parameters())
    assert 3e6 < parameters < 4e6
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12e6
    rows = pq.read_table(folder / "eval.parquet").to_pylist()
    for row, problem in zip(rows, held_out_problems(500, 0), strict=True):
        expected = (problem.kind, problem.question, problem.answer, problem.final)
        assert (row["kind"], row["question"], row["answer"], row["final"]) == expected
        assert [each["bytes"][:4] for each in row["images"]] == [b"\x89PNG"] * len(problem.pictures)
