"""Copies between host and device that neither side waits for."""

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
    """A tensor of the values on the device. On a GPU through pinned memory, so that the host goes
    on at once (torch keeps the pinned memory until the copy is done).
    """
    host = torch.as_tensor(values, dtype=dtype)
    if device.type != "cuda":
        return host
    return host.pin_memory().to(device, non_blocking=True)


def release_cached_memory(device: torch.device) -> None:
    """Give a GPU back what torch keeps of freed tensors. To be called before anything is allocated
    to stay: a small tensor in a corner of the KV cache of an engine that is gone would keep all of
    it from the next one.
    """
    if device.type == "cuda":
        torch.cuda.empty_cache()


class Download:
    """A tensor on its way to the host, which nobody waits for before `wait`."""

    def __init__(self, values: Tensor) -> None:
        self._host = values
        self._event: torch.cuda.Event | None = None
        if values.is_cuda:
            self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._host.copy_(values, non_blocking=True)
            self._event = torch.cuda.Event()
            self._event.record()

    def wait(self) -> npt.NDArray[Any]:
        """The values; of a tensor that is on the host already, the tensor's own memory."""
        if self._event is not None:
            self._event.synchronize()
        array: npt.NDArray[Any] = self._host.numpy()
        return array
