"""Measure which operations give a row the same bits in every batch, and what a change costs.

    python scripts/bench/bench_determinism.py products [--library] [--json PATH]
    python scripts/bench/bench_determinism.py schedules [--models qwen3-0.6b] [--schedules 200]

- `products`: the products of five models, by the library as the engine uses it, or with `--library`
  without splits of the sum. Workspaces are limited by variables of the environment.
- `schedules`: a row beside random other rows, cut into random chunks, with CUDA graphs or not, with
  drafts or not, with a shared prefix or not. A digest of each operation's result is kept at the KV
  slot of each token; the first operation whose digest differs from a run of the row alone counts.

Needs a GPU for figures; on a CPU both run on small shapes. Nothing of the engine is changed: what a
deterministic mode would change is patched here.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from determinism_changes import STAGES, changes, library_rules
from determinism_schedules import run_schedules
from measuring import DEVICE, DTYPE, environment, microseconds
from torch import Tensor
from workloads import bare_model, model_config

from batchgen.engine.layers.linear import Float32Linear, Linear, RowParallelLinear
from batchgen.engine.layers.mixers import kv_expansion as expansion_layer
from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.memory.kernel_warmup import Undone
from batchgen.kernels.layers.linear import add_linear_

GPU = DEVICE.type == "cuda"
MODELS = ("qwen3-0.6b", "qwen3-8b", "qwen3-30b-a3b", "hybrid-35b-a3b", "deepseek-v2-lite")
SMALL = {"qwen3-0.6b": 5, "qwen3-30b-a3b": 4, "hybrid-35b-a3b": 5, "deepseek-v2-lite": 4}
"""The models of `schedules`, with their numbers of layers; the last layer is not compared, because
a prefill computes only some tokens of it."""
DENSE_ROWS = (
    *range(1, 18), 24, 32, 33, *range(40, 257, 8), 257, *range(288, 513, 32),
    600, 768, 777, 1000, 1024, 1333, 1536, 2048, 3072, 4096, 5000, 6144, 8192,
)  # fmt: skip
TIMED_ROWS = (1, 8, 64, 256, 2048, 8192)
HEAD_ROWS = 512
"""The most rows whose logits are computed."""


class Line(NamedTuple):
    """A line of the resulting table."""

    test: str
    what: str
    setting: str
    bits: str
    cost: str = ""


# Test B: products by the library.


class Case(NamedTuple):
    """A product of a model: `linear`, `add` to the residual, with a result in `float32`, or one
    for each of the `heads`."""

    kind: str
    columns: int
    depth: int
    heads: int = 1

    def operands(self, rows: int, buffers: int = 1) -> tuple[Tensor, list[Tensor], Tensor]:
        """Make x, as many weights as there are buffers, and a residual."""
        draws = torch.Generator(DEVICE).manual_seed(self.columns * 7919 + self.depth)
        random_of = partial(torch.randn, device=DEVICE, dtype=DTYPE, generator=draws)
        x = random_of(rows, self.heads, self.depth)
        shape = (self.heads, self.depth, self.columns)
        weights = [random_of(*shape).mul_(self.depth**-0.5) for _ in range(buffers)]
        residual = random_of(rows, self.columns)
        if self.kind == "heads":
            return x, weights, residual
        return x.flatten(1), [w[0].t().contiguous() for w in weights], residual

    def run(self, x: Tensor, w: Tensor, residual: Tensor) -> Tensor:
        if self.kind == "heads":
            return expansion_layer._multiply_heads(x, w)
        if self.kind == "add":
            return add_linear_(residual, x, w)
        if self.kind == "float32" and GPU:
            return torch.mm(x, w.t(), out_dtype=torch.float32)
        return F.linear(x, w)


def cases(model: str) -> Counter[tuple[str, Case]]:
    """Count the products of a model's layers, by name; those of experts are not among them."""
    with Undone(torch.device("cuda")):
        made = bare_model(model_config(model), torch.device("cuda"))
    found: Counter[tuple[str, Case]] = Counter()
    for path, module in made.named_modules():
        name = ".".join(path.split(".")[-2:])
        if isinstance(module, KVExpansion):
            heads, both, size = module.weight.shape
            found["absorb", Case("heads", size, module._key_size, heads)] += 1
            found["values", Case("heads", both - module._key_size, size, heads)] += 1
        elif isinstance(module, Linear):
            adds = isinstance(module, RowParallelLinear) and "shared_expert" not in path
            wide = "float32" if isinstance(module, Float32Linear) else "linear"
            found[name, Case("add" if adds else wide, *module.weight.shape)] += 1
    return found


