"""Train one of the small models of arithmetic that batchgen ships.

    python scripts/nano/train_nano.py nano_sdar --out OUT
    batchgen +experiment=nano_sdar model.path=OUT

The first command takes configuration and tokenizer from the shipped folder and writes a new one,
with a training.json that says what was run; the second answers and grades the 500 held-out problems
with it. The options begin as the shipped model was trained, in 5 to 9 minutes of an H100. A seed
trains on the same problems; sums on a GPU may differ in their last bits.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import os
import shutil
import time
from pathlib import Path
from typing import Any

import torch
from nano_learning import Batch, Recipe
from safetensors.torch import save_file
from torch.utils.data import DataLoader, Dataset

SHIPPED = Path(__file__).parents[2] / "batchgen" / "data"
MODELS = ("nano_sdar", "nano_hybrid")
OPTIONS = {"steps": int, "batch_size": int, "lr": float}
WARMUP_STEPS = 200
REPORT_EVERY = 500


class Batches(Dataset[Batch]):
    """The batches of a run, each drawn from the seed and its step."""

    def __init__(self, recipe: Recipe, seed: int) -> None:
        self._recipe, self._seed = recipe, seed

    def __len__(self) -> int:
        return self._recipe.steps

    def __getitem__(self, step: int) -> Batch:
        return self._recipe.make_batch(self._seed, step, self._recipe.batch_size)


def train(recipe: Recipe, config: dict[str, Any], seed: int) -> tuple[Any, float]:
    """Train with AdamW, a warm-up and a cosine schedule; return the module and the last loss."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    learner = recipe.learner(config)
    learner.module.to(device).train()
    torch.set_float32_matmul_precision("high")  # products that are not in bfloat16
    parameters = [*learner.module.parameters()]
    groups = [
        {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in parameters if p.dim() == 1], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, betas=(0.9, 0.95), fused=device.type == "cuda")
    start = time.perf_counter()
    workers = len(os.sched_getaffinity(0))
    for step, rows in enumerate(DataLoader(Batches(recipe, seed), None, num_workers=workers), 1):
        cosine = 0.5 * (1 + math.cos(math.pi * step / recipe.steps))
        for group in optimizer.param_groups:
            group["lr"] = recipe.lr * min(step / WARMUP_STEPS, cosine)
        batch = rows.to(device)
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
            loss = learner.loss(batch)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if step % REPORT_EVERY == 0 or step == recipe.steps:
            print(f"{time.perf_counter() - start:4.0f} s  step {step}  loss {loss:.4f}", flush=True)
    return learner.module, float(loss)


def write_folder(out: Path, shipped: Path, module: Any, training: dict[str, Any]) -> None:
    """Write the trained model, with the small files of the shipped model, into a new folder."""
    out.mkdir(parents=True, exist_ok=True)
    for file in [*shipped.glob("*.json"), *shipped.glob("*.jinja")]:
        shutil.copyfile(file, out / file.name)
    (out / "training.json").write_text(json.dumps(training, indent=2) + "\n")
    weights = {
        name: tensor.to("cpu", torch.bfloat16).contiguous()
        for name, tensor in module.state_dict().items()
        if name != "lm_head.weight"  # it is the embedding
    }
    save_file(weights, out / "model.safetensors", metadata={"format": "pt"})


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", choices=MODELS)
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    parser.add_argument("--seed", type=int, default=0)
    for name, type in OPTIONS.items():
        flag = "--" + name.replace("_", "-")
        parser.add_argument(flag, type=type, help="default: as the shipped model")
    args = parser.parse_args()
    recipe: Recipe = importlib.import_module(args.model).RECIPE
    options = {name: getattr(args, name) or getattr(recipe, name) for name in OPTIONS}
    shipped = SHIPPED / args.model
    config = json.loads((shipped / "config.json").read_text())
    module, loss = train(recipe._replace(**options), config, args.seed)
    run = {"seed": args.seed, **options, "train_loss": loss}
    write_folder(args.out, shipped, module, run)


if __name__ == "__main__":
    main()
