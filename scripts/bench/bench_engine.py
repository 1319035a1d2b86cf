"""Measure the engine: its throughput, and what options of it cost.

    python scripts/bench/bench_engine.py throughput --model qwen3-8b --workload mixed,decode
    python scripts/bench/bench_engine.py throughput --model qwen3-30b-a3b --workload mixed \\
        --routing uniform [--columns routed_experts] [--quantization none,fp8] [--requests 128]
    python scripts/bench/bench_engine.py table [--models gpt-oss-20b] [--beside OLDER_TREE]
    python scripts/bench/bench_engine.py determinism [--models qwen3-0.6b] [--schedules 200]
    python scripts/bench/bench_engine.py price --models qwen3-8b,gpt-oss-20b [--layers 12]
    python scripts/bench/bench_engine.py price --models qwen3-8b,qwen3-8b \\
        --against qwen3-8b-int4,qwen3-8b-nvfp4
    python scripts/bench/bench_engine.py adapters --model qwen3-8b [--adapters 1,4,16] [--rank 16]
    python scripts/bench/bench_engine.py unmasking [--model sdar-8b] [--in-flight 128]
    python scripts/bench/bench_engine.py tensor-parallel [--model qwen3-30b-a3b] [--ranks 1,2,4]

All modes take random weights, in bfloat16 on a GPU, or in FP8 with `--quantization fp8`, and in
float32 on a CPU. Prompts are random, and EOS is ignored. Every mode writes its figures with `--json
PATH`.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict
from typing import Any

import torch
from measuring import Mode, Rates, commas, measure_rates, run_mode
from modes import adapters, determinism, price, table, tensor_parallel, unmasking
from modes.engine_runs import Bench, Run
from modes.routing import ROUTINGS
from shapes import MODELS
from workloads import WORKLOADS

from batchgen.engine.interface.engine_config import EngineConfig

_ENGINE_OPTIONS: dict[str, Any] = {
    "max_num_seqs": int,
    "max_batched_tokens": int,
    "max_model_len": int,
    "gpu_memory_utilization": float,
    "kv_cache_gib": float,
}


def figures_of(run: Run) -> dict[str, Any]:
    """Return a run's fields and the rates that follow from them, for `--json`."""
    tokens = run.prompt_tokens + run.output_tokens
    return asdict(run) | {
        "output_tokens_per_s": run.output_tokens / run.seconds,
        "total_tokens_per_s": tokens / run.seconds,
        "idle_seconds": run.idle,
        "floor_share": run.floor.total / run.seconds,
        "floor_share_here": run.floor_here and run.floor_here.total / run.seconds,
    }


def describe(run: Run, figures: dict[str, Any]) -> str:
    prefill, decode, mixed, full = run.prefill, run.decode, run.mixed, run.full_batch
    lines = [
        f"{run.workload}: {run.seconds:.3f} s, {figures['output_tokens_per_s']:.1f} output tok/s, "
        f"{figures['total_tokens_per_s']:.1f} total tok/s"
    ]
    if run.floor_here:  # there is none on a CPU
        lines.append(
            f"  floor {run.floor.total:.2f} s (share {figures['floor_share']:.3f}), at the rates "
            f"here {run.floor_here.total:.2f} s (share {figures['floor_share_here']:.3f})"
        )
    host = run.seconds - prefill.seconds - decode.seconds - mixed.seconds - run.idle
    lines.append(
        f"  prefill {prefill.seconds:.3f} s in {prefill.steps} steps "
        f"(floor {run.floor.prefill:.2f}), decode {decode.seconds:.3f} s in {decode.steps} "
        f"(floor {run.floor.decode:.2f}), both in one {mixed.seconds:.3f} s in {mixed.steps}, "
        f"idle between {run.idle:.3f} s "
        f"({run.idle / run.seconds:.1%}), before and after {host:.3f} s"
    )
    if full.steps:
        each, idle = full.seconds / full.steps, full.idle_before / full.steps
        lines.append(
            f"  at batch {full.rows // full.steps}: {each * 1e3:.3f} ms per step and "
            f"{idle * 1e6:.0f} us idle ({idle / (each + idle):.2%}); mean batch "
            f"{decode.rows / decode.steps:.1f}"
        )
    lines.append(
        f"  preemptions {run.preemptions}, cached tokens {run.cached_tokens}, "
        f"peak KV use {run.peak_kv_usage:.1%}"
    )
    return "\n".join(lines)


