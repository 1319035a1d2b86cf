"""The speeds of devices: published figures of GPUs, and measurements of this machine's CPU.

The forecast of a job (`step_cost.py`) takes its device from `device_named` or `device_here`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from statistics import median

import torch

from batchgen.util.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Device:
    """The speed and the memory of a GPU or CPU.

    Attributes:
        name: what to call the device in a text.
        bandwidth: bytes per second that are read from its memory.
        rate: floating-point operations per second of matrix products; on a GPU in 16 bits.
        memory: bytes that a program can have on a GPU; 0 for a CPU.
        fp8: whether the device multiplies in FP8.
    """

    name: str
    bandwidth: float
    rate: float
    memory: int = 0
    fp8: bool = False

    @property
    def is_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.memory > 0

    def flops(self, dtype: torch.dtype) -> float:
        """Operations per second of matrix products in this dtype.

        A GPU is taken to be twice as fast in 8 bits as in 16, and a sixteenth as fast in 32. A CPU
        was measured in the dtype that it uses.
        """
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
    """The GPU of a name in `DEVICES`, whatever its case and punctuation; None for `cpu`.

    Raises:
        ConfigError: no device has this name.
    """
    known = {"cpu": None} | {_plain(device.name): device for device in DEVICES.values()}
    if _plain(name) not in known:
        raise ConfigError(
            f"plan.device={name} is not known: choose among cpu, {', '.join(DEVICES)}"
        )
    return known[_plain(name)]


def device_here(name: str, dtype: torch.dtype) -> Device:
    """The device of this machine that the value `name` of `engine.device` stands for."""
    if name == "cpu" or (name == "auto" and not torch.cuda.is_available()):
        return measured_cpu(dtype)
    properties = torch.cuda.get_device_properties(0)
    fp8 = (properties.major, properties.minor) >= (8, 9)
    return replace(gpu_like(properties.name, properties.total_memory), fp8=fp8)


def gpu_like(full_name: str, memory: int) -> Device:
    """The entry of `DEVICES` for the GPU that a driver calls `full_name`, with its actual `memory`
    in bytes.

    A GPU that is not in the table is taken as an A100, and its name says so.
    """
    plain = _plain(full_name)
    like = [d for d in DEVICES.values() if _plain(d.name.partition("-")[0]) in plain]
    if not like:
        name = f"{full_name}, taken as an A100,"
        return replace(DEVICES["A100"], name=name, memory=memory)
    if "pcie" in plain:
        like = [d for d in like if d.name.endswith("PCIe")] or like
    return replace(min(like, key=lambda device: abs(device.memory - memory)), memory=memory)


def measured_cpu(dtype: torch.dtype, seconds: float = 0.2) -> Device:
    """Measure this machine's CPU with torch's current number of threads.

    Two rates are measured for `seconds` each: a matrix product of 32 rows in `dtype`, as in a
    decode step, and reading 64 MiB.
    """
    x, weight = torch.ones((32, 1024), dtype=dtype), torch.ones((4096, 1024), dtype=dtype)
    stream = torch.ones(16 * 2**20)
    product_s = _seconds(lambda: torch.nn.functional.linear(x, weight), seconds)
    rate = 2 * len(x) * weight.numel() / product_s
    return Device("cpu", stream.nbytes / _seconds(stream.sum, seconds), rate)


def _seconds(work: Callable[[], object], seconds: float) -> float:
    """The median time of a call of `work`, over the calls that fit into `seconds` and at least
    three. A first call warms up and is not counted."""
    work()
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        work()
        times.append(time.perf_counter() - start)
    return median(times)


def _plain(name: str) -> str:
    """A name in lower case without punctuation."""
    return "".join(c for c in name.lower() if c.isalnum())
