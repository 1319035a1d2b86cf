"""The norm of a residual stream to which parts of a sum are still to be added."""

from __future__ import annotations

import pytest
import torch

from batchgen.engine.layers.fp8_format import FP8Format
from batchgen.engine.layers.norm import RMSNorm
from batchgen.engine.parallel.tensor_parallel import PendingParts
from batchgen.kernels.fp8.quantise import BothRows, FP8Rows


@pytest.mark.parametrize(("quantised", "keep"), [(False, False), (True, False), (True, True)])
def test_parts_are_added_before_the_norm(quantised: bool, keep: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    residual = torch.randn((5, 144), generator=generator)
    parts = torch.randn((3, 5, 144), generator=generator)
    norm = RMSNorm(144, 1e-6, device=torch.device("cpu"), dtype=torch.float32)
    norm.weight.copy_(torch.rand(144, generator=generator))
    if quantised:
        norm.quantise_result(FP8Format(), keep=keep)
    expected, total = norm.of_stream(residual + parts.sum(0))
    found, stream = norm.of_stream(PendingParts(residual, parts))
    assert stream is residual
    torch.testing.assert_close(stream, total)
    if keep:
        assert isinstance(found, BothRows) and isinstance(expected, BothRows)
        torch.testing.assert_close(found.plain, expected.plain)
        found, expected = found.in_fp8, expected.in_fp8
    if quantised:
        assert isinstance(found, FP8Rows) and isinstance(expected, FP8Rows)
        found, expected = found.dequantise(), expected.dequantise()
    # A value may be rounded to the other neighbour.
    torch.testing.assert_close(found, expected, rtol=2**-3 if quantised else 1e-6, atol=1e-3)
