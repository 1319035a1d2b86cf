"""The report as a part of a job: when it is made, made again, and left out."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.pages.report import write_report
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.fake_job import FakeJob

ROWS = 20


def job(tmp_path: Path, **values: Any) -> FakeJob:
    return FakeJob(str(tmp_path / "out"), rows=ROWS, report=True, **values)


def test_a_job_ends_with_a_report_of_all_its_rows(tmp_path: Path) -> None:
    result = job(tmp_path).run()
    page = (tmp_path / "out" / "report.html").read_text(encoding="utf-8")
    assert page.count("link to this row") == 2 * ROWS
    assert "template_error" in page and "fake" in page
    assert "report            " + str(tmp_path / "out" / "report.html") in result.message
    timeline = JobFolderReader(tmp_path / "out").metrics["timeline"]
    assert timeline[-1][1] == 2 * ROWS and timeline[-1][2] > 0


def test_without_the_key_there_is_none(tmp_path: Path) -> None:
    result = replace(job(tmp_path), report=False).run()
    assert not (tmp_path / "out" / "report.html").exists()
    assert "report.html" not in result.message


def test_a_job_that_goes_on_has_no_old_report(tmp_path: Path) -> None:
    job(tmp_path, limit=10).run()
    report = tmp_path / "out" / "report.html"
    assert report.read_text(encoding="utf-8").count("link to this row") == 20
    with pytest.raises(RuntimeError):
        job(tmp_path, fail_at_step=2).run()
    assert not report.exists()
    job(tmp_path).run()
    assert report.read_text(encoding="utf-8").count("link to this row") == 2 * ROWS


def test_a_complete_job_makes_a_report_that_it_lacks(tmp_path: Path) -> None:
    replace(job(tmp_path), report=False).run()
    assert "report.html" in job(tmp_path).run().message
    report = tmp_path / "out" / "report.html"
    made = report.stat().st_mtime_ns
    assert "report.html" not in job(tmp_path).run().message
    assert report.stat().st_mtime_ns == made


def test_a_report_never_fails_a_job(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(*_: Any) -> str:
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr(write_report, "report_html", broken)
    result = job(tmp_path, bad=False).run()
    assert result.exit_code == 0
    assert JobFolderReader(tmp_path / "out").metrics["status"] == "complete"
    assert "could not be made (ZeroDivisionError: a bug)" in capsys.readouterr().err
