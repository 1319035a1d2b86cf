"""Copies between host and device that run while both go on with other work."""

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
    the host does not wait for it. torch keeps the pinned memory until the copy is done."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def release_cached_memory(device: torch.device) -> None:
    """Give the memory of freed tensors that torch holds back to the GPU. This is called before
    anything long-lived is allocated. Otherwise a small tensor could be placed in the memory of a
    dropped engine's KV cache, and the next engine could not use the rest of it."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Download:
    """A copy of a tensor to the host, which starts at once and is waited for only in `wait`."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> npt.NDArray[Any]:
        """Wait for the copy and return the values. If the tensor was on the host, nothing was
        copied and the array shares its memory."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array
