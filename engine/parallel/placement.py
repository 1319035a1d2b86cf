"""Where the parameters of layers are allocated: the device, the dtype, and the ranks that divide
them. Every layer gets a `Placement` when it is built."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and dtype of a layer's parameters, the ranks that divide its weights, and the
    format of its cache."""

    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel = ALONE
    fp8_cache: bool = False  # whether attention keeps keys and values in FP8
