"""A sweep of real jobs: weights that load once, and the table that it ends with."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pyarrow.parquet as pq
import pytest
from hydra.core.global_hydra import GlobalHydra

from batchgen.__main__ import run_command
from batchgen.inputs.model.open_model import OpenedModel
from tests.support.jobs.real_job import ROWS, overrides, run


def data(folder: Path) -> Any:
    table = pq.read_table(folder / "data", partitioning=None)
    return table.select(["row_id", "sample_index", "token_ids"]).to_pylist()


@pytest.mark.thorough
def test_a_sweep_loads_weights_once_and_ends_with_its_table(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Engines differ, tokens are those of jobs alone, and what is scored needs no model."""
    rows = tmp_path / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS[:4]))
    asked = [one.replace("'", "") for one in overrides(model, rows, tmp_path / "sweep")]
    more = ["engine.max_num_seqs=2,3", "sampling.temperature=0.7,1.2"]
    more.append("score.column=num_generated_tokens")
    load: Callable[..., Any] = OpenedModel.load
    with patch.object(OpenedModel, "load", autospec=True, side_effect=load) as loads:
        assert run_command(["--multirun", *asked, *more]) == 0
    GlobalHydra.instance().clear()
    assert loads.call_count == 1
    said = capsys.readouterr().out
    assert "report: " in said and (tmp_path / "sweep" / "report.html").is_file()
    table = said[said.index("\narm ") :].splitlines()
    assert len(table[2:6]) == 4 and table[5].startswith("D  temperature=1.2, max_num_seqs=3 ")
    for sampling in ("0.7", "1.2"):
        alone = tmp_path / f"alone{sampling}"
        run([*overrides(model, rows, alone), f"sampling.temperature={sampling}"])
        for seqs in (2, 3):
            name = f"engine.max_num_seqs={seqs},sampling.temperature={sampling}"
            assert data(tmp_path / "sweep" / name) == data(alone)
