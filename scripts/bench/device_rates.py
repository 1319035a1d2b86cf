"""The rates that a GPU's memory and matrix units reach, from which floors of time are computed."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True)
class Rates:
    """What a GPU reaches.

    Attributes:
        bandwidth: bytes of device memory per second.
        flops: bfloat16 operations per second.
    """

    bandwidth: float
    flops: float


H100 = Rates(3.0e12, 790e12)
"""The result of `measure_rates` on an H100 80GB, rounded."""


def measure_rates(device: torch.device) -> Rates:
    """Measure a GPU with a copy of 1 GiB, read and written, and a product of two 8192² matrices."""
    rates = Rates(_copy_rate(device), _matmul_rate(device))
    torch.cuda.empty_cache()  # the engine comes next, which sizes its KV cache by the free memory
    return rates


def _copy_rate(device: torch.device) -> float:
    source = torch.randint(0, 2**31 - 1, (2**28,), dtype=torch.int32, device=device)
    target = torch.empty_like(source)
    return 2 * source.nbytes / _median_seconds(lambda: target.copy_(source))


def _matmul_rate(device: torch.device, size: int = 8192) -> float:
    a = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    b = torch.randn(size, size, dtype=torch.bfloat16, device=device)
    return 2 * size**3 / _median_seconds(lambda: a @ b)


def _median_seconds(launch: Callable[[], object], repeats: int = 20) -> float:
    for _ in range(3):
        launch()
    marks = [
        (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
        for _ in range(repeats)
    ]
    for start, end in marks:
        start.record()
        launch()
        end.record()
    torch.cuda.synchronize()
    milliseconds: list[float] = [start.elapsed_time(end) for start, end in marks]
    return statistics.median(milliseconds) / 1e3
