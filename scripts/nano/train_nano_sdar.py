"""Train nano_sdar: a few million parameters that solve small arithmetic by block diffusion.

    python scripts/nano/train_nano_sdar.py --out outputs/nano_model [--minutes 8] [--seed 0]

Half of the training problems are answered in plain text, half in JSON (see nano_problems.py). What
is written is a model folder with HuggingFace's layout (model.safetensors in bfloat16, config.json,
the tokenizer), and in it eval.jsonl with held-out problems, answer_schema.json with the JSON Schema
of an answer in JSON, and training.json with what was run and measured. The same seed trains on the
same problems with the same noise; sums on a GPU may differ in their last bits.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from nano_diffusion import Batch, diffusion_loss
from nano_exam import SEQUENCE_LENGTH, THRESHOLD, Exam, encode
from nano_problems import FORMS, SCHEMA, Problem, held_out_set, problems, row_json
from nano_sdar import NanoConfig, NanoSDAR
from nano_tokenizer import build_tokenizer
from safetensors.torch import save_file
from transformers import PreTrainedTokenizerBase

HEAD_DIM = 64
WARMUP_STEPS = 200


def main() -> None:
    args = _arguments()
    clock = Clock(args.minutes * 60)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    tokenizer = build_tokenizer()
    held_out = held_out_set(args.eval_count, args.seed)
    quick = Exam(held_out[: args.quick_count], tokenizer, device)
    train = _to(_training_set(args, tokenizer), device)
    print(f"{clock.seconds:.0f} s: {args.examples} training problems on {device}", flush=True)

    model = NanoSDAR(_config(args), args.seed).to(device)
    print(f"{sum(p.numel() for p in model.parameters()) / 1e6:.2f} million parameters")
    steps, train_loss = fit(model, train, quick, args, clock)
    for parameter in model.parameters():  # measure the weights as the file will hold them
        parameter.data = parameter.data.bfloat16().float()
    exam = Exam(held_out, tokenizer, device)
    results = {
        "steps": steps,
        "train_loss": train_loss,
        "threshold": THRESHOLD,
        "held_out": {form: exam.grade(model, form).to_json() for form in FORMS},
    }
    print(json.dumps(results, indent=1))
    save(args.out, model, tokenizer, held_out, {"arguments": _plain(args), **results})
    print(f"{clock.seconds:.0f} s: wrote {args.out}")


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


def fit(
    model: NanoSDAR, train: Batch, exam: Exam, args: argparse.Namespace, clock: Clock
) -> tuple[int, float]:
    """Train until the steps or the minutes are over, whichever comes first.

    The learning rate falls to zero by then in either case. Returns the number of steps, and the
    mean loss of the steps between the last two evaluations.
    """
    device = train.ids.device
    generator = torch.Generator(device).manual_seed(args.seed)
    optimizer = _optimizer(model)
    total, count, mean = torch.zeros((), device=device), 0, math.nan
    begin, step, progress = clock.seconds, 0, 0.0
    while progress < 1:
        rate = args.lr * min((step + 1) / WARMUP_STEPS, _cosine(progress))
        for group in optimizer.param_groups:
            group["lr"] = rate
        total += _update(model, optimizer, _draw(train, args.batch_size, generator), generator)
        step, count = step + 1, count + 1
        progress = max(step / args.steps, (clock.seconds - begin) / (clock.limit - begin))
        if progress >= 1 or step % args.eval_every == 0:
            mean, count = total.item() / count, 0
            total.zero_()
            with _autocast(device):
                grades = [f"{form}: {exam.grade(model, form)}" for form in FORMS]
            line = f"{clock.seconds:4.0f} s  step {step}  loss {mean:.4f}"
            print("  ".join([line, *grades]), flush=True)
    return step, mean


def _update(
    model: NanoSDAR, optimizer: torch.optim.Optimizer, batch: Batch, generator: torch.Generator
) -> torch.Tensor:
    with _autocast(batch.ids.device):
        loss = diffusion_loss(model, batch, generator)
    optimizer.zero_grad(set_to_none=True)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.detach()


def _training_set(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> Batch:
    """Make as many training problems in either form, and different ones."""
    stream = problems("train", args.seed)
    half = args.examples // len(FORMS)
    parts = [encode(itertools.islice(stream, half), form, tokenizer) for form in FORMS]
    return Batch(*(torch.cat(tensors) for tensors in zip(*parts, strict=True)))


def save(
    folder: Path,
    model: NanoSDAR,
    tokenizer: PreTrainedTokenizerBase,
    held_out: Sequence[Problem],
    training: dict[str, Any],
) -> None:
    """Write the files that the head of this module names; existing ones are replaced."""
    folder.mkdir(parents=True, exist_ok=True)
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in model.state_dict().items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer.save_pretrained(folder)
    lines = [row_json(index, problem) for index, problem in enumerate(held_out)]
    (folder / "eval.jsonl").write_text("\n".join(lines) + "\n")
    contents = {"config": model.config.to_hf(), "answer_schema": SCHEMA, "training": training}
    for name, content in contents.items():
        (folder / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def _draw(data: Batch, size: int, generator: torch.Generator) -> Batch:
    device = data.ids.device
    rows = torch.randint(len(data.ids), (size,), device=device, generator=generator)
    return Batch(data.ids[rows], data.prompt_lens[rows], data.lens[rows])


def _to(data: Batch, device: torch.device) -> Batch:
    return Batch(*(tensor.to(device) for tensor in data))


def _optimizer(model: NanoSDAR) -> torch.optim.AdamW:
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


def _config(args: argparse.Namespace) -> NanoConfig:
    size = args.hidden_size
    heads = size // HEAD_DIM
    return NanoConfig(
        hidden_size=size,
        num_layers=args.layers,
        num_heads=heads,
        num_kv_heads=max(heads // 2, 1),
        head_dim=HEAD_DIM,
        intermediate_size=3 * size,
        block_size=args.block_size,
    )


def _plain(args: argparse.Namespace) -> dict[str, Any]:
    return {key: value for key, value in vars(args).items() if key != "out"}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=_Formatter)
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
    parser.add_argument("--hidden-size", type=int, default=256, help="a multiple of 64")
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--block-size", type=int, default=4, help="a divisor of 192")
    args = parser.parse_args()
    if args.hidden_size % HEAD_DIM or SEQUENCE_LENGTH % args.block_size:
        parser.error("--hidden-size must be a multiple of 64, --block-size a divisor of 192")
    return args


class _Formatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


if __name__ == "__main__":
    main()
