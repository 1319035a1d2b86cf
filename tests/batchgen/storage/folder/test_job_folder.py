"""A job takes an empty folder or its own one; any other is refused with a reason and unharmed."""

import dataclasses
import json
import os
import shutil
import socket
import subprocess
import sys
from collections import namedtuple
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest

from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.folder.refused_folder import refuse_shrinking
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.manifest import Manifest, _versions
from batchgen.util.errors import ConfigError
from batchgen.util.temporary import temporary_name
from tests.support.jobs.output_rows import (
    PER_SHARD,
    ROWS,
    all_rows,
    finished_row,
    open_writer,
    write,
)

MANIFEST = Manifest.build(
    {"sampling": {"seed": 0, "stop": ("a",)}, "model": {"path": "m"}}, {"dataset": "abc"}
)


def _open(path: Path, manifest: Manifest = MANIFEST, overwrite: bool = False) -> JobFolder:
    return JobFolder(path, manifest, lambda stop: None, overwrite=overwrite)


def _open_with_row(path: Path) -> None:
    with _open(path) as folder:
        (folder.data / "part-00000.parquet").touch()


def _names(path: Path) -> list[str]:
    return sorted(str(p.relative_to(path)) for p in path.rglob("*"))


def test_a_new_folder_and_the_same_job_again(tmp_path: Path) -> None:
    out = tmp_path / "a/b"
    with _open(out) as folder:
        assert folder.is_new
        (folder.data / "x").write_text("kept")
    for overwrite in (False, True):  # the same job is resumed, whatever overwrite says
        with _open(out, overwrite=overwrite) as folder:
            assert not folder.is_new
            assert (folder.data / "x").read_text() == "kept"
    assert json.loads((out / "manifest.json").read_text())["format_version"] == 2


def test_another_job_is_refused_with_what_differs(tmp_path: Path) -> None:
    _open_with_row(tmp_path)
    before = (tmp_path / "manifest.json").read_bytes()
    other = Manifest.build({"sampling": {"seed": 1, "n": 4}, "model": {"path": "m"}}, {})
    with pytest.raises(ConfigError) as error:
        _open(tmp_path, other)
    assert str(error.value).splitlines() == [
        f"output.dir={tmp_path} holds the output of a different job:",
        "  sampling.seed: 0 → 1",
        '  sampling.stop: ["a"] → (not set)',
        "  sampling.n: (not set) → 4",
        "  fingerprint.dataset: abc → (not set)",
        "use another output.dir, or output.overwrite=true to delete that output",
    ]
    assert (tmp_path / "manifest.json").read_bytes() == before
    _open(tmp_path).close()  # the lock was given back


def test_versions_of_what_computes_the_rows_are_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MANIFEST.versions["xgrammar"] == version("xgrammar")

    def without_triton(package: str) -> str:
        if package == "triton":
            raise PackageNotFoundError(package)
        return "1.0"

    monkeypatch.setattr("batchgen.storage.stores.manifest.version", without_triton)
    versions = _versions.__wrapped__()
    assert "triton" not in versions and versions["xgrammar"] == "1.0"


def test_versions_do_not_make_another_job() -> None:
    other = dataclasses.replace(MANIFEST, versions={"torch": "9"})
    assert MANIFEST.differences(other, lambda stop: None) == []


def test_a_folder_without_a_finished_row_is_any_jobs(tmp_path: Path) -> None:
    with _open(tmp_path) as folder:
        (folder.journal / "retry").touch()
    other = Manifest.build({"sampling": {"seed": 1}}, {})
    with _open(tmp_path, other) as folder:
        assert folder.is_new
        (folder.journal / "part-00000.0001.journal").touch()
    with pytest.raises(ConfigError, match="a different job"):
        _open(tmp_path)


def test_overwrite_deletes_what_a_job_wrote_and_nothing_else(tmp_path: Path) -> None:
    with _open(tmp_path) as folder:
        (folder.data / "part-00000.parquet").write_text("")
    for name in ("README.md", "config.yaml", "metrics.json", "my notes.txt"):
        (tmp_path / name).write_text("")
    other = Manifest.build({"sampling": {"seed": 1}}, {})
    with _open(tmp_path, other, overwrite=True) as folder:
        assert folder.is_new
    assert _names(tmp_path) == [".lock", "data", "journal", "manifest.json", "my notes.txt"]
    assert Manifest.read(tmp_path / "manifest.json").identity == {"sampling": {"seed": 1}}


@pytest.mark.parametrize("overwrite", [False, True])
def test_files_of_others_are_never_touched(tmp_path: Path, overwrite: bool) -> None:
    (tmp_path / "thesis.tex").write_text("x")
    (tmp_path / "data").mkdir()
    with pytest.raises(ConfigError, match=r"not belong to a batchgen job \(data, thesis\.tex\)"):
        _open(tmp_path, overwrite=overwrite)
    assert _names(tmp_path) == ["data", "thesis.tex"]


