"""The task of nano_vl: chats about drawn numbers, longer ones later, drawn while it learns."""

from __future__ import annotations

import functools
import itertools
import math
import os
from argparse import Namespace
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from nano_learning import Batch, Recipe, chat, pad, tally
from nano_pictures import (
    MOST_DIGITS,
    PAIRS,
    SHAPES,
    SINGLES,
    PictureProblem,
    Shape,
    Size,
    draw,
    held_out_problems,
    picture_problems,
    png,
)
from nano_vl import (
    FACTOR,
    IMAGE_ID,
    VISION_END_ID,
    VISION_START_ID,
    PictureModel,
    build_tokenizer,
    right_rows,
)
from torch import Tensor

LENGTH = 144
"""Tokens of a row: room for the longest prompt and its answer."""
CHUNK = 250
"""Problems that a process draws at a time."""
LEARNT = 0.7
"""The share of right rows at which longer numbers come."""
LONGEST_STAGE = 0.04
"""The share of the time after which they come in any case."""
FIRST_FRESH = 10**6
"""The number of the first chunk that is drawn while a model is trained."""
WEIGHTS = {0: 0.1, 1: 0.55, 2: 0.35}
"""The share of batches whose rows have no picture, one, and two."""

Arrays = list[npt.NDArray[Any]]
"""Rows of one shape: levels, ids, prompt_lens, lens, positions [B, 3, N], and pixels by picture."""


