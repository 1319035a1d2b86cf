"""The first operation in which a job's rows depend on their company is named."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import patch

import pytest
from torch import Tensor

from batchgen.cli.verbs.audit import main
from batchgen.engine.layers.feed_forward import mlp as mlp_layer
from batchgen.kernels.layers.activation import silu_and_mul
from tests.support.jobs.real_job import overrides, run


@pytest.mark.thorough
def test_the_operation_is_named(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run(overrides(model, rows, tmp_path / "out"))
    look = [str(tmp_path / "out"), "--seed", "1", "--operations", "--rows"]
    assert main([*look, "2"]) == 0
    said = "2 of 2 rows (4 samples) equal in batches and alone, of 11, seed 1: at 95% fewer"
    assert said in capsys.readouterr().out
    assert main([*look, "2", "engine.tensor_parallel=2"]) == 2
    assert "set engine.tensor_parallel=1" in capsys.readouterr().err

    def dependent(x: Tensor) -> Tensor:
        return silu_and_mul(x) * (1 + 2**-20 * (len(x) == 32))  # 18 samples, and not 2

    with patch.object(mlp_layer, "silu_and_mul", dependent):
        assert main([*look, "9"]) == 1
    assert ": sample 0: silu of layer 0 at token " in capsys.readouterr().out
