"""The journal keeps every whole batch and nothing else, wherever its files end."""

import os
from pathlib import Path

import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.storage.shards.journal import Journal, read_file
from batchgen.util.errors import JobError

SCHEMA = pa.schema([("row_index", pa.int64()), ("text", pa.string())], metadata={"a": "b"})


def _batch(*rows: int) -> pa.RecordBatch:
    return pa.record_batch([list(rows), [f"row {i}" for i in rows]], schema=SCHEMA)


def _read(path: Path) -> list[list[int]]:
    return [batch.column("row_index").to_pylist() for batch in read_file(path, SCHEMA)]


def _one_file(folder: Path) -> Path:
    (path,) = folder.glob("*.journal")
    return path


def test_batches_of_several_shards_and_attempts(tmp_path: Path) -> None:
    first = Journal(tmp_path, SCHEMA)
    first.append(0, _batch(1))
    first.append(7, _batch(70, 71))
    first.append(0, _batch(0))
    second = Journal(tmp_path, SCHEMA)
    second.append(0, _batch(2))
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        "part-00000.0001.journal",
        "part-00000.0002.journal",
        "part-00007.0001.journal",
    ]
    for journal in (second, Journal(tmp_path, SCHEMA)):
        assert journal.shards() == {0, 7}
        assert [b.column(0).to_pylist() for _, b in journal.read(0)] == [[1], [0], [2]]
        assert [b.column(0).to_pylist() for _, b in journal.read(7)] == [[70, 71]]
    assert pa.Table.from_batches([b for _, b in second.read(7)]).schema.equals(
        SCHEMA, check_metadata=True
    )


def test_a_file_cut_at_any_byte_keeps_the_whole_batches_before(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SCHEMA)
    ends = []
    for i in range(4):
        journal.append(0, _batch(*range(10 * i, 10 * i + i + 1)))
        ends.append(_one_file(tmp_path).stat().st_size)
    path = _one_file(tmp_path)
    whole, everything = path.read_bytes(), _read(path)
    assert len(everything) == 4
    for size in range(len(whole) + 1):
        path.write_bytes(whole[:size])
        assert _read(path) == everything[: sum(end <= size for end in ends)], f"cut at {size}"
        path.write_bytes(whole[:size] + bytes(len(whole) - size))
        # Cut where only zeros follow, the file is whole all the same.
        kept = sum(not any(whole[size:end]) for end in ends)
        assert _read(path) == everything[:kept], f"zeros from {size}"


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(data=st.data())
def test_a_damaged_byte_never_gives_a_wrong_row(
    data: st.DataObject, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = tmp_path_factory.mktemp("journal")
    journal = Journal(folder, SCHEMA)
    for i in range(3):
        journal.append(0, _batch(i))
    path = _one_file(folder)
    damaged = bytearray(path.read_bytes())
    everything = _read(path)
    where = data.draw(st.integers(0, len(damaged) - 1))
    damaged[where] ^= data.draw(st.integers(1, 255))
    path.write_bytes(damaged)
    found = _read(path)
    assert found == everything[: len(found)] and len(found) < 3


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda fd, data: write(fd, bytes(data)[:7]))
    journal = Journal(tmp_path, SCHEMA)
    journal.append(0, _batch(1, 2, 3))
    journal.append(0, _batch(4))
    assert _read(_one_file(tmp_path)) == [[1, 2, 3], [4]]


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    Journal(tmp_path, SCHEMA).append(0, _batch(1))
    other = SCHEMA.append(pa.field("new", pa.int8()))
    with pytest.raises(JobError, match="another version of batchgen"):
        list(Journal(tmp_path, other).read(0))


def test_sync_reaches_every_file_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda fd: synced.append(os.readlink(f"/proc/self/fd/{fd}")))
    journal = Journal(tmp_path, SCHEMA)
    journal.append(0, _batch(1))
    journal.append(1, _batch(1))
    journal.sync()
    assert synced == []  # not for every batch: only after SYNC_SECONDS
    journal.sync(force=True)
    names = [f"{tmp_path}/part-0000{i}.0001.journal" for i in (0, 1)]
    assert sorted(synced) == [str(tmp_path), *names]
    journal.sync(force=True)
    assert len(synced) == 3


def test_a_failed_write_names_the_file(tmp_path: Path) -> None:
    journal = Journal(tmp_path, SCHEMA)
    (tmp_path / "part-00000.0001.journal").mkdir()
    with pytest.raises(JobError, match=r"cannot write .*part-00000\.0001\.journal: Is a directory"):
        journal.append(0, _batch(1))