def encode(problem: PictureProblem) -> tuple[list[int], int, npt.NDArray[np.int16]]:
    """Encode a problem with its answer: tokens, those of the prompt, rotary positions [3, N]."""
    content, spans = list[int](), list[tuple[int, Size]]()
    sizes = iter(picture.size for picture in problem.pictures)
    for index, text in enumerate(problem.text.split("\0")):
        if index:
            height, width = size = next(sizes)
            content.append(VISION_START_ID)
            spans.append((len(content), size))
            content += [IMAGE_ID] * (height // FACTOR * (width // FACTOR)) + [VISION_END_ID]
        content += text.encode()
    ids, prompt = chat(content, problem.answer)
    before = ids.index(10) + 1  # the content begins behind the line of the role
    spans = [(before + start, size) for start, size in spans]
    columns, done, position = [], 0, 0
    for start, (height, width) in [*spans, (len(ids), (0, 0))]:
        columns.append(np.arange(start - done) + [[position]] * 3)
        position += start - done
        rows, cells = height // FACTOR, width // FACTOR
        row, cell = np.divmod(np.arange(rows * cells), max(cells, 1))
        columns.append(np.stack([np.zeros_like(row), row, cell]) + position)
        position += max(rows, cells)
        done = start + rows * cells
    return ids, prompt, np.concatenate(columns, axis=1).astype(np.int16)


def make_arrays(problems: Sequence[PictureProblem]) -> Arrays:
    """Encode problems of one shape, and draw their pictures."""
    encoded = [encode(each) for each in problems]
    positions = np.zeros((len(problems), 3, LENGTH), np.int16)
    for row, (tokens, _, places) in enumerate(encoded):
        positions[row, :, : len(tokens)] = places
    pictures = zip(*(each.pictures for each in problems), strict=True)
    pixels = [np.stack([np.asarray(draw(picture)) for picture in drawn]) for drawn in pictures]
    chats = pad(((tokens, prompt) for tokens, prompt, _ in encoded), LENGTH)
    return [np.array([each.level for each in problems]), *chats, positions, *pixels]


def _chunk(shape: Shape, seed: int, number: int) -> Arrays:
    stream = picture_problems("train", shape, f"{seed}.{number}")
    return make_arrays([*itertools.islice(stream, CHUNK)])


class Rows:
    """Rows of one shape on a device, those with short numbers first."""

    def __init__(self, arrays: Arrays, device: torch.device) -> None:
        levels, order = arrays[0], np.argsort(arrays[0], kind="stable")
        self._parts = [torch.from_numpy(part[order]).to(device) for part in arrays[1:]]
        self._width = int(self._parts[2].max())
        self.up_to = np.searchsorted(np.sort(levels), range(1, MOST_DIGITS + 1), side="right")

    def __getitem__(self, rows: Tensor) -> Batch:
        ids, prompt_lens, lens, positions, *pixels = (part[rows] for part in self._parts)
        width = self._width
        return Batch(
            ids[:, :width].long(),
            prompt_lens.long(),
            lens.long(),
            positions[:, :, :width].long().transpose(0, 1),
            tuple(pixels),
        )

    def __len__(self) -> int:
        return len(self._parts[0])

    def replace(self, arrays: Arrays, random: Random) -> None:
        """Put other rows in the place of some, whatever levels they have."""
        start = random.randrange(max(1, len(self) - CHUNK))
        for old, new in zip(self._parts, arrays[1:], strict=True):
            count = min(len(new), len(old) - start)
            old[start : start + count] = torch.from_numpy(new[:count]).to(old.device)
        self._width = max(self._width, int(self._parts[2].max()))


class Reading:
    """Training rows that all processes draw, before and in training, and an exam.

    Numbers are short at first. A digit is added when most rows are right, and in any case after a
    while. Then new rows take the place of old ones, so that the model sees each seldom.
    """

    def __init__(self, args: Namespace, learner: PictureModel) -> None:
        self._args, self._learner = args, learner
        self._held_out = held_out_problems(args.eval_count, args.seed)
        self._level, self._right, self._fresh = MOST_DIGITS if args.start else 1, 0.0, FIRST_FRESH
        self._random, self._other = Random(args.seed), Random(f"fresh {args.seed}")
        self._weights = [
            WEIGHTS[len(shape)] / (1, len(SINGLES), len(PAIRS))[len(shape)] for shape in SHAPES
        ]
        self._waiting: list[tuple[Shape, Future[Arrays]]] = []
        self._exams: dict[int, list[tuple[list[PictureProblem], Batch]]] = {}
        self.tokenizer = build_tokenizer()

    def draw(self, device: torch.device) -> None:
        args, self._processes = self._args, len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(self._processes)
        found = {}
        for shape, weight in zip(SHAPES, self._weights, strict=True):
            chunks = range(math.ceil(args.examples * weight / CHUNK))
            drawn = self._pool.map(functools.partial(_chunk, shape, args.seed), chunks)
            found[shape] = [np.concatenate(each) for each in zip(*drawn, strict=True)]
        self._rows = {shape: Rows(arrays, device) for shape, arrays in found.items()}

    def batch(self, step: int, progress: float, generator: torch.Generator) -> Batch:
        if step % 10 == 0 and step:  # the device is asked seldom
            self._right += 0.05 * (self._learner.right.item() - self._right)
            if self._level == MOST_DIGITS:
                self._replace()
            elif self._right > LEARNT or progress > LONGEST_STAGE * self._level:
                self._level, self._right = self._level + 1, 0.3
        (shape,) = self._random.choices(SHAPES, self._weights)
        rows, size = self._rows[shape], (self._args.batch_size,)
        many = max(int(rows.up_to[self._level - 1]), 1)
        device = generator.device
        return rows[torch.randint(many, size, device=device, generator=generator)]

    def _replace(self) -> None:
        """Put what has been drawn in the place of other rows, and have more drawn."""
        done = [each for each in self._waiting if each[1].done()]
        self._waiting = [each for each in self._waiting if each not in done]
        for shape, future in done:
            self._rows[shape].replace(future.result(), self._other)
        while len(self._waiting) < 2 * self._processes:
            (shape,) = self._other.choices(SHAPES, self._weights)
            self._fresh += 1
            future = self._pool.submit(_chunk, shape, self._args.seed, self._fresh)
            self._waiting.append((shape, future))

    def grade(self, folder: Path, count: int) -> dict[str, dict[str, Any]]:
        """Count right answers of the model in memory: of all, of each kind, and by the digits of
        what is read. It gives an answer if each token is the likeliest behind those before it."""
        if count not in self._exams:
            self._exams[count] = [*self._exam(count)]
        found = defaultdict(list)
        for problems, batch in self._exams[count]:
            with torch.inference_mode():
                rights = right_rows(self._learner.logits(batch), batch).tolist()
            for problem, right in zip(problems, rights, strict=True):
                read = [f"read {problem.level}"] if problem.kind == "read" else []
                for group in ("all", problem.kind, *read):
                    found[group].append(right)
        return {name: tally(each) for name, each in sorted(found.items())}

    def _exam(self, count: int) -> Iterator[tuple[list[PictureProblem], Batch]]:
        """Draw the problems of each shape."""
        device = next(self._learner.module.parameters()).device
        groups = defaultdict(list)
        for problem in self._held_out[:count]:
            groups[problem.shape].append(problem)
        for problems in groups.values():
            # Equal levels keep the problems in their order.
            levels, *arrays = make_arrays(problems)
            rows = Rows([0 * levels, *arrays], device)
            yield problems, rows[torch.arange(len(problems))]

    def write_eval_set(self, folder: Path) -> None:
        import pyarrow as pa
        import pyarrow.parquet as pq

        image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
        texts = [(name, pa.string()) for name in ("id", "kind", "question", "answer", "final")]
        schema = pa.schema([*texts[:2], ("images", pa.list_(image)), *texts[2:]])
        table = pa.Table.from_pylist([*_eval_rows(self._held_out)], schema)
        pq.write_table(table, folder / "eval.parquet", compression="zstd")

    def close(self) -> None:
        self._pool.shutdown(cancel_futures=True)


def _eval_rows(problems: Sequence[PictureProblem]) -> Iterator[dict[str, Any]]:
    for index, problem in enumerate(problems):
        yield {
            "id": f"{problem.kind}-{index}",
            "kind": problem.kind,
            "images": [{"bytes": png(picture), "path": None} for picture in problem.pictures],
            "question": problem.question,
            "answer": problem.answer,
            "final": problem.final,
        }


RECIPES = {
    "nano_vl": Recipe(PictureModel, Reading, {
        "steps": 100_000, "minutes": 8.4, "batch_size": 256, "lr": 1e-3, "examples": 300_000,
        "eval_count": 500, "quick_count": 500, "eval_every": 700, "hidden_size": 192, "layers": 4,
        "width": 128, "depth": 4,
    }),
}  # fmt: skip
