"""Trains LoRA adapters for nano_vl, a small model that comes with batchgen, on a CPU.

The model adds, but was never asked to double a number. Three adapters learn it from different
amounts of practice, in less than a minute on two cores:

    python scripts/nano/nano_adapters.py --out adapters
    batchgen adapters/job.yaml
    batchgen compare adapters/out --by adapter

The folders are those that PEFT writes: adapter_config.json and adapter_model.safetensors.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from random import Random

import torch
from nano_learning import answer_loss, chat, pad
from nano_sums import is_held_out, sum_steps
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText

SHIPPED = Path(__file__).parents[2] / "batchgen/data/nano_vl"
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
RANK, ALPHA = 8, 16
"""The rank of the low-rank products, and LoRA's alpha: products are multiplied by ALPHA / RANK."""
STEPS = (2, 5, 20)
"""After how many steps an adapter is written."""
BATCH, LENGTH = 16, 96
"""The problems of a training step, and the tokens that each is padded to."""
ROWS = 40
"""The problems that the job answers."""
WORDINGS = ("What is twice {a}?", "Double {a}.", "What is the double of {a}?")

JOB = """\
# Each question runs with each adapter and with the model alone, in one batch.
model: {{choice: nano_vl, lora: [base, {adapters}], lora_grid: true}}
dataset: {{path: {out}/doubles.jsonl, id_column: id}}
prompt.user: "{{{{ question }}}}"
sampling: {{choice: greedy, max_new_tokens: 64}}
post:
  - Extract: {{methods: [regex], pattern: 'Answer: (\\w+)'}}
  - Grade: {{method: exact, target: final}}
output.dir: {out}/out
"""


class LowRankLinear(nn.Module):
    """A frozen linear layer, plus the low-rank product that an adapter adds to its output."""

    def __init__(self, base: nn.Linear, generator: torch.Generator) -> None:
        super().__init__()
        self.base = base
        drawn = torch.randn(RANK, base.in_features, generator=generator)
        self.down = nn.Parameter(drawn * base.in_features**-0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, RANK))

    def forward(self, x: Tensor) -> Tensor:
        added: Tensor = self.base(x) + (x @ self.down.T) @ self.up.T * (ALPHA / RANK)
        return added


def doubles(split: str, seed: str) -> Iterator[tuple[str, str, int]]:
    """Yield problems of `train` or `held_out` without end: question, working and result."""
    random = Random(f"doubles {split} {seed}")
    while True:
        a = random.randint(10, 499)
        if is_held_out(f"2*{a}") == (split == "held_out"):
            question = random.choice(WORDINGS).format(a=a)
            yield question, f"{a}+{a}: {', '.join(sum_steps(a, a))}.", 2 * a


def adapted(model: nn.Module, generator: torch.Generator) -> dict[str, LowRankLinear]:
    """Add a LoRA adapter to each of the modules TARGETS; return the adapters by module name."""
    model.requires_grad_(requires_grad=False)
    layers = {}
    for name, module in list(model.named_modules()):
        parent, _, last = name.rpartition(".")
        if last in TARGETS and isinstance(module, nn.Linear):
            layers[name] = LowRankLinear(module, generator)
            setattr(model.get_submodule(parent), last, layers[name])
    return layers


def write_adapter(folder: Path, layers: Mapping[str, LowRankLinear]) -> None:
    """Write an adapter as PEFT does."""
    folder.mkdir(parents=True)
    tensors = {}
    for name, layer in layers.items():
        for factor, values in (("A", layer.down), ("B", layer.up)):
            tensors[f"base_model.model.{name}.lora_{factor}.weight"] = values.detach().contiguous()
    save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "nano_vl",
        "r": RANK, "lora_alpha": ALPHA, "target_modules": list(TARGETS), "bias": "none",
    }  # fmt: skip
    (folder / "adapter_config.json").write_text(json.dumps(config, indent=2))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="the folder to write")
    args = parser.parse_args()
    model = AutoModelForImageTextToText.from_pretrained(SHIPPED, dtype=torch.float32)
    layers = adapted(model, torch.Generator().manual_seed(0))
    learned = [p for layer in layers.values() for p in (layer.down, layer.up)]
    optimizer = torch.optim.AdamW(learned, lr=5e-3, weight_decay=0.0)
    practice = doubles("train", "0")
    for step in range(1, max(STEPS) + 1):
        problems = [next(practice) for _ in range(BATCH)]
        chats = [chat(q.encode(), f"{working} Answer: {a}") for q, working, a in problems]
        batch = pad(chats, LENGTH)
        loss = answer_loss(model(batch.ids).logits, batch)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step in STEPS:
            write_adapter(args.out / f"steps{step}", layers)
            print(f"step {step}: loss {loss.item():.3f}", flush=True)
    held_out = doubles("held_out", "rows")
    with (args.out / "doubles.jsonl").open("w") as file:
        for number in range(ROWS):
            question, _, result = next(held_out)
            row = {"id": f"d{number}", "question": question, "final": str(result)}
            file.write(json.dumps(row) + "\n")
    adapters = ", ".join(f"{args.out}/steps{steps}" for steps in STEPS)
    (args.out / "job.yaml").write_text(JOB.format(adapters=adapters, out=args.out))


if __name__ == "__main__":
    main()
