"""Rows in any order become the same shards; nothing is lost, doubled or half-written."""

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import batchgen.storage.shards.shard_files
from batchgen.storage.leases.file_store import FolderGone
from batchgen.storage.shards.output_schema import FinishedRow, OutputSchema
from batchgen.util.errors import ConfigError, JobError
from tests.support.jobs.fake_job import LOGPROBS
from tests.support.jobs.output_rows import (
    PER_SHARD,
    ROWS,
    SAMPLES,
    SCHEMA,
    all_rows,
    finished_row,
    open_writer,
    shards,
    split,
    write,
)


def test_every_row_is_where_it_belongs(tmp_path: Path) -> None:
    rows = all_rows()
    write(tmp_path, [rows], PER_SHARD, ROWS)
    assert list(shards(tmp_path)) == [f"part-0000{k}.parquet" for k in range(5)]
    assert list((tmp_path / "journal").iterdir()) == []
    for k in range(5):
        table = pq.read_table(tmp_path / f"data/part-0000{k}.parquet")
        assert table.schema.equals(SCHEMA.arrow)
        assert table.schema.metadata == SCHEMA.arrow.metadata
        assert [f.metadata for f in table.schema] == [f.metadata for f in SCHEMA.arrow]
        mine = [row for row in rows if row.row_index // PER_SHARD == k]
        found = table.to_pylist()
        assert len(found) == len(mine)
        for row, wrote in zip(mine, found, strict=True):
            assert wrote["row_id"] == row.row_id
            assert (wrote["row_index"], wrote["sample_index"]) == (row.row_index, row.sample_index)
            assert {name: wrote[name] for name in row.fields} == row.fields
            if row.output is None:
                assert wrote["error"] == {"type": "bad", "message": "is bad"}
                assert wrote["finish_reason"] == "error" and wrote["text"] is None
                assert wrote["token_ids"] == wrote["logprobs"] == wrote["top_logprobs"] == []
                assert wrote["num_generated_tokens"] == 0
                assert wrote["num_prompt_tokens"] is wrote["prompt_token_ids"] is None
                continue
            output = row.output
            assert wrote["error"] is None
            assert wrote["text"] == output.text and wrote["token_ids"] == output.token_ids
            assert wrote["prompt_token_ids"] == output.prompt_token_ids
            assert (wrote["finish_reason"], wrote["stop"]) == (output.finish_reason, output.stop)
            assert wrote["num_prompt_tokens"] == len(output.prompt_token_ids)
            assert wrote["num_generated_tokens"] == len(output.token_ids)
            for name in ("logprobs", "top_logprobs"):
                np.testing.assert_array_equal(np.array(wrote[name]), output.columns[name])


def test_a_long_field_lies_in_a_shard_once_for_all_samples(tmp_path: Path) -> None:
    """Such as the tests of a program, which are as long for 8 samples as for one."""
    rng, most = random.Random(0), 400_000
    texts = [rng.randbytes(most // 2).hex() for _ in range(2)]
    rows = [
        row._replace(fields={**row.fields, "question": texts[row.row_index]})
        for row in all_rows(2, SAMPLES)
    ]
    write(tmp_path, [rows], PER_SHARD, 2)
    table = pq.read_table(tmp_path / "data/part-00000.parquet")
    assert table["question"].to_pylist() == [texts[row.row_index] for row in rows]
    (content,) = shards(tmp_path).values()
    # zstd makes half of hex digits; a copy for each sample would be 3 times as much
    assert 0.9 * most < len(content) < 1.2 * most


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(8))
def test_shards_do_not_depend_on_the_order_of_completion(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        batchgen.storage.shards.shard_files, "ROW_GROUP_BYTES", 4000
    )  # several in a shard
    rng = random.Random(seed)
    rows = all_rows()
    write(tmp_path / "one", [rows], PER_SHARD, ROWS)
    rng.shuffle(rows)
    write(tmp_path / "two", split(rows, rng), PER_SHARD, ROWS)
    assert pq.ParquetFile(tmp_path / "one/data/part-00000.parquet").num_row_groups > 1
    assert shards(tmp_path / "one") == shards(tmp_path / "two")  # to the byte


@pytest.mark.quick(1)
@pytest.mark.parametrize("seed", range(8))
def test_resuming_at_any_point_gives_the_same_shards(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    rows = all_rows()
    write(tmp_path / "one", [rows], PER_SHARD, ROWS)
    rng.shuffle(rows)
    done: set[tuple[int, int]] = set()
    while len(done) < len(rows):
        with open_writer(tmp_path / "two") as writer:
            assert writer.resumed == len(done)
            for index in range(ROWS):
                expected = [s for s in range(SAMPLES) if (index, s) not in done]
                assert writer.missing(index) == expected
            left = [row for row in rows if (row.row_index, row.sample_index) not in done]
            for batch in split(left, rng)[: rng.randint(0, 3)] if len(left) > 1 else [left]:
                writer.write(batch)
                done |= {(row.row_index, row.sample_index) for row in batch}
    with open_writer(tmp_path / "two") as writer:
        assert writer.num_leading_rows == 20  # the end of the last shard is not known yet
        writer.finish(ROWS)
        assert writer.num_leading_rows == ROWS
    assert shards(tmp_path / "one") == shards(tmp_path / "two")


@pytest.mark.parametrize("num_rows", [0, 1, 4, 5, 6, 10])
@pytest.mark.parametrize("per_shard", [1, 5])
def test_the_last_shard_is_as_long_as_the_rows_left(
    tmp_path: Path, num_rows: int, per_shard: int
) -> None:
    write(tmp_path, [all_rows(num_rows)], per_shard, num_rows)
    files = sorted((tmp_path / "data").iterdir())
    lengths = [pq.read_metadata(path).num_rows // SAMPLES for path in files]
    full, rest = divmod(num_rows, per_shard)
    assert lengths == [per_shard] * full + [rest] * (rest > 0 or num_rows == 0)
    assert all(pq.read_schema(path).equals(SCHEMA.arrow) for path in files)


def test_a_shard_does_not_wait_for_an_earlier_one(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write([row for row in all_rows() if row.row_index != 2])
        writer.flush()
        assert list(shards(tmp_path)) == [f"part-0000{k}.parquet" for k in (1, 2, 3)]
        writer.write([finished_row(2, s) for s in range(SAMPLES)])
        writer.finish(ROWS)
    assert len(shards(tmp_path)) == 5


def test_a_row_is_never_taken_twice(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer, pytest.raises(AssertionError, match="written twice"):
        writer.write([finished_row(0, 0)])
        writer.write([finished_row(0, 0)])


def test_a_worker_that_awakes_and_takes_its_shard_back(tmp_path: Path) -> None:
    """Another one has finished rows of it meanwhile, which the first one goes on computing."""
    write(tmp_path / "whole", [all_rows()], PER_SHARD, ROWS)
    with open_writer(tmp_path / "out", worker=1) as first:
        with open_writer(tmp_path / "out", worker=2) as second:
            second.write([finished_row(0, 0), finished_row(1, 1)])
        first.take(0)
        first.write(all_rows())
        first.finish(ROWS)
    assert shards(tmp_path / "out") == shards(tmp_path / "whole")


def test_copies_of_a_shard_are_compared_to_the_bit_but_for_what_follows_the_schedule(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [finished_row(i, s) for i in range(PER_SHARD) for s in range(SAMPLES)]
    write(tmp_path / "one", [rows], PER_SHARD, PER_SHARD)
    published = tmp_path / "one" / "data" / "part-00000.parquet"

    def publish(again: list[FinishedRow], *exact: Any) -> None:
        """Let another worker publish first, and differ."""

        def second(number: int, temporary: Path | None, replaces: bool) -> bool:
            shutil.copy(published, tmp_path / "two" / "data" / published.name)
            return False

        shutil.rmtree(tmp_path / "two", ignore_errors=True)
        with open_writer(tmp_path / "two", publish=second) as writer:
            writer.set_exact(*exact)
            writer.write(again)
            writer.finish(PER_SHARD)

    def changed(name: str, value: Any) -> list[FinishedRow]:
        assert rows[3].output is not None
        return [
            *rows[:3],
            rows[3]._replace(output=replace(rows[3].output, **{name: value})),
            *rows[4:],
        ]

    for what in (changed("num_cached_tokens", 99), changed("text", "other")):
        with pytest.raises(JobError, match="has computed different rows"):
            publish(what, True, ())
    assert list((tmp_path / "two" / "differing").iterdir())
    publish(changed("num_cached_tokens", 99), True, {"num_cached_tokens"})
    assert capsys.readouterr().err == ""
    with pytest.raises(JobError, match="has computed different rows"):
        publish(changed("text", "other"), True, {"num_cached_tokens"})
    publish(changed("text", "other"), False, {"num_cached_tokens"})
    assert "computed twice, with small differences" in capsys.readouterr().err


def test_leftovers_of_a_kill_while_publishing_are_cleaned_up(tmp_path: Path) -> None:
    with open_writer(tmp_path) as writer:
        writer.write([finished_row(i, s) for i in range(4) for s in range(SAMPLES)])
    journal = tmp_path / "journal"
    (kept,) = journal.iterdir()
    content = kept.read_bytes()
    with open_writer(tmp_path) as writer:
        writer.write([finished_row(4, s) for s in range(SAMPLES)])
        writer.flush()
    kept.write_bytes(content)  # killed after the shard was renamed, before its journal was deleted
    (journal / "part-00001.parquet.tmp").write_bytes(b"PAR1 half")
    before = shards(tmp_path)
    with open_writer(tmp_path) as writer:
        assert writer.resumed == writer.num_leading_rows * SAMPLES == PER_SHARD * SAMPLES
        writer.flush()
        assert list(journal.iterdir()) == []
    assert shards(tmp_path) == before


def test_a_shard_that_is_published_while_it_is_taken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its journal files are deleted between their listing and their reading."""
    with open_writer(tmp_path) as other:
        other.write([finished_row(0, 0)])
    (file,) = (tmp_path / "journal").iterdir()
    with open_writer(tmp_path) as writer:
        monkeypatch.setattr(writer._journal, "refresh", file.unlink)
        writer.take(0)
        assert not writer.is_open(0)
        writer.write([finished_row(0, 1)])  # a row that comes late is not kept
    assert not list((tmp_path / "journal").iterdir())


def test_a_shard_that_is_published_while_its_last_rows_are_computed_a_second_time(
    tmp_path: Path,
) -> None:
    """Its journal files are gone before the second worker hears that the shard is published."""
    rows = [finished_row(index, sample) for index in range(PER_SHARD) for sample in range(SAMPLES)]
    with open_writer(tmp_path, worker=1) as first, open_writer(tmp_path, worker=2) as second:
        first.write(rows[:-1])
        second.take(0)
        first.write(rows[-1:])
        first.flush()
        second.absorb(0)
        second.write(rows[-1:])
        second.finish(PER_SHARD)
        assert not second.is_open(0) and second.complete_shards == {0}
    assert pq.read_table(tmp_path / "data").num_rows == len(rows)


def test_rows_whose_journal_was_deleted_are_not_called_complete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [finished_row(index, sample) for index in range(PER_SHARD) for sample in range(SAMPLES)]
    with open_writer(tmp_path / "early", worker=1) as writer:
        writer.write(rows[:-1])
    with open_writer(tmp_path / "early", worker=2) as writer:
        writer.take(0)
        next((tmp_path / "early/journal").iterdir()).unlink()
        writer.others_have_rows()  # lists the files
        with pytest.raises(JobError, match=r"shards \[0\] were deleted, though the shards"):
            writer.write(rows[-1:])
    for name, delete in (("late", Path.unlink), ("later", lambda file: shutil.rmtree(file.parent))):
        with open_writer(tmp_path / name, worker=1) as writer:
            publish = writer._publisher._publish

            def delete_first(
                number: int,
                files: list[Path],
                *arguments: Any,
                delete: Callable[[Path], None] = delete,
                publish: Callable[..., None] = publish,
            ) -> None:
                delete(files[0])
                publish(number, files, *arguments)

            monkeypatch.setattr(writer._publisher, "_publish", delete_first)
            writer.write(rows)
            with pytest.raises(JobError, match=r"shards \[0\] were deleted, though"):
                writer.finish(PER_SHARD)

    def gone(*_: Any, **__: Any) -> bool:
        raise FolderGone

    with open_writer(tmp_path / "without leases", publish=gone) as writer:
        writer.write(rows)
        with pytest.raises(JobError, match=r"shards \[0\] were deleted, though"):
            writer.finish(PER_SHARD)
    with open_writer(tmp_path / "without leases") as writer:
        assert writer.resumed == len(rows)
        writer.finish(PER_SHARD)
    assert len(shards(tmp_path / "without leases")) == 1


@pytest.mark.parametrize("damage", ["truncated", "garbage", "empty", "foreign"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    write(tmp_path, [all_rows()], PER_SHARD, ROWS)
    path = tmp_path / "data/part-00001.parquet"
    content = path.read_bytes()
    if damage == "foreign":
        pq.write_table(pa.table({"a": [1]}), path)
    else:
        path.write_bytes({"truncated": content[:-9], "garbage": b"x" * 99, "empty": b""}[damage])
    with pytest.raises(JobError, match=r"part-00001\.parquet is damaged .*: delete it and run the"):
        open_writer(tmp_path)
    path.unlink()
    with open_writer(tmp_path) as writer:
        assert writer.num_leading_rows == PER_SHARD
        assert writer.missing(4) == [] and writer.missing(5) == list(range(SAMPLES))


def test_a_dataset_that_shrank_is_noticed(tmp_path: Path) -> None:
    write(tmp_path, [all_rows()], PER_SHARD, ROWS)
    with open_writer(tmp_path) as writer, pytest.raises(JobError, match=r"part-00004.* is damaged"):
        writer.finish(20)


def test_input_columns_may_not_have_the_names_of_output_columns() -> None:
    given = pa.schema([("text", pa.string()), ("x", pa.int8()), ("logprobs", pa.string())])
    with pytest.raises(ConfigError, match=r"'text', 'logprobs' .*dataset\.columns"):
        OutputSchema.build(given, (LOGPROBS,), (), prompt_token_ids=False)


def test_every_field_says_what_it_is() -> None:
    assert SCHEMA.arrow.names[:6] == [
        *("row_id", "row_index", "sample_index"),
        *("question", "number", "tags"),
    ]
    assert all(field.metadata[b"meaning"] for field in SCHEMA.arrow)
    top = SCHEMA.arrow.field("top_logprobs")
    assert top.type == pa.list_(pa.list_(pa.list_(pa.float32(), 3), 2))
    assert top.metadata[b"shape"] == b"[num_tokens, 2, 3]"
    assert (top.metadata[b"dtype"], top.metadata[b"scope"]) == (b"float32", b"output")


def test_a_worker_that_awakes_behind_the_end_of_the_job(tmp_path: Path) -> None:
    """It finds neither its journal nor a place for temporary files, and all shards are there."""
    write(tmp_path / "whole", [all_rows()], PER_SHARD, ROWS)
    with open_writer(tmp_path / "out", num_rows=ROWS) as writer:
        writer.write([finished_row(i, s) for i in range(4) for s in range(SAMPLES)])
        opened = writer.older
        shutil.rmtree(tmp_path / "out/journal")
        shutil.copytree(tmp_path / "whole/data", tmp_path / "out/data", dirs_exist_ok=True)
        writer.write([finished_row(4, s) for s in range(SAMPLES)])
        writer.write([finished_row(i, 0) for i in (6, 7)])
        writer.flush()
    assert opened.rows == 0 and shards(tmp_path / "out") == shards(tmp_path / "whole")
