"""`batchgen clean` deletes versions of steps that nobody needs, and says what it keeps."""

from __future__ import annotations

from pathlib import Path

import pytest

from batchgen.__main__ import run_command
from batchgen.pipelines.run.old_versions import OldVersions
from batchgen.storage.leases.folder_lock import FolderLock
from batchgen.util.errors import ConfigError
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.pipeline_job import folders, run, shards, values, written


def small(model: Path, rows: Path, out: str, tmp_path: Path) -> str:
    """A pipeline of two steps."""
    given = values(model, rows, Path("out"))
    given["output"]["dir"] = out
    given["steps"] = {name: given["steps"][name] for name in ("draft", "judge")}
    return written(tmp_path / "pipeline.yaml", given)


@pytest.mark.thorough
def test_old_versions_are_deleted(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    out = tmp_path / "out"
    pipeline = small(model, rows, str(out), tmp_path)
    assert run(pipeline) == 0
    first = folders(out)
    assert run_command(["clean", str(out)]) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert run(pipeline, "judge.sampling.seed=1") == 0
    kept = shards(out)
    capsys.readouterr()
    assert run_command(["clean", str(out)]) == 0  # nobody is there who could say yes
    said = capsys.readouterr().out
    assert str(first["judge"]) in said and "1 folder, " in said and "add --yes" in said
    assert first["judge"].is_dir()
    (first["judge"] / "mine.txt").write_text("not of a job")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True)
    monkeypatch.setattr("builtins.input", lambda _: "y")
    assert run_command(["clean", str(out)]) == 0
    assert "Deleted 1 folder" in capsys.readouterr().out
    assert [path.name for path in first["judge"].iterdir()] == ["mine.txt"]
    assert run_command(["clean", str(out)]) == 0
    assert "nothing to delete" in capsys.readouterr().out
    assert shards(out) == kept
    (first["judge"] / "mine.txt").unlink()
    assert run(pipeline) == 0 and folders(out) == first
    assert run_command(["clean", str(tmp_path)]) == 2
    assert "is not the folder of a pipeline" in capsys.readouterr().err


@pytest.mark.thorough
def test_what_is_needed_stays(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    pipeline = small(model, rows, str(out), tmp_path)
    assert run(pipeline) == 0
    first = folders(out)
    assert run(pipeline, "judge.sampling.seed=1", "judge.budget.tokens=1") == 4
    assert run_command(["clean", str(out), "--yes"]) == 1
    said = capsys.readouterr().out
    assert f"{first['judge']}  stays: judge is not complete, and may copy its rows" in said
    assert "Nothing was deleted." in said
    assert run(pipeline, "judge.sampling.seed=1") == 0
    found = OldVersions(str(out))
    (version,) = found.found()
    lock = FolderLock(first["judge"] / ".lock")
    with pytest.raises(ConfigError, match="is in use by another job"):
        found.delete(version)
    assert run_command(["clean", str(out), "--yes"]) == 1
    assert "stays: a worker runs there" in capsys.readouterr().out
    lock.__exit__()
    assert (first["judge"] / "data").is_dir()


@pytest.mark.slow
def test_old_versions_in_a_bucket_are_deleted(
    model: Path, rows: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    files = FaultyFiles()
    use(monkeypatch, files)
    pipeline = small(model, rows, "s3://jobs/out", tmp_path)
    assert run(pipeline) == 0
    assert run(pipeline, "judge.sampling.seed=1") == 0
    before = set(files.store)
    assert run_command(["clean", "s3://jobs/out", "--yes"]) == 0
    assert "Deleted 1 folder" in capsys.readouterr().out
    gone = {path for path in before if path not in files.store}
    gone = {path for path in gone if not path.startswith("jobs/out/.locks/")}
    assert gone and all(path.startswith("jobs/out/judge.") for path in gone)
    assert {path.split("/")[2] for path in gone}.isdisjoint(
        {path.split("/")[2] for path in files.store}
    )
