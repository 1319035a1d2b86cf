"""Copies between host and device that neither side waits for."""

from __future__ import annotations

from collections.abc import Sequence

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
