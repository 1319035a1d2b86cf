"""Objects in a store: made once, whoever comes first, also where answers are lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, rule

from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.leases.lease_files import SESSION
from batchgen.storage.leases.object_store import ObjectStore
from batchgen.storage.leases.store_operations import Create, Names, Operation, Overwrite, Read, Same
from batchgen.storage.stores.object_storage import ObjectStorage
from batchgen.storage.stores.range_file import ObjectFile
from batchgen.util.errors import ConfigError, JobError
from tests.batchgen.storage.leases.test_lease_protocol import Workers
from tests.support.jobs.object_files import AFTER, BEFORE, Below, FaultyFiles, store_in
from tests.support.jobs.workers_model import MemoryStore


def test_the_first_one_makes_an_object(tmp_path: Path) -> None:
    store = store_in(FaultyFiles())
    file = tmp_path / "shard"
    file.write_bytes(b"12" * 5_000_000)
    assert store.do(Names("leases")) == [] and store.do(Read("leases/a")) is None
    assert store.do(Create("leases/a", b"1")) is True
    assert store.do(Create("leases/a", b"2")) is False
    assert store.do(Read("leases/a")) == b"1"
    assert store.do(Create("data/b", file)) is True
    assert store.do(Same("data/b", file)) and not store.do(Same("data/c", file))
    file.write_bytes(b"12" * 4_999_999 + b"13")
    assert not store.do(Same("data/b", file)) and store.do(Create("data/b", file)) is False
    store.do(Overwrite("workers/b", b"3"))
    store.do(Overwrite("workers/b", b"4"))
    assert store.do(Read("workers/b")) == b"4" and store.do(Names("workers")) == ["b"]
    assert store.sizes() == {"leases/a": 1, "data/b": 10_000_000, "workers/b": 1}
    store.delete(["leases/a", "leases/z"])
    assert not store.exists("leases/a") and store.exists("data") and store.names("") != []
    assert store.operations["Create"] == 4


@pytest.mark.parametrize("fault", [BEFORE, AFTER])
def test_a_lost_answer_is_asked_for_again(fault: str) -> None:
    faults = [fault, fault]
    files = FaultyFiles(lambda: faults.pop() if faults else None)
    store = store_in(files)
    assert store.do(Create("leases/a", b"mine")) is True and not faults
    assert files.created == ["jobs/leases/a"]
    faults += [fault]
    assert store.do(Create("leases/a", b"another's")) is False and not faults
    faults += [fault]
    assert store.do(Read("leases/a")) == b"mine" and not faults


def test_a_store_that_does_not_answer_and_one_that_refuses() -> None:
    files = FaultyFiles(lambda: BEFORE)
    store = ObjectStore(Below(files, "s3://jobs"), "s3://jobs", patience=0.02)
    with pytest.raises(JobError, match=r"cannot write s3://jobs/leases/a: 503: slow down"):
        store.do(Create("leases/a", b"1"))
    tried = sum(files.requests.values())
    assert tried >= 1

    def refuse() -> str | None:
        raise PermissionError("no permission (AccessDenied)")

    files.fault = refuse
    with pytest.raises(JobError, match=r"no permission \(AccessDenied\)"):
        store.do(Read("leases/a"))
    assert sum(files.requests.values()) == tried + 1


def test_a_store_without_create_if_absent_is_refused() -> None:
    class Careless(Below):
        def create(self, name: str, content: bytes) -> None:
            self.overwrite(name, content)  # what is there is lost

    files = FaultyFiles()
    with pytest.raises(ConfigError, match="ignores If-None-Match"):
        ObjectStore(Careless(files, "s3://jobs"), "s3://jobs").probe("x")
    files = FaultyFiles()
    store_in(files).probe("x")
    assert not files.store


def test_a_worker_of_a_session_that_is_over_writes_no_more() -> None:
    store = store_in(FaultyFiles())
    store.do(Create(SESSION, b"one"))
    store.fence(b"one")
    store.do(Overwrite("workers/0001.json", b"{}"))
    assert store.do(Names("leases")) == ["session.json"]
    store.overwrite(SESSION, b"two")
    late: list[Operation] = [Overwrite("workers/0001.json", b"1"), Create("data/a", b"1")]
    for operation in late:
        with pytest.raises(JobError, match="opened again without it"):
            store.do(operation)
    store.delete([SESSION])
    for operation in (late[0], Names("leases")):
        with pytest.raises(FolderGone):
            store.do(operation)


def test_an_object_is_read_as_a_file() -> None:
    store = store_in(FaultyFiles())
    store.create("data/a", bytes(range(100)))
    file = ObjectFile(store, "data/a")
    assert file.seek(-10, 2) == 90 and file.read(4) == bytes(range(90, 94)) and file.tell() == 94
    assert file.read() == bytes(range(94, 100)) and file.read(3) == b""
    assert file.seek(10) == 10 and file.seek(5, 1) == 15 and file.readall() == bytes(range(15, 100))
    assert str(file) == "s3://jobs/data/a"
    buffer = bytearray(3)
    file.seek(1)
    assert file.readinto(buffer) == 3 and bytes(buffer) == b"\1\2\3"


def test_the_working_folder_of_a_process_that_is_gone_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from batchgen.config.groups.workers_config import WorkersConfig

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    first = ObjectStorage(store_in(FaultyFiles()), WorkersConfig())
    parts = first.path.name.split("-")
    dead = tmp_path / "-".join([*parts[:2], parts[2], "1", "abc"])  # its number was given again
    other = tmp_path / "-".join(["batchgen", "another", *parts[2:]])  # of another machine
    for folder in (dead, other):
        folder.mkdir()
    second = ObjectStorage(store_in(FaultyFiles()), WorkersConfig())
    assert first.path.exists() and other.exists() and not dead.exists()
    first.close()
    second.close()
    assert list(tmp_path.iterdir()) == [other]


class _Objects(MemoryStore):
    """The store of the model of the protocol, with requests that fail when they are to."""

    def __init__(self) -> None:
        super().__init__()
        self.faults: list[str] = []
        self.files = FaultyFiles(lambda: self.faults.pop() if self.faults else None)
        self._store = store_in(self.files, "s3://")
        self.created = _Names(self.files)  # type: ignore[assignment]
        self.objects = _Contents(self.files)

    def do(self, operation: Any) -> Any:
        if isinstance(operation, (Create, Overwrite, Read, Same, Names)):
            return self._store.do(operation)
        return super().do(operation)


class _Names:
    """The names of the objects that were created."""

    def __init__(self, files: FaultyFiles) -> None:
        self._files = files

    def count(self, name: str) -> int:
        return self._files.created.count(name)


class _Contents(dict[str, bytes]):
    """The objects by their names, whose requests never fail."""

    def __init__(self, files: FaultyFiles) -> None:
        super().__init__()
        self._files = files

    def __getitem__(self, name: str) -> bytes:
        return self._files.store[name]

    def __contains__(self, name: object) -> bool:
        return name in self._files.store

    def get(self, name: str, default: Any = None) -> Any:
        return self[name] if name in self else default

    def items(self) -> Any:
        return list(self._files.store.items())

    def __setitem__(self, name: str, content: bytes) -> None:
        self._files.put(name, content)

    def pop(self, name: str, default: Any = None) -> Any:
        return self._files.store.pop(name, default)


class WorkersOverRequests(Workers):
    """The protocol over an object store, with requests that fail and are repeated."""

    @initialize(shards=st.integers(1, 4))
    def begin(self, shards: int) -> None:
        super().begin(shards)
        self.store = _Objects()
        self.living = []
        self.spawn()

    @rule(faults=st.lists(st.sampled_from([BEFORE, AFTER]), min_size=1, max_size=3))
    def requests_fail(self, faults: list[str]) -> None:
        """The next requests of whoever makes them."""
        assert isinstance(self.store, _Objects)
        self.store.faults += faults


_SETTINGS = settings(max_examples=20, stateful_step_count=30, deadline=None)
TestWorkersOverRequests = WorkersOverRequests.TestCase
TestWorkersOverRequests.settings = _SETTINGS


@pytest.mark.slow
class TestManyRunsOverRequests(WorkersOverRequests.TestCase):  # type: ignore[misc, valid-type]
    settings = settings(_SETTINGS, max_examples=1500, stateful_step_count=60)
