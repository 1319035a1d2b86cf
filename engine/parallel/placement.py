"""Where the parameters of layers are made."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel


@dataclass(frozen=True, slots=True)
class Placement:
    """The device and dtype of a layer's parameters, and the ranks that divide its weights."""

    device: torch.device
    dtype: torch.dtype
    parallel: TensorParallel = ALONE
