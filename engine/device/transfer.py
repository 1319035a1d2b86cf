"""Copies between host and device that do not make either wait: `upload` and `Download`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor


def upload(
    values: Sequence[int] | Sequence[float] | Sequence[bool] | npt.NDArray[np.generic],
    dtype: torch.dtype,
    device: torch.device,
) -> Tensor:
    """Return a tensor of these values on the device. A copy to a GPU goes through pinned memory, so
    the host does not wait for it; torch keeps the pinned memory until the copy is done."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    pinned = torch.empty(host.shape, dtype=dtype, pin_memory=True)
    # torch would wake all cores to copy an image, which takes longer than the copy.
    np.copyto(pinned.numpy(), host.numpy())
    return pinned.to(device, non_blocking=True)


def release_cached_memory(device: torch.device) -> None:
    """Return cached memory of freed tensors to the GPU.

    Called before long-lived tensors are allocated. Otherwise a small tensor could be placed in the
    memory of a dropped engine's KV cache, and the next engine could not use the rest of that
    memory.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Download:
    """A copy of a tensor to the host. The copy starts at once, and only `wait` waits for it."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the copy and return the values. A tensor that was already on the host is not
        copied; the array shares its memory."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array
