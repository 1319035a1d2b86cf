"""Compile what an engine compiles at its start, for an NVIDIA GPU that need not be there.

    python scripts/check/check_start_up.py [--model tiny-hybrid] [--threads 4] [--capability 90]

Compiles the kernels ahead, as an engine does, with an empty cache of Triton, and prints the seconds
that it takes with so many threads, and those of each kernel in the thread that compiled it. Then it
goes through the forwards of all graphs and layers, with launches that compile what is missing.
The exit code is 1 if anything is, which is also the case if a kernel does not compile.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import check_compile  # which turns Triton's interpreter off
import torch
import triton
from triton.runtime import driver

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from workloads import MODELS, bare_model, model_config

from batchgen.engine.base.engine_config import EngineConfig, ResolvedConfig
from batchgen.engine.engine_models import planned_uses
from batchgen.engine.memory.kernel_warmup import Undone, rehearse
from batchgen.engine.memory.memory_plan import (
    ModelUse,
    largest_decode,
    largest_prefill,
    scratch_runner,
)
from batchgen.kernels.compile_ahead import compiling_ahead
from batchgen.strategies.ar.strategy import ARStrategy

GPU_BYTES = 141 * 2**30
MULTIPROCESSORS = 132
"""Of an H200."""


def pretend(capability: int) -> None:
    """Let torch and Triton see a GPU, on which nothing can run."""
    major, minor = divmod(capability, 10)
    properties: Any = SimpleNamespace(
        major=major, minor=minor, multi_processor_count=MULTIPROCESSORS, total_memory=GPU_BYTES,
        shared_memory_per_block_optin=check_compile.SHARED_BYTES[capability],
    )  # fmt: skip
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (major, minor)
    driver.set_active(check_compile.AbsentGPU(capability))


def plan(name: str, device: torch.device) -> tuple[ModelUse, ResolvedConfig]:
    """Make a model of `workloads.MODELS` with shapes and no values, and an engine's settings."""
    with Undone(device):
        model = bare_model(model_config(name), device)
        uses, config = planned_uses(model, {}, ARStrategy(), EngineConfig(), ())
        (use,) = uses.values()
        return use, config


@torch.inference_mode()
def run_all(use: ModelUse, config: ResolvedConfig) -> None:
    """Go through all forwards before the first step of an engine, with all layers of the model."""
    with Undone(use.model.device):
        runner = scratch_runner(use, config)
        largest_prefill(runner, use, config)
        largest_decode(runner, use, config)
        runner.run_uncaptured(use.graph_shapes(config))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", choices=sorted(MODELS), default="tiny-hybrid")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--capability", type=int, default=90, help="such as 90 for Hopper")
    arguments = parser.parse_args()
    pretend(arguments.capability)
    use, config = plan(arguments.model, torch.device("cuda", 0))
    seconds: dict[str, list[float]] = defaultdict(list)

    def listen(src: Any, times: Any, cache_hit: bool, **_: Any) -> None:
        if not cache_hit:
            seconds[src.name].append(times.total / 1e6)

    triton.knobs.compilation.listener = listen
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        start, cpu = time.perf_counter(), time.process_time()
        with compiling_ahead(arguments.threads, lambda: None):
            rehearse([use], config)
            gone_through = time.perf_counter() - start
        took, cpu = time.perf_counter() - start, time.process_time() - cpu
        for name, each in sorted(seconds.items(), key=lambda item: -sum(item[1])):
            print(f"{name}: {', '.join(f'{one:.2f}' for one in each)} s")
        print(
            f"{sum(map(len, seconds.values()))} variants in {took:.2f} s with "
            f"{arguments.threads} threads; {gone_through:.2f} s to go through the forwards, "
            f"{cpu:.2f} s of cores without the assembler"
        )
        seconds.clear()
        compiled = check_compile.Compiled(arguments.capability)
        run = triton.JITFunction.run
        triton.JITFunction.run = lambda kernel, *args, **options: compiled.launch(
            kernel, *args, **options
        )
        run_all(use, config)
        triton.JITFunction.run = run
    for name, each in seconds.items():
        print(f"{name}: {len(each)} variants were missing")
    for name, error in compiled.errors.items():
        print(f"{name}: {error}")
    sys.exit(1 if seconds or compiled.errors or not compiled.variants else 0)


if __name__ == "__main__":
    main()
