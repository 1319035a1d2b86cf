"""Objects as files: made once, whole, by whoever comes first."""

from __future__ import annotations

import errno
import io
import os
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from batchgen.__main__ import run_command
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.generation.worker import Worker, others_run
from batchgen.jobs.launchers.launched import LaunchedFolder
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.failure_detector import FailureDetector
from batchgen.storage.leases.file_store import FileStore, FolderGone
from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.leases.lease_files import published_name
from batchgen.storage.leases.lease_protocol import Task, publish_leased
from batchgen.storage.leases.process_identity import is_gone, machine, process_identity
from batchgen.storage.leases.store_operations import Create, Names, Overwrite, Read, Same, carry_out
from batchgen.storage.stores.manifest import Manifest
from batchgen.util.errors import JobError
from tests.support.jobs.racing_workers import winners


def _folder(tmp_path: Path) -> Path:
    for name in ("leases", "workers", "data", "journal"):
        (tmp_path / name).mkdir()
    return tmp_path


@pytest.fixture(params=["links", "no links"])
def folder(tmp_path: Path, request: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
    def refuse(source: Path, path: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    if request.param == "no links":
        monkeypatch.setattr(os, "link", refuse)
    return _folder(tmp_path)


def test_the_first_one_makes_an_object(folder: Path) -> None:
    one, two = FileStore(folder, "one"), FileStore(folder, "two")
    assert one.do(Create("leases/a", b"1")) is True
    assert two.do(Create("leases/a", b"2")) is False
    assert two.do(Read("leases/a")) == b"1" and two.do(Same("leases/a", b"1"))
    assert not two.do(Same("leases/a", b"2")) and not two.do(Same("leases/b", b"1"))
    two.do(Overwrite("workers/b", b"3"))
    two.do(Overwrite("workers/b", b"4"))
    assert one.do(Read("workers/b")) == b"4" and one.do(Read("workers/c")) is None
    assert one.do(Names("leases")) == ["a"] and one.do(Names("workers")) == ["b"]


def test_many_at_once_and_one_wins(folder: Path) -> None:
    wins = winners(lambda name: FileStore(folder, name))
    assert len(wins) == 50
    owners = {path.read_text() for path in (folder / "leases").iterdir()}
    assert owners == set(wins) and len(list((folder / "leases").iterdir())) == 50


@pytest.mark.parametrize("replaces", [False, True])
def test_who_publishes_second_compares(folder: Path, replaces: bool) -> None:
    if replaces:
        (folder / published_name(3)).write_bytes(b"older")
    files = {}
    for name, content in {"a": b"same", "b": b"same", "c": b"other"}.items():
        files[name] = folder / "journal" / name
        files[name].write_bytes(content)
    store = FileStore(folder, "x")
    found = [
        carry_out(publish_leased(3, file, i, replaces=replaces), store.do)
        for i, file in enumerate(files.values())
    ]
    assert found == [True, True, False]
    assert (folder / published_name(3)).read_bytes() == b"same"
    assert (folder / "leases/00003.done.json").exists()


def test_a_link_whose_answer_was_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.link

    def lossy(source: Path, path: Path) -> None:
        real(source, path)
        raise FileExistsError(errno.EEXIST, "File exists")

    monkeypatch.setattr(os, "link", lossy)
    store = FileStore(_folder(tmp_path), "x")
    assert store.do(Create("leases/a", b"1")) is True


def test_errors_say_what_is_the_matter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = FileStore(tmp_path, "x")
    with pytest.raises(FolderGone):
        store.do(Names("leases"))
    with pytest.raises(FolderGone):
        store.do(Create("leases/a", b"1"))
    _folder(tmp_path)

    def full(path: Path, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_bytes", full)
    with pytest.raises(JobError, match=r"cannot write .*\.a\.x\.tmp: No space left on device"):
        store.do(Create("leases/a", b"1"))


@pytest.mark.parametrize("deleted", ["workers", "leases"])
def test_who_completes_the_job_may_delete_what_is_made_durable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, deleted: str
) -> None:
    """The folder is deleted between the write, or the renaming, and the fsync."""
    store = FileStore(_folder(tmp_path), "x")

    def deleted_before(path: Path) -> None:
        if tmp_path / deleted in (path, path.parent):
            shutil.rmtree(tmp_path / deleted)
        fsync_path(path)

    monkeypatch.setattr("batchgen.storage.leases.file_store.fsync_path", deleted_before)
    with pytest.raises(FolderGone):
        store.do(Overwrite("leases/older.json", b"1"))


def test_a_process_of_this_machine_is_known_to_be_gone() -> None:
    beat = process_identity()
    assert not is_gone(beat)
    pid = os.fork()
    if not pid:
        os._exit(0)
    os.waitpid(pid, 0)
    assert is_gone({**beat, "pid": pid})
    assert is_gone({**beat, "process_started": "1"})  # its number was given to another one
    assert not is_gone({**beat, "pid": pid, "machine": "another"})


def test_a_worker_is_judged_by_the_clock_of_who_looks() -> None:
    now = 0.0
    watch = FailureDetector(10.0, lambda: now, lambda beat: False)
    assert not watch.is_dead(1, b'{"ended": null, "beats": 1}')
    now = 9.0
    assert not watch.is_dead(1, b'{"ended": null, "beats": 1}')
    assert not watch.is_dead(1, b'{"ended": null, "beats": 2}')
    now = 18.9
    assert not watch.is_dead(1, b'{"ended": null, "beats": 2}')
    now = 19.0
    assert watch.is_dead(1, b'{"ended": null, "beats": 2}')
    assert not watch.is_dead(1, b'{"ended": null, "beats": 3}')  # it was only paused
    assert watch.is_dead(2, b'{"ended": "stopped"}') and not watch.is_dead(3, None)
    now = 40.0
    assert watch.is_dead(3, None)  # whose heartbeat was never there


class _Failing:
    """Lets calls fail that are made with a path of some name: first `times` times."""

    def __init__(self, patch: pytest.MonkeyPatch, owner: Any, name: str, code: int) -> None:
        self.left, self.real, self.code = 0, getattr(owner, name), code
        self.where = ""
        patch.setattr(owner, name, lambda *args, **kwargs: self._call(*args, **kwargs))
        patch.setattr("batchgen.storage.leases.patience._PAUSES", (0.0, 0.0, 0.0))

    def _call(self, path: Any, *args: Any, **kwargs: Any) -> Any:
        if self.left and self.where in str(path):
            self.left -= 1
            raise OSError(self.code, os.strerror(self.code))
        return self.real(path, *args, **kwargs)


@pytest.mark.parametrize("code", [errno.ESTALE, errno.EIO])
def test_a_file_server_that_fails_is_asked_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    store = FileStore(_folder(tmp_path), "x")
    store.do(Overwrite("workers/0001.json", b"1"))
    for name, operation, answer in (
        ("read_bytes", Read("workers/0001.json"), b"1"),
        ("read_bytes", Same("workers/0001.json", b"1"), True),
        ("write_bytes", Create("leases/a", b"2"), True),
        ("replace", Overwrite("leases/a", b"3"), None),
    ):
        with monkeypatch.context() as patch:
            fails = _Failing(patch, Path, name, code)
            fails.left = 3
            assert store.do(operation) == answer and not fails.left
    with monkeypatch.context() as patch:
        fails = _Failing(patch, os, "listdir", code)
        fails.left = 3
        assert store.do(Names("leases")) == ["a"]
        fails.left, expected = 4, os.strerror(code)
        with pytest.raises(JobError, match=rf"cannot read {tmp_path}/leases: {expected}"):
            store.do(Names("leases"))
        assert not fails.left


def test_an_error_without_a_name_names_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = FileStore(_folder(tmp_path), "x")
    for name, operation, expected in (
        ("read_bytes", Read("workers/0007.json"), "cannot read {}/workers/0007.json: Stale"),
        ("write_bytes", Create("leases/a", b"1"), "cannot write {}/leases/a: Stale"),
    ):
        with monkeypatch.context() as patch:
            _Failing(patch, Path, name, errno.ESTALE).left = 99
            with pytest.raises(JobError, match=expected.format(tmp_path)):
                store.do(operation)


def test_a_lease_whose_making_was_not_answered_is_known_by_its_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real, lost = os.link, [1]

    def lossy(source: Path, path: Path) -> None:
        real(source, path)
        if lost:
            lost.pop()
            raise OSError(errno.ESTALE, "Stale file handle")

    monkeypatch.setattr(os, "link", lossy)
    store = FileStore(_folder(tmp_path), "x")
    assert store.do(Create("leases/a", b"mine")) is True and not lost
    lost.append(1)
    assert store.do(Create("leases/b", b"mine")) is True
    assert (tmp_path / "leases/a").stat().st_nlink == 1
    assert store.do(Create("leases/a", b"other")) is False


def test_a_disk_that_is_full_leaves_no_lease_without_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: Path, path: Path) -> None:
        raise OSError(errno.EPERM, "Operation not permitted")

    class Full(io.FileIO):
        def write(self, content: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "link", refuse)
    store = FileStore(_folder(tmp_path), "x")
    opened = Path.open

    def full(path: Path, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
        return Full(path, mode) if mode == "xb" else opened(path, mode, *args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(Path, "open", full)
        with pytest.raises(JobError, match=r"cannot write .*/leases/a: No space left on device"):
            store.do(Create("leases/a", b"1"))
    assert store.do(Names("leases")) == []
    assert store.do(Create("leases/a", b"1")) is True


UNREADABLE = [
    b"",
    b'{"worker": 1, "en',
    bytes(50),
    b"\xff\xfe",
    b"[]",
    b'{"worker": 1}',
    b"[" * 10**5,
]


@pytest.mark.parametrize("content", UNREADABLE)
def test_a_heartbeat_that_cannot_be_read_is_one_that_does_not_change(content: bytes) -> None:
    now = 0.0
    watch = FailureDetector(10.0, lambda: now, is_gone)
    assert not watch.is_dead(1, content) and watch.how_ended(content) is None
    now = 9.0
    assert not watch.is_dead(1, content)
    now = 10.0
    assert watch.is_dead(1, content)
    assert not watch.is_dead(1, content + b" ")


@pytest.mark.parametrize("content", UNREADABLE)
def test_nobody_fails_because_of_it(
    tmp_path: Path, content: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "journal").mkdir()
    manifest = Manifest(identity={}, fingerprints={}, columns={}, versions={})
    (tmp_path / "manifest.json").write_text(manifest.text())
    config = WorkersConfig(heartbeat=0.05, stale_after=0.2)
    worker = Worker(tmp_path, config, 1)
    worker.begin(set(), 1)
    (tmp_path / "workers/0002.json").write_bytes(content)
    (tmp_path / "leases/00000.e001.json").write_bytes(content)
    (tmp_path / "leases/00001.quarantined.json").write_bytes(content)
    assert worker.others() == [] and worker.is_first()
    assert worker.next_task(True).kind == "wait" and worker.quarantined() == {1: ()}
    assert run_command(["status", str(tmp_path)]) == 0
    assert "unreadable" in capsys.readouterr().out
    assert JobFolderReader(tmp_path).may_run
    assert len(LaunchedFolder(tmp_path).beats()) == 1
    time.sleep(0.25)
    assert worker.next_task(True) == Task("shard", 0)
    worker.end("stopped")
    assert not others_run(tmp_path, config)


def test_a_clone_of_this_machine_is_another_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """It has the same start of the kernel and the same numbers of processes."""
    beat = {**process_identity(), "pid": 999_999_999}
    assert is_gone(beat)
    for patched, value in (
        ("socket.gethostname", lambda: "clone"),
        ("batchgen.storage.leases.process_identity._cards", lambda: ["02:00:00:00:00:01"]),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(patched, value)
            machine.cache_clear()
            assert not is_gone(beat) and is_gone({**process_identity(), "pid": 999_999_999})
    machine.cache_clear()


def test_a_process_that_the_system_hides_is_not_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    def hidden(path: Path) -> str:
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")

    beat = process_identity()
    monkeypatch.setattr(Path, "read_text", hidden)
    assert not is_gone(beat)
    assert is_gone({**beat, "pid": 999_999_999})
    assert is_gone({**beat, "pid": 999_999_999, "process_started": None})
    assert not is_gone({**beat, "pid": "../self"})
