"""Train nano_vl: a few million parameters in Qwen3-VL's form that read drawn numbers.

    python scripts/nano/train_nano_vl.py --out OUT --minutes 8
    python scripts/nano/train_nano_vl.py --out OUT --minutes 8 --start OUT
    python scripts/nano/train_nano_vl.py --eval-set OUT

It needs torch, transformers, Pillow and numpy. What is written is a model folder in HuggingFace's
layout and training.json, which says what was run and how many held-out problems have right answers.
An answer counts as right if each of its tokens is the likeliest behind those before it, which is
the case exactly if greedy decoding gives that answer. The folder is written at each evaluation, so
that a run that is cut short leaves a model, with which --start goes on. --eval-set writes the
held-out problems with their pictures as eval.parquet, for which it needs pyarrow.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from nano_pictures import (
    MOST_DIGITS,
    PAIRS,
    SHAPES,
    SINGLES,
    PictureProblem,
    Size,
    draw,
    held_out_problems,
    picture_problems,
    png,
)
from nano_vl import (
    PROCESSOR,
    PictureBatch,
    PictureModel,
    answer_targets,
    build_tokenizer,
    encode,
    stack,
)
from safetensors.torch import load_file, save_file
from torch import Tensor

LENGTH = 144
"""Tokens of a row: room for the longest prompt and its answer."""
WARMUP_STEPS = 200
CHUNK = 250
NOISE = 6.0
"""The standard deviation of the noise of training pictures, of 255."""
LEARNT = 0.7
"""How many of the rows must be right before longer numbers come."""
LONGEST_STAGE = 0.04
"""The share of the time after which they come in any case."""
FIRST_FRESH = 10**6
"""The number of the first chunk that is drawn while a model is trained."""
WEIGHTS = {0: 0.1, 1: 0.55, 2: 0.35}
"""How often a batch has rows with so many pictures."""


class Rows:
    """Rows of one shape on a device, those with short numbers first."""

    def __init__(self, parts: Sequence[Any], levels: Sequence[int], device: torch.device) -> None:
        order = np.argsort(levels, kind="stable")
        kept = [torch.from_numpy(part[order]).to(device) for part in parts]
        self._ids, self._positions, self._prompts, self._lens = kept[:4]
        self._pixels = kept[4:]
        self.width = int(self._lens.max())
        self.up_to = np.searchsorted(np.sort(levels), range(1, MOST_DIGITS + 1), side="right")

    def __getitem__(self, rows: Tensor) -> PictureBatch:
        return PictureBatch(
            self._ids[rows, : self.width].long(),
            self._positions[rows, :, : self.width].long().transpose(0, 1),
            self._prompts[rows].long(),
            self._lens[rows].long(),
            tuple(pixels[rows] for pixels in self._pixels),
        )

    def __len__(self) -> int:
        return len(self._ids)

    def replace(self, parts: Sequence[Any], start: int) -> None:
        """Put other rows in the place of those from `start` on, whatever levels they have."""
        kept = [self._ids, self._positions, self._prompts, self._lens, *self._pixels]
        for old, new in zip(kept, parts, strict=True):
            count = min(len(new), len(old) - start)
            old[start : start + count] = torch.from_numpy(new[:count]).to(old.device)
        self.width = max(self.width, int(self._lens.max()))


class FreshRows:
    """Draws further rows in all processes while a model is trained, so that it sees each seldom."""

    def __init__(self, seed: int) -> None:
        self._pool = ProcessPoolExecutor(_processes())
        self._seed, self._drawn = seed, 0
        self._random = Random(f"fresh {seed}")
        self._waiting: list[tuple[tuple[Size, ...], Future[Any]]] = []
        # Processes are forked at once, before CUDA is in use.
        list(self._pool.map(abs, range(_processes())))

    def put(self, rows: dict[tuple[Size, ...], Rows]) -> None:
        """Put what has been drawn in the place of other rows, and have more drawn."""
        done = [each for each in self._waiting if each[1].done()]
        self._waiting = [each for each in self._waiting if not each[1].done()]
        for shape, future in done:
            parts, _ = future.result()
            rows[shape].replace(parts, self._random.randrange(max(1, len(rows[shape]) - CHUNK)))
        weights = [_weight(shape) for shape in SHAPES]
        while len(self._waiting) < 2 * _processes():
            (shape,) = self._random.choices(SHAPES, weights)
            self._drawn += 1
            job = (shape, self._seed, FIRST_FRESH + self._drawn)
            self._waiting.append((shape, self._pool.submit(_training_part, job)))

    def close(self) -> None:
        """Stop the processes."""
        self._pool.shutdown(cancel_futures=True)


def make_parts(problems: Sequence[PictureProblem]) -> tuple[list[Any], list[int]]:
    """Encode problems of one shape and draw their pictures; returns arrays and levels."""
    arrays: list[Any] = list(stack([encode(each) for each in problems], LENGTH))
    for drawn in zip(*(each.pictures for each in problems), strict=True):
        arrays.append(np.stack([np.asarray(draw(picture)) for picture in drawn]))
    return arrays, [each.level for each in problems]


def _training_part(job: tuple[tuple[Size, ...], int, int]) -> tuple[list[Any], list[int]]:
    shape, seed, chunk = job
    return make_parts(
        [*itertools.islice(picture_problems("train", shape, f"{seed}.{chunk}"), CHUNK)]
    )


def training_parts(examples: int, seed: int) -> dict[tuple[Size, ...], tuple[Any, list[int]]]:
    """Draw the training problems on all cores: arrays and levels of each shape."""
    found = {}
    with ProcessPoolExecutor(_processes()) as pool:
        for shape in SHAPES:
            share = _weight(shape)
            jobs = [(shape, seed, chunk) for chunk in range(math.ceil(examples * share / CHUNK))]
            arrays, levels = zip(*pool.map(_training_part, jobs), strict=True)
            parts = [np.concatenate(each) for each in zip(*arrays, strict=True)]
            found[shape] = (parts, [*itertools.chain(*levels)])
    return found


def _processes() -> int:
    return len(os.sched_getaffinity(0))


def _weight(shape: tuple[Size, ...]) -> float:
    """How often a batch has this shape."""
    return WEIGHTS[len(shape)] / {0: 1, 1: len(SINGLES), 2: len(PAIRS)}[len(shape)]


class Exam:
    """Held-out problems, and how many of their answers a model gives."""

    def __init__(self, problems: Sequence[PictureProblem], device: torch.device) -> None:
        groups: dict[Any, list[PictureProblem]] = defaultdict(list)
        for problem in problems:
            groups[tuple(picture.size for picture in problem.pictures)].append(problem)
        self._groups = []
        for each in groups.values():
            parts, _ = make_parts(each)
            # Equal levels keep the problems in their order.
            self._groups.append((each, Rows(parts, [1] * len(each), device)))

    @torch.inference_mode()
    def grade(self, model: PictureModel) -> dict[str, Any]:
        """Count right answers, of all, of each kind and by the digits of what is read."""
        found: dict[str, list[bool]] = defaultdict(list)
        for problems, rows in self._groups:
            batch = rows[torch.arange(len(rows))]
            rights = right_rows(model.logits(batch), batch).tolist()
            for problem, right in zip(problems, rights, strict=True):
                found["all"].append(right)
                found[problem.kind].append(right)
                if problem.kind == "read":
                    found[f"read {problem.level}"].append(right)
        return {
            name: {"rows": len(each), "accuracy": round(sum(each) / len(each), 4)}
            for name, each in sorted(found.items())
        }


def right_rows(logits: Tensor, batch: PictureBatch) -> Tensor:
    """Tell for each row whether every token of its answer is the likeliest one, [B] bool."""
    targets = answer_targets(batch)
    return ((logits.argmax(-1) == targets) | (targets == -100)).all(1)


class Run:
    """One training run: its rows, its model, and the folder that it writes."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._start = args, time.perf_counter()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.model = PictureModel(args)
        if args.start:
            weights = load_file(args.start / "model.safetensors")
            self.model.module.load_state_dict(
                {name: weight.float() for name, weight in weights.items()}, strict=False
            )
        # Processes are forked before CUDA is in use.
        self._fresh = FreshRows(args.seed)
        rows = training_parts(args.examples, args.seed)
        self._say(f"{sum(len(levels) for _, levels in rows.values())} problems are drawn")
        self._rows = {shape: Rows(*each, self._device) for shape, each in rows.items()}
        self.model.module.to(self._device)
        self._exam = Exam(held_out_problems(args.eval_count, args.seed), self._device)
        size = sum(p.numel() for p in self.model.module.parameters())
        self._say(f"training on {self._device}, {size / 1e6:.2f} million parameters")

    def finish(self) -> None:
        """Train, measure the weights as the file holds them, and write the folder."""
        steps = self._fit()
        self._fresh.close()
        for parameter in self.model.module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        torch.set_float32_matmul_precision("highest")
        grades = self._exam.grade(self.model)
        self._save({"steps": steps, "held_out": grades})
        self._say(f"wrote {self._args.out}: {_in_short(grades)}")

    def _fit(self) -> int:
        """Train until the minutes or the steps are over; the learning rate falls to zero by then.

        Numbers are short at first. A digit is added when most rows are right, and in any case after
        a while. Then new rows take the place of old ones.
        """
        args, begin, last = self._args, self._seconds, self._seconds
        torch.set_float32_matmul_precision("high")
        generator = torch.Generator(self._device).manual_seed(args.seed)
        optimizer = _optimizer(self.model.module)
        random, shapes = Random(args.seed), [*SHAPES]
        weights = [_weight(shape) for shape in shapes]
        level = MOST_DIGITS if args.start else 1
        step, progress, right, losses = 0, 0.0, 0.0, 0.0
        while progress < 1:
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min((step + 1) / WARMUP_STEPS, cosine)
            (shape,) = random.choices(shapes, weights)
            loss, share = self._update(self._rows[shape], level, optimizer, generator)
            step += 1
            if step % 10 == 0:  # the device is asked seldom
                losses = loss.item() if step == 10 else 0.95 * losses + 0.05 * loss.item()
                right += 0.05 * (share.item() - right)
                if level == MOST_DIGITS:
                    self._fresh.put(self._rows)
                elif right > LEARNT or progress > LONGEST_STAGE * level:
                    level, right = level + 1, 0.3
            spent = (self._seconds - begin) / (60 * args.minutes - begin)
            progress = max(step / args.steps, spent)
            if self._seconds - last > args.eval_seconds and progress < 1:
                last = self._seconds
                grades = self._exam.grade(self.model)
                self._save({"steps": step, "held_out": grades})
                self._say(f"step {step} level {level} loss {losses:.3f} {_in_short(grades)}")
        return step

    def _update(
        self, rows: Rows, level: int, optimizer: torch.optim.Optimizer, generator: torch.Generator
    ) -> tuple[Tensor, Tensor]:
        many = max(int(rows.up_to[level - 1]), 1)
        size = (self._args.batch_size,)
        batch = rows[torch.randint(many, size, device=self._device, generator=generator)]
        batch = batch._replace(pixels=tuple(_noised(each, generator) for each in batch.pixels))
        with _autocast(self._device):
            logits = self.model.logits(batch)
        targets = answer_targets(batch)
        loss = F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.module.parameters(), 1.0)
        optimizer.step()
        return loss.detach(), right_rows(logits.detach(), batch).float().mean()

    def _save(self, training: dict[str, Any]) -> None:
        folder = self._args.out
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.model.module.state_dict().items()
            if name != "lm_head.weight"  # it is the embedding
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        build_tokenizer().save_pretrained(folder)
        paths = ("out", "start", "eval_set")
        kept = {name: value for name, value in vars(self._args).items() if name not in paths}
        contents = {
            "config": self.model.config,
            "preprocessor_config": PROCESSOR,
            "training": {"arguments": kept, **training},
        }
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _say(self, text: str) -> None:
        print(f"{self._seconds:4.0f} s  {text}", flush=True)


