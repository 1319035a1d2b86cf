"""What the tests of attention kernels share."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

_CLOSE = {torch.float32: 1e-5, torch.bfloat16: 1e-2, torch.float16: 2e-3}


@pytest.fixture(scope="session")
def same_bits() -> Callable[[Tensor, Tensor], None]:
    """`same_bits(ours, theirs)`: results of a kernel are equal; where it is compiled, bit for bit.

    In the interpreter its products are numpy's, whose bits depend on the make of the CPU and on a
    row's place among the others, so there they are only close.
    """

    def check(ours: Tensor, theirs: Tensor) -> None:
        if ours.is_cuda:
            assert torch.equal(ours, theirs)
        else:
            close = _CLOSE[ours.dtype]
            torch.testing.assert_close(ours, theirs, rtol=close, atol=close)

    return check
