"""`--dry-run` refuses what a run refuses, in the same words, and no refusal leaves a folder."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import pytest

from batchgen.__main__ import run_command
from tests.support.jobs.real_job import contents, overrides

_HUGE = 10**21


def _refusals(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[str, str]:
    """The error of a run, and that of a dry run."""
    found = []
    for more in ([], ["--dry-run"]):
        assert run_command([*arguments, *more]) == 2
        stderr = capsys.readouterr().err
        assert "Traceback" not in stderr
        found.append(stderr.rpartition("batchgen: ")[2])
    return found[0], found[1]


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("given", "says"),
    [
        (["output.text_column=row_id"], "output.text_column=row_id is the name of another column"),
        (["output.dir=/proc/out"], "output.dir=/proc/out cannot be written (it is not on a disk)"),
        (["dataset.path=/"], "dataset.path=/ is the root of all files of this machine"),
        (["sampling.n=1000000000000"], "sampling.n must be at most 1,000,000, got"),
        (
            ["sampling.n=1000000", "output.rows_per_shard=1001"],
            "output.rows_per_shard=1001 with sampling.n=1000000 makes shards of 1,001,000,000 "
            "answers: choose fewer rows, at most 1,000\n",
        ),
        ([f"output.rows_per_shard={_HUGE}"], f"output.rows_per_shard={_HUGE} with sampling.n=2"),
        ([f"sampling.max_new_tokens={_HUGE}"], f"sampling.max_new_tokens={_HUGE} leaves no room"),
        (["engine.max_num_seqs=1000000000"], "engine.max_num_seqs must be 1 to 65,536, got"),
        (["engine.kv_cache_gib=1e300"], "engine.kv_cache_gib must be above 0 and at most"),
        (["engine.kv_cache_gib=inf"], "engine.kv_cache_gib must be above 0 and at most"),
        (["workers.heartbeat=nan"], "workers.heartbeat must be above 0 and at most 604,800"),
        (
            ["workers.heartbeat=1e300", "workers.stale_after=1e301"],
            "workers.heartbeat must be above 0 and at most 604,800",
        ),
        (["workers.stale_after=inf"], "workers.stale_after must be above 0 and at most 604,800"),
        (["launcher=local", f"launcher.workers={_HUGE}"], "launcher.workers must be 1 to 1,024"),
        (["launcher=local"], "launcher.workers has no value, and there is no GPU"),
        ([f"score.workers={_HUGE}"], "score.workers must be null (one on each core) or 1 to"),
    ],
)
def test_a_new_job(
    given: list[str],
    says: str,
    model: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    out = tmp_path / "deep/out"
    run, dry = _refusals(overrides(model, rows, out, *given), capsys)
    assert says in run
    assert dry == run
    assert not out.parent.exists()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "given", [["sampling.top_k"], ["dataset.limit"], ["dataset.limit", "dataset.streaming=true"]]
)
def test_a_number_without_a_largest_one(
    given: list[str], model: Path, rows: Path, tmp_path: Path
) -> None:
    key, *more = given
    arguments = [*overrides(model, rows, tmp_path / "out"), f"{key}={_HUGE}", *more]
    assert run_command([*arguments, "--dry-run"]) == run_command(arguments) == 0


def test_one_shard_for_all_rows(model: Path, rows: Path, tmp_path: Path) -> None:
    """What is kept in memory goes by the rows that there are."""
    out = tmp_path / "out"
    assert run_command([*overrides(model, rows, out), "output.rows_per_shard=500000000"]) == 0
    assert len(list((out / "data").iterdir())) == 1


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["text", "row_id", "error"])
def test_a_column_of_the_name_of_ours(
    name: str, model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    rows.write_text(json.dumps({"id": "a", "q": "b", name: "c"}) + "\n")
    run, dry = _refusals(overrides(model, rows, tmp_path / "out"), capsys)
    assert f"'{name}'" in run and dry == run
    assert not (tmp_path / "out").exists()


def test_a_limit_below_the_rows_that_are_done(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_command(overrides(model, rows, out)) == 0
    before = contents(out)
    capsys.readouterr()
    run, dry = _refusals([*overrides(model, rows, out), "dataset.limit=3"], capsys)
    assert "rows up to number 11 are finished, and a job can grow but not shrink" in run
    assert dry == run
    assert contents(out).keys() == before.keys()


class _Usage(NamedTuple):
    total: int
    used: int
    free: int


@pytest.mark.parametrize("why", ["no permission", "no room"])
def test_a_folder_that_cannot_be_made(
    why: str,
    model: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir()
    if why == "no permission":
        locked.chmod(0o555)
        if os.access(locked, os.W_OK):  # root may write anywhere
            monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != locked)
        says = f"output.dir={locked}/a/out cannot be written (Permission denied): choose a folder"
    else:
        monkeypatch.setattr(shutil, "disk_usage", lambda _: _Usage(9, 9, 5 << 20))
        says = f"output.dir={locked}/a/out has 5 MiB of free disk space"
    run, dry = _refusals(overrides(model, rows, locked / "a/out"), capsys)
    assert says in run and dry == run
    assert list(locked.iterdir()) == []
