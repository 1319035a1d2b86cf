"""`batchgen show` and `export` on jobs that run, were killed, or are complete."""

from __future__ import annotations

import csv
import gzip
import itertools
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from batchgen.cli.verbs import export, follow, show
from batchgen.cli.verbs.follow import NewRows
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.row_order import KEYS
from tests.support.jobs.fake_job import FakeEngine, FakeJob

ROOT = Path(__file__).parents[4]
Printed = pytest.CaptureFixture[str]


@pytest.fixture
def stopped(tmp_path: Path) -> Path:
    """A job of 40 rows and 2 samples that failed in its ninth step, with shards and journals."""
    folder = tmp_path / "out"
    with pytest.raises(RuntimeError, match="fell off the bus"):
        FakeJob(str(folder), rows=40, rows_per_shard=4, fail_at_step=9).run()
    assert list((folder / "data").iterdir()) and list((folder / "journal").iterdir())
    return folder


def test_rows_of_shards_and_journals_are_shown(stopped: Path, capsys: Printed) -> None:
    capsys.readouterr()
    assert show.main([str(stopped), "--json", "--columns", "row_id,sample_index"]) == 0
    rows = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = JobFolderReader(stopped).rows(["row_id", "sample_index"])
    assert rows == list(expected) and 8 < len(rows) < 80
    assert show.main([str(stopped), "--rows", "9" * 20, "--json"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == len(rows)
    assert show.main([str(stopped), "--rows", "0"]) == 0
    header = capsys.readouterr().out.splitlines()[0]
    assert f"out: failed, {len(rows)} of 80 answers ({len(rows) / 80:.0%}), " in header
    assert header.endswith("; the job's command resumes it")


def test_a_killed_job_says_so(stopped: Path, capsys: Printed) -> None:
    metrics = json.loads((stopped / "metrics.json").read_text())
    metrics["status"] = metrics["attempts"][-1]["status"] = "running"
    (stopped / "metrics.json").write_text(json.dumps(metrics))
    lock = (stopped / ".lock").read_text()
    (stopped / ".lock").write_text(lock.replace(f"pid {os.getpid()}", "pid 999999999"))
    capsys.readouterr()
    assert show.main([str(stopped), "--follow"]) == 0  # and does not wait for it
    (line,) = capsys.readouterr().out.splitlines()
    assert "out: killed, " in line


def test_only_one_sample(stopped: Path, capsys: Printed) -> None:
    capsys.readouterr()
    assert show.main([str(stopped), "--sample", "1", "--rows", "3"]) == 0
    shown = capsys.readouterr().out
    assert shown.count(", sample 1, ") == 3 == shown.count("\nrow ")


def test_a_job_without_a_finished_row(tmp_path: Path, capsys: Printed) -> None:
    with pytest.raises(RuntimeError):
        FakeJob(str(tmp_path / "out"), bad=False, fail_at_step=1).run()
    capsys.readouterr()
    assert show.main([str(tmp_path / "out")]) == 0
    assert capsys.readouterr().out.endswith("\n\nThere are no finished rows yet.\n")
    assert show.main([str(tmp_path / "out"), "--row", "id0"]) == 2
    assert "--row id0: no row of " in capsys.readouterr().err
    assert export.main([str(tmp_path / "out")]) == 2
    assert "is finished yet: there is nothing to export" in capsys.readouterr().err


@pytest.mark.quick(1)
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_new_rows_come_once_and_none_is_missed(
    every: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """However seldom one looks, also if shards were published in between."""
    folder, steps, seen = tmp_path / "out", itertools.count(), list[tuple[int, int]]()
    before = set[tuple[int, int]]()
    step = FakeEngine.step
    new: list[NewRows] = []

    def look() -> None:
        for batch in new[0].look():
            seen.extend(zip(*(batch[name].to_pylist() for name in KEYS), strict=True))

    def step_and_look(engine: FakeEngine) -> Any:
        number = next(steps)
        if number == 4:
            new.append(NewRows(folder))
            before.update(_keys(folder))
        elif number > 4 and number % every == 0:
            look()
        return step(engine)

    monkeypatch.setattr(FakeEngine, "step", step_and_look)
    FakeJob(str(folder), rows=30, rows_per_shard=4, max_num_seqs=4).run()
    look()
    assert len(before) > 4 and len(seen) == len(set(seen))
    assert set(seen) == _keys(folder) - before


@pytest.mark.parametrize("change", [{"samples": 2}, {"retry_errors": True, "bad": False}])
@pytest.mark.parametrize("every", [1, 3, 1000])
def test_only_new_rows_of_shards_that_are_published_again(
    every: int, change: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A job that grows, or computes its errors again, replaces its shards. It was killed before."""
    job = FakeJob(str(tmp_path / "out"), rows=30, rows_per_shard=4, max_num_seqs=4, samples=1)
    job.run()
    folder, steps, seen = Path(job.out), itertools.count(1), list[tuple[int, int]]()
    with pytest.raises(RuntimeError):
        replace(job, **change, fail_at_step=2).run()
    assert list((folder / "data").iterdir()) and list((folder / "journal").iterdir())
    before, new = _answers(folder), NewRows(folder)
    step = FakeEngine.step

    def look() -> None:
        for batch in new.look():
            seen.extend(zip(*(batch[name].to_pylist() for name in KEYS), strict=True))

    def step_and_look(engine: FakeEngine) -> Any:
        if next(steps) % every == 0:
            look()
        return step(engine)

    monkeypatch.setattr(FakeEngine, "step", step_and_look)
    replace(job, **change).run()
    look()
    assert len(seen) == len(set(seen))
    assert set(seen) >= _answers(folder) - before and not set(seen) & before


def test_rows_that_two_workers_have_computed_come_once(stopped: Path) -> None:
    new = NewRows(stopped)
    for path in list((stopped / "journal").glob("*.journal")):
        shutil.copy(path, path.with_name(path.name.replace(".0001.", ".0002.")))
    finished = [reason for batch in new.look() for reason in batch["finish_reason"].to_pylist()]
    assert set(finished) <= {"error"}


def _answers(folder: Path) -> set[tuple[int, int]]:
    """The keys of the rows without an error."""
    rows = JobFolderReader(folder).rows([*KEYS, "error"])
    return {(r["row_index"], r["sample_index"]) for r in rows if r["error"] is None}


def _keys(folder: Path) -> set[tuple[int, int]]:
    rows = JobFolderReader(folder).rows(KEYS)
    return {(row["row_index"], row["sample_index"]) for row in rows}


def test_follow_prints_until_the_job_ends(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    before = _keys(stopped)
    monkeypatch.setattr(follow, "is_over", lambda reader: reader.metrics["status"] == "complete")

    def resume(seconds: float) -> None:
        FakeJob(str(stopped), rows=40, rows_per_shard=4).run()

    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=resume))
    capsys.readouterr()
    assert show.main([str(stopped), "--follow", "--columns", "number"]) == 0
    first, *lines, empty, last = capsys.readouterr().out.splitlines()
    assert "out: failed, " in first and not empty
    assert "out: complete, 40 questions, 80 answers, " in last
    assert sum(line.startswith("row id") for line in lines) == 80 - len(before)


def test_ctrl_c_ends_following_quietly(
    stopped: Path, monkeypatch: pytest.MonkeyPatch, capsys: Printed
) -> None:
    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(follow, "is_over", lambda reader: False)
    monkeypatch.setattr(follow, "time", SimpleNamespace(sleep=interrupt))
    capsys.readouterr()
    assert show.main([str(stopped), "--follow"]) == 130
    assert capsys.readouterr().err == ""


def test_export_to_files(stopped: Path, tmp_path: Path, capsys: Printed) -> None:
    plain, packed = tmp_path / "rows.jsonl", tmp_path / "rows.csv.gz"
    assert export.main([str(stopped), "--out", str(plain)]) == 0
    rows = [json.loads(line) for line in plain.read_text().splitlines()]
    assert rows == list(JobFolderReader(stopped).rows())
    columns = "row_id,number,tags,text"
    assert export.main([str(stopped), "--columns", columns, "--out", str(packed)]) == 0
    with gzip.open(packed, "rt", newline="") as file:
        table = list(csv.DictReader(file))
    assert [int(row["number"]) for row in table] == [row["number"] for row in rows]
    assert [json.loads(row["tags"]) for row in table] == [row["tags"] for row in rows]
    assert [row["text"] or None for row in table] == [row["text"] for row in rows]
    assert export.main([str(stopped), "--out", str(plain)]) == 2


def test_a_file_that_cannot_be_finished_is_not_left_behind(stopped: Path, tmp_path: Path) -> None:
    shard = max((stopped / "data").iterdir())
    shard.write_bytes(shard.read_bytes()[:-9])
    path = tmp_path / "rows.jsonl"
    assert export.main([str(stopped), "--out", str(path)]) == 1
    assert not path.exists()


@pytest.mark.thorough
def test_a_reader_that_wants_no_more_is_no_error(stopped: Path) -> None:
    """And neither verb loads what only jobs need."""
    program = (
        "import sys\nfrom batchgen.cli.verbs import export\n"
        f"code = export.main([{str(stopped)!r}])\n"
        "heavy = {'torch', 'transformers', 'datasets', 'hydra'} & set(sys.modules)\n"
        "print(code, sorted(heavy), file=sys.stderr)"
    )
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [sys.executable, "-c", program], stdout=write, stderr=subprocess.PIPE, text=True,
        env=environment, timeout=120,
    )  # fmt: skip
    os.close(write)
    assert (done.returncode, done.stderr) == (0, "0 []\n")
