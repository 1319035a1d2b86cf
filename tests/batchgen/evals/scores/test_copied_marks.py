"""A mark that rows have copied from another job is not the job's own."""

from pathlib import Path

import pyarrow as pa
import pytest

from batchgen.cli.verb_table import run_verb
from tests.support.jobs.finished_job import finished_job, row


def test_marks_that_rows_were_given_are_no_grades(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Their score would be another job's, and their agreement that of the marks with themselves."""
    rows = [row(index, mark=float(index % 2)) for index in range(6)]
    job = finished_job(tmp_path / "job", rows, [pa.field("mark", pa.float64())])
    assert run_verb("grade", [str(job), "post=[{Extract: {methods: [whole]}}]"]) == 0
    for more in ([], ["--agreement", "mark"]):
        assert run_verb("score", [str(job), *more]) == 2
        assert "have no column 'mark'" in capsys.readouterr().err
