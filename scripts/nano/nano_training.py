"""How the nano models are trained, measured and written; see train_nano_sdar.py for one of them."""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from nano_batch import Batch, encode
from nano_exam import Exam, Learner
from nano_problems import FORMS, SCHEMA, held_out_set, problems, row_json
from nano_tokenizer import build_tokenizer
from safetensors.torch import save_file
from torch import nn
from transformers import PreTrainedTokenizerBase

WARMUP_STEPS = 200


class Clock:
    """The seconds since the start.

    Attributes:
        limit: seconds after which training ends.
    """

    def __init__(self, limit: float) -> None:
        self.limit, self._start = limit, time.perf_counter()

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self._start


class Run:
    """One training run: its problems, its model, and the folder that it writes.

    The folder has HuggingFace's layout: model.safetensors in bfloat16, config.json, the tokenizer.
    In it are also eval.jsonl with held-out problems, answer_schema.json with the JSON Schema of an
    answer in JSON, and training.json with what was run and measured.
    """

    def __init__(self, learner: Learner, config: dict[str, Any], args: argparse.Namespace) -> None:
        """Make the problems and move the model to the device.

        Args:
            learner: with a model on the CPU.
            config: contents of config.json.
            args: of `arguments`, and others.
        """
        self.learner, self._config, self._args = learner, config, args
        self._clock = Clock(args.minutes * 60)
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._tokenizer = build_tokenizer()
        self._held_out = held_out_set(args.eval_count, args.seed)
        train = _training_set(args, self._tokenizer)
        self._train = train.to(self._device)
        self._say(f"{args.examples} training problems on {self._device}")
        learner.model.to(self._device)
        size = sum(p.numel() for p in learner.model.parameters())
        print(f"{size / 1e6:.2f} million parameters")

    def finish(self, facts: dict[str, Any]) -> None:
        """Train, measure the weights as the file holds them, and write the folder with `facts`."""
        torch.set_float32_matmul_precision("high")  # products that are not in bfloat16
        steps, train_loss = self._fit()
        torch.set_float32_matmul_precision("highest")
        for parameter in self.learner.model.parameters():
            parameter.data = parameter.data.bfloat16().float()
        exam = Exam(self._held_out, self._tokenizer, self._device)
        with torch.compiler.set_stance("force_eager"):
            grades = {form: exam.grade(self.learner, form).to_json() for form in FORMS}
        results = {"steps": steps, "train_loss": train_loss, **facts, "held_out": grades}
        print(json.dumps(results, indent=1))
        self._save({"arguments": _plain(self._args), **results})
        self._say(f"wrote {self._args.out}")

    def _fit(self) -> tuple[int, float]:
        """Train until the steps or the minutes are over, whichever comes first.

        The learning rate falls to zero by then in either case. At every evaluation the folder is
        written, so that a run that is cut short leaves a model. Returns the number of steps, and
        the mean loss of the steps between the last two evaluations.
        """
        args, clock = self._args, self._clock
        exam = Exam(self._held_out[: args.quick_count], self._tokenizer, self._device)
        generator = torch.Generator(self._device).manual_seed(args.seed)
        optimizer = _optimizer(self.learner.model)
        total, count, mean = torch.zeros((), device=self._device), 0, math.nan
        begin, step, progress = clock.seconds, 0, 0.0
        while progress < 1:
            rate = args.lr * min((step + 1) / WARMUP_STEPS, _cosine(progress))
            for group in optimizer.param_groups:
                group["lr"] = rate
            total += self._update(optimizer, generator)
            step, count = step + 1, count + 1
            progress = max(step / args.steps, (clock.seconds - begin) / (clock.limit - begin))
            if progress >= 1 or step % args.eval_every == 0:
                mean, count = total.item() / count, 0
                total.zero_()
                with _autocast(self._device), torch.compiler.set_stance("force_eager"):
                    grades = [f"{form}: {exam.grade(self.learner, form)}" for form in FORMS]
                self._say("  ".join([f"step {step}  loss {mean:.4f}", *grades]))
                self._save({"arguments": _plain(args), "steps": step, "train_loss": mean})
        return step, mean

    def _update(self, optimizer: torch.optim.Optimizer, generator: torch.Generator) -> torch.Tensor:
        batch = _draw(self._train, self._args.batch_size, generator)
        with _autocast(self._device):
            loss = self.learner.loss(batch, generator)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.learner.model.parameters(), 1.0)
        optimizer.step()
        return loss.detach()

    def _save(self, training: dict[str, Any]) -> None:
        folder = self._args.out
        folder.mkdir(parents=True, exist_ok=True)
        weights = {
            name: tensor.to("cpu", torch.bfloat16).contiguous()
            for name, tensor in self.learner.model.state_dict().items()
        }
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        self._tokenizer.save_pretrained(folder)
        lines = [row_json(index, problem) for index, problem in enumerate(self._held_out)]
        (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
        contents = {"config": self._config, "answer_schema": SCHEMA, "training": training}
        for name, content in contents.items():
            (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")

    def _say(self, text: str) -> None:
        print(f"{self._clock.seconds:4.0f} s  {text}", flush=True)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """Make the parser of a training script, with the arguments that all have."""
    parser = argparse.ArgumentParser(description=description, formatter_class=Formatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=12_000)
    parser.add_argument("--minutes", type=float, default=8.0, help="all but the last measurement")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--examples", type=int, default=800_000, help="of both forms")
    parser.add_argument("--eval-count", type=int, default=500, help="each in both forms")
    parser.add_argument("--quick-count", type=int, default=100, help="of these, in training")
    parser.add_argument("--eval-every", type=int, default=1000)
    parser.add_argument("--hidden-size", type=int, default=256)
    return parser


class Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Shows defaults, and a description as it is written."""


def _training_set(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Make as many training problems in either form, and different ones."""
    stream = problems("train", args.seed)
    half = args.examples // len(FORMS)
    parts = [encode(itertools.islice(stream, half), form, tokenizer) for form in FORMS]
    return Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def _draw(data: Batch, size: int, generator: torch.Generator) -> Batch:
    device = data.ids.device
    rows = torch.randint(len(data.ids), (size,), device=device, generator=generator)
    return Batch(data.ids[rows], data.prompt_lens[rows], data.lens[rows])


def _optimizer(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": 0.1},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=matrices[0].is_cuda)


def _cosine(progress: float) -> float:
    return 0.5 * (1 + math.cos(math.pi * progress))


def _autocast(device: torch.device) -> AbstractContextManager[None]:
    return torch.autocast("cuda", torch.bfloat16) if device.type == "cuda" else nullcontext()


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(args).items() if key != "out"}