def add_throughput_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--routing", choices=ROUTINGS, default="model", help="who chooses experts")
    parser.add_argument(
        "--columns", type=commas(str), default=[], help="output columns of all rows"
    )
    parser.add_argument("--quantization", type=commas(str, ("none", "fp8")), default=["none"])
    parser.add_argument("--kv-cache-dtype", choices=("auto", "fp8"), default="auto")
    parser.add_argument("--requests", type=int, help="only the first so many of each workload")
    for name, kind in _ENGINE_OPTIONS.items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind)
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", default=None)
    parser.add_argument("--no-cuda-graph", dest="cuda_graph", action="store_false", default=None)
    parser.add_argument("--workload", type=commas(str, WORKLOADS), required=True)
    parser.add_argument("--runs", type=int, default=1, help="timed runs of each workload")


def make_bench(options: argparse.Namespace, quantization: str) -> Bench:
    """Load the model of the options, with an engine for it. Options that are None keep the
    defaults of `EngineConfig`."""
    names = (*_ENGINE_OPTIONS, "overlap", "cuda_graph")
    values = {name: getattr(options, name) for name in names}
    return Bench(
        options.model,
        EngineConfig(**{name: value for name, value in values.items() if value is not None}),
        routing=options.routing,
        columns=tuple(options.columns),
        quantization="fp8" if quantization == "fp8" else None,
        kv_cache_dtype=options.kv_cache_dtype,
        most_requests=options.requests,
    )


def run_throughput(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Time workloads, and compare each with its floor: the time that no implementation can beat.

    The output says how the time divides into prefill, decode, and a device that waits for the host.
    If the model has experts, its random weights route tokens less evenly than chance does
    (`--routing uniform`). The dummy weights of other engines may send all tokens to the same
    experts (`--routing same`).
    """
    here = measure_rates()
    if here:
        print(here)
    results = []
    for quantization in options.quantization:
        if len(options.quantization) > 1:
            print(f"quantization {quantization}")
        results.append(run_workloads(options, quantization, here))
    return results


def run_workloads(
    options: argparse.Namespace, quantization: str, here: Rates | None
) -> dict[str, Any]:
    """Time all workloads in one engine. `here` are the rates of this GPU; None on a CPU."""
    bench = make_bench(options, quantization)
    warm_up = bench.warm_up(options.workload, options.temperature)
    print(
        f"load {bench.load_seconds:.2f} s, engine {bench.engine_seconds:.2f} s, "
        f"warm-up {warm_up:.2f} s\n{bench.engine.memory}",
        flush=True,
    )
    runs = []
    for name in options.workload:
        for _ in range(options.runs):
            run = bench.run(name, options.temperature, here)
            runs.append(figures_of(run))
            print(describe(run, runs[-1]), flush=True)
    return {
        "model": options.model,
        "engine_config": asdict(bench.engine.config),
        "quantization": quantization,
        "kv_cache_dtype": options.kv_cache_dtype,
        "requests": options.requests,
        "routing": options.routing,
        "columns": options.columns,
        "memory": asdict(bench.engine.memory),
        "rates": here._asdict() if here else None,
        "load_seconds": bench.load_seconds,
        "engine_seconds": bench.engine_seconds,
        "warm_up_seconds": warm_up,
        "peak_memory_bytes": torch.cuda.max_memory_reserved() if here else None,
        "runs": runs,
    }


MODES = {
    "throughput": Mode(add_throughput_arguments, run_throughput),
    "determinism": Mode(determinism.add_arguments, determinism.run),
    "table": Mode(table.add_arguments, table.run),
    "price": Mode(price.add_arguments, price.run),
    "adapters": Mode(adapters.add_arguments, adapters.run),
    "unmasking": Mode(unmasking.add_arguments, unmasking.run),
    "tensor-parallel": Mode(tensor_parallel.add_arguments, tensor_parallel.run),
}


if __name__ == "__main__":
    run_mode(__doc__, MODES)
