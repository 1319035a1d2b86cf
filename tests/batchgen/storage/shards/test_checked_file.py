"""A bit that has rotted in a file of a job is never served: every reader refuses the file."""

from __future__ import annotations

import errno
import io
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.cli.verbs import compare, export, grade, report, score, show
from batchgen.cli.verbs.follow import NewRows
from batchgen.pages.rows.job_rows import JobRows
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.shards.checked_file import CheckedFile, DamagedFile, seal
from batchgen.util.errors import JobError
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.output_rows import PER_SHARD, ROWS, all_rows, open_writer
from tests.support.jobs.written_job import write_job

POST = "[{_target_: batchgen.grading.extract.Extract}]"
TABLE = pa.table(
    {
        "text": pa.array([None if i == 3 else "ab" * i for i in range(40)]),
        "ids": pa.array([[*range(i % 5)] for i in range(40)], pa.list_(pa.int32())),
        "error": pa.array([{"type": "a" * (i % 2)} for i in range(40)]),
        "ids.more": pa.array(range(40), pa.int64()),
    }
)


def _written(path: Path, *, sealed: bool = True) -> bytes:
    """A file of two row groups whose columns have several pages."""
    pq.write_table(
        TABLE, path, row_group_size=30, compression="zstd", data_page_size=16,
        write_batch_size=4, write_page_checksum=True,
    )  # fmt: skip
    if sealed:
        seal(path)
    return path.read_bytes()


