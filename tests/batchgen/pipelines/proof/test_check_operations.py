"""The first operation in which a job's rows depend on their company is named."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from check_operations import main
from torch import Tensor

from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.kernels.layers.activation import silu_and_mul
from tests.support.jobs.real_job import overrides, run


def test_the_operation_is_named(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(overrides(model, rows, tmp_path / "out", "output.report=false"))
    assert main([str(tmp_path / "out"), "--rows", "2"]) == 0
    assert capsys.readouterr().out.count(": equal") == 2

    def dependent(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 2**-20 * (len(x) == 32))  # 18 samples, and not 2

    with patch.object(mlp_layer, "silu_and_mul", dependent):
        assert main([str(tmp_path / "out"), "--rows", "9"]) == 1
    assert ": silu of layer 0 at token " in capsys.readouterr().out
