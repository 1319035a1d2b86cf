"""Sets of rows that `batchgen select` makes of complete jobs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from batchgen.__main__ import run_command
from batchgen.pipelines.publish import data_folder, set_rows
from batchgen.pipelines.publish.chosen_rows import SelectionRequest, choose
from batchgen.pipelines.publish.finished_rows import open_rows
from batchgen.pipelines.publish.selection import select
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.object_files import FaultyFiles, use

SCORE = pa.field("score", pa.float64(), metadata={"meaning": "as in the input"})


def scored_job(path: Path, scores: list[list[float | None]], **options: Any) -> Path:
    """A job with these scores [rows][samples] in a column of the data set."""
    rows = [
        row(i, k, text=f"text {i} {k}", score=score)
        for i, samples in enumerate(scores)
        for k, score in enumerate(samples)
    ]
    return finished_job(path, rows, [SCORE], **options)


def read(folder: Path) -> list[dict[str, Any]]:
    files = sorted((folder / "data").glob("*.parquet"))
    found: list[dict[str, Any]] = pa.concat_tables(map(pq.read_table, files)).to_pylist()
    return found


def run(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def test_a_set_has_the_data_the_text_the_grades_and_where_each_row_came_from(
    tmp_path: Path,
) -> None:
    texts = ["yes", "no", None, "yes"]
    job = finished_job(tmp_path / "job", [row(i, text=t) for i, t in enumerate(texts)], graded=True)
    out = tmp_path / "out"
    assert run("select", job, "--where", "mark == 1", "--out", out) == 0
    found = read(out)
    assert [one["id"] for one in found] == ["id0#0", "id3#0"]
    wanted = {
        "id": "id3#0", "question": "question 3", "target": "yes", "response": "yes", "mark": 1.0,
        "source": {"job": str(job), "row_id": "id3", "sample_index": 0},
    }  # fmt: skip
    assert {name: found[1][name] for name in wanted} == wanted
    assert not {"row_id", "token_ids", "finish_reason", "error", "text"} & set(found[1])
    facts = json.loads((out / "selection.json").read_text())
    assert facts["rows"] == 2 and facts["jobs"][0]["manifest"]["fingerprints"] == {"model": "abc"}
    assert [tuple(step) for step in facts["funnel"]] == [
        ("rows in all", 4), ("without error rows", 3), ("--where mark == 1", 2),
    ]  # fmt: skip
    card = (out / "README.md").read_text()
    assert "data/*.parquet" in card and "`nowhere`" in card and "temperature=0.5" in card


def test_best_sorts_and_top_keep_the_first_of_equal_rows(tmp_path: Path) -> None:
    job = scored_job(tmp_path / "job", [[1, 3, 3], [None, None, None], [5, 2, 5], [0, 0, 4]])
    out = tmp_path / "out"
    assert run("select", job, "--best", "score", "--out", tmp_path / "best") == 0
    assert [one["id"] for one in read(tmp_path / "best")] == ["id0", "id2", "id3"]
    assert [one["score"] for one in read(tmp_path / "best")] == [3, 5, 4]
    assert run("select", job, "--by", "score", "--top", 4, "--out", out) == 0
    assert [one["id"] for one in read(out)] == ["id2#0", "id2#2", "id3#2", "id0#1"]
    assert (
        run("select", job, "--by", "score", "--ascending", "--top", 3, "--out", tmp_path / "least")
        == 0
    )
    assert [one["id"] for one in read(tmp_path / "least")] == ["id3#0", "id3#1", "id0#0"]


def test_of_rows_that_agree_the_best_stays_and_null_agrees_with_nothing(tmp_path: Path) -> None:
    rows = [row(i, text=f"t{i}", score=s) for i, s in enumerate([1.0, 2.0, 9.0, 2.0, 2.0])]
    for one, question in zip(rows, ["a", "b", "A", None, None], strict=True):
        one["question"] = question
    job = finished_job(tmp_path / "job", rows, [SCORE])
    by = "question|lower if question is not none else none"
    assert run("select", job, "--dedupe", by, "--by", "score", "--out", tmp_path / "out") == 0
    assert [one["id"] for one in read(tmp_path / "out")] == ["id2#0", "id1#0", "id3#0", "id4#0"]


def test_several_jobs_have_the_union_of_their_columns(tmp_path: Path) -> None:
    a = scored_job(tmp_path / "a", [[1], [2]])
    b = finished_job(tmp_path / "b", [row(0), row(1, text=None)])
    assert run("select", a, b, "--out", tmp_path / "out") == 0
    assert [(r["id"], r["score"]) for r in read(tmp_path / "out")] == [
        ("a/id0#0", 1), ("a/id1#0", 2), ("b/id0#0", None),
    ]  # fmt: skip


@settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    scores=st.lists(
        st.lists(st.sampled_from([None, 0.0, 1.0, 2.5]), min_size=2, max_size=2),
        min_size=1, max_size=12,
    ),
    top=st.integers(1, 30),
    sizes=st.sampled_from([(2, 1), (3, 2), (1000, 256)]),
)  # fmt: skip
def test_any_choice_is_what_python_sorts(
    tmp_path_factory: pytest.TempPathFactory,
    scores: list[list[float | None]],
    top: int,
    sizes: tuple[int, int],
) -> None:
    """The order also holds where the set has many shards and passes."""
    folder = tmp_path_factory.mktemp("select")
    job = open_rows(str(scored_job(folder / "job", scores, in_shard=4)))
    flat = [(i, k, s) for i, row in enumerate(scores) for k, s in enumerate(row) if s is not None]
    wanted = sorted(flat, key=lambda one: -one[2])[:top]
    with pytest.MonkeyPatch.context() as patch:
        for module in (data_folder, set_rows):
            patch.setattr(module, "ROWS_PER_SHARD", sizes[0])
        patch.setattr(data_folder, "ROWS_PER_GROUP", sizes[0])
        patch.setattr(set_rows, "_BUCKETS", sizes[1])
        if not wanted:
            with pytest.raises(ValueError, match="no row is left"):
                select([job], SelectionRequest(by="score", top=top), folder / "out")
            return
        select([job], SelectionRequest(by="score", top=top), folder / "out")
    found = [(one["id"], one["score"]) for one in read(folder / "out")]
    assert found == [(f"id{i}#{k}", s) for i, k, s in wanted]
    assert len(choose([job], SelectionRequest(best="score"))[0]) == sum(
        any(s is not None for s in r) for r in scores
    )


def test_the_same_command_changes_nothing_and_another_one_overwrites_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, out = scored_job(tmp_path / "job", [[1], [2]]), tmp_path / "out"
    assert run("select", job, "--out", out) == 0
    before = {path: path.read_bytes() for path in out.rglob("*") if path.is_file()}
    assert run("select", job, "--out", out) == 0
    assert "already" in capsys.readouterr().out
    assert run("select", job, "--where", "score > 1", "--out", out) == 2
    assert "holds something else" in capsys.readouterr().err
    assert {path: path.read_bytes() for path in out.rglob("*") if path.is_file()} == before
    again = tmp_path / "again"
    assert run("select", job, "--out", again) == 0
    for path, content in before.items():
        copy = again / path.relative_to(out)
        assert copy.read_bytes().replace(b"again", b"out") == content or copy.name == "README.md"
    assert not [path for path in tmp_path.iterdir() if path.name.startswith(".")]


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--where", "scroe > 1"], "no column 'scroe'"),
        (["--where", "grades.mark == 1"], "no column 'grades'"),
        (["--where", "question > 1"], "row 'id0'"),
        (["--by", "question"], "must be a number"),
        (["--top", "3"], "--top needs --by"),
        (["--where", "score > 100"], "no row is left"),
        (["--text-as", "question"], "two columns 'question'"),
        (["--columns", "question,nothing"], "no column 'nothing'"),
    ],
)
def test_a_mistake_is_named_and_leaves_no_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: list[str], says: str
) -> None:
    job = scored_job(tmp_path / "job", [[1], [2]])
    assert run("select", job, *arguments, "--out", tmp_path / "out") == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


def test_what_rows_and_grades_both_have_must_be_told_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = pa.field("answer", pa.string(), metadata={"meaning": "as in the input"})
    rows = [row(i, text=t, answer="gold") for i, t in enumerate(["yes", "no"])]
    job = finished_job(tmp_path / "job", rows, [answer], graded=True)
    assert run("select", job, "--where", "answer == 'gold'", "--out", tmp_path / "out") == 2
    assert "grades.answer or row.answer" in capsys.readouterr().err
    where = "grades.answer == 'no' and row.answer == 'gold'"
    assert run("select", job, "--where", where, "--out", tmp_path / "out") == 0
    found = read(tmp_path / "out")
    assert [(one["answer"], one["grades_answer"]) for one in found] == [("gold", "no")]


def test_an_incomplete_job_is_refused_with_the_command_that_completes_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path / "job", [row(0)], metrics={"status": "stopped"})
    assert run("select", job, "--out", tmp_path / "out") == 2
    assert f"batchgen {job}/config.yaml output.dir={job}" in capsys.readouterr().err


def test_grades_of_other_rows_are_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path / "job", [row(0), row(1)], graded=True)
    other = finished_job(tmp_path / "other", [row(0), row(1, text="no")])
    shard = "data/part-00000.parquet"
    (job / shard).write_bytes((other / shard).read_bytes())
    assert run("select", job, "--where", "mark == 1", "--out", tmp_path / "out") == 2
    assert f"batchgen grade {job}" in capsys.readouterr().err


def test_a_set_is_read_by_datasets_and_by_the_next_job(tmp_path: Path) -> None:
    from datasets import load_dataset

    from batchgen.config.groups.dataset_config import DatasetConfig
    from batchgen.inputs.dataset.dataset_files import load_split

    job = scored_job(tmp_path / "job", [[1, 2], [3, 4]])
    out = tmp_path / "out"
    assert run("select", job, "--best", "score", "--out", out) == 0
    assert load_dataset(str(out), split="train", cache_dir=str(tmp_path / "c"))["id"] == [
        "id0",
        "id1",
    ]
    data = load_split(DatasetConfig(kind="files", path=str(out), id_column="id")).data
    assert list(data["response"]) == ["text 0 1", "text 1 1"]


@pytest.mark.parametrize(
    "content",
    ["", "[]", "null", "{}", '{"format": 2}', "[" * 100_000,
     '{"format": 1, "kind": [], "request": "x"}',
     '{"format": 1, "kind": "rows", "request": "x", "jobs": [1]}',
     '{"format": 1, "kind": "rows", "request": "x", "text_column": "../x", "jobs": []}'],
)  # fmt: skip
def test_a_set_of_a_stranger_is_refused_in_words(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    job, out = scored_job(tmp_path / "job", [[1], [2]]), tmp_path / "out"
    assert run("select", job, "--out", out) == 0
    (out / "selection.json").write_text(content)
    assert run("export", out, "--to", "sft", "--out", tmp_path / "sft.jsonl") in (1, 2)
    assert "batchgen: " in capsys.readouterr().err
    assert not (tmp_path / "sft.jsonl").exists()


@pytest.mark.parametrize("name", ["data/part-00000.parquet", "selection.json", "README.md", "data"])
def test_a_link_in_a_set_is_not_followed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str
) -> None:
    job, out = scored_job(tmp_path / "job", [[1], [2]]), tmp_path / "out"
    assert run("select", job, "--out", out) == 0
    path = out / name
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    for verb in (("export", out, "--to", "sft"), ("push", out, "me/set")):
        assert run(*verb) == 2
        assert "is a link" in capsys.readouterr().err


def test_a_job_in_an_object_store_is_read_where_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = finished_job(
        tmp_path / "job", [row(i, text=t) for i, t in enumerate(["yes", "no", "yes"])], graded=True
    )
    files = FaultyFiles()
    use(monkeypatch, files)
    for path in job.rglob("*"):
        if path.is_file() and path.name != ".lock":
            files.put(f"jobs/{path.relative_to(job)}", path.read_bytes())
    asked = ("--where", "mark == 1", "--out")
    assert run("select", "s3://jobs", *asked, tmp_path / "there") == 0
    assert run("select", job, *asked, tmp_path / "here") == 0
    there, here = read(tmp_path / "there"), read(tmp_path / "here")
    assert [one["id"] for one in there] == ["id0#0", "id2#0"] == [one["id"] for one in here]
    assert run("export", "s3://jobs", "--to", "sft", *asked, tmp_path / "there.jsonl") == 0
    assert run("export", job, "--to", "sft", *asked, tmp_path / "here.jsonl") == 0
    assert (tmp_path / "there.jsonl").read_bytes() == (tmp_path / "here.jsonl").read_bytes()


@pytest.mark.parametrize("id_column", ["id", None])
def test_a_column_id_of_the_data_does_not_take_the_place_of_the_sets(
    tmp_path: Path, id_column: str | None
) -> None:
    fields = [pa.field("id", pa.string(), metadata={"meaning": "as in the input"})]
    config = {"dataset": {"kind": "files", "id_column": id_column}}
    job = finished_job(tmp_path / "job", [row(0, id="id0")], fields, config=config)
    assert run("select", job, "--out", tmp_path / "out") == 0
    (found,) = read(tmp_path / "out")
    assert found["id"] == "id0#0" and found.get("input_id") == (None if id_column else "id0")


def test_json_of_a_column_that_gets_another_name_is_read_as_json(tmp_path: Path) -> None:
    described = {"meaning": "as in the input", "feature": json.dumps({"id": {"_type": "Json"}})}
    fields = [pa.field("id", pa.string(), metadata=described)]
    config = {"dataset": {"kind": "files", "id_column": None}}
    rows = [row(0, id='{"a": [1, "b"]}')]
    job = finished_job(tmp_path / "job", rows, fields, config=config)
    assert run("select", job, "--out", tmp_path / "out") == 0
    messages = '[{user: "{{ input_id.a[1] }}"}, {assistant: "{{ response }}"}]'
    lines = tmp_path / "a.jsonl"
    asked = ("--to", "sft", "--messages", messages, "--where", "input_id.a[0] == 1")
    assert run("export", tmp_path / "out", *asked, "--out", lines) == 0
    assert json.loads(lines.read_text())["messages"][0]["content"] == "b"


@pytest.mark.parametrize("first", [0, 1])
def test_a_column_source_of_one_job_has_no_place_beside_the_sets_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], first: int
) -> None:
    source = pa.field("source", pa.string(), metadata={"meaning": "as in the input"})
    jobs = [
        finished_job(tmp_path / "a", [row(0, source="a book")], [source]),
        finished_job(tmp_path / "b", [row(0)]),
    ]
    assert run("select", jobs[first], jobs[1 - first], "--out", tmp_path / "out") == 2
    said = capsys.readouterr().err
    assert f"{jobs[0]} has a column 'source'" in said and "--columns" in said
    assert not (tmp_path / "out").exists()
    wanted = ["--columns", "question,text"]
    assert run("select", *jobs, *wanted, "--out", tmp_path / "out") == 0