@pytest.fixture(scope="module")
def content(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return _written(tmp_path_factory.mktemp("sealed") / "part-00000.parquet")


def _flipped(content: bytes, bit: int) -> bytes:
    found = bytearray(content)
    found[bit // 8] ^= 1 << (bit % 8)
    return bytes(found)


def _is_right_or_refused(content: bytes) -> bool:
    try:
        with CheckedFile(io.BytesIO(content)) as file:  # type: ignore[arg-type]
            batches = pa.Table.from_batches(file.batches(7))
            some = file.read(["ids", "error"], [1])
            return bool(
                file.read() == TABLE
                and batches == TABLE
                and some == TABLE.select(["ids", "error"]).slice(30)
                and file.metadata.num_rows == len(TABLE)
            )
    except DamagedFile:
        return True


@settings(max_examples=settings().max_examples * 5, deadline=None)
@given(data=st.data())
def test_a_flipped_bit_gives_the_right_values_or_a_refusal(
    content: bytes, data: st.DataObject
) -> None:
    bit = data.draw(st.integers(0, 8 * len(content) - 1))
    assert _is_right_or_refused(_flipped(content, bit)), bit


@pytest.mark.slow
def test_every_flipped_bit_gives_the_right_values_or_a_refusal(content: bytes) -> None:
    wrong = [n for n in range(8 * len(content)) if not _is_right_or_refused(_flipped(content, n))]
    assert wrong == []


@given(data=st.data())
@example(None)
def test_a_file_that_is_cut_off_is_refused(content: bytes, data: st.DataObject | None) -> None:
    length = 0 if data is None else data.draw(st.integers(0, len(content) - 1))
    with pytest.raises(DamagedFile):
        CheckedFile(io.BytesIO(content[:length]))  # type: ignore[arg-type]


def test_other_readers_read_a_sealed_file(content: bytes) -> None:
    assert pq.read_table(io.BytesIO(content)) == TABLE
    assert _is_right_or_refused(content)
    with CheckedFile(io.BytesIO(content)) as file:  # type: ignore[arg-type]
        assert file.read(["ids.more"])["ids.more"] == TABLE["ids.more"]
        assert file.read(["text"], []).num_rows == 0


def test_files_of_older_versions_are_checked_by_their_pages(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.parquet"
    _written(path, sealed=False)
    with CheckedFile(path) as file:
        assert file.read() == TABLE
    _rot(path, "text")
    with CheckedFile(path) as file, pytest.raises(DamagedFile, match=r"row group 0: .*CRC"):
        file.read()


def test_the_error_names_file_row_group_column_and_what_to_do(tmp_path: Path) -> None:
    path = tmp_path / "data" / "part-00007.parquet"
    path.parent.mkdir()
    content = _written(path)
    place = pq.read_metadata(path).row_group(1).column(1).data_page_offset + 3
    path.write_bytes(_flipped(content, 8 * place))
    with CheckedFile(path) as file:
        assert file.read(["text"])["text"] == TABLE["text"]
        with pytest.raises(DamagedFile) as found:
            list(file.batches(10))
    assert str(found.value) == (
        f"the published shard {path} is damaged (row group 1: column ids.list.element differs from "
        "what was written): delete it and run the same command, which computes its rows again"
    )


def test_an_error_of_the_disk_is_not_the_file_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Away(io.BytesIO):
        is_away = False

        def read(self, size: int | None = -1) -> bytes:
            if self.is_away:
                raise OSError(errno.EIO, "Input/output error")
            return super().read(size)

    monkeypatch.setattr("batchgen.storage.shards.checked_file._MOST_AT_END", 1000)
    file = CheckedFile(source := Away(_written(tmp_path / "x")))  # type: ignore[arg-type]
    source.is_away = True
    for read in (file.read, lambda: list(file.batches(10))):
        with pytest.raises(JobError, match=r"cannot read .*Input/output error") as found:
            read()
        assert not isinstance(found.value, DamagedFile)
    with pytest.raises(JobError, match=r"cannot read .*/gone: No such file"):
        CheckedFile(tmp_path / "gone")


def _rot(path: Path, column: str) -> None:
    """Flip a bit in the values of a column, which its page's checksum and the file's know."""
    group = pq.read_metadata(path).row_group(0)
    chunks = [group.column(number) for number in range(group.num_columns)]
    chunk = next(c for c in chunks if c.path_in_schema.split(".")[0] == column)
    end = chunk.data_page_offset + chunk.total_compressed_size
    if chunk.dictionary_page_offset:
        end = chunk.dictionary_page_offset + chunk.total_compressed_size
    path.write_bytes(_flipped(path.read_bytes(), 8 * (end - 2)))


@pytest.fixture(scope="module")
def whole_job(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("whole") / "job"
    return finished_job(path, [row(i) for i in range(20)], graded=True, metrics={"error_rows": 0})


@pytest.fixture
def job(whole_job: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(whole_job, tmp_path / "job"))


def _arguments(job: Path) -> dict[str, Callable[[], Any]]:
    out = str(job)
    return {
        "show": lambda: show.main([out]),
        "show one": lambda: show.main([out, "--row", "id3"]),
        "export": lambda: export.main([out, "--out", str(job.parent / "rows.jsonl")]),
        "report": lambda: report.main([out]),
        "score": lambda: score.main([out]),
        "compare": lambda: compare.main([out, out]),
        "grade": lambda: grade.main([out, f"post={POST}"]),
    }


@pytest.mark.parametrize("verb", ["show", "show one", "export", "report", "grade"])
def test_verbs_refuse_a_shard_that_has_rotted(
    job: Path, verb: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _rot(job / "data/part-00000.parquet", "text")
    assert _arguments(job)[verb]() != 0
    error = capsys.readouterr().err
    assert "part-00000.parquet is damaged (row group 0: column text differs from what" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("verb", "column"),
    [("compare", "mark"), ("compare", "row_id"), ("score", "mark"), ("report", "mark")],
)
def test_verbs_refuse_grades_that_have_rotted(
    job: Path, verb: str, column: str, capsys: pytest.CaptureFixture[str]
) -> None:
    _rot(job / "grades/part-00000.parquet", column)
    assert _arguments(job)[verb]() != 0
    error = capsys.readouterr().err
    assert f"the grades {job}/grades/part-00000.parquet are damaged (row group 0: " in error
    assert f"delete part-00000.parquet there and run `batchgen grade {job}`" in error


def test_grades_whose_footer_has_rotted_are_named(
    job: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = job / "grades/part-00000.parquet"
    path.write_bytes(_flipped(path.read_bytes(), 8 * (path.stat().st_size - 30)))
    assert score.main([str(job)]) != 0
    assert f"the grades {path} are damaged (its footer" in capsys.readouterr().err


def test_the_viewer_and_follow_refuse_them_too(tmp_path: Path) -> None:
    job = tmp_path / "job"
    write_job(job, 20, 2, rows_per_shard=20)
    new = NewRows(job)
    _rot(job / "data/part-00000.parquet", "finish_reason")
    reader = JobFolderReader(job)
    with pytest.raises(DamagedFile):
        list(reader.rows())
    with pytest.raises(DamagedFile):
        JobRows(reader).samples(3, ["finish_reason"])
    with pytest.raises(DamagedFile):
        [*new.look()]


def test_a_shard_that_lost_a_bit_is_computed_again_after_it_was_deleted(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write(all_rows())
        writer.finish(ROWS)
    path = tmp_path / "data/part-00001.parquet"
    before = path.read_bytes()
    path.write_bytes(_flipped(before, 8 * (len(before) - 20)))
    with pytest.raises(DamagedFile, match="footer differs from what was written"):
        open_writer(tmp_path)
    path.unlink()
    with open_writer(tmp_path) as writer:
        assert [n for n in range(ROWS) if writer.missing(n)] == [*range(PER_SHARD, 2 * PER_SHARD)]
        writer.write([r for r in all_rows() if r.row_index // PER_SHARD == 1])
        writer.finish(ROWS)
    assert path.read_bytes() == before
