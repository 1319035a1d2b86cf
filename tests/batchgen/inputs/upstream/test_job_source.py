"""Rows that are answers of other jobs, read from folders that no model has written."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.inputs.dataset.row_digest import rows_digest
from batchgen.inputs.dataset.source import Left, Row
from batchgen.inputs.upstream.job_source import JobSource
from batchgen.inputs.upstream.read_jobs import read_jobs
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.fingerprint import fingerprint_text
from tests.support.jobs.finished_job import POST, finished_job, row

ANSWERS = [
    row(index, sample, None if (index, sample) == (2, 1) else f"{'yes' if index % 2 else 'no'}")
    for index in range(7)
    for sample in range(3)
]
"""Seven rows of three answers, one of which is an error; those of odd rows are right."""


def source(
    *paths: Path | str, named: Sequence[str] | None = (), own: str = "elsewhere", **keys: Any
) -> JobSource:
    where = tuple(map(str, paths))
    config = DatasetConfig(kind="job", path=where[0] if len(where) == 1 else where, **keys)
    used = None if named is None else frozenset(named)
    found = JobSource(read_jobs(config.paths, own), config, used)
    found.learn()
    return found


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return finished_job(tmp_path_factory.mktemp("jobs") / "draft", ANSWERS, in_shard=6, graded=True)


def ids(rows: JobSource) -> list[str]:
    return [one.id for one in rows.rows()]


def test_each_answer_is_a_row(draft: Path) -> None:
    found = source(draft, named=["text", "finish_reason", "mark"])
    rows = list(found.rows())
    assert found.num_rows == len(rows) == 20
    assert found.funnel == (Left("answers", 21), Left("dataset.errors=drop", 20))
    assert [one.index for one in rows] == list(range(20))
    assert [one.id for one in rows][:4] == ["id0#0", "id0#1", "id0#2", "id1#0"]
    assert "id2#1" not in ids(found)
    assert rows[3].fields == {
        "question": "question 1",
        "target": "yes",
        "text": "yes",
        "finish_reason": "stop",
        "mark": 1.0,
    }
    assert found.schema.names == ["question", "target", "source"]
    assert found.passthrough(rows[4]) == {
        "question": "question 1",
        "target": "yes",
        "source": {"row_id": "id1", "sample_index": 1, "digest": fingerprint_text("yes")},
    }


def test_errors_can_stay(draft: Path) -> None:
    found = source(draft, errors="keep", named=["text", "error"])
    (bad,) = [one for one in found.rows() if one.id == "id2#1"]
    assert bad.fields["text"] is None
    assert bad.fields["error"] == {"type": "bad_row", "message": "row 2"}
    assert found.passthrough(bad)["source"]["digest"] is None
    assert (found.num_rows, found.num_errors) == (21, 1)


def test_answers_of_a_row_can_be_lists(draft: Path) -> None:
    found = source(draft, rows="rows", text_as="replies", named=["grades", "num_generated_tokens"])
    rows = list(found.rows())
    assert [one.id for one in rows] == [f"id{index}" for index in range(7)]
    assert rows[2].fields["replies"] == ["no", "no"]
    assert rows[1].fields["grades"]["mark"] == [1.0, 1.0, 1.0]
    assert rows[1].fields["num_generated_tokens"] == [3, 3, 3]
    assert rows[1].fields["question"] == "question 1"
    assert found.schema.field("replies").type == pa.list_(pa.string())
    where = found.passthrough(rows[1])["source"]
    assert where == {
        "row_id": "id1",
        "sample_index": None,
        "digest": fingerprint_text("yes", "yes", "yes"),
    }


def test_the_best_answer_is_the_first_of_the_highest(tmp_path: Path) -> None:
    scores: list[list[float | None]] = [
        [1.0, 3.0, 3.0],
        [None, float("nan"), None],
        [None, -1.0, 2.0],
        [0.5, 0.5, 0.0],
    ]
    answers = [
        row(index, sample, f"t{sample}", score=scores[index][sample])
        for index in range(4)
        for sample in range(3)
    ]
    job = finished_job(tmp_path / "a", answers, [pa.field("score", pa.float64())], in_shard=6)
    best = source(job, rows="best", best="score", text_as="reply")
    assert [one.fields["reply"] for one in best.rows()] == ["t1", "t0", "t2", "t0"]
    assert ids(best) == ["id0", "id1", "id2", "id3"]
    assert [best.passthrough(one)["source"]["sample_index"] for one in best.rows()] == [1, 0, 2, 0]
    shortest = source(job, rows="best", best="-(score or 0)", where="sample_index > 0", text_as="r")
    assert [one.fields["r"] for one in shortest.rows()] == ["t1", "t2", "t1", "t2"]
    with pytest.raises(ConfigError, match=r"dataset\.best: text is 't0' in the answer id0#0"):
        source(job, rows="best", best="text")


def test_where_sees_data_answers_and_grades(draft: Path) -> None:
    assert ids(source(draft, where="mark == 1 and sample_index == 2")) == [
        "id1#2",
        "id3#2",
        "id5#2",
    ]
    assert ids(source(draft, where="row_id == 'id4' and grades.mark == 0")) == [
        f"id4#{sample}" for sample in range(3)
    ]
    assert ids(source(draft, where="'2' in question", rows="rows")) == ["id2"]
    assert source(draft, where="mark == 1").funnel[-1] == Left("dataset.where", 9)


def test_an_expression_without_a_value_makes_an_error_row(draft: Path) -> None:
    found = source(draft, where="num_prompt_tokens > 12", errors="keep")
    failed = [one for one in found.rows() if one.failure is not None]
    assert [one.id for one in failed] == ["id2#1"]
    assert "null in this row: num_prompt_tokens" in str(failed[0].failure)
    assert isinstance(failed[0].failure, RequestError) and failed[0].failure.type == "bad_row"
    # In a row of several answers one is enough.
    for rows, best in (("rows", None), ("best", "sample_index")):
        found = source(draft, rows=rows, best=best, where="num_prompt_tokens > 11", errors="keep")
        assert [one.id for one in found.rows() if one.failure] == ["id2"]
        assert ids(found) == ["id2", "id3", "id4", "id5", "id6"]


def test_a_name_that_data_and_grades_have_is_refused_in_expressions(tmp_path: Path) -> None:
    answers = [row(index, 0, "yes", answer="gold") for index in range(3)]
    field = pa.field("answer", pa.string(), metadata={"meaning": "as in the input"})
    job = finished_job(tmp_path / "a", answers, [field], graded=True)
    with pytest.raises(ConfigError, match=r"dataset\.where: answer is a column of the data and"):
        source(job, where="answer == 'yes'")
    assert len(ids(source(job, where="grades.answer == 'yes' and row.answer == 'gold'"))) == 3
    assert len(ids(source(job, where="answer == 'yes'", rename={"answer": "gold"}))) == 3
    one = next(source(job, named=["answer", "grades"]).rows())
    assert one.fields["answer"] == "gold" and one.fields["grades"]["answer"] == "yes"


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"where": "marks == 1"}, "dataset.where: there is no column 'marks'"),
        ({"where": "grades.marks == 1"}, "dataset.where: the grades have no column 'marks'"),
        ({"where": "mark =="}, "dataset.where: unexpected"),
        ({"rows": "best", "best": "marks"}, "dataset.best: there is no column 'marks'"),
        ({"columns": ("question", "marks")}, "dataset.columns: no column 'marks'"),
        ({"rename": {"answer_": "gold"}}, "dataset.rename: no column 'answer_'"),
        ({"rename": {"question": "target"}}, "cannot become 'target', which is a column already"),
        ({"rename": {"question": "row_id"}}, "no column can be called 'row_id'"),
        ({"text_as": "question"}, "'dataset.rename={question: NAME}'"),
        ({"text_as": "sample_index"}, "no column can be called 'sample_index'"),
        ({"text_as": "q", "rename": {"text": "q2"}}, "which dataset.text_as names"),
        ({"rename": {"question": "source"}}, "rename it with 'dataset.rename={source: NAME}'"),
        ({"rename": {"question": "grades"}}, "'dataset.rename={grades: NAME}'"),
    ],
)
def test_mistakes_are_refused_by_name(draft: Path, keys: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError) as error:
        source(draft, **keys)
    assert said in str(error.value)


def test_nothing_left_says_what_was_left_out(draft: Path) -> None:
    with pytest.raises(ConfigError) as error:
        source(draft, where="mark > 1")
    said = str(error.value)
    assert "no row of" in said and "answers: 21" in said and "dataset.where: 0" in said
    assert said.count("\n") == 3 and "id0#0: mark=0.0" in said


def test_columns_with_a_value_per_token_are_read_when_they_are_named(draft: Path) -> None:
    assert "logprobs" not in next(source(draft, named=None).rows()).fields
    assert "finish_reason" in next(source(draft, named=None).rows()).fields
    assert next(source(draft, named=["logprobs"]).rows()).fields["logprobs"] == [-0.5, -0.5]
    assert "logprobs" in source(draft).features
    renamed = source(draft, rename={"logprobs": "draft_logprobs"}, columns=("draft_logprobs",))
    assert renamed.schema.names == ["draft_logprobs", "source"]


@pytest.mark.parametrize("rows", ["samples", "rows", "best"])
def test_any_row_can_be_read_by_its_index(draft: Path, rows: Any) -> None:
    found = source(draft, rows=rows, best="mark" if rows == "best" else None, named=["text"])
    every = list(found.rows())
    assert list(found.rows(3)) == every[3:]
    for indices in ([2, 0, 5, 2], [1, 2, 5], [], list(range(len(every)))[::-1]):
        assert list(found.rows_at(indices)) == [every[index] for index in indices]
    limited = source(draft, rows=rows, best=found._config.best, named=["text"], limit=4)
    assert list(limited.rows()) == every[:4] and limited.num_rows == 4
    tables = list(found.tables(len(every), 3))
    assert {len(table) for table in tables[:-1]} == {3}
    assert sum(map(len, tables)) == len(every)
    assert rows_digest(found, 4) == rows_digest(limited, 4) != rows_digest(found, 5)


@pytest.mark.thorough
@given(st.data())
def test_rows_follow_from_the_answers(tmp_path_factory: Any, data: st.DataObject) -> None:
    """Ids differ, what is chosen is what the expression says, and a prefix gives a prefix."""
    samples = data.draw(st.integers(1, 3))
    marks = data.draw(st.lists(st.sampled_from([0, 1, 2, None]), min_size=2, max_size=12))
    answers = [
        row(index, sample, f"{index}.{sample}", score=mark)
        for index, mark in enumerate(marks)
        for sample in range(samples)
    ]
    field = pa.field("score", pa.int64())
    folder = tmp_path_factory.mktemp("made")
    size = data.draw(st.integers(1, 4)) * samples
    stop = data.draw(st.integers(1, len(marks)))
    whole = finished_job(folder / "whole", answers, [field], in_shard=size)
    prefix = finished_job(folder / "prefix", answers[: stop * samples], [field], in_shard=size)
    rows = data.draw(st.sampled_from(["samples", "rows"]))
    keys: dict[str, Any] = {"where": "score is none or score > 0", "rows": rows, "named": ["text"]}
    kept = [one for one in answers if one["score"] != 0]
    if not kept:
        return
    found = list(source(whole, **keys).rows())
    assert len({one.id for one in found}) == len(found)
    texts = [one.fields["text"] for one in found]
    flat = texts if rows == "samples" else [text for one in texts for text in one]
    assert flat == [one["text"] for one in kept]
    if any(one["row_index"] < stop for one in kept):
        first = list(source(prefix, **keys).rows())
        assert first == found[: len(first)]


def test_several_jobs_are_read_one_after_the_other(draft: Path, tmp_path: Path) -> None:
    other = finished_job(tmp_path / "x" / "other", ANSWERS[:6], in_shard=3, graded=True)
    both = source(draft, other, where="mark == 1", named=["text"])
    assert ids(both)[-4:] == ["draft/id5#2", "other/id1#0", "other/id1#1", "other/id1#2"]
    assert both.passthrough(list(both.rows())[-1])["source"]["row_id"] == "other/id1"
    assert [job.name for job in both.jobs] == ["draft", "other"]
    globbed = source(f"{tmp_path}/x/*")
    assert ids(globbed)[0] == "id0#0"
    twin = tmp_path / "y" / "other"
    shutil.copytree(other, twin)
    assert ids(source(other, twin, where="mark == 1"))[::3] == ["x/other/id1#0", "y/other/id1#0"]
    with pytest.raises(ConfigError, match="no folder matches"):
        source(f"{tmp_path}/z/*")
    with pytest.raises(ConfigError, match="globs are for folders"):
        source("s3://bucket/draft-*")


def test_jobs_with_other_columns_are_refused(draft: Path, tmp_path: Path) -> None:
    field = pa.field("level", pa.int64(), metadata={"meaning": "as in the input"})
    schema_field = [field]
    wide = [row(0, 0, "yes", level=3)]
    job = finished_job(tmp_path / "wide", wide, schema_field)
    # `level` stands behind the text here, as columns of batchgen do, so that it is not copied.
    assert "level" not in source(draft, job).schema.names
    other = tmp_path / "named"
    shutil.copytree(job, other)
    manifest = json.loads((other / "manifest.json").read_text())
    manifest["identity"]["output"]["text_column"] = "question"
    (other / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ConfigError, match=r"question.* is string in .* and absent in"):
        source(draft, other)


def edit(job: Path, name: str, **keys: Any) -> None:
    found = json.loads((job / name).read_text())
    (job / name).write_text(json.dumps({**found, **keys}))


def test_only_complete_jobs_are_read(draft: Path, tmp_path: Path) -> None:
    def copy(name: str) -> Path:
        return Path(shutil.copytree(draft, tmp_path / name))

    with pytest.raises(ConfigError, match=r"has no manifest\.json\).*dataset=files reads files"):
        source(tmp_path)
    with pytest.raises(ConfigError, match="does not exist"):
        source(tmp_path / "nowhere")
    edit(copy("stopped"), "metrics.json", status="stopped")
    with pytest.raises(ConfigError, match=r"stopped, .*complete it first: batchgen .*stopped/conf"):
        source(tmp_path / "stopped")
    (copy("new") / "metrics.json").unlink()
    with pytest.raises(ConfigError, match="not begun"):
        source(tmp_path / "new")
    with pytest.raises(ConfigError, match=r"own output\.dir"):
        source(draft, own=str(draft))
    (copy("short") / "data" / "part-00003.parquet").unlink()
    with pytest.raises(JobError, match=r"hold 18 rows, and metrics\.json says 21"):
        source(tmp_path / "short")
    (copy("gap") / "data" / "part-00001.parquet").unlink()
    with pytest.raises(JobError, match="of 4 shards 1 is missing"):
        source(tmp_path / "gap")
    contents = ("{}", "[]", '{"identity": 3, "fingerprints": {}}', '{"identity": [], "x": 1}')
    for number, content in enumerate(contents):
        (copy(f"m{number}") / "manifest.json").write_text(content)
        with pytest.raises(ConfigError, match="is not a manifest of batchgen"):
            source(tmp_path / f"m{number}")


def test_a_damaged_file_ends_in_a_clear_word(draft: Path, tmp_path: Path) -> None:
    job = Path(shutil.copytree(draft, tmp_path / "job"))
    shard = job / "data" / "part-00001.parquet"
    content = bytearray(shard.read_bytes())
    content[20] ^= 1
    shard.write_bytes(content)
    with pytest.raises(JobError, match=r"part-00001\.parquet is damaged"):
        list(source(job, where="'2' in question").rows())
    shard.write_bytes(b"no parquet")
    with pytest.raises(JobError, match="is damaged"):
        source(job)


def test_grades_must_be_of_these_rows(draft: Path, tmp_path: Path) -> None:
    job = Path(shutil.copytree(draft, tmp_path / "job"))
    (job / "grades" / "part-00002.parquet").unlink()
    assert len(ids(source(job))) == 20  # nobody asks for grades
    with pytest.raises(ConfigError, match=r"some shards have no grades.*`batchgen grade"):
        source(job, where="mark == 1")
    other = finished_job(
        tmp_path / "other", [{**one, "text": "yes"} for one in ANSWERS], in_shard=6, graded=True
    )
    shutil.rmtree(job / "grades")
    shutil.copytree(other / "grades", job / "grades")
    assert source(job).columns
    for path in (job / "data").iterdir():
        path.touch()  # written after its grades
    with pytest.raises(ConfigError, match="some belong to other rows"):
        source(job, named=["mark"])
    shutil.rmtree(job / "grades")
    with pytest.raises(ConfigError, match="there is no column 'mark'"):
        source(job, where="mark == 1")


def test_a_job_that_changes_while_it_is_read_is_noticed(tmp_path: Path) -> None:
    job = finished_job(tmp_path / "a", ANSWERS, in_shard=6)
    rows = source(job, named=["text"])
    finished_job(tmp_path / "b", [{**one, "text": "x"} for one in ANSWERS], in_shard=6)
    shutil.copy(tmp_path / "b/data/part-00002.parquet", job / "data")
    with pytest.raises(JobError, match="has changed while it was read"):
        list(rows.rows())


def test_ids_of_rows_must_differ(tmp_path: Path) -> None:
    twice = [row(0), row(1), {**row(2), "row_id": "id0"}]
    with pytest.raises(ConfigError, match="have the id 'id0'"):
        source(finished_job(tmp_path / "a", twice))
    with pytest.raises(JobError, match="not in order"):
        source(finished_job(tmp_path / "b", [row(1), row(0)]))


def test_the_fingerprint_is_of_what_is_read(draft: Path, tmp_path: Path) -> None:
    job = Path(shutil.copytree(draft, tmp_path / "moved"))
    assert source(job).fingerprint == source(draft).fingerprint
    graded = source(job, where="mark == 1")
    JobGrades(job).make(POST[:1], "text", ScoreConfig())
    assert source(job).fingerprint == source(draft).fingerprint
    with pytest.raises(ConfigError, match="there is no column 'mark'"):
        source(job, where="mark == 1")
    assert source(job, named=["answer"]).fingerprint != graded.fingerprint


def test_json_of_several_types_stays_json(tmp_path: Path) -> None:
    from datasets.features import Json

    from batchgen.inputs.dataset.stored_json import stored_field

    field = stored_field("extra", Json(), pa.string())
    values = [{"a": 1}, [2, "b"], None]
    answers = [
        row(index, 0, "yes", extra=None if value is None else json.dumps(value))
        for index, value in enumerate(values)
    ]
    job = finished_job(tmp_path / "a", answers, [field])
    found = source(job, columns=("extra",))
    rows: list[Row] = list(found.rows())
    assert [one.fields["extra"] for one in rows] == values
    stored = [found.passthrough(one)["extra"] for one in rows]
    assert [None if one is None else json.loads(one) for one in stored] == values
    assert found.schema.field("extra").type == pa.string()
    assert ids(source(job, where="extra is mapping and extra.a == 1")) == ["id0#0"]
    renamed = source(job, where="more is mapping", rename={"extra": "more"})
    assert ids(renamed) == ["id0#0"]
