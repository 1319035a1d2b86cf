"""The reader of a job's folder sees every finished row once, in order, at any time."""

import json
import random
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError, JobError
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.output_rows import (
    PER_SHARD,
    ROWS,
    SAMPLES,
    all_rows,
    finished_row,
    open_writer,
    split,
)


def _reader(folder: Path) -> JobFolderReader:
    (folder / "manifest.json").write_text("{}")
    return JobFolderReader(folder)


def _keys(rows: Any) -> list[tuple[int, int]]:
    return [(row["row_index"], row["sample_index"]) for row in rows]


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(4))
def test_rows_of_shards_and_journals_in_order(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = all_rows()
    rng.shuffle(rows)
    done: list[tuple[int, int]] = []
    with open_writer(tmp_path) as writer:
        assert _reader(tmp_path).schema is None and list(_reader(tmp_path).rows()) == []
        for batch in split(rows, rng):
            writer.write(batch)
            done += [(row.row_index, row.sample_index) for row in batch]
            found = list(_reader(tmp_path).rows(["row_index", "sample_index"]))
            assert found == [dict(zip(("row_index", "sample_index"), k, strict=True))
                             for k in sorted(done)]  # fmt: skip
        writer.finish(ROWS)
    whole = [row for path in sorted((tmp_path / "data").iterdir())
             for row in pq.read_table(path).to_pylist()]  # fmt: skip
    assert list(_reader(tmp_path).rows()) == whole
    schema = _reader(tmp_path).schema
    assert schema is not None and schema.equals(
        pq.read_schema(tmp_path / "data/part-00000.parquet")
    )


def test_columns_and_single_rows(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(all_rows()[:-2])
        writer.flush()
        reader = _reader(tmp_path)
        assert list(reader.rows(["number", "row_id"]))[4] == {"number": 1, "row_id": "id1"}
        assert _keys(reader.find("id4")) == [(4, 0), (4, 1), (4, 2)]  # in a shard
        assert _keys(reader.find("id22")) == [(22, 0)]  # in a journal
        assert list(reader.find("id99")) == []
        with pytest.raises(ConfigError, match="no column 'txt': choose among row_id, "):
            list(reader.rows(["txt"]))


def test_a_journal_that_is_being_written(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write([finished_row(0, 0)])
        writer.write([finished_row(0, 1)])
    (journal,) = (tmp_path / "journal").iterdir()
    journal.write_bytes(journal.read_bytes()[:-5])
    assert _keys(_reader(tmp_path).rows()) == [(0, 0)]
    journal.write_bytes(b"\x00\x01")
    assert _keys(_reader(tmp_path).rows()) == []


def test_a_shard_published_while_its_journal_is_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import batchgen.storage.folder.read_job as read_job
    import batchgen.storage.shards.journal as journal

    with open_writer(tmp_path) as writer:
        writer.write([finished_row(i, s) for i in range(4) for s in range(SAMPLES)])
        opened = journal.read_file

        def publish_first(path: Path) -> Any:
            monkeypatch.undo()
            writer.write([finished_row(4, s) for s in range(SAMPLES)])
            writer.flush()
            return opened(path)

        monkeypatch.setattr(read_job, "read_file", publish_first)
        rows = list(_reader(tmp_path).shard(0).batches(["row_index"]))
        assert sum(batch.num_rows for batch in rows) == PER_SHARD * SAMPLES


@pytest.mark.quick(1)
@pytest.mark.parametrize("is_published", [False, True])
def test_a_shard_from_a_row_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_published: bool
) -> None:
    """From shards with several row groups, from journals, and from both."""
    monkeypatch.setattr("batchgen.storage.shards.shard_files.ROW_GROUP_BYTES", 3000)
    with open_writer(tmp_path) as writer:
        writer.write(all_rows() if is_published else all_rows()[::2])
        if is_published:
            writer.finish(ROWS)
    reader = _reader(tmp_path)
    whole = list(reader.rows(["row_index", "sample_index", "text"]))
    if is_published:
        assert pq.ParquetFile(tmp_path / "data/part-00000.parquet").num_row_groups > 1
    for first in range(ROWS + 1):
        for size in (2, 1000):
            found = [
                row
                for number in reader.shards()
                for batch in reader.shard(number).batches(list(whole[0]), first, size)
                for row in batch.to_pylist()
            ]
            assert found == [row for row in whole if row["row_index"] >= first]


def test_a_damaged_shard_is_named(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(all_rows())
        writer.finish(ROWS)
    path = tmp_path / "data/part-00002.parquet"
    path.write_bytes(path.read_bytes()[:-9])
    with pytest.raises(JobError, match=r"part-00002\.parquet is damaged"):
        list(_reader(tmp_path).rows())


def test_only_the_folder_of_a_job(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no manifest"):
        JobFolderReader(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        JobFolderReader(tmp_path / "x")


def test_config_and_metrics_of_a_job(tmp_path: Path) -> None:
    FakeJob(str(tmp_path), rows=5, text_column="answer").run()
    reader = JobFolderReader(tmp_path)
    assert reader.config["sampling"]["n"] == 2 and reader.manifest["fingerprints"]
    assert reader.metrics["status"] == "complete" and reader.text_column == "answer"
    assert (
        reader.schema is not None
        and "text" not in reader.schema.names
        and next(reader.find("id1"))["answer"]
    )


@pytest.mark.parametrize(("owner", "status"), [
    ("pid 999999999 on {host}, since x", "killed"), ("pid {pid} on {host}, since x", "running"),
    ("pid 1 on another.host, since x", "running"), ("", "killed"),
])  # fmt: skip
def test_metrics_of_a_killed_job_say_so(tmp_path: Path, owner: str, status: str) -> None:
    import os
    import socket

    running = {"status": "running", "attempts": [{"status": "running"}]}
    (tmp_path / "metrics.json").write_text(json.dumps(running))
    (tmp_path / ".lock").write_text(owner.format(host=socket.gethostname(), pid=os.getpid()))
    found = _reader(tmp_path).metrics
    assert found["status"] == found["attempts"][-1]["status"] == status


def test_a_killed_job_whose_parent_has_not_noticed_is_killed(tmp_path: Path) -> None:
    import os
    import socket

    child = os.posix_spawn("/bin/true", ["true"], {})
    os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    try:
        (tmp_path / "metrics.json").write_text('{"status": "running", "attempts": []}')
        (tmp_path / ".lock").write_text(f"pid {child} on {socket.gethostname()}, since x")
        assert not _reader(tmp_path).may_run
    finally:
        os.waitpid(child, 0)
