"""Properties of a device that kernel launches need: how many programs it runs at once, and how much
shared memory a program may have."""

from __future__ import annotations

import functools

import torch

_INTERPRETED_PROGRAMS = 8
"""Programs under Triton's interpreter, where there is no GPU to ask for multiprocessors."""


def device_programs(device: torch.device, per_multiprocessor: int = 1) -> int:
    """Return the number of programs to launch a persistent kernel with: one whose programs take one
    item of work after another, so that all of them run at once."""
    if device.type == "cpu":
        return _INTERPRETED_PROGRAMS
    return _multiprocessors(device) * per_multiprocessor


def shared_bytes(device: torch.device) -> int:
    """Return the most shared memory that one program may have on this GPU, in bytes."""
    properties = torch.cuda.get_device_properties(device)
    return int(properties.shared_memory_per_block_optin)  # type: ignore[attr-defined]


def has_large_shared_memory(device: torch.device) -> bool:
    """Return whether a program may have 227 KiB of shared memory, as on Hopper and the large
    Blackwell GPUs."""
    return shared_bytes(device) >= 227 * 1024


@functools.cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
