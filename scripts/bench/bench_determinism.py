"""Measure which operations give a row the same bits in every batch, and what it costs where a
change is needed for that.

    python scripts/bench/bench_determinism.py tiles products attention schedules [--json PATH]
    python scripts/bench/bench_determinism.py workloads [--workloads decode mixed] [--variants …]
    python scripts/bench/bench_determinism.py schedules [--models qwen3-0.6b] [--schedules 200]

- `tiles`: one product by Triton, cut into tiles in many ways, and the experts' products by each
  line of their table of tiles.
- `products`: the products of five models, by the library as the engine uses it, by the library
  without splits of the sum, and by a Triton kernel with one order of the sum.
- `attention`: decode attention of rows in batches of several sizes and widths.
- `workloads`: qwen3-8b with contexts split by their own length alone, beside the engine as it is.
- `schedules`: a row beside random other rows, cut into random chunks, with CUDA graphs or not, with
  drafts or not, with a shared prefix or not. A digest of each operation's result is kept at the KV
  slot of each token; the first operation whose digest differs from a run of the row alone counts.

Needs a GPU for figures; on a CPU everything but `workloads` runs on small shapes. Nothing of the
engine is changed: what a deterministic mode would change is patched here.
"""

from __future__ import annotations

import argparse
import gc
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from cases.attention import DecodeShape
from cases.experts import SHAPES, Batch, Layer, timed
from determinism_changes import LIMITS, STAGES, changes, library_rules, one_split_rule, one_tile
from determinism_schedules import run_schedules
from measuring import DEVICE, DTYPE, environment, microseconds
from modes.engine_runs import Bench
from ordered_product import Tile, ordered_add, ordered_heads, ordered_linear, ordered_product
from torch import Tensor
from workloads import bare_model, model_config

from batchgen.engine.base.engine_config import EngineConfig
from batchgen.engine.layers.linear import Float32Linear, Linear, RowParallelLinear
from batchgen.engine.layers.mixers import kv_expansion as expansion_layer
from batchgen.engine.layers.mixers.kv_expansion import KVExpansion
from batchgen.engine.memory.kernel_warmup import Undone
from batchgen.kernels.attention.attention import AttentionMetadata, paged_attention
from batchgen.kernels.attention.kv_cache import KVCache
from batchgen.kernels.compile_ahead import can_compile_ahead, compiling_ahead
from batchgen.kernels.layers.linear import add_linear_
from batchgen.kernels.moe.experts_triton import grouped_parts_triton
from batchgen.kernels.moe.moe_tiles import TABLE, choose_tiles

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
SETTINGS = ("today", "no splits", "limited", "ordered")
"""How products run: as the engine has them; by cuBLASLt with no split allowed; so, and with limited
workspaces; by Triton."""


class Line(NamedTuple):
    """A line of the resulting table."""

    test: str
    what: str
    setting: str
    bits: str
    cost: str = ""


def digest(*tensors: Tensor) -> str:
    parts = [t.detach().contiguous().view(torch.uint8).cpu().numpy().tobytes() for t in tensors]
    return hashlib.blake2b(b"".join(parts), digest_size=8).hexdigest()


# Test A: tiles.


def all_tiles() -> list[Tile]:
    if not GPU:
        return [Tile(16, 16, 32, 4, 1), Tile(16, 16, 64, 4, 1, swap=True)]
    found = product((16, 32, 64, 128), (8, 16, 32, 64, 128, 256), (32, 64, 128), (False, True))
    return [Tile(m, n, k, 8 if m * n > 16384 else 4, 2, swap) for m, n, k, swap in found]


def compile_all(launch: Callable[[Any], object], variants: Sequence[Any]) -> None:
    """Compile the kernels of launch(v) for all variants side by side."""
    if GPU and can_compile_ahead():
        with compiling_ahead(os.cpu_count() or 1, partial(torch.cuda.set_device, 0)):
            for variant in variants:
                launch(variant)


def describe(tiles: Sequence[Tile]) -> str:
    names = ("M", "N", "K")
    sizes = [f"{n} {sorted({t[i] for t in tiles})}" for i, n in enumerate(names)]
    return f"{', '.join(sizes)}, swapped {sorted({t.swap for t in tiles})}"


