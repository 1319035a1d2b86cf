"""nano_vl: Qwen3-VL's modules of transformers learn to read drawn numbers, longer ones later."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nano_learning import Batch, Recipe, answer_loss, chat, pad
from nano_numbers import (
    MOST_DIGITS,
    PAIRS,
    PICTURE,
    SINGLES,
    PictureProblem,
    draw,
    picture_problems,
)
from torch import Tensor, nn
from transformers import AttentionInterface, Qwen3VLConfig, Qwen3VLForConditionalGeneration

VISION_START_ID, VISION_END_ID, IMAGE_ID = 259, 260, 261
PATCH, MERGE = 16, 2
FACTOR = PATCH * MERGE
"""Pixels of a token's side."""
LENGTH = 144
"""Tokens of a row: room for the longest prompt and its answer."""
NOISE = 6.0
"""The standard deviation of the noise of training pictures, of 255."""
STAGE = 0.04
"""The share of the run after which numbers have another digit."""


class PictureModel:
    """The model in training."""

    def __init__(self, contents: dict[str, Any]) -> None:
        # A name with "flash" gets the pictures of a batch at once; others get one after another.
        AttentionInterface.register("flash_by_picture", attention_by_picture)
        config = Qwen3VLConfig(**contents | {"dtype": "float32"})
        config._attn_implementation = "sdpa"
        self.module: Any = Qwen3VLForConditionalGeneration(config).float()
        self.module.model.visual.config._attn_implementation = "flash_by_picture"
        # Rows of the tables begin small, products with a variance of one over their inputs.
        tables = {"embed_tokens": 0.06, "pos_embed": 0.2}
        for name, weight in self.module.named_parameters():
            if weight.dim() > 1:
                std = tables.get(name.split(".")[-2], float(weight[0].numel() ** -0.5))
                nn.init.normal_(weight, std=std)

    def loss(self, batch: Batch) -> Tensor:
        """Compute nats per token of the answers; pictures get noise."""
        pixels = batch.patches
        if pixels is not None:
            noise = NOISE * torch.randn(pixels.shape, device=pixels.device)
            frame = ((pixels + noise) / 127.5 - 1).view(-1, 3, 1, PATCH**2)
            pixels = frame.expand(-1, -1, 2, -1).flatten(1)  # a picture is two equal frames
        logits = self.module(
            input_ids=batch.ids,
            pixel_values=pixels,
            image_grid_thw=batch.grids,
            mm_token_type_ids=(batch.ids == IMAGE_ID).int(),
            use_cache=False,
        ).logits
        return answer_loss(logits, batch)


def attention_by_picture(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    cu_seq_lens_q: Tensor,
    **unused: Any,
) -> tuple[Tensor, None]:
    """Attention [1, heads, patches, d] in which each picture's patches see each other alone."""
    lens = cu_seq_lens_q.diff()
    real = torch.arange(int(lens.max()), device=lens.device) < lens[:, None]  # [pictures, longest]

    def padded(states: Tensor) -> Tensor:
        rows = states.new_zeros(*real.shape, states.shape[1], states.shape[3])
        rows[real] = states[0].transpose(0, 1)
        return rows.transpose(1, 2)

    states = (padded(query), padded(key), padded(value))
    out = F.scaled_dot_product_attention(*states, real[:, None, None], scale=scaling)
    return out.transpose(1, 2)[real][None], None


def encode(problem: PictureProblem) -> tuple[list[int], int]:
    """Encode a problem with its answer; returns the tokens, and how many are the prompt."""
    first, *others = problem.text.split(PICTURE)
    content = [*first.encode()]
    for text, picture in zip(others, problem.pictures, strict=True):
        cells = picture.size[0] // FACTOR * (picture.size[1] // FACTOR)
        content += [VISION_START_ID, *[IMAGE_ID] * cells, VISION_END_ID, *text.encode()]
    return chat(content, problem.answer)


def cut(image: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Cut a picture [height, width, 3] into patches in the order of tokens: the four of a token are
    beside each other."""
    rows, cells = image.shape[0] // FACTOR, image.shape[1] // FACTOR
    split = image.reshape(rows, MERGE, PATCH, cells, MERGE, PATCH, 3)
    return split.transpose(0, 3, 1, 4, 6, 2, 5).reshape(-1, 3 * PATCH**2)


def collate(problems: Sequence[PictureProblem]) -> Batch:
    """Encode problems, and draw their pictures."""
    batch = pad([encode(each) for each in problems], LENGTH)
    images = [np.asarray(draw(picture)) for each in problems for picture in each.pictures]
    if not images:
        return batch
    grids = [(1, image.shape[0] // PATCH, image.shape[1] // PATCH) for image in images]
    patches = np.concatenate([cut(image) for image in images])
    return batch._replace(patches=torch.from_numpy(patches), grids=torch.tensor(grids))


def make_batch(seed: int, step: int, progress: float, rows: int) -> Batch:
    """Draw the rows of a step, of one shape; numbers are short at first."""
    random = Random(f"{seed}.{step}")
    (shapes,) = random.choices(([()], SINGLES, PAIRS), (0.1, 0.55, 0.35))
    stream = picture_problems("train", random.choice(shapes), f"{seed}.{step}")
    most = min(1 + int(progress / STAGE), MOST_DIGITS)
    return collate([*itertools.islice((each for each in stream if each.digits <= most), rows)])


RECIPE = Recipe(PictureModel, make_batch, steps=8100, batch_size=256, lr=1e-3)