@pytest.mark.parametrize("content", ["", "{", "[]", '{"a": 1}', '{"format_version": 2, "x": 2}'])
def test_a_manifest_of_others_is_refused(tmp_path: Path, content: str) -> None:
    (tmp_path / "manifest.json").write_text(content)
    with pytest.raises(ConfigError, match="is not a manifest of batchgen"):
        _open(tmp_path, overwrite=True)
    assert (tmp_path / "manifest.json").read_text() == content


def test_a_manifest_of_another_version_is_refused(tmp_path: Path) -> None:
    (tmp_path / "manifest.json").write_text('{"format_version": 99}')
    with pytest.raises(ConfigError, match="has format version 99, this batchgen reads"):
        _open(tmp_path, overwrite=True)


def test_a_first_attempt_killed_before_its_manifest_is_no_obstacle(tmp_path: Path) -> None:
    (tmp_path / ".lock").write_text("pid 1")
    temporary_name(tmp_path / "manifest.json").write_text('{"form')
    with _open(tmp_path) as folder:
        assert folder.is_new
    assert _names(tmp_path) == [".lock", "data", "journal", "manifest.json"]


def test_a_new_worker_has_a_higher_number_than_all_that_wrote(tmp_path: Path) -> None:
    """Also if a kill came between the deletion of the old heartbeats and the first new one."""
    with _open(tmp_path) as folder:
        assert folder.least_worker == 1
        (folder.journal / "part-00003.0007.journal").touch()
    with _open(tmp_path) as folder:
        assert folder.least_worker == 8
        (folder.journal / "part-00003.0012.retry").touch()
    with _open(tmp_path) as folder:
        assert folder.least_worker == 12  # the errors from before number 12 are tried again
        (tmp_path / "workers").mkdir()
        (tmp_path / "workers/0020.json").touch()
    with _open(tmp_path) as folder:
        assert folder.least_worker == 21


def test_what_killed_processes_have_not_finished_writing_is_deleted(tmp_path: Path) -> None:
    with _open(tmp_path):
        pass
    (tmp_path / "grades").mkdir()
    written = ("README.md", "config.yaml", "metrics.json", "report.html", "data/part-00000.parquet")
    for name in (*written, "manifest.json", "grades/part-00000.parquet", "my notes.txt"):
        temporary_name(tmp_path / name).write_text("half")
    with _open(tmp_path) as folder:
        assert not folder.is_new
    (kept,) = tmp_path.rglob("*.tmp")
    assert kept.name.startswith(".my notes.txt.")


def test_two_jobs_on_one_folder(tmp_path: Path) -> None:
    program = (
        "import sys; from pathlib import Path\n"
        "from batchgen.storage.leases.folder_lock import FolderLock\n"
        "lock = FolderLock(Path(sys.argv[1])); print('locked', flush=True); input()"
    )
    holder = subprocess.Popen(
        [sys.executable, "-c", program, str(tmp_path / ".lock")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(__file__).parents[4],
    )
    assert holder.stdout is not None and holder.stdout.readline() == b"locked\n"
    owner = rf"in use by another job \(pid {holder.pid} on {socket.gethostname()}, since 2"
    with pytest.raises(ConfigError, match=owner):
        _open(tmp_path)
    holder.kill()  # the lock goes with the process, however that ends
    holder.wait()
    with _open(tmp_path), pytest.raises(ConfigError, match=f"pid {os.getpid()} on"):
        _open(tmp_path)


@pytest.mark.parametrize("where", ["file", "below a file", "proc"])
def test_a_folder_that_cannot_be(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("mine")
    paths = {"file": "file", "below a file": "file/out", "proc": "/proc/out"}
    with pytest.raises(ConfigError, match=r"cannot be written \(.+\): choose a folder"):
        _open(tmp_path / paths[where])
    assert (tmp_path / "file").read_text() == "mine"


def test_an_unwritable_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path, data: bytes) -> int:
        raise PermissionError(13, "Permission denied", str(path))

    _open(tmp_path).close()
    monkeypatch.setattr(Path, "write_bytes", refuse)
    with pytest.raises(ConfigError, match=r"cannot be written \(Permission denied\)"):
        _open(tmp_path)


def test_a_full_disk_is_refused_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(9, 9, 5 << 20))
    with pytest.raises(ConfigError, match="has 5 MiB of free disk space"):
        _open(tmp_path)
    assert _names(tmp_path) == []


def test_a_dataset_that_shrank(tmp_path: Path) -> None:
    """Rows that are done count whether they are in shards or only in the journal."""
    for name, rows in (("shards", ROWS), ("journal", 8)):
        folder = tmp_path / name
        if name == "shards":
            write(folder, [all_rows()], PER_SHARD, ROWS)
        else:
            with open_writer(folder) as writer:
                writer.write([finished_row(7, 0)])
        (folder / "manifest.json").touch()
        storage = FolderStorage(folder)
        message = rf"would have {rows - 1} rows, .* up to number {rows} are .*limit={rows} or more"
        with pytest.raises(ConfigError, match=message):
            refuse_shrinking(storage, rows - 1)
        refuse_shrinking(storage, rows)
        refuse_shrinking(storage, None)