def tiles_lines(depth: int) -> list[Line]:
    torch.manual_seed(0)
    x = torch.randn(16, depth, device=DEVICE, dtype=DTYPE).repeat(8, 1)
    w = torch.randn(256, depth, device=DEVICE, dtype=DTYPE)
    tiles, classes = all_tiles(), defaultdict(list)
    out = torch.empty(len(x), len(w), device=DEVICE)
    compile_all(lambda tile: ordered_product(x, w, out, tile=tile), tiles)
    for tile in tiles:
        kernel = ordered_product(x, w, out, tile=tile)
        instruction = "wgmma" if GPU and "wgmma" in kernel.asm["ptx"] else "mma.sync"
        steady = torch.equal(out, out[:16].repeat(8, 1))
        classes[digest(out[:16]) if steady else "rows of a tile differ"].append((tile, instruction))
    return [
        Line(
            "A", f"product, K = {depth}, float32 result",
            f"{len(members)} of {len(tiles)} tiles by {sorted({i for _, i in members})}",
            f"class {name}: {describe([tile for tile, _ in members])}",
        )
        for name, members in classes.items()
    ]  # fmt: skip


def expert_lines(all_tokens: Sequence[int]) -> list[Line]:
    """Compare the lines of the table of experts' tiles, and time each at several numbers of
    tokens."""
    lines = []
    for name, shape in SHAPES.items():
        torch.manual_seed(0)
        layer, probe = Layer.make(shape), Batch(shape, 512)
        tables = [tiles for _, tiles in TABLE]

        def parts(tiles: Any, batch: Batch = probe, i: int = 0, layer: Layer = layer) -> Tensor:
            return grouped_parts_triton(
                batch.x, *layer, batch.ids[i], batch.weights[i], tiles=tiles
            )

        compile_all(parts, tables)
        classes: dict[str, list[int]] = defaultdict(list)
        for number, tiles in enumerate(tables):
            classes[digest(parts(tiles))].append(number)
        cost: dict[int, str] = {}
        for tokens in all_tokens:
            batch = Batch(shape, tokens)
            times = [timed(lambda i, t=t, b=batch: parts(t, b, i)) for t in tables]  # type: ignore[misc]
            today = times[tables.index(choose_tiles(batch.ids[0].numel(), layer.gate_up))]
            best = [min(times[n] for n in members) for members in classes.values()]
            cost[tokens] = f"{today:.0f} → " + " or ".join(f"{b:.0f}" for b in best)
        lines.append(
            Line(
                "A", f"experts of {name}, 512 tokens", "each line of the table for all",
                f"{len(classes)} classes of lines: {list(classes.values())}",
                "µs today → the best line of one class, by tokens: "
                + ", ".join(f"{tokens}: {text}" for tokens, text in cost.items()),
            )
        )  # fmt: skip
    return lines


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

    def run(self, x: Tensor, w: Tensor, residual: Tensor, ordered: bool) -> Tensor:
        if self.kind == "heads":
            return (ordered_heads if ordered else expansion_layer._multiply_heads)(x, w)
        if self.kind == "add":
            return (ordered_add if ordered else add_linear_)(residual, x, w)
        if self.kind == "float32" and GPU:
            if ordered:
                return ordered_linear(x, w, dtype=torch.float32)
            return torch.mm(x, w.t(), out_dtype=torch.float32)
        return ordered_linear(x, w) if ordered else F.linear(x, w)


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


def _run_once(case: Case, rows: int) -> None:
    x, (w,), residual = case.operands(rows)
    case.run(x, w, residual, ordered=True)


