"""Objects as files: made once, whole, by whoever comes first."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest
from racing_workers import winners

from batchgen.errors import JobError
from batchgen.output.fsync import fsync_path
from batchgen.workers.file_store import FileStore, FolderGone
from batchgen.workers.names import published_name
from batchgen.workers.operations import Create, Names, Overwrite, Read, Same, carry_out
from batchgen.workers.process import identity, is_gone
from batchgen.workers.protocol import publish
from batchgen.workers.watch import Watch


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
        carry_out(publish(3, file, i, replaces=replaces), store.do)
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

    monkeypatch.setattr("batchgen.workers.file_store.fsync_path", deleted_before)
    with pytest.raises(FolderGone):
        store.do(Overwrite("leases/older.json", b"1"))


def test_a_process_of_this_machine_is_known_to_be_gone() -> None:
    beat = identity()
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
    watch = Watch(10.0, lambda: now, lambda beat: False)
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
