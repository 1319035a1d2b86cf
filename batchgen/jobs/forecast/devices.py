"""The speeds of devices: published figures of GPUs, and measurements of this machine's CPU."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from batchgen.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """The speed of a device: bytes per second that it reads from its memory, and operations per
    second of matrix products, `rate`, which is that of 16 bits on a GPU.

    `memory` is 0 for a CPU, and `fp8` says that it multiplies in FP8.
    """

    name: str
    bandwidth: float
    rate: float
    memory: int = 0
    fp8: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether it is a GPU."""
        return self.memory > 0

    def flops(self, dtype: torch.dtype) -> float:
        """Operations per second of matrix products in this dtype: on a GPU half as many in twice
        the bytes, and in float32 a sixteenth of those in 16 bits."""
        times = {1: 2.0, 2: 1.0}.get(dtype.itemsize, 1 / 16)
        return self.rate * (times if self.is_gpu else 1.0)


_GPUS = (  # TB/s, dense TFLOP/s in 16 bits, GiB that a program can have, FP8
    ("B200", 8.0, 2250, 178, True),
    ("H200", 4.8, 989, 139.8, True),
    ("H100", 3.35, 989, 79.1, True),
    ("H100-PCIe", 2.0, 756, 79.1, True),
    ("A100", 2.04, 312, 79.2, False),
    ("A100-40GB", 1.56, 312, 39.4, False),
    ("L40S", 0.864, 362, 44.4, True),
    ("L4", 0.3, 121, 22.5, True),
    ("A10", 0.6, 125, 22.5, False),
    ("RTX4090", 1.01, 165, 23.6, True),
    ("RTX3090", 0.936, 71, 23.6, False),
)
DEVICES = {
    name: Device(name, terabytes * 1e12, rate * 1e12, int(gib * 2**30), fp8)
    for name, terabytes, rate, gib, fp8 in _GPUS
}
"""GPUs by name, as their makers publish them."""


def device_named(name: str) -> Device | None:
    """The GPU that a user names; None for `cpu`. ConfigError if it is not known."""
    known = {"cpu": None} | {_plain(device.name): device for device in DEVICES.values()}
    if _plain(name) not in known:
        raise ConfigError(
            f"plan.device={name} is not known: choose among cpu, {', '.join(DEVICES)}"
        )
    return known[_plain(name)]


def device_here(name: str, dtype: torch.dtype) -> Device:
    """What `engine.device` means on this machine."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return measured_cpu(dtype)
    properties = torch.cuda.get_device_properties(0)
    fp8 = (properties.major, properties.minor) >= (8, 9)
    return replace(gpu_like(properties.name, properties.total_memory), fp8=fp8)


def gpu_like(full_name: str, memory: int) -> Device:
    """The GPU that a driver calls `full_name`, with the memory that it really has; one that is not
    in the table is taken as an A100."""
    plain = _plain(full_name)
    like = [d for d in DEVICES.values() if _plain(d.name.partition("-")[0]) in plain]
    if not like:
        name = f"{full_name}, taken as an A100,"
        return replace(DEVICES["A100"], name=name, memory=memory)
    if "pcie" in plain:
        like = [d for d in like if d.name.endswith("PCIe")] or like
    return replace(min(like, key=lambda device: abs(device.memory - memory)), memory=memory)


def measured_cpu(dtype: torch.dtype, seconds: float = 0.2) -> Device:
    """This machine's CPU with two rates, each measured for `seconds` with the threads that torch
    has: of a product of 32 rows in `dtype`, as in a decode step, and of reading 64 MiB."""
    x, weight = torch.ones((32, 1024), dtype=dtype), torch.ones((4096, 1024), dtype=dtype)
    stream = torch.ones(16 * 2**20)
    product_s = _seconds(lambda: torch.nn.functional.linear(x, weight), seconds)
    rate = 2 * len(x) * weight.numel() / product_s
    return Device("cpu", stream.nbytes / _seconds(stream.sum, seconds), rate)


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
