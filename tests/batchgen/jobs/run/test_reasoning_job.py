"""Jobs that tell thoughts from answers: columns, constraint, post steps, and what people see."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.cli.verbs import show
from batchgen.cli.verbs.validate import validate
from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import overrides, run

SCHEMA = "{type: object, properties: {a: {type: boolean}}, required: [a]}"


def table(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / "data", partitioning=None).to_pylist()
    return found


def test_the_columns(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, out = tmp_path / "plain", tmp_path / "out"
    longer = "sampling.max_new_tokens=40"
    run(overrides(model, rows, plain, longer))
    step = "post=[{_target_: batchgen.grading.extract.Extract, methods: [last_number]}]"
    run(overrides(model, rows, out, longer, "output.reasoning_end=e", step, "output.report=true"))
    found = set()
    for before, row in zip(table(plain), table(out), strict=True):
        assert before["token_ids"] == row["token_ids"]
        thoughts, marker, answer = before["text"].partition("e")
        found.add(marker)
        assert (row["reasoning"], row["text"]) == (thoughts, answer)
    assert found == {"", "e"}
    names = pq.read_table(out / "data", partitioning=None).column_names
    assert names.index("reasoning") == names.index("text") + 1
    assert "reasoning" not in table(plain)[0]
    assert (out / "report.html").is_file()
    capsys.readouterr()
    assert show.main([str(out)]) == 0
    assert "reasoning" in capsys.readouterr().out


@pytest.mark.thorough
def test_with_a_constraint(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    constraint = ["constraint=json_schema", f"constraint.schema={SCHEMA}"]
    marker = ["constraint.start_after=e", "output.reasoning_end=e", "output.columns=[parsed]"]
    run(overrides(model, rows, out, "sampling.max_new_tokens=150", *constraint, *marker))
    done = [row for row in table(out) if row["constraint_satisfied"]]
    assert done
    for row in done:
        assert "e" not in row["reasoning"]
        assert json.loads(row["text"]) == row["parsed"]
    report = validate(out)
    assert report.counts["valid"] == len(done) and not report.counts["invalid"]


def test_a_column_of_the_data_set_has_the_name(model: Path, tmp_path: Path) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"id": "a", "q": "x", "reasoning": "given"}\n')
    run(overrides(model, rows, tmp_path / "out"))
    assert table(tmp_path / "out")[0]["reasoning"] == "given"
    with pytest.raises(ConfigError, match="dataset columns 'reasoning' have the names of"):
        run(overrides(model, rows, tmp_path / "out2", "output.reasoning_end=e"))
