"""Where an element of a matrix lies in its panels, and which matrices are kept so."""

from __future__ import annotations

import pytest
import torch

from batchgen.kernels.fp8.fp8_weight import FP8
from batchgen.kernels.moe.panels import (
    PANEL,
    keeps_panels,
    matrix_sizes,
    panels_shape,
    rows_of_panels,
    to_panels,
)


def test_each_panel_has_64_columns_of_all_rows() -> None:
    rows = torch.arange(2 * 3 * 192).view(2, 3, 192)
    panels = to_panels(rows)
    assert panels.shape == panels_shape(2, 3, 192) and panels.is_contiguous()
    for expert, n, k in ((0, 0, 0), (0, 2, 63), (1, 0, 64), (1, 2, 191)):
        assert panels[expert, k // PANEL, n, k % PANEL] == rows[expert, n, k]
    assert torch.equal(rows_of_panels(panels).flatten(2), rows)
    assert matrix_sizes(panels) == matrix_sizes(rows) == (2, 3, 192)


@pytest.mark.parametrize(
    ("device", "dtype", "widths", "keeps"),
    [
        ("cuda", torch.bfloat16, (2048, 768), True),
        ("cuda", torch.float16, (64, 64), True),
        ("cuda", torch.bfloat16, (2048, 96), False),
        ("cuda", torch.bfloat16, (96, 768), False),
        ("cuda", torch.float32, (2048, 768), False),
        ("cuda", FP8, (2048, 768), False),
        ("cpu", torch.bfloat16, (2048, 768), False),
    ],
)
def test_matrices_of_16_bits_are_kept_in_panels_on_gpus(
    device: str, dtype: torch.dtype, widths: tuple[int, ...], keeps: bool
) -> None:
    assert keeps_panels(torch.device(device), dtype, *widths) is keeps