def scan(
    case: Case, all_rows: Sequence[int]
) -> tuple[dict[int, tuple[int, int]], dict[int, float]]:
    """Compute a product at each number of rows M: how many of the compared rows have the bits that
    they have in the product of most rows, where they stand in other places, and the time of some.

    One order of a sum differs from another in few values of 16 bits, so many are compared.
    """
    most = max(all_rows)
    x, (w,), residual = case.operands(most)
    reference = case.run(x, w, residual.clone())
    bits: dict[int, tuple[int, int]] = {}
    for rows in all_rows:
        wanted = min(max(16, 2**16 // case.columns, rows), 512 * rows, most)
        equal = []
        for start in range(0, wanted - rows + 1, rows):
            part = slice(start, start + rows)
            out = case.run(x[part], w, residual[part].clone())
            equal.append((out == reference[part]).flatten(1).all(1))
        all_equal = torch.cat(equal)
        bits[rows] = int(all_equal.sum()), len(all_equal)
    micros: dict[int, float] = {}
    _, weights, _ = case.operands(1, max(1, min(16, -(-(2**28) // w.nbytes))) if GPU else 0)
    for rows in (r for r in TIMED_ROWS if GPU and r <= most):
        here, base = x[:rows], residual[:rows].clone()
        runs: list[Callable[[], object]] = [partial(case.run, here, w, base) for w in weights]
        micros[rows] = microseconds(runs, 32 if rows <= 512 else 4)
    return bits, micros


def product_lines(models: Sequence[str], setting: str) -> list[Line]:
    """Say where each product keeps a row's bits, and what all products of a model take."""
    lines = []
    all_rows = DENSE_ROWS if GPU else (1, 3, 17)
    for model in models:
        totals: dict[int, float] = defaultdict(float)
        for (name, case), count in cases(model).items():
            rows = [r for r in all_rows if r <= HEAD_ROWS] if name == "lm_head" else all_rows
            bits, micros = scan(case, rows)
            what = f"{model} {name} {case.kind} {case.columns}×{case.depth}"
            lines.append(Line("B", what, setting, _kept(bits), _times(micros)))
            for number, time in micros.items():
                totals[number] += count * time
        lines.append(Line("B", f"{model}, all products", setting, "", _times(totals)))
    return lines


def _kept(bits: dict[int, tuple[int, int]]) -> str:
    """Say how many rows have the bits of the largest product, and at which M some have not."""
    equal, rows = (sum(counts) for counts in zip(*bits.values(), strict=True))
    others = [rows for rows, (kept, compared) in bits.items() if kept < compared]
    at = f", not all at M = {ranges(others, [*bits])}" if others else ""
    return f"{equal} of {rows} rows{at}"


def ranges(numbers: Sequence[int], among: Sequence[int]) -> str:
    """Write some of the numbers `among`, all ascending, as ranges."""
    runs: list[tuple[int, int]] = []
    before = dict(zip(among[1:], among, strict=False))
    for number in numbers:
        follows = bool(runs) and before.get(number) == runs[-1][1]
        first = runs.pop()[0] if follows else number
        runs.append((first, number))
    return ", ".join(f"{a}" if a == b else f"{a}–{b}" for a, b in runs)


def _times(micros: dict[int, float]) -> str:
    return ", ".join(f"M {rows}: {time:.1f} µs" for rows, time in micros.items())


# Test C: schedules.


def schedule_lines(models: Sequence[str], count: int, stages: Sequence[str]) -> list[Line]:
    lines = []
    for model, stage in product(models, stages):
        layers = SMALL.get(model)
        tokens, rows = (60_000, 192) if GPU else (3_000, 6)
        found = run_schedules(model, stage, count, DEVICE, tokens=tokens, rows=rows, layers=layers)
        differ = sum(found.by_kind.values())
        lines.append(
            Line("C", f"{model}, {layers or 'all'} layers", stage,
                 f"{count - differ} of {count} schedules equal; " + _counts(found.by_cause),
                 f"differing by engine: {_counts(found.by_kind)}; {_counts(found.seen)}")
        )  # fmt: skip
        print(lines[-1], flush=True)
    return lines


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count}" for name, count in counter.most_common())


def table(lines: Sequence[Line]) -> str:
    rows = ["| " + " | ".join(line) + " |" for line in [Line(*Line._fields), *lines]]
    return "\n".join([rows[0], "|---" * len(Line._fields) + "|", *rows[1:]])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("modes", nargs="+", choices=("products", "schedules"))
    parser.add_argument("--models", nargs="+")
    parser.add_argument("--library", action="store_true", help="products without splits")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["today", "attention"])
    parser.add_argument("--json", type=Path, help="write the lines")
    arguments = parser.parse_args()
    lines: list[Line] = []
    for mode in arguments.modes:
        if mode == "products":
            with changes([library_rules] if arguments.library else []):
                setting = "no splits" if arguments.library else "today"
                lines += product_lines(arguments.models or MODELS, setting)
        else:
            models = arguments.models or tuple(SMALL)
            lines += schedule_lines(models, arguments.schedules, arguments.stages)
    if arguments.json:
        arguments.json.write_text(json.dumps(environment() | {"lines": lines}, indent=1) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