def _noised(pixels: Tensor, generator: torch.Generator) -> Tensor:
    noise = torch.randn(pixels.shape, device=pixels.device, generator=generator)
    return (pixels + NOISE * noise).round().clamp(0, 255).to(torch.uint8)


def _in_short(grades: dict[str, Any]) -> str:
    return "  ".join(f"{name} {found['accuracy']:.3f}" for name, found in grades.items())


def _optimizer(model: torch.nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def eval_rows(count: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the rows of eval.parquet: id, kind, images, question, answer, final."""
    for index, problem in enumerate(held_out_problems(count, seed)):
        files = [{"bytes": png(picture), "path": None} for picture in problem.pictures]
        yield {
            "id": f"{problem.kind}-{index}",
            "kind": problem.kind,
            "images": files,
            "question": problem.question,
            "answer": problem.answer,
            "final": problem.final,
        }


def write_eval_set(args: argparse.Namespace) -> None:
    """Write the held-out problems as eval.parquet."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    texts = [(name, pa.string()) for name in ("question", "answer", "final")]
    schema = pa.schema([("id", pa.string()), ("kind", pa.string()), ("images", pa.list_(image))])
    for name, kind in texts:
        schema = schema.append(pa.field(name, kind))
    table = pa.Table.from_pylist([*eval_rows(args.eval_count, args.seed)], schema)
    pq.write_table(table, args.eval_set / "eval.parquet", compression="zstd")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="the folder to write")
    parser.add_argument("--start", type=Path, help="a folder whose weights are trained on")
    parser.add_argument("--eval-set", type=Path, metavar="FOLDER", help="train nothing")
    parser.add_argument("--steps", type=int, default=100_000)
    parser.add_argument("--minutes", type=float, default=8.0, help="all but the last measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=300_000)
    parser.add_argument("--eval-count", type=int, default=500)
    parser.add_argument("--eval-seconds", type=float, default=40.0, help="between evaluations")
    parser.add_argument("--hidden-size", type=int, default=192, help="of the language model")
    parser.add_argument("--layers", type=int, default=4, help="of the language model")
    parser.add_argument("--width", type=int, default=128, help="of the vision tower")
    parser.add_argument("--depth", type=int, default=4, help="of the vision tower")
    args = parser.parse_args()
    if (args.out is None) == (args.eval_set is None):
        parser.error("give --out or --eval-set")
    if args.eval_set is not None:
        write_eval_set(args)
        return
    Run(args).finish()


if __name__ == "__main__":
    main()
