"""Where an element of a matrix lies in its panels, and which matrices are kept so."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.fp8.fp8_weight import FP8
from batchgen.kernels.moe.tiled_layout import (
    keeps_panels,
    matrix_sizes,
    panels_shape,
    rows_of_panels,
    to_panels,
)


@pytest.mark.parametrize(("dtype", "width"), [(torch.bfloat16, 64), (FP8, 128)])
def test_each_panel_has_128_bytes_of_all_rows(dtype: torch.dtype, width: int) -> None:
    rows = torch.randn(2, 3, 3 * width, generator=torch.Generator().manual_seed(0)).to(dtype)
    panels = to_panels(rows)
    assert panels.shape == panels_shape(2, 3, 3 * width, dtype) == (2, 3, 3, width)
    assert panels.is_contiguous()
    rows, panels = rows.float(), panels.float()
    for expert, n, k in ((0, 0, 0), (0, 2, width - 1), (1, 0, width), (1, 2, 3 * width - 1)):
        assert panels[expert, k // width, n, k % width] == rows[expert, n, k]
    assert torch.equal(rows_of_panels(panels).flatten(2), rows)
    assert matrix_sizes(panels) == matrix_sizes(rows) == (2, 3, 3 * width)


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "keeps"),
    [
        ("cuda", torch.bfloat16, (2048, 768), True),
        ("cuda", torch.float16, (64, 64), True),
        ("cuda", torch.bfloat16, (2048, 96), False),
        ("cuda", torch.bfloat16, (96, 768), False),
        ("cuda", torch.float32, (2048, 768), False),
        ("cuda", FP8, (2048, 768), True),
        ("cuda", FP8, (2048, 192), False),
        ("cpu", torch.bfloat16, (2048, 768), False),
    ],
)
def test_matrices_that_panels_divide_are_kept_so_on_gpus(
    device: str, dtype: torch.dtype, widths: tuple[int, ...], keeps: bool
) -> None:
    assert keeps_panels(torch.device(device), dtype, *widths) is keeps
