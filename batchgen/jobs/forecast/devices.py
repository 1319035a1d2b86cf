"""The speeds of devices: published figures of GPUs, and measurements of this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median
from typing import TYPE_CHECKING

from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import torch

_PRODUCT = (128, 1024, 4096)
"""The sizes (rows, in features, out features) of the measured product, as in a large decode
step."""
_FEW_ROWS = 16
"""CPU forwards are padded to a multiple of 16 tokens; one of only 16 is slower for each token."""
_LEAST_SHARE = 0.25
"""A product of 16 rows takes no longer than one of 64, whatever else runs while it is measured."""
_STREAM_BYTES = 64 * 2**20


@dataclass(frozen=True, slots=True)
class Device:
    """The speed of a device: bytes per second that it reads from its memory, and operations per
    second of matrix products in 16 bits and in float32.

    `few_rows` is the share of that rate which products of 16 rows reach, `memory` is 0 for a CPU,
    and `fp8` says that it multiplies in FP8, twice as fast as in bfloat16.
    """

    name: str
    bandwidth: float
    half_flops: float
    single_flops: float
    memory: int = 0
    few_rows: float = 1.0
    fp8: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.memory > 0

    def flops(self, dtype: torch.dtype) -> float:
        """Operations per second of matrix products in this dtype."""
        if dtype.itemsize == 1:
            return 2 * self.half_flops
        return self.half_flops if dtype.itemsize == 2 else self.single_flops


_WITH_FP8 = ("B200", "H200", "H100", "H100-PCIe", "L40S", "L4", "RTX4090")


def _gpu(name: str, terabytes: float, half: float, single: float, gibibytes: float) -> Device:
    rates = terabytes * 1e12, half * 1e12, single * 1e12
    return Device(name, *rates, int(gibibytes * 2**30), fp8=name in _WITH_FP8)


DEVICES = {
    device.name: device
    for device in (
        _gpu("B200", 8.0, 2250, 75, 178),
        _gpu("H200", 4.8, 989, 67, 139.8),
        _gpu("H100", 3.35, 989, 67, 79.1),
        _gpu("H100-PCIe", 2.0, 756, 51, 79.1),
        _gpu("A100", 2.04, 312, 19.5, 79.2),
        _gpu("A100-40GB", 1.56, 312, 19.5, 39.4),
        _gpu("L40S", 0.864, 362, 91, 44.4),
        _gpu("L4", 0.3, 121, 30, 22.5),
        _gpu("A10", 0.6, 125, 31, 22.5),
        _gpu("RTX4090", 1.01, 165, 83, 23.6),
        _gpu("RTX3090", 0.936, 71, 36, 23.6),
    )
}
"""GPUs by name: memory bandwidth and dense rates of products as their makers publish them."""


def device_named(name: str) -> Device | None:
    """The GPU that a user names; None for `cpu`. ConfigError if it is not known."""
    wanted = _plain(name)
    if wanted == "cpu":
        return None
    for device in DEVICES.values():
        if _plain(device.name) == wanted:
            return device
    raise ConfigError(f"plan.device={name} is not known: choose among cpu, {', '.join(DEVICES)}")


def gpu_like(full_name: str, memory: int) -> Device | None:
    """The GPU that a driver calls `full_name`, with the memory that it really has; None if the
    table has none like it."""
    plain = _plain(full_name)
    fitting = [d for d in DEVICES.values() if _plain(d.name.partition("-")[0]) in plain]
    if not fitting:
        return None
    if "pcie" in plain and (pcie := [d for d in fitting if d.name.endswith("PCIe")]):
        fitting = pcie
    best = min(fitting, key=lambda device: abs(device.memory - memory))
    return replace(best, memory=memory)


def this_gpu() -> Device | None:
    """The GPU of this machine; None if it is not in the table."""
    import torch

    properties = torch.cuda.get_device_properties(0)
    return gpu_like(properties.name, properties.total_memory)


def measured_cpu(dtype: torch.dtype, seconds: float) -> Device:
    """This machine's CPU with three rates, each measured for `seconds` with the threads that torch
    has: of a product of 128 rows in `dtype`, of one of 16, and of reading 64 MiB."""
    import torch

    rows, inputs, outputs = _PRODUCT
    x = torch.ones((rows, inputs), dtype=dtype)
    weight = torch.ones((outputs, inputs), dtype=dtype)
    stream = torch.ones(_STREAM_BYTES // 4)
    linear = torch.nn.functional.linear
    many = 2 * rows * inputs * outputs / _seconds(lambda: linear(x, weight), seconds)
    some = x[:_FEW_ROWS]
    few = 2 * _FEW_ROWS * inputs * outputs / _seconds(lambda: linear(some, weight), seconds)
    bandwidth = _STREAM_BYTES / _seconds(stream.sum, seconds)
    share = min(max(few / many, _LEAST_SHARE), 1.0)
    return Device("cpu", bandwidth, many, many, few_rows=share)


def _seconds(work: Callable[[], object], seconds: float) -> float:
    """The median time of the calls that fit into some seconds; the first is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def _plain(name: str) -> str:
    return "".join(c for c in name.lower() if c.isalnum())