def scan(case: Case, all_rows: Sequence[int], ordered: bool, times: bool) -> dict[str, Any]:
    """Compute a product at each number of rows M, and time some.

    Rows are compared with what they are in the product of most rows, where they stand in other
    places. One order of a sum differs from another in few values of 16 bits, so there are many.
    """
    most = max(all_rows)
    x, (w,), residual = case.operands(most)
    reference = case.run(x, w, residual.clone(), ordered)
    bits: dict[int, tuple[int, int]] = {}
    for rows in all_rows:
        wanted = min(max(16, 2**16 // case.columns, rows), 512 * rows, most)
        equal = []
        for start in range(0, wanted - rows + 1, rows):
            part = slice(start, start + rows)
            out = case.run(x[part], w, residual[part].clone(), ordered)
            equal.append((out == reference[part]).flatten(1).all(1))
        all_equal = torch.cat(equal)
        bits[rows] = int(all_equal.sum()), len(all_equal)
    micros: dict[int, float] = {}
    count = max(1, min(16, -(-(2**28) // w.nbytes)))
    _, weights, _ = case.operands(1, count) if times else (None, [], None)
    for rows in TIMED_ROWS if times else ():
        if rows <= max(all_rows):
            here, base = x[:rows], residual[:rows].clone()
            runs: list[Callable[[], object]] = [
                partial(case.run, here, w, base, ordered) for w in weights
            ]
            micros[rows] = microseconds(runs, 32 if rows <= 512 else 4)
    return {"bits": bits, "digest": digest(reference), "µs": micros}


def product_scans(
    setting: str, models: Sequence[str], all_rows: Sequence[int], times: bool
) -> dict[str, Any]:
    """Scan every product of the models in this process, which has one setting of the library."""
    all_cases = sorted({(name == "lm_head", case) for m in models for name, case in cases(m)})
    if setting == "ordered":
        sizes = [(case, rows) for _, case in all_cases for rows in (16, 32, 64, 512, 1024)]
        compile_all(lambda each: _run_once(*each), sizes)
    found = {}
    for is_head, case in all_cases:
        rows = [r for r in all_rows if r <= HEAD_ROWS] if is_head else all_rows
        found[repr(tuple(case))] = scan(case, rows, setting == "ordered", times and GPU)
        if GPU:
            torch.cuda.empty_cache()
    return found


def other_process(setting: str, models: Sequence[str], times: bool) -> dict[str, Any]:
    """Run `product_scans` in a process of its own, as workspaces are limited before its start."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "scans.json"
        command = [sys.executable, __file__, "scan", "--setting", setting, "--json", str(path)]
        command += [] if times else ["--no-times"]
        limits = LIMITS if setting == "limited" else {}
        subprocess.run([*command, "--models", *models], check=True, env=dict(os.environ) | limits)
        return dict(json.loads(path.read_text()))


def product_lines(models: Sequence[str], scans: dict[str, dict[str, Any]]) -> list[Line]:
    """Say where each product keeps a row's bits, and what all products of a model take."""
    lines = []
    for model in models:
        totals: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for (name, case), count in cases(model).items():
            key = repr(tuple(case))
            for setting, found in scans.items():
                same = found[key]["digest"] == scans["ordered"][key]["digest"]
                lines.append(
                    Line("B", f"{model} {name} {case.kind} {case.columns}×{case.depth}", setting,
                         _kept(found[key]["bits"]) + (", the ordered sum" if same else ""),
                         _times(found[key]["µs"]))
                )  # fmt: skip
                for rows, micros in found[key]["µs"].items():
                    totals[setting][rows] += count * micros
        for setting, sums in totals.items():
            lines.append(Line("B", f"{model}, all products", setting, "", _times(sums)))
    return lines


def _kept(bits: dict[str, tuple[int, int]]) -> str:
    """Say how many rows have the bits of the largest product, and at which M some have not."""
    equal, rows = (sum(counts) for counts in zip(*bits.values(), strict=True))
    others = [int(rows) for rows, (kept, compared) in bits.items() if kept < compared]
    at = f", not all at M = {ranges(others, [*map(int, bits)])}" if others else ""
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


def _times(micros: dict[Any, float]) -> str:
    return ", ".join(f"M {rows}: {time:.1f} µs" for rows, time in micros.items())


# Item 4: the rules of decode attention.

VARIANTS: dict[str, tuple[Callable[[], Any], ...]] = STAGES | {
    "splits of 512": (one_split_rule,),
    "splits of 1,024": (partial(one_split_rule, 1024),),
    "splits of 2,048": (partial(one_split_rule, 2048),),
    "512, tiles of 64 KiB": (one_split_rule, partial(one_tile, 1)),
    "512, tiles of 32 KiB": (one_split_rule, partial(one_tile, 64)),
}
WIDTHS = (1, 2, 4, 8, 16)
CONTEXTS = {
    "qwen3-8b": (DecodeShape(256, 850, mixed=True), 32, 8, 128, (1, 8, 32, 128, 256)),
    "qwen3-8b at 8,192 tokens": (DecodeShape(32, 8192), 32, 8, 128, (1, 8, 32)),
    "hybrid-35b-a3b": (DecodeShape(256, 850, mixed=True), 16, 2, 256, (1, 8, 32, 256)),
}
"""Rows' contexts, query heads, KV heads, values of a head, and the numbers of rows that are run."""


class Context(NamedTuple):
    """The caches of one layer after another, and the queries that end each row: at most 16."""

    caches: list[KVCache]
    tables: Tensor
    ends: Tensor
    queries: Tensor

    @classmethod
    def make(cls, shape: DecodeShape, heads: int, kv_heads: int, size: int) -> Context:
        ends = torch.tensor(shape.contexts())
        blocks = int(ends.max()) // 16 + 1
        tables = 1 + torch.randperm(shape.batch * blocks).view(shape.batch, blocks)
        pages = (kv_heads, 1 + tables.numel(), 16, size)
        random_of = partial(torch.randn, device=DEVICE, dtype=DTYPE)
        caches = [KVCache(random_of(pages), random_of(pages)) for _ in range(4 if GPU else 1)]
        queries = random_of((shape.batch, max(WIDTHS), heads, size))
        return cls(caches, tables.to(DEVICE), ends.to(DEVICE), queries)

    def launch(self, rows: int, width: int) -> Callable[[], list[Tensor]]:
        """Return what attends for the last `width` queries of the first rows, cache by cache."""
        last = torch.arange(-width, 0, device=DEVICE)
        positions = (self.ends[:rows, None] + last).flatten()
        lens = tuple(self.ends[:rows].tolist())
        meta = AttentionMetadata(
            positions, (width,) * rows, lens, self.tables[:rows], decode_width=width
        )
        q = self.queries[:rows, -width:].flatten(0, 1)
        return lambda: [paged_attention(q, cache, [meta], 0.1) for cache in self.caches]


def attention_lines() -> list[Line]:
    """Compare the result of each row's last query between batches and widths, and time them."""
    lines = []
    for name, (shape, heads, kv_heads, size, batches) in CONTEXTS.items():
        if not GPU:
            shape, batches = shape._replace(batch=3), (1, 3)
        torch.manual_seed(0)
        contexts = Context.make(shape, heads, kv_heads, size)
        sizes = list(product(batches, WIDTHS))
        for variant in (v for v in VARIANTS if v == "today" or v not in STAGES):
            equal, micros = [], []
            with changes(VARIANTS[variant]):
                compile_all(lambda each, c=contexts: c.launch(*each)(), sizes)  # type: ignore[misc]
                reference = contexts.launch(max(batches), 1)()[0]
                for rows, width in sizes:
                    launch = contexts.launch(rows, width)
                    last = launch()[0].unflatten(0, (rows, width))[:, -1]
                    same = int((last == reference[:rows]).flatten(1).all(1).sum())
                    if same < rows:
                        equal.append(f"{rows}×{width}: {same}")
                    if GPU:
                        time = microseconds([launch], 1) / len(contexts.caches)
                        micros.append(f"{rows}×{width}: {time:.1f}")
            lines.append(
                Line("4", f"decode attention of {name}, rows × width", variant,
                     "rows equal to the largest batch at width 1, where not all: "
                     + (", ".join(equal) or "nowhere"), "µs " + ", ".join(micros))
            )  # fmt: skip
    return lines


def workload_lines(model: str, names: Sequence[str], variants: Sequence[str]) -> list[Line]:
    """Run workloads under some variants one after another, in this process."""
    lines = []
    for variant in variants:
        with changes(VARIANTS[variant]):
            bench = Bench(model, EngineConfig())
            bench.warm_up(list(names), 0.6)
            for name in names:
                run = bench.run(name, 0.6, None)
                full, steps = run.full_batch, max(run.full_batch.steps, 1)
                each = f"{full.seconds / steps * 1e3:.3f} ms a step of {full.rows // steps} rows"
                cost = f"{run.seconds:.3f} s, {each}"
                lines.append(Line("4", f"{model} {name}", variant, "", cost))
                print(lines[-1], flush=True)
            bench.free()
            del bench
            gc.collect()
            torch.cuda.empty_cache()
    return lines


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
    modes = ("tiles", "products", "attention", "workloads", "schedules", "scan")
    parser.add_argument("modes", nargs="+", choices=modes)
    parser.add_argument("--models", nargs="+", help="of products or of schedules")
    parser.add_argument("--schedules", type=int, default=200)
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=["today", "attention"])
    parser.add_argument("--workloads", nargs="+", default=["decode", "mixed"])
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=["today", "attention"])
    parser.add_argument("--no-times", dest="times", action="store_false", help="of products")
    parser.add_argument("--setting", default="today", help="of scan, which products runs")
    parser.add_argument("--json", type=Path, help="write the lines, and all that is behind them")
    arguments = parser.parse_args()
    models = arguments.models or MODELS
    rows = DENSE_ROWS if GPU else (1, 3, 17)
    if "scan" in arguments.modes:
        steady = arguments.setting in ("no splits", "limited")
        with changes([library_rules] if steady else []):
            found = product_scans(arguments.setting, models, rows, arguments.times)
        arguments.json.write_text(json.dumps(found))
        return
    lines: list[Line] = []
    behind: dict[str, Any] = environment()
    for mode in arguments.modes:
        if mode == "tiles":
            lines += tiles_lines(4096 if GPU else 64)
            lines += expert_lines((1, 16, 64, 256, 1024, 8192)) if GPU else []
        elif mode == "products":
            behind["scans"] = {
                setting: other_process(setting, models, arguments.times) for setting in SETTINGS
            }
            lines += product_lines(models, behind["scans"])
        elif mode == "attention":
            lines += attention_lines()
        elif mode == "workloads":
            for model in arguments.models or ("qwen3-8b",):
                lines += workload_lines(model, arguments.workloads, arguments.variants)
        else:
            models = arguments.models or tuple(SMALL)
            lines += schedule_lines(models, arguments.schedules, arguments.stages)
        if arguments.json:
            behind["lines"] = lines
            arguments.json.write_text(json.dumps(behind, indent=1) + "\n")
    print(table(lines))


if __name__ == "__main__":
    main()
