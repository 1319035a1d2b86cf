"""Storages of a job's folder: what a worker may still write when others have completed the job."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.generation.worker import Worker
from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.leases.fsync import fsync_path
from batchgen.storage.leases.lease_files import LEASES, SESSION, WORKERS
from batchgen.storage.leases.store_operations import Create
from batchgen.storage.metrics.job_metrics import Metrics
from batchgen.storage.metrics.tally import Tally
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.object_storage import ObjectStorage
from batchgen.util.temporary import delete_temporaries
from tests.support.jobs.object_files import FaultyFiles, store_in


def _folder(path: Path) -> tuple[Storage, Callable[[], None]]:
    """A folder's storage, and what completes the job as others would."""
    storage = FolderStorage(path)
    storage.store("a", joins=False)
    return storage, lambda: shutil.rmtree(path / WORKERS)


def _objects(path: Path) -> tuple[Storage, Callable[[], None]]:
    """In an object store as in a folder."""
    store = store_in(FaultyFiles())
    storage = ObjectStorage(store, WorkersConfig())
    storage.store("a", joins=False).do(Create(SESSION, b"a"))
    store.fence(b"a")
    return storage, lambda: store.delete([SESSION])


@pytest.mark.parametrize("kind", [_folder, _objects])
def test_who_was_paused_while_others_completed_the_job_changes_nothing(
    kind: Callable[[Path], tuple[Storage, Callable[[], None]]], tmp_path: Path
) -> None:
    storage, complete = kind(tmp_path)
    path = storage.path / "metrics.json"
    with storage.local_copy():
        storage.write(path, "mine")
        assert storage.read(path) == b"mine"
        complete()
        storage.write(path, "late")
        storage.write(storage.path / "README.md", "late")
    assert storage.read(path) == b"mine" and not storage.exists(storage.path / "README.md")
    storage.close()


@pytest.mark.parametrize("kind", [_folder, _objects])
def test_who_completed_the_job_keeps_its_figures(
    kind: Callable[[Path], tuple[Storage, Callable[[], None]]], tmp_path: Path
) -> None:
    """Although another worker has overwritten them in between, and the folders are gone."""
    storage, complete = kind(tmp_path)
    path = storage.path / "metrics.json"
    metrics = Metrics(path, 0, Tally(["a"], constrained=False), storage=storage)
    metrics.save("complete")
    mine = storage.read(path)
    storage.write(path, '{"status": "running"}')
    complete()
    metrics.keep()
    assert mine and storage.read(path) == mine
    storage.close()


def test_the_journal_may_be_deleted_while_it_is_made_safe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By another worker, who has completed the job: also between a look and the fsync."""
    journal = tmp_path / "journal"
    journal.mkdir()
    file = journal / "part-00000.0001.journal"
    file.write_bytes(b"rows")

    def deleted_before(path: Path) -> None:
        if path == journal:
            shutil.rmtree(journal)
        fsync_path(path)

    monkeypatch.setattr("batchgen.storage.stores.folder_storage.fsync_path", deleted_before)
    storage = FolderStorage(tmp_path)
    assert storage.flush({file}, force=True) == ()
    assert not journal.exists()
    assert storage.flush({file}, force=True) == ()


def test_a_folder_is_gone_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody sees a part of the leases while they are deleted, or adds one to the rest. What is
    left if that is killed goes when the folder is opened next."""
    (tmp_path / LEASES).mkdir()
    (tmp_path / SESSION).write_text("a")
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    storage = FolderStorage(tmp_path)
    storage.delete(tmp_path / LEASES)
    assert not storage.exists(tmp_path / LEASES)
    (left,) = tmp_path.iterdir()
    monkeypatch.undo()
    delete_temporaries(tmp_path, [LEASES])
    assert not left.exists()


def test_the_session_is_deleted_before_the_leases(tmp_path: Path) -> None:
    """In an object store, where it tells the others that the job is complete."""
    files = FaultyFiles()
    store = store_in(files)
    for name in (LEASES + "/00000.e001.json", LEASES + "/finish.e001.json", SESSION):
        store.create(name, b"1")
    seen: list[list[str]] = []
    real = store.delete

    def noted(names: Sequence[str]) -> None:
        for name in names:
            real([name])
            seen.append(store.names(LEASES))

    storage = ObjectStorage(store, WorkersConfig())
    store.delete = noted  # type: ignore[method-assign]
    storage.delete(storage.path / LEASES)
    assert sorted(seen[0]) == ["00000.e001.json", "finish.e001.json"]
    assert len(seen) == 3 and not seen[-1]
    storage.close()


def test_who_joins_a_folder_makes_none(tmp_path: Path) -> None:
    with pytest.raises(FolderGone):
        Worker(tmp_path, WorkersConfig(), 1, joins=True)
    assert list(tmp_path.iterdir()) == []
    worker = Worker(tmp_path, WorkersConfig(), 1)
    worker.end("complete")
    assert {path.name for path in tmp_path.iterdir()} == {LEASES, WORKERS}
