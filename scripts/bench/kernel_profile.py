"""The time that the GPU spends in each kernel, and on none, during a few steps of the engine."""

from __future__ import annotations

import gzip
import json
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_ON_DEVICE = {"kernel", "gpu_memcpy", "gpu_memset"}
_NOISE = ("void ", "at::native::", "at::", "(anonymous namespace)::", "c10::", "std::", "cutlass::")
_NAME_WIDTH = 72


@dataclass(frozen=True, slots=True)
class KernelTime:
    """All launches of the kernels of one name; `total` is their time in microseconds."""

    name: str
    launches: int
    total: float


@dataclass(frozen=True, slots=True)
class KernelWindow:
    """What the device did from the start of the first kernel to the end of the last.

    `length` and `busy` are microseconds, `busy` those in which a kernel or copy ran. The costliest
    kernels come first; if some overlapped, their sum is more than `busy`.
    """

    length: float
    busy: float
    kernels: list[KernelTime]

    @classmethod
    def from_events(cls, events: Iterable[dict[str, Any]]) -> KernelWindow:
        """Read the complete events ("ph": "X") of a Chrome trace that ran on the device."""
        runs = sorted(
            (float(e["ts"]), float(e["ts"]) + float(e["dur"]), str(e["name"]))
            for e in events
            if e["ph"] == "X" and e.get("cat") in _ON_DEVICE
        )
        if not runs:
            raise ValueError("the trace has no kernels: did the profiler see a GPU?")
        busy, reached = 0.0, runs[0][0]
        by_name: dict[str, list[float]] = defaultdict(list)
        for start, end, name in runs:
            busy += max(0.0, end - max(start, reached))
            reached = max(reached, end)
            by_name[name].append(end - start)
        kernels = [KernelTime(name, len(times), sum(times)) for name, times in by_name.items()]
        kernels.sort(key=lambda kernel: -kernel.total)
        return cls(reached - runs[0][0], busy, kernels)

    def table(self, title: str, steps: int, top: int = 15) -> str:
        """Format the `top` costliest kernels of a window of `steps` steps, per step."""
        launches = sum(kernel.launches for kernel in self.kernels)
        idle = (self.length - self.busy) / steps
        lines = [
            f"{title}: {self.length / steps / 1e3:.3f} ms per step, busy "
            f"{self.busy / self.length:.1%}, idle {idle:.0f} us between kernels, "
            f"{launches / steps:.0f} launches",
            f"{'us/step':>10} {'share':>6} {'calls':>7} {'us each':>8}  kernel",
        ]
        rest = KernelTime(
            f"({len(self.kernels) - top} other names)",
            sum(kernel.launches for kernel in self.kernels[top:]),
            sum(kernel.total for kernel in self.kernels[top:]),
        )
        for kernel in [*self.kernels[:top], *([rest] if rest.launches else [])]:
            lines.append(
                f"{kernel.total / steps:10.1f} {kernel.total / self.length:6.1%} "
                f"{kernel.launches / steps:7.1f} {kernel.total / kernel.launches:8.1f}  "
                f"{short_name(kernel.name)}"
            )
        return "\n".join(lines)


def short_name(name: str) -> str:
    """Cut return type and common namespaces from a C++ name, and the middle if it is long."""
    for noise in _NOISE:
        name = name.replace(noise, "")
    if len(name) <= _NAME_WIDTH:
        return name
    half = (_NAME_WIDTH - 3) // 2
    return f"{name[:half]}...{name[-half:]}"


def profile_window(run: Callable[[], object], trace: Path) -> KernelWindow:
    """Call `run` under torch's profiler, write its Chrome trace (gzipped if named .gz) and
    summarise what ran on the GPU."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        run()
        torch.cuda.synchronize()
    profiler.export_chrome_trace(str(trace))
    content = gzip.decompress(trace.read_bytes()) if trace.suffix == ".gz" else trace.read_bytes()
    return KernelWindow.from_events(json.loads(content)["traceEvents"])
