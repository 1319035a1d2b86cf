"""Time products in FP8 beside those in bfloat16.

    python scripts/bench/bench_fp8.py [--tokens 1,16,64,256,2048,16384] [--expert-tokens 256,8192]
    python scripts/bench/bench_fp8.py --tune

Needs a GPU that computes in FP8. The linear layers are those of Qwen3-8B and Qwen3-30B-A3B, the
experts those of a layer of Qwen3-30B-A3B, to which tokens are routed uniformly. Times are of
launches in a CUDA graph, with weights that are not in the L2 cache; `FP8` is with the time to
quantise the rows, `ours` and `cuBLAS` without. `--tune` tries the tiles of a list before, and
prints the fastest for the table of batchgen/kernels/fp8/tiles.py; `--compile` only compiles what
that will need, in as many processes as there are CPUs.
"""

from __future__ import annotations

import argparse
import sys

import torch
import torch.nn.functional as F
from fp8_layers import LINEAR_SHAPES, FP8Layer, LinearCase, LinearShape, timed_each
from fp8_tuning import compile_all, tune_experts, tune_linear
from moe_layers import SHAPES, Batch, Layer, timed

from batchgen.engine.layers.fp8_format import has_fp8_units
from batchgen.kernels.fp8.fp8_experts_triton import fp8_grouped_mlp_triton
from batchgen.kernels.fp8.fp8_linear import (
    fp8_linear,
    fp8_linear_library,
    library_multiplies,
)
from batchgen.kernels.fp8.fp8_linear_triton import fp8_linear_triton
from batchgen.kernels.fp8.quantise import quantise_rows
from batchgen.kernels.moe.experts_triton import grouped_mlp_triton


def bench_linear(shape: LinearShape, tokens: int) -> None:
    """Print the times of one product, and what the faster way in FP8 reads and computes."""
    case = LinearCase.make(shape, tokens)
    out = torch.empty((tokens, shape.width), dtype=torch.bfloat16, device="cuda")
    count = len(case.weights)
    plain = timed_each(lambda i: F.linear(case.x, case.plain[i]), count)
    whole = timed_each(
        lambda i: fp8_linear(quantise_rows(case.x), case.weights[i], dtype=torch.bfloat16), count
    )
    kernel = timed_each(
        lambda i: fp8_linear_triton(case.rows.values, case.rows.scales, case.weights[i], out), count
    )
    library = "-"
    try:
        time = timed_each(lambda i: fp8_linear_library(case.rows, case.weights[i]), count)
        library = f"{time:.1f}"
    except (RuntimeError, ValueError, AttributeError) as error:  # an older torch, or GPU
        print(f"cuBLAS: {str(error).splitlines()[0]}", flush=True)
    chosen = "cuBLAS" if library_multiplies(case.rows, case.weights[0], torch.bfloat16) else "ours"
    operations = 2 * tokens * shape.width * shape.depth
    read = shape.width * shape.depth + tokens * (shape.depth + 2 * shape.width)
    print(
        f"{shape.name:8}{tokens:6}{plain:10.1f}{whole:10.1f}{plain / whole:7.2f}{kernel:10.1f}"
        f"{library:>10}{operations / whole / 1e6:8.0f}{read / whole / 1e3:8.0f}  {chosen}",
        flush=True,
    )


def bench_experts(layer: Layer, fp8: FP8Layer, tokens: int) -> None:
    """Print the time of a layer of experts in both."""
    shape = SHAPES["30b-a3b"]
    batch = Batch.make(shape, tokens)
    plain, quantised = (
        timed(lambda i, run=run, of=of: run(batch.x, *of, batch.ids[i], batch.weights[i]))  # type: ignore[misc]
        for run, of in ((grouped_mlp_triton, layer), (fp8_grouped_mlp_triton, fp8))
    )
    operations = 6 * batch.ids[0].numel() * shape.hidden * shape.inner
    print(
        f"{'experts':8}{tokens:6}{plain:10.1f}{quantised:10.1f}{plain / quantised:7.2f}"
        f"{operations / quantised / 1e6:28.0f}",
        flush=True,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tokens", default="1,16,64,256,2048,16384", help="comma separated")
    parser.add_argument("--expert-tokens", default="256,512,8192", help="comma separated")
    parser.add_argument("--tune", action="store_true", help="try tiles, print the fastest")
    parser.add_argument("--compile", action="store_true", help="compile what --tune will try")
    arguments = parser.parse_args()
    if not torch.cuda.is_available() or not has_fp8_units(torch.device("cuda")):
        sys.exit("needs a GPU that computes in FP8")
    tokens = [int(n) for n in arguments.tokens.split(",") if n]
    expert_tokens = [int(n) for n in arguments.expert_tokens.split(",") if n]
    torch.manual_seed(0)
    if arguments.compile:
        compile_all(tokens, expert_tokens)
        return
    if arguments.tune:
        tune_linear(tokens)
    print(
        f"{torch.cuda.get_device_name()}\n{'':8}{'tokens':>6}{'bf16 µs':>10}{'FP8 µs':>10}{'':7}"
        f"{'ours':>10}{'cuBLAS':>10}{'TFLOP/s':>8}{'GB/s':>8}"
    )
    for shape in LINEAR_SHAPES:
        for count in tokens:
            bench_linear(shape, count)
    layer = Layer.make(SHAPES["30b-a3b"])
    fp8 = FP8Layer.of(layer)
    if arguments.tune:
        tune_experts(fp8, expert_tokens)
    for count in expert_tokens:
        bench_experts(layer, fp8, count)


if __name__ == "__main__":
    main()
