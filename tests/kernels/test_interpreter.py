"""The interpreter that tests hasten finds what the plain one finds."""

import pytest
import torch
import triton
from triton import language as tl

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="kernels are compiled")


@triton.jit
def _add(x, y, sums, size: tl.constexpr):
    at = tl.arange(0, size)
    tl.store(sums + at, tl.load(x + at) + tl.load(y + at))


@pytest.mark.parametrize("dtype", [torch.int8, torch.int32])
def test_sums_that_overflow_are_refused(dtype: torch.dtype) -> None:
    most = torch.iinfo(dtype).max
    x, y = torch.tensor([most - 1, 5], dtype=dtype), torch.tensor([1, 0], dtype=dtype)
    sums = torch.empty_like(x)
    _add[(1,)](x, y, sums, 2)
    assert sums.tolist() == [most, 5]
    with pytest.raises(Exception, match=r"overflow detected for operation add"):
        _add[(1,)](x, y + 1, sums, 2)
