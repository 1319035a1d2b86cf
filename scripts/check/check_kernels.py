"""Compile the Triton kernels for an NVIDIA GPU that need not be there.

    python scripts/check/check_kernels.py [--model tiny,tiny-moe] [--quantization fp8]
        [--capability 90] [--threads 4] [--hashes NEW.json] [--against OLD.json]
    python scripts/check/check_kernels.py --tests tests/kernels

With --model, an engine's kernels are compiled ahead for each model, as its start-up does, with an
empty Triton cache. Then every forward that an engine runs at start-up is run without computing
anything, and its launches compile the kernels that are still missing.

With --tests, the launches of those tests are compiled and not run. So the tests' results are wrong,
and only the compiler's errors count: it refuses some code that the interpreter accepts.

--hashes writes the SHA-256 of each variant's PTX, by kernel, signature, constants and options.
--against compares them with a file of an earlier run, and lists the variants whose code only one of
the two runs has. It compares code alone: the names of kernels and arguments do not matter.

The exit code is 1 if a kernel does not compile, asks for more shared memory than there is, was
missing after the start-up, or has other code than in the file of --against.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import sys
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

os.environ["TRITON_INTERPRET"] = "0"  # read when a kernel is defined
os.environ["TRITON_DISABLE_LINE_INFO"] = "1"  # the code names no files and lines
os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")

import pytest
import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.backends.driver import DriverBase
from triton.runtime import driver
from triton.runtime.jit import JITFunction

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

from shapes import MODELS
from workloads import bare_model, model_config

from batchgen.engine.engine_models import planned_uses
from batchgen.engine.interface.engine_config import EngineConfig, ResolvedConfig
from batchgen.engine.loading.loader import Quantization
from batchgen.engine.memory.kernel_warmup import ShapesOnly, warm_up
from batchgen.engine.memory.largest_steps import largest_decode, largest_prefill, scratch_runner
from batchgen.engine.memory.model_use import ModelUse
from batchgen.kernels.compile_ahead import compiling_ahead
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy

SHARED_BYTES = {80: 163 * 1024, 89: 99 * 1024, 90: 227 * 1024, 100: 227 * 1024}
"""The most shared memory of a program, by compute capability (CUDA C++ programming guide)."""
H200 = {"total_memory": 141 * 2**30, "multi_processor_count": 132}
"""Properties of the GPU that `pretend` reports, whatever its capability."""


class AbsentGPU(DriverBase):  # type: ignore[misc]
    """A driver for a GPU that is not there: Triton can compile for it, and launch nothing."""

    map_python_to_cpp_type = get_active_torch_device = get_benchmarker = None

    def __init__(self, capability: int) -> None:
        self._target = GPUTarget("cuda", capability, 32)

    @classmethod
    def is_active(cls) -> bool:
        return True

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


class Compiled:
    """Records the variants that Triton compiles, and their errors.

    Attributes:
        seconds: the compile times of a kernel's variants, by the kernel's name.
        hashes: SHA-256 of a variant's PTX, by a key that describes the variant, as JSON.
        errors: the message for a kernel that does not compile or takes too much shared memory, by
            the kernel's name.
    """

    def __init__(self, capability: int) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)
        self.hashes: dict[str, str] = {}
        self.errors: dict[str, str] = {}
        self._shared = SHARED_BYTES.get(capability, SHARED_BYTES[80])
        self._run = JITFunction.run
        triton.knobs.compilation.listener = self._listen

    def _listen(
        self, src: Any, metadata: Any, metadata_group: dict[str, str], times: Any, cache_hit: bool
    ) -> None:
        """Record a variant. Triton calls this once for each, in the thread that compiled it."""
        if not cache_hit:
            self.seconds[src.name].append(times.total / 1e6)
        options = {name: metadata[name] for name in ("num_warps", "num_stages", "num_ctas")}
        attributes = sorted(map(str, src.attrs.items()))
        constants = {src.fn.arg_names[at[0]]: str(value) for at, value in src.constants.items()}
        key = json.dumps([src.name, src.signature, constants, attributes, options])
        (code,) = (Path(path) for name, path in metadata_group.items() if name.endswith(".ptx"))
        text = code.read_text().replace(src.name, "kernel")
        self.hashes[key] = hashlib.sha256(text.encode()).hexdigest()
        if metadata["shared"] > self._shared:
            self.errors[src.name] = (
                f"{metadata['shared']:,} bytes of shared memory, of {self._shared:,}"
            )

    def launch(self, kernel: JITFunction[Any], *args: Any, **options: Any) -> Any:
        """Compile a kernel without launching it: the replacement for `JITFunction.run`."""
        options["warmup"] = True
        # Kernels get this constant as true for tensors on a CPU, such as those of tests. Compile
        # the code for a GPU.
        if "INTERPRETED" in options:
            options["INTERPRETED"] = False
        try:
            return self._run(kernel, *args, **options)
        except Exception as error:
            self.errors.setdefault(kernel.__name__, f"{type(error).__name__}: {error}")
            raise

    def differences(self, earlier: dict[str, str]) -> list[str]:
        """Say which variants have code that no earlier one had, and the reverse."""
        new = [key for key, code in self.hashes.items() if code not in set(earlier.values())]
        gone = [key for key, code in earlier.items() if code not in set(self.hashes.values())]
        return [f"other code: {key}" for key in new] + [f"code is gone: {key}" for key in gone]


def pretend(capability: int) -> None:
    """Make torch report a GPU of this capability. Nothing can run on it."""
    major, minor = divmod(capability, 10)
    shared = SHARED_BYTES.get(capability, SHARED_BYTES[80])
    properties: Any = SimpleNamespace(
        major=major, minor=minor, shared_memory_per_block_optin=shared, **H200
    )
    torch.cuda.get_device_properties = lambda *_: properties
    torch.cuda.get_device_capability = lambda *_: (major, minor)


def plan(
    name: str, device: torch.device, quantization: Quantization | None
) -> tuple[ModelUse, ResolvedConfig]:
    """Make a model of `shapes.MODELS`, and the settings of an engine for it. In `ShapesOnly`,
    its parameters have shapes and no values, so they need no GPU."""
    with ShapesOnly(device):
        model = bare_model(model_config(name), device, quantization=quantization)
        strategy = DLLMStrategy(block_length=4) if "sdar" in name else ARStrategy()
        uses, config = planned_uses(model, {}, strategy, EngineConfig(), ())
        (use,) = uses.values()
        return use, config


@torch.inference_mode()
def run_all(use: ModelUse, config: ResolvedConfig) -> None:
    """Run every forward that an engine runs at start-up, with all layers of the model. In the mode
    `ShapesOnly` operations compute only shapes, so all that happens is that launches compile."""
    with ShapesOnly(use.model.device):
        runner = scratch_runner(use, config)
        largest_prefill(runner, use, config)
        largest_decode(runner, use, config)
        runner.run_uncaptured(use.graph_shapes(config))


def compile_start_up(
    name: str, quantization: Quantization | None, threads: int, compiled: Compiled
) -> list[str]:
    """Compile the kernels of an engine with this model as its start-up does. Return a line for each
    kernel that its forwards launch and the start-up did not compile."""
    use, config = plan(name, torch.device("cuda", 0), quantization)
    compiled.seconds.clear()
    start, cpu = time.perf_counter(), time.process_time()
    with compiling_ahead(threads, lambda: None):
        warm_up([use], config)
        forwards_took = time.perf_counter() - start
    # CPU seconds of this process, all threads together. ptxas is another process, so excluded.
    took, cpu = time.perf_counter() - start, time.process_time() - cpu
    for kernel, seconds in sorted(compiled.seconds.items(), key=lambda item: -sum(item[1])):
        print(f"{kernel}: {', '.join(f'{s:.2f}' for s in seconds)} s")
    print(
        f"{name}: {sum(map(len, compiled.seconds.values()))} variants in {took:.2f} s with "
        f"{threads} threads; {forwards_took:.2f} s to go through the forwards, "
        f"{cpu:.2f} s of cores without the assembler"
    )
    compiled.seconds.clear()
    JITFunction.run = lambda kernel, *args, **options: compiled.launch(kernel, *args, **options)
    run_all(use, config)
    JITFunction.run = compiled._run
    return [
        f"{kernel}: {len(seconds)} variants were missing"
        for kernel, seconds in compiled.seconds.items()
    ]


def compile_tests(tests: list[str], compiled: Compiled) -> None:
    """Run tests with launches that compile and do not run; print the variants of each kernel."""
    JITFunction.run = lambda kernel, *args, **options: compiled.launch(kernel, *args, **options)
    quiet = ["-p", "no:terminal", "-p", "no:cacheprovider", "-m", "not slow and not gpu"]
    pytest.main([*quiet, *tests])
    JITFunction.run = compiled._run
    for name, count in sorted(Counter(json.loads(key)[0] for key in compiled.hashes).items()):
        print(f"{name}: {count} variants")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny-hybrid", help=f"'all' or of {', '.join(MODELS)}")
    parser.add_argument("--quantization", choices=("fp8",), help="of weights while they load")
    parser.add_argument("--tests", nargs="+", help="compile what these tests launch instead")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--capability", type=int, default=90, help="such as 90 for Hopper")
    parser.add_argument("--hashes", type=Path, metavar="FILE", help="write the hashes here")
    parser.add_argument("--against", type=Path, metavar="FILE", help="compare with these hashes")
    arguments = parser.parse_args()
    driver.set_active(AbsentGPU(arguments.capability))
    compiled, problems = Compiled(arguments.capability), []
    with tempfile.TemporaryDirectory() as folder:
        os.environ["TRITON_CACHE_DIR"] = folder
        if arguments.tests:
            compile_tests(arguments.tests, compiled)
        else:
            pretend(arguments.capability)
            names = list(MODELS) if arguments.model == "all" else arguments.model.split(",")
            for name in names:
                problems += compile_start_up(
                    name, arguments.quantization, arguments.threads, compiled
                )
    problems += [f"{name} does not compile: {error}" for name, error in compiled.errors.items()]
    if arguments.hashes:
        arguments.hashes.write_text(json.dumps(compiled.hashes, indent=1, sort_keys=True))
    if arguments.against:
        problems += compiled.differences(json.loads(arguments.against.read_text()))
    print("\n".join([*problems, f"{len(compiled.hashes)} variants, {len(problems)} problems"]))
    sys.exit(1 if problems or not compiled.hashes else 0)


if __name__ == "__main__":
    main()
