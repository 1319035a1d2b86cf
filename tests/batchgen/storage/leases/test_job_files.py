"""A job's folder from a stranger: no link in it is followed, neither to read nor to write."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from batchgen.__main__ import run_command
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.storage.leases.job_files import JOB_FILES, refuse_links
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.finished_job import finished_job, row

SECRET = "a secret of the user"
NAMES = [
    *JOB_FILES,
    "data/part-00000.parquet",
    "grades/steps.json",
    "grades/part-00001.parquet",
    ".lock",
]
VERBS = [
    ["show", "out"], ["export", "out"], ["status", "out"], ["report", "out"],
    ["grade", "out"], ["score", "out", "--save"], ["compare", "out", "out"], ["validate", "out"],
    ["view", "out"], ["plan", "model=nano_hybrid", "dataset=demo", "plan.like=out"],
    ["model=nano_hybrid", "dataset=demo", "output.dir=out", "--dry-run"],
    ["model=nano_hybrid", "dataset=demo", "output.dir=out"],
    ["model=nano_hybrid", "dataset=demo", "output.dir=out", "launcher.workers=1"],
]  # fmt: skip


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_job(tmp_path_factory.mktemp("graded") / "out", [row(0), row(1)], graded=True)


@pytest.fixture
def foreign(graded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file of the user's, which nothing changes or shows; the job is `out` beside it."""
    shutil.copytree(graded, tmp_path / "out")
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "foreign"
    path.write_text(SECRET)
    yield path
    assert path.read_text() == SECRET
    for file in tmp_path.rglob("*"):
        if file.is_file() and not file.is_symlink() and file != path:
            assert SECRET.encode() not in file.read_bytes(), file


def put(place: Path, target: Path) -> None:
    """Let a name be a link to the target, or where it is a folder, to a folder with the target."""
    if place.is_dir():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(target)


@pytest.mark.parametrize("name", NAMES)
def test_every_own_name_is_looked_at(foreign: Path, name: str) -> None:
    refuse_links(Path("out"))
    put(Path("out", name), foreign)
    with pytest.raises(ConfigError, match=rf"^out: {name.replace('.', '[.]')} is a link"):
        refuse_links(Path("out"))


@pytest.mark.quick(2)
@pytest.mark.parametrize("arguments", VERBS, ids=lambda arguments: " ".join(arguments[-2:]))
@pytest.mark.parametrize("name", ["config.yaml", "grades"])
def test_every_verb_refuses_them(
    foreign: Path, arguments: list[str], name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    put(Path("out", name), foreign)
    assert run_command(arguments) in (1, 2)
    said = capsys.readouterr()
    assert f"{name} is a link" in said.err and SECRET not in said.out + said.err


def test_a_pipe_keeps_nobody_waiting(foreign: Path, capsys: pytest.CaptureFixture[str]) -> None:
    Path("out/metrics.json").unlink()
    os.mkfifo("out/metrics.json")
    assert run_command(["show", "out"]) == 2
    assert "metrics.json is neither a file nor a folder" in capsys.readouterr().err


def test_the_folder_itself_and_what_is_not_the_jobs_may_be_links(foreign: Path) -> None:
    Path("out/notes").symlink_to(foreign)
    Path("link").symlink_to("out")
    assert run_command(["score", "link", "--save"]) == 0
    assert Path("link/notes").is_symlink()


def test_the_lock_of_a_job_is_no_link(foreign: Path) -> None:
    Path("lock").symlink_to(foreign)
    with pytest.raises(OSError):
        FolderLock(Path("lock"))


def test_a_temporary_name_may_lead_to_a_folder(tmp_path: Path) -> None:
    FakeJob(str(tmp_path / "out"), rows=3).run()
    (tmp_path / "theirs").mkdir()
    (tmp_path / "theirs/file").touch()
    (tmp_path / "out/.README.md.1-aa.tmp").symlink_to(tmp_path / "theirs")
    FakeJob(str(tmp_path / "out"), rows=3).run()
    assert (tmp_path / "theirs/file").exists()
    assert not os.path.lexists(tmp_path / "out/.README.md.1-aa.tmp")


def test_a_log_may_be_a_link_to_another_log_and_to_nothing_else(foreign: Path) -> None:
    """submitit leaves a link to the script that it has submitted, and Slurm's workers start."""
    logs = foreign.parent / "out" / "logs" / "slurm-1"
    logs.mkdir(parents=True)
    (logs / "7_submission.sh").write_text("#!/bin/sh\n")
    link = logs / ".submission_file_1.sh"
    link.symlink_to(logs / "7_submission.sh")
    refuse_links(foreign.parent / "out")
    for target in (foreign, foreign.parent / "out" / "config.yaml", logs / "missing"):
        link.unlink()
        link.symlink_to(target)
        with pytest.raises(ConfigError, match=r"\.submission_file_1\.sh is a link"):
            refuse_links(foreign.parent / "out")
