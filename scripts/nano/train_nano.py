"""Train one of the small models that batchgen ships: arithmetic in text, or numbers in pictures.

    python scripts/nano/train_nano.py nano_sdar --out OUT
    python scripts/nano/train_nano.py nano_vl --out OUT --minutes 30
    python scripts/nano/train_nano.py nano_vl --out OUT --minutes 8 --start OUT
    python scripts/nano/train_nano.py nano_hybrid --measure batchgen/data/nano_hybrid
    python scripts/nano/train_nano.py nano_vl --eval-set FOLDER

What is written is a model folder in HuggingFace's layout and training.json, which says what was run
and how many held-out problems have right answers. The folder is written at each evaluation, so that
a run that is cut short leaves a model, with which --start goes on. A model's options begin as it
was shipped; --minutes hold for all but the last exam, and the learning rate falls to zero by then.
--measure grades a folder; --eval-set writes the held-out problems. A seed trains on the same first
problems; sums on a GPU may differ in their last bits. nano_vl needs torch, transformers, Pillow and
numpy (--eval-set also pyarrow); the others answer in exams with batchgen's engine.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from nano_learning import Recipe
from safetensors.torch import load_file, save_file
from torch import Tensor

WARMUP_STEPS = 200
MODELS = {"nano_sdar": "nano_sums", "nano_hybrid": "nano_sums", "nano_vl": "nano_reading"}
"""The module of each model's recipe; only nano_vl's trains without batchgen's requirements."""


def find_recipe(model: str) -> Recipe:
    """Return how a model is made."""
    recipe: Recipe = importlib.import_module(MODELS[model]).RECIPES[model]
    return recipe


class Run:
    """A model with its task: one training run, or an exam."""

    def __init__(self, args: argparse.Namespace) -> None:
        self._args, self._start = args, time.perf_counter()
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        recipe = find_recipe(args.model)
        self.learner = recipe.learner(args)
        self.task = recipe.task(args, self.learner)
        if folder := args.start or args.measure:
            weights = load_file(folder / "model.safetensors")
            weights = {name: weight.float() for name, weight in weights.items()}
            unset = self.learner.module.load_state_dict(weights, strict=False).missing_keys
            assert unset in ([], ["lm_head.weight"]), unset  # it is the embedding

    def measure(self) -> dict[str, Any]:
        """Grade the weights."""
        self.learner.module.to(self._device)
        return self.task.grade(self._args.measure, self._args.eval_count)

    def train(self) -> None:
        """Train, grade the weights as the file holds them, and write the folder."""
        out = self._args.out
        self.task.draw(self._device)
        self.learner.module.to(self._device)
        size = sum(p.numel() for p in self.learner.module.parameters())
        self._say(f"training on {self._device}, {size / 1e6:.2f} million parameters")
        torch.set_float32_matmul_precision("high")  # products that are not in bfloat16
        told = self._fit()
        self.task.close()
        torch.set_float32_matmul_precision("highest")
        for parameter in self.learner.module.parameters():
            parameter.data = parameter.data.bfloat16().float()
        grades = self.task.grade(out, self._args.eval_count)
        self._save({**told, "held_out": grades})
        self._say(f"wrote {out}: {in_short(grades)}")

    def _fit(self) -> dict[str, Any]:
        """Train until the steps or the minutes are over, whichever comes first.

        Returns the number of steps, and the mean loss of those since the last evaluation.
        """
        args, begin = self._args, self._seconds
        generator = torch.Generator(self._device).manual_seed(args.seed)
        optimizer = _optimizer(self.learner.module)
        total, count, step, progress = torch.zeros((), device=self._device), 0, 0, 0.0
        while True:
            cosine = 0.5 * (1 + math.cos(math.pi * progress))
            for group in optimizer.param_groups:
                group["lr"] = args.lr * min((step + 1) / WARMUP_STEPS, cosine)
            total += self._update(step, progress, optimizer, generator)
            step, count = step + 1, count + 1
            spent = (self._seconds - begin) / (60 * args.minutes - begin)
            progress = max(step / args.steps, spent)
            if progress < 1 and step % args.eval_every:
                continue
            told = {"steps": step, "train_loss": total.item() / count, **self.learner.facts}
            self._save(told)
            self._say(f"step {step}  loss {told['train_loss']:.4f}")
            if progress >= 1:
                return told
            self._say(in_short(self.task.grade(args.out, args.quick_count)))
            total, count = torch.zeros_like(total), 0

    def _update(
        self,
        step: int,
        progress: float,
        optimizer: torch.optim.Optimizer,
        generator: torch.Generator,
    ) -> Tensor:
        batch = self.task.batch(step, progress, generator)
        with _autocast(self._device):
            loss = self.learner.loss(batch, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learner.module.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def _save(self, training: dict[str, Any]) -> None:
        folder = self._args.out
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.learner.module.state_dict().items()
            if name != "lm_head.weight"  # it is the embedding
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self.task.tokenizer.save_pretrained(folder)
        paths = ("out", "start", "measure", "eval_set", "model")
        kept = {name: value for name, value in vars(self._args).items() if name not in paths}
        contents = {
            "config": self.learner.config,
            "training": {"arguments": kept, **training},
            **self.learner.files,
        }
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")

    @property
    def _seconds(self) -> float:
        return time.perf_counter() - self._start

    def _say(self, text: str) -> None:
        print(f"{self._seconds:4.0f} s  {text}", flush=True)


def in_short(grades: dict[str, Any]) -> str:
    """Say the figures of each group of an exam."""
    texts = []
    for name, found in grades.items():
        figures = [f"{key} {value:.3f}" for key, value in found.items() if type(value) is float]
        texts.append(f"{name}: {', '.join(figures)}")
    return "  ".join(texts)


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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS, help="first; its settings are further options")
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--out", type=Path, help="train, and write this folder")
    what.add_argument("--measure", type=Path, metavar="FOLDER", help="grade a folder")
    what.add_argument("--eval-set", type=Path, metavar="FOLDER", help="write the problems there")
    parser.add_argument("--start", type=Path, help="a folder whose weights are trained on")
    parser.add_argument("--seed", type=int, default=0)
    model = sys.argv[1] if len(sys.argv) > 1 else ""
    settings = find_recipe(model).settings if model in MODELS else {}
    for name, value in settings.items():
        flag, told = "--" + name.replace("_", "-"), f"default {value}"
        if isinstance(value, bool):
            parser.add_argument(
                flag, default=value, help=told, action=argparse.BooleanOptionalAction
            )
        else:
            parser.add_argument(flag, default=value, help=told, type=type(value))
    args = parser.parse_args()
    try:
        run = Run(args)
    except ValueError as error:
        parser.error(str(error))
    if args.eval_set:
        run.task.write_eval_set(args.eval_set)
    elif args.measure:
        print(json.dumps(run.measure(), indent=1))
    else:
        run.train()


if __name__ == "__main__":
    main()
