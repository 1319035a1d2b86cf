"""A job whose first rows all fail in the same way stops, and leaves no trace of them."""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.job_outcome import report
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.generation.fail_fast import FIRST_ROWS, AllRowsFailed, FailFast
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.output_schema import FinishedRow
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.output_rows import finished_row


def _error(index: int, kind: str = "bad") -> FinishedRow:
    error = RequestError(kind, f"row {index} is bad")
    return FinishedRow(f"id{index}", index, 0, {}, error=error)


def test_rows_are_held_until_one_of_them_is_different() -> None:
    for different in (finished_row(99, 0), _error(99, "worse")):
        first = FailFast(enabled=True)
        for i in range(40):
            assert first.passed([_error(i)], in_flight=3) == [] and not first.wait
        assert len(first.passed([different], in_flight=2)) == 41
        many = [_error(i) for i in range(100, 300)]
        assert first.passed(many, in_flight=0) == many and not first.wait


def test_rows_that_have_begun_are_waited_for() -> None:
    first = FailFast(enabled=True)
    assert first.passed([_error(i) for i in range(FIRST_ROWS)], in_flight=2) == []
    assert first.wait
    assert first.passed([_error(70)], in_flight=1) == [] and first.wait
    message = r"the first 52 rows have all failed .* way: bad: row 0 is bad \(row id0\)\. The job h"
    with pytest.raises(AllRowsFailed, match=message):
        first.passed([_error(71)], in_flight=0)


def test_samples_of_a_row_count_once() -> None:
    first = FailFast(enabled=True)
    rows = [_error(i)._replace(sample_index=s) for i in range(FIRST_ROWS - 1) for s in range(9)]
    assert first.passed(rows, in_flight=0) == []
    assert first.rest() == rows


@dataclass(frozen=True)
class _BadPrompt(Prompt):
    """Fails for the rows from `start` on and before `stop`."""

    start: int = 0
    stop: int = 10**9

    def token_ids(self, row: Any) -> list[int]:
        if self.start <= row.index < self.stop:
            raise RequestError("missing_field", f"row {row.index} has no question")
        return [row.index, 1, 2]


def _run(job: FakeJob, prompt: _BadPrompt) -> JobResult:
    return execute_job(job.config(), replace(job.parts(), prompt=prompt))


def test_a_job_whose_rows_all_fail(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    job = FakeJob(str(out), rows=300, bad=False)
    assert report(lambda: _run(job, _BadPrompt())) == 1
    lines = capsys.readouterr().err.splitlines()
    assert lines[-1].startswith("batchgen: the first ") and "Finished rows are" not in lines[-1]
    assert "same way: missing_field: row 0 has no question (row id0). The job has" in lines[-1]
    assert list(JobFolderReader(out).rows()) == []
    assert json.loads((out / "metrics.json").read_text())["rows"] == 0
    # With the mistake mended, or a prompt that is another job's, all rows are computed.
    job = replace(job, temperature=0.5)
    assert _run(job, _BadPrompt(0, 0)).exit_code == 0
    whole = replace(job, out=str(tmp_path / "whole"))
    _run(whole, _BadPrompt(0, 0))
    for path in (out / "data").iterdir():
        assert path.read_bytes() == (tmp_path / "whole/data" / path.name).read_bytes()


@pytest.mark.quick(2)
@pytest.mark.parametrize("rows", [1, 2, FIRST_ROWS - 1])
@pytest.mark.parametrize("stream", [False, True])
def test_a_small_job_whose_rows_all_fail_begins_again(
    rows: int, stream: bool, tmp_path: Path
) -> None:
    """With another prompt, whose fingerprint is another job's, in the same folder."""
    job = FakeJob(str(tmp_path / "out"), rows=rows, bad=False)

    def run(job: FakeJob, prompt: _BadPrompt) -> JobResult:
        parts = replace(job.parts(), prompt=prompt)
        if stream:
            parts.source.num_rows = None  # type: ignore[misc]
            parts.source.rows = _Stream(rows)  # type: ignore[method-assign]
        return execute_job(job.config(), parts)

    who = f"all {rows} rows of the job have" if rows > 1 else "the only row of the job has"
    message = f"^{who} failed in the same way: missing_field: row 0 has"
    with pytest.raises(AllRowsFailed, match=message):
        run(job, _BadPrompt())
    assert list(JobFolderReader(tmp_path / "out").rows()) == []
    assert run(replace(job, temperature=0.5), _BadPrompt(0, 0)).exit_code == 0
    assert len(list(JobFolderReader(tmp_path / "out").rows())) == 2 * rows


class _Stream:
    """The rows of a FakeSource that does not know how many it has."""

    def __init__(self, rows: int) -> None:
        self._source = FakeJob("", rows=rows).parts().source

    def __call__(self, start: int = 0) -> Iterator[Any]:
        return self._source.rows(start)


@pytest.mark.parametrize("bad", [_BadPrompt(0, 9), _BadPrompt(1, 10)])
def test_a_small_job_with_one_answer_is_written(bad: _BadPrompt, tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path), rows=10, samples=1, bad=False)
    assert _run(job, bad).error_rows == 9


def test_on_all_errors_continue(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path), rows=60, bad=False, on_all_errors="continue")
    assert _run(job, _BadPrompt()).error_rows == 120
    # Another attempt has errors alone before it, and is stopped if these fail once more.
    job = replace(job, on_all_errors="stop", retry_errors=True)
    with pytest.raises(AllRowsFailed):
        _run(job, _BadPrompt())
    assert len(list(JobFolderReader(tmp_path).rows(["error"]))) == 120
    assert _run(job, _BadPrompt(0, 0)).exit_code == 0


@pytest.mark.quick(1)
@pytest.mark.parametrize("bad", [_BadPrompt(0, 200), _BadPrompt(1, 300), _BadPrompt(0, 49)])
def test_many_errors_and_some_answers(tmp_path: Path, bad: _BadPrompt) -> None:
    """Whatever the order in which they finish: rows with an answer take longer than errors."""
    job = FakeJob(str(tmp_path), rows=300, samples=1, bad=False, max_num_seqs=128)
    assert _run(job, bad).error_rows == bad.stop - bad.start


def test_an_engine_that_fails_every_row(tmp_path: Path) -> None:
    class Broken(FakeEngine):
        def step(self) -> list[RequestOutput]:
            error = RequestError("no_answer", "all values are NaN")
            return [replace(o, finish_reason="error", error=error) for o in super().step()]

    job = FakeJob(str(tmp_path), rows=300, bad=False)
    parts = replace(job.parts(), port=lambda: Broken(job))
    with pytest.raises(AllRowsFailed, match="no_answer: all values are NaN"):
        execute_job(job.config(), parts)
