"""What trackers are told of jobs, and that none can stop or slow one."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.job_config import JobConfig
from batchgen.config.groups.output_config import ProgressConfig
from batchgen.jobs.resolve import early_checks
from batchgen.jobs.run.run_job import execute_job
from batchgen.jobs.trackers import to_json, trackers
from batchgen.jobs.trackers.trackers import SENT, Run, Trackers
from batchgen.util.errors import ConfigError
from tests.support.jobs.shared_jobs import in_threads
from tests.support.jobs.until_job import UntilJob

METRICS = {
    "rows": 3, "error_rows": 1, "prompt_tokens": 5, "generated_tokens": 7, "tokens_per_s": 2.5,
    "wall_s": 1.0, "status": "running", "attempts": [{"started": "2026-01-01", "host": "h"}],
    "sampling": {"seed": {"job": 1}}, "timeline": [],
}  # fmt: skip


class Recorder:
    """A tracker that keeps what it is told."""

    def __init__(self) -> None:
        self.runs = list[Run]()
        self.values = list[Mapping[str, float]]()
        self.closed = 0

    def begin(self, run: Run) -> Recorder:
        self.runs.append(run)
        return self

    def log(self, values: Mapping[str, float]) -> None:
        self.values.append(values)

    def close(self) -> None:
        self.closed += 1


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> Recorder:
    found = Recorder()
    monkeypatch.setattr(to_json, "begin", found.begin)
    return found


class _Job(UntilJob):
    """A graded job that reports to a tracker."""

    def config(self) -> JobConfig:
        return replace(super().config(), progress=ProgressConfig(report_to=("json",)))


def test_a_job_that_goes_on_is_one_run_with_its_scores(tmp_path: Path, recorder: Recorder) -> None:
    job = _Job(str(tmp_path / "out"), rows=20)
    with pytest.raises(RuntimeError):
        replace(job, fail_at_step=8).run()
    assert recorder.closed == 1 and "score" not in recorder.values[-1]
    assert 0 < recorder.values[-1]["score_so_far"] < 1
    for result in in_threads([job, job]):
        assert not isinstance(result, Exception)
    metrics = json.loads((tmp_path / "out" / "metrics.json").read_text())
    assert len(set(recorder.runs)) == 1 and recorder.runs[0].name.startswith("out-")
    # Two workers, of which one at a time reports: the first, and the one that completes the job.
    assert 2 <= len(recorder.runs) <= 3
    last = next(values for values in reversed(recorder.values) if "score" in values)
    assert last["rows"] == metrics["rows"]
    assert last["score"] == metrics["score"]["avg"]["value"]
    assert "score_so_far" not in last and "score_so_far" not in metrics
    names = {name for values in recorder.values for name in values}
    assert all(name in (*SENT, "score") or name[:5] in ("pass@", "pass^", "maj@1", "maj@2")
               for name in names)  # fmt: skip
    other = replace(job, out=str(tmp_path / "other" / "out"))
    other.run()
    assert recorder.runs[-1] != recorder.runs[0]


def test_no_key_of_it_is_of_the_job(tmp_path: Path, recorder: Recorder) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=4, bad=False)
    job.run()
    result = execute_job(_Job(**{**job.__dict__}).config(), job.parts())
    assert "complete already" in result.message and not recorder.runs


class _Bad(Recorder):
    """A tracker that hangs, or raises, at some moment."""

    def __init__(self, how: str, when: str) -> None:
        super().__init__()
        self._how, self._when = how, when
        self.free = threading.Event()

    def _fail(self, when: str) -> None:
        if when != self._when:
            return
        if self._how == "raises":
            raise OSError("no network")
        self.free.wait(60)

    def begin(self, run: Run) -> Recorder:
        self._fail("begin")
        return self

    def log(self, values: Mapping[str, float]) -> None:
        self._fail("log")

    def close(self) -> None:
        self._fail("close")


@pytest.mark.parametrize("when", ["begin", "log", "close"])
@pytest.mark.parametrize("how", ["raises", "hangs"])
def test_a_bad_tracker_does_not_stop_or_slow_what_it_is_told_of(
    how: str, when: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = _Bad(how, when)
    monkeypatch.setattr(to_json, "begin", bad.begin)
    monkeypatch.setattr(trackers, "_END_SECONDS", 0.3)
    began = time.monotonic()
    beside = Trackers(["json"], "p", "out")
    for _ in range(1000):
        beside.tell(METRICS)
    beside.close()
    assert time.monotonic() - began < 5
    bad.free.set()
    said = capsys.readouterr().err
    assert said.count("progress.report_to=json has failed, and the job continues") == 1
    assert ("no network" if how == "raises" else "does not answer") in said


def test_a_job_ends_beside_a_tracker_that_hangs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bad = _Bad("hangs", "log")
    monkeypatch.setattr(to_json, "begin", bad.begin)
    monkeypatch.setattr(trackers, "_END_SECONDS", 0.2)
    assert _Job(str(tmp_path / "out"), rows=6, bad=False).run().exit_code == 0
    bad.free.set()


def test_a_line_of_json_a_minute(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    beside = Trackers(["json"], "p", "/some/where/out/")
    for rows in range(5):
        beside.tell({**METRICS, "rows": rows, "score": {"avg": {"value": 0.5}, "questions": 3}})
    beside.close()
    first, last = map(json.loads, capsys.readouterr().out.splitlines())
    assert first["rows"] == 0 and last["rows"] == 4 and last["score"] == 0.5
    assert first["run"] == last["run"]
    assert set(last) == {"score", "run", *SENT} & {"score", "run", *METRICS}


def test_a_package_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_checks, "find_spec", lambda name: None)
    config: Any = UntilJob("out").config()
    config = replace(config, progress=ProgressConfig(report_to=("json", "wandb")))
    with pytest.raises(ConfigError, match=r"needs the package wandb.*batchgen\[wandb\]"):
        early_checks._check_trackers(config)


def _told(name: str) -> None:
    for rows in (1, 2):  # two attempts at one job
        beside = Trackers([name], "exams", "out")
        beside.tell({**METRICS, "rows": rows, "score_so_far": 0.5})
        beside.tell({**METRICS, "rows": rows + 10, "score": {"avg": {"value": 0.25}}})
        beside.close()


def test_trackio_has_one_run_with_the_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path))
    pytest.importorskip("trackio")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr(trackers, "_END_SECONDS", 60)
    _told("trackio")
    runs = SQLiteStorage.get_runs("exams")
    assert len(runs) == 1 and runs[0].startswith("out-")
    rows = SQLiteStorage.get_logs("exams", runs[0])
    assert [row["rows"] for row in rows] == [1, 11, 2, 12] and rows[-1]["score"] == 0.25
    assert [row.get("score_so_far") for row in rows] == [0.5, None] * 2
    assert {name for row in rows for name in row} <= {*SENT, "score", "step", "timestamp"}


def test_wandb_offline_has_the_values_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("wandb")
    for name, value in {"WANDB_MODE": "offline", "WANDB_DIR": str(tmp_path),
                        "WANDB_API_KEY": "x" * 40}.items():  # fmt: skip
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(trackers, "_END_SECONDS", 60)
    monkeypatch.setattr(socket, "gethostname", lambda: "a-host-of-its-own")
    _told("wandb")
    assert "has failed" not in capsys.readouterr().err
    folders = sorted((tmp_path / "wandb").glob("offline-run-*"))
    assert len({folder.name.rpartition("-")[2] for folder in folders}) == 1
    content = b"".join(path.read_bytes() for path in tmp_path.rglob("*.wandb"))
    assert b"tokens_per_s" in content and b"score" in content
    names = ("a-host-of-its-own", "pytest", "x" * 40, str(Path.cwd()))
    assert [name for name in names if name.encode() in content] == []
