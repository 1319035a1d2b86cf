"""What all benchmarks share: options, subcommands (modes), results as JSON, a process's memory, a
GPU's rates, and the times of kernel launches."""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
import triton
from torch import Tensor

T = TypeVar("T")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPE = torch.bfloat16 if DEVICE.type == "cuda" else torch.float32
_GRAPH_MICROSECONDS = 5000
"""About how long one replay of a CUDA graph of timed launches should take."""


def commas(convert: Callable[[str], T], choices: Collection[T] = ()) -> Callable[[str], list[T]]:
    """Make the argparse type of values between commas. Each must be one of `choices`, unless there
    are none."""

    def read(text: str) -> list[T]:
        values = [convert(part) for part in text.split(",") if part]
        if unknown := [value for value in values if choices and value not in choices]:
            names = ", ".join(map(str, choices))
            raise argparse.ArgumentTypeError(f"unknown {unknown[0]!r}: choose from {names}")
        return values

    return read


def environment() -> dict[str, Any]:
    """Return the command, the commit and the machine of this process."""
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
        "device": torch.cuda.get_device_name(DEVICE) if DEVICE.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "triton": triton.__version__,
    }


def save_results(path: Path | None, mode: str, results: Sequence[Any]) -> None:
    """Write a benchmark's results, the command, the commit and the machine as JSON, if `path` is
    not None."""
    if path is not None:
        content = {"mode": mode} | environment() | {"results": results}
        path.write_text(json.dumps(content, indent=1) + "\n")


class Mode(NamedTuple):
    """A subcommand: a function that adds its options, and one that measures and returns figures,
    whose docstring is its help text."""

    add_arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], list[Any]]


def run_mode(description: str, modes: dict[str, Mode], arguments: list[str] | None = None) -> Any:
    """Run the subcommand that the command line names, and return its figures."""
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    commands = parser.add_subparsers(dest="mode", required=True)
    for name, mode in modes.items():
        subparser = commands.add_parser(
            name,
            description=mode.run.__doc__,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        mode.add_arguments(subparser)
        subparser.add_argument("--json", type=Path, help="write all figures here")
    options = parser.parse_args(arguments)
    results = modes[options.mode].run(options)
    save_results(options.json, options.mode, results)
    return results


def anonymous_mib() -> float:
    """Return the MiB of memory that this process holds, without the pages of mapped files, which
    the system takes back when it needs them."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) / 1024


def synchronize() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


class Rates(NamedTuple):
    """The bytes of device memory and the bfloat16 operations that a GPU reaches in a second."""

    bandwidth: float
    flops: float

    def __str__(self) -> str:
        return f"copy {self.bandwidth / 1e12:.3f} TB/s, matmul {self.flops / 1e12:.0f} TFLOP/s"


H100 = Rates(3.0e12, 790e12)
"""The result of `measure_rates` on an H100 80GB, rounded."""


def measure_rates() -> Rates | None:
    """Measure a GPU with a kernel over 1 GiB and a product of two 8192² matrices; None on a CPU."""
    if DEVICE.type == "cpu":
        return None
    source = torch.randint(0, 2**31 - 1, (2**28,), dtype=torch.int32, device=DEVICE)
    # Not `copy_`: in a CUDA graph the GPU's copy engine does it, at two thirds of a kernel's rate.
    copy = microseconds([partial(torch.neg, source, out=torch.empty_like(source))], launches=1)
    product = microseconds([partial(torch.mm, *random_normal(2, 8192, 8192))], launches=1)
    # Every byte is read and written, and every product of a matmul is a multiplication and a sum.
    rates = Rates(2e6 * source.nbytes / copy, 2e6 * 8192**3 / product)
    del source
    torch.cuda.empty_cache()  # the engine comes next, which sizes its KV cache by the free memory
    return rates


def _clock_ms(launch: Callable[[], object]) -> float:
    start = time.perf_counter()
    launch()
    return 1e3 * (time.perf_counter() - start)


def microseconds(runs: Sequence[Callable[[], object]], launches: int | None = None) -> float:
    """Return the microseconds of one launch in a CUDA graph: the median of 20 replays.

    The graph launches all `runs` in turn, at least `launches` times, by default as often as take
    about 5 ms but at most 64 times. On a CPU each runs once.
    """
    if DEVICE.type == "cpu":
        return 1e3 * statistics.mean(map(_clock_ms, runs))
    if launches is None:
        once = microseconds(runs, launches=1)
        launches = max(1, min(64, int(_GRAPH_MICROSECONDS / once)))
    with torch.cuda.stream(torch.cuda.Stream()):
        for run in runs:
            run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    launches = -(-launches // len(runs)) * len(runs)
    # With several ranks, another thread of this process makes CUDA calls during the capture.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        for i in range(launches):
            runs[i % len(runs)]()
    graph.replay()
    marks = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(20)]
    for start, end in marks:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    times: list[float] = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(times) * 1e3 / launches


def random_normal(*shape: int, dtype: torch.dtype = DTYPE) -> Tensor:
    return torch.randn(shape, dtype=dtype, device=DEVICE)


Launch = Callable[[int], Any]
"""Launches a kernel on the i-th of its inputs."""


@dataclass(frozen=True)
class Case:
    """A kernel to be timed."""

    name: str
    launch: Launch
    count: int = 1  # the number of inputs: so many that they are not all in the L2 cache at once
    num_bytes: float = 0  # the bytes that a launch must read and write; 0: no floor
    flops: float = 0
