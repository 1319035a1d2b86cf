"""Measure the offline throughput of the engine on the workloads on which engines are compared.

    python scripts/bench/bench_throughput.py --model qwen3-8b --workload mixed,decode [--json PATH]
    python scripts/bench/bench_throughput.py --model qwen3-8b --workload mixed \\
        --profile trace.json.gz
    TRITON_CACHE_DIR=$(mktemp -d) \\
        python scripts/bench/bench_throughput.py --model qwen3-8b --start-up
    python scripts/bench/bench_throughput.py --model qwen3-30b-a3b --workload mixed \\
        --routing uniform [--columns routed_experts]
    python scripts/bench/bench_throughput.py --model qwen3-8b --workload mixed \\
        --quantization none,fp8 [--requests 128]

The weights are random, in bfloat16 (float32 on a CPU), or with `--quantization fp8` in FP8 where
the device computes in it; several are measured one after another. EOS is ignored; there is one
device. Printed beside the seconds are the physical floor of the work, with the rates of an H100 and
with the rates measured in the same process, and how the time divides into prefill, decode and a
device that waits for the host. For a model with experts it also counts how many of them a step
touches; random weights route less evenly than chance does (`--routing uniform`), and the dummy
weights of other engines may let all tokens go to the same experts (`--routing same`).
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import threading
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import triton
from bench_engine import Bench, Run
from device_rates import Rates, measure_rates
from expert_counts import ROUTINGS
from this_process import process_age
from workloads import MODELS, WORKLOADS

from batchgen.engine.base.engine_config import EngineConfig

PEERS: dict[tuple[str, str], dict[str, float]] = {
    ("qwen3-0.6b", "mixed"): {"vLLM 0.23.0": 7.6, "lmdeploy 0.18.0": 10.2},
    ("qwen3-8b", "mixed"): {"vLLM 0.23.0": 18.1, "lmdeploy 0.18.0": 21.3},
    ("qwen3-8b", "decode"): {"vLLM 0.23.0": 38.0},
    ("qwen3-8b", "prefill"): {"vLLM 0.23.0": 19.7},
    ("qwen3-30b-a3b", "mixed"): {
        "vLLM 0.26.0, H200, uniform routing": 25.4,
        "vLLM 0.23.0, H200": 23.6,
        "vLLM, H100": 51.6,
    },
    ("qwen3-30b-a3b", "decode"): {
        "vLLM 0.26.0, H200, uniform routing": 32.7,
        "vLLM 0.23.0, H200": 31.9,
    },
    ("qwen3-30b-a3b", "prefill"): {"vLLM 0.23.0, H200": 12.1},
    ("hybrid-35b-a3b", "mixed"): {"vLLM 0.26.0, H200": 25.7},
    ("hybrid-35b-a3b", "decode"): {"vLLM 0.26.0, H200": 37.8},
    ("deepseek-v2-lite", "mixed"): {"vLLM 0.26.0, H200": 9.9},
    ("deepseek-v2-lite", "prefill"): {"vLLM 0.26.0, H200": 9.0},
}
"""The seconds of other engines by model and workload, on an H100 80GB unless they say otherwise."""


def describe(run: Run, model: str) -> str:
    prefill, decode, mixed, full = run.prefill, run.decode, run.mixed, run.full_batch
    lines = [
        f"{run.workload}: {run.seconds:.3f} s, {run.output_rate:.1f} output tok/s, "
        f"{run.total_rate:.1f} total tok/s"
    ]
    if run.floor_here:  # there is none on a CPU
        lines.append(
            f"  floor {run.floor.total:.2f} s (share {run.floor.total / run.seconds:.3f}), at the "
            f"rates here {run.floor_here.total:.2f} s "
            f"(share {run.floor_here.total / run.seconds:.3f})"
        )
        lines += [
            f"  {name}: {seconds} s, {seconds / run.seconds:.2f} times ours"
            for name, seconds in PEERS.get((model, run.workload), {}).items()
        ]
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


def figures_of(run: Run, model: str) -> dict[str, Any]:
    return asdict(run) | {
        "output_tokens_per_s": run.output_rate,
        "total_tokens_per_s": run.total_rate,
        "idle_seconds": run.idle,
        "floor_share": run.floor.total / run.seconds,
        "floor_share_here": run.floor_here and run.floor_here.total / run.seconds,
        "peer_seconds": PEERS.get((model, run.workload), {}),
    }


def environment(device: torch.device) -> dict[str, Any]:
    cuda = device.type == "cuda"
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty"],
        cwd=Path(__file__).parent,
        capture_output=True,
        text=True,
        check=False,  # a copy of the tree may come without its history
    )
    return {
        "command": shlex.join(sys.argv),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "commit": commit.stdout.strip() or None,
        "device": torch.cuda.get_device_name(device) if cuda else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), required=True)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--workload", help=f"comma separated, of {', '.join(WORKLOADS)}")
    what.add_argument(
        "--start-up", action="store_true", help="only time the start up to the first token"
    )
    parser.add_argument("--runs", type=int, default=1, help="timed runs of each workload")
    parser.add_argument("--temperature", type=float, default=0.6)
    parser.add_argument("--routing", choices=ROUTINGS, default="model", help="who chooses experts")
    parser.add_argument("--columns", default="", help="comma separated, of every request")
    parser.add_argument("--quantization", default="none", help="comma separated, of none and fp8")
    parser.add_argument("--requests", type=int, help="only the first so many of each workload")
    parser.add_argument("--json", type=Path, help="write all figures here")
    parser.add_argument("--profile", type=Path, help="after the runs; traces NAME.json or .json.gz")
    parser.add_argument(
        "--profile-after", type=int, default=8, help="decode steps before the profiled ones"
    )
    parser.add_argument("--max-num-seqs", type=int)
    parser.add_argument("--max-batched-tokens", type=int)
    parser.add_argument("--max-model-len", type=int)
    parser.add_argument("--gpu-memory-utilization", type=float)
    parser.add_argument("--no-overlap", dest="overlap", action="store_false", default=None)
    parser.add_argument("--no-cuda-graph", dest="cuda_graph", action="store_false", default=None)
    arguments = parser.parse_args()
    if arguments.workload:
        arguments.workload = arguments.workload.split(",")
        if unknown := [name for name in arguments.workload if name not in WORKLOADS]:
            parser.error(f"unknown workload {unknown[0]!r}: choose from {', '.join(WORKLOADS)}")
    arguments.quantization = arguments.quantization.split(",")
    if unknown := [name for name in arguments.quantization if name not in ("none", "fp8")]:
        parser.error(f"unknown quantization {unknown[0]!r}: choose none or fp8")
    if arguments.start_up and len(arguments.quantization) > 1:
        parser.error("--start-up takes one --quantization")
    if arguments.start_up and (arguments.profile or arguments.runs != 1):
        parser.error("--start-up takes neither --profile nor --runs")
    if arguments.profile and not torch.cuda.is_available():
        parser.error("--profile needs a GPU")
    return arguments


def engine_config(arguments: argparse.Namespace) -> EngineConfig:
    names = (
        "max_num_seqs",
        "max_batched_tokens",
        "max_model_len",
        "gpu_memory_utilization",
        "overlap",
        "cuda_graph",
    )
    options = {name: getattr(arguments, name) for name in names}
    return EngineConfig(**{name: value for name, value in options.items() if value is not None})


def make_bench(
    arguments: argparse.Namespace, config: EngineConfig, device: torch.device, quantization: str
) -> Bench:
    return Bench(
        arguments.model,
        config,
        device,
        routing=arguments.routing,
        columns=tuple(filter(None, arguments.columns.split(","))),
        quantization="fp8" if quantization == "fp8" else None,
        most_requests=arguments.requests,
    )


def run_workloads(
    arguments: argparse.Namespace,
    config: EngineConfig,
    device: torch.device,
    quantization: str,
    here: Rates | None,
) -> dict[str, Any]:
    bench = make_bench(arguments, config, device, quantization)
    warm_up = bench.warm_up(arguments.workload, arguments.temperature)
    print(
        f"load {bench.load_seconds:.2f} s, engine {bench.engine_seconds:.2f} s, "
        f"warm-up {warm_up:.2f} s\n{bench.engine.memory}",
        flush=True,
    )
    runs = []
    for name in arguments.workload:
        for _ in range(arguments.runs):
            run = bench.run(name, arguments.temperature, here)
            print(describe(run, arguments.model), flush=True)
            runs.append(figures_of(run, arguments.model))
    if arguments.profile:
        for name in arguments.workload:
            bench.profile(name, arguments.temperature, arguments.profile, arguments.profile_after)
    engine_config, memory = asdict(bench.engine.config), asdict(bench.engine.memory)
    peak = torch.cuda.max_memory_reserved() if here else None
    bench.free()
    touched = {name: bench.touched(name) for name in arguments.workload}
    for name, kinds in touched.items():
        for kind in kinds:
            print(f"{name}: {kind.line()}")
    return {
        "engine_config": engine_config,
        "quantization": quantization,
        "requests": arguments.requests,
        "routing": arguments.routing,
        "columns": arguments.columns,
        "experts_touched": {name: [asdict(t) for t in kinds] for name, kinds in touched.items()},
        "memory": memory,
        "rates": asdict(here) if here else None,
        "load_seconds": bench.load_seconds,
        "engine_seconds": bench.engine_seconds,
        "warm_up_seconds": warm_up,
        "peak_memory_bytes": peak,
        "runs": runs,
    }


def run_start_up(
    arguments: argparse.Namespace, config: EngineConfig, device: torch.device
) -> dict[str, Any]:
    imported = process_age()
    compiled = compiled_kernels()
    bench = make_bench(arguments, config, device, arguments.quantization[0])
    built = process_age()
    of_engine = len(compiled)
    bench.first_token(arguments.temperature)
    total = process_age()
    ahead = sum(compiled)
    print(
        f"first token {total:.2f} s after the process started: imports {imported:.2f} s, weights "
        f"{bench.load_seconds:.2f} s, engine {bench.engine_seconds:.2f} s, "
        f"request {total - built:.2f} s\n"
        f"kernels compiled ahead {ahead}, by the engine's launches {of_engine - ahead}, "
        f"by the request's {len(compiled) - of_engine}"
    )
    return {
        "engine_config": asdict(bench.engine.config),
        "first_token_seconds": total,
        "imports_seconds": imported,
        "load_seconds": bench.load_seconds,
        "engine_seconds": bench.engine_seconds,
        "request_seconds": total - built,
        "kernels_compiled_ahead": ahead,
        "kernels_compiled_by_engine": of_engine - ahead,
        "kernels_compiled_by_request": len(compiled) - of_engine,
    }


def compiled_kernels() -> list[bool]:
    """Return a list that grows by one entry for each kernel that Triton compiles from now on:
    whether a thread compiled it ahead. Kernels of its cache do not count."""
    compiled: list[bool] = []

    def listen(cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            compiled.append(threading.current_thread() is not threading.main_thread())

    triton.knobs.compilation.listener = listen
    return compiled


def main() -> None:
    arguments = parse_arguments()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    config = engine_config(arguments)
    if arguments.start_up:
        all_figures = [run_start_up(arguments, config, device)]
    else:
        here = measure_rates(device) if device.type == "cuda" else None
        if here:
            print(f"copy {here.bandwidth / 1e12:.3f} TB/s, matmul {here.flops / 1e12:.0f} TFLOP/s")
        all_figures = []
        for quantization in arguments.quantization:
            if len(arguments.quantization) > 1:
                print(f"quantization {quantization}")
            all_figures.append(run_workloads(arguments, config, device, quantization, here))
    common = {"model": arguments.model} | environment(device)
    figures: Any = [common | each for each in all_figures]
    if len(figures) == 1:
        figures = figures[0]
    print(f"{arguments.model} on {common['device']}, torch {common['torch']}, {common['date']}")
    if arguments.json:
        arguments.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
