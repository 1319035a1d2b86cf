"""Jobs with a real (tiny) model that read the answers of other jobs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import yaml

from batchgen.__main__ import run_command
from batchgen.config.groups.job_config import StepConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.engine.request_params import derive_seed
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.inputs.dataset.seed_stream import stream_seed
from batchgen.storage.stores.manifest import READ_JOB, Manifest
from batchgen.util.errors import ConfigError
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.real_job import ROWS, contents, overrides, run
from tests.support.jobs.viewed_page import read, site

LENGTH = StepConfig(
    target="batchgen.grading.extract.Extract", options={"methods": ["regex"], "pattern": "(.)"}
)


def reader(model: Path, path: object, out: object, *more: str) -> list[str]:
    """The command of a job that reads the job at a path."""
    given = overrides(model, Path(str(path)), Path("out"), *more)
    kept = [one for one in given if not one.startswith(("dataset", "output.dir"))]
    own = [one for one in more if one.startswith("dataset.")]
    return ["dataset=job", f"dataset.path={path}", *kept, *own, f"output.dir={out}"]


def output_rows(out: Path) -> list[dict[str, Any]]:
    """All rows of a finished job."""
    return [one for path in sorted((out / "data").iterdir()) for one in _rows(path)]


def _rows(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(path).to_pylist()
    return found


def tokens(out: Path) -> dict[tuple[str, int], list[int]]:
    """The tokens of each sample, by the id of its row."""
    return {(one["row_id"], one["sample_index"]): one["token_ids"] for one in output_rows(out)}


@pytest.fixture(scope="module")
def answered(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of such a job, and its rows."""
    top = tmp_path_factory.mktemp("answered")
    rows = top / "rows.jsonl"
    rows.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    run(overrides(model, rows, top / "draft"))
    return top / "draft"


@pytest.fixture
def draft(answered: Path, tmp_path: Path) -> Path:
    """A complete job with two answers to each of eleven rows, which a test may change."""
    return shutil.copytree(answered, tmp_path / "draft")


@pytest.mark.thorough
def test_a_job_reads_a_job_that_reads_a_job(model: Path, draft: Path, tmp_path: Path) -> None:
    judge, last = tmp_path / "judge", tmp_path / "last"
    prompt = "prompt.user='{{ q }} {{ reply }} {{ finish_reason }}'"
    assert run(reader(model, draft, judge, prompt, "dataset.text_as=reply")).exit_code == 0
    found = output_rows(judge)
    assert len(found) == 44
    assert [one["row_id"] for one in found[:4]] == ["r0#0", "r0#0", "r0#1", "r0#1"]
    texts = {(one["row_id"], one["sample_index"]): one["text"] for one in output_rows(draft)}
    for one in found:
        source = one["source"]
        assert one["reply"] == texts[source["row_id"], source["sample_index"]]
        assert one["row_id"] == f"{source['row_id']}#{source['sample_index']}"
    assert run(reader(model, judge, last, prompt, "dataset.rows=rows")).exit_code == 0
    names = {name for one in output_rows(last) for name in one}
    assert {"q", "reply", "source"} <= names  # the judge's own `source` is not copied
    assert output_rows(last)[0]["source"]["row_id"] == "r0#0"
    manifests = [Manifest.read(out / "manifest.json") for out in (draft, judge, last)]
    assert [m.identity["dataset"].get("depth") for m in manifests] == [None, 1, 2]
    assert [m.identity["sampling"].get("stream") for m in manifests] == [None, "depth 1", "depth 2"]
    assert [READ_JOB in m.fingerprints for m in manifests] == [False, True, True]
    card = (judge / "README.md").read_text()
    assert "- `answers`: 22" in card and "- `dataset.errors=drop`: 22" in card
    # The command again, and the job file that is in the folder, compute nothing.
    before = contents(judge / "data")
    again = run(reader(model, draft, judge, prompt, "dataset.text_as=reply"))
    assert again.message.startswith("This job is complete already")
    assert run_command([str(judge / "config.yaml")]) == 0
    assert contents(judge / "data") == before
    assert yaml.safe_load((judge / "config.yaml").read_text())["dataset"]["text_as"] == "reply"


@pytest.mark.thorough
def test_a_reader_draws_other_numbers_than_what_it_reads(
    model: Path, rows: Path, draft: Path, tmp_path: Path
) -> None:
    """With equal ids, prompts and seeds; and a given stream decides it for every job."""
    best = ("dataset.rows=best", "dataset.best=-sample_index")
    run(reader(model, draft, tmp_path / "a", *best))
    assert tokens(tmp_path / "a").keys() == tokens(draft).keys()
    same = [tokens(tmp_path / "a")[key] == ids for key, ids in tokens(draft).items()]
    assert not all(same)
    run(overrides(model, rows, tmp_path / "b", "sampling.stream='depth 1'"))
    assert tokens(tmp_path / "b") == tokens(tmp_path / "a")
    run(reader(model, draft, tmp_path / "c", *best, "sampling.stream=judge"))
    assert tokens(tmp_path / "c") != tokens(tmp_path / "a")
    moved = tmp_path / "elsewhere" / "other_name"
    shutil.copytree(draft, moved)
    run(reader(model, moved, tmp_path / "d", *best))
    assert tokens(tmp_path / "d") == tokens(tmp_path / "a")
    with pytest.raises(ConfigError, match=r"sampling\.stream"):
        run(reader(model, draft, tmp_path / "a", *best, "sampling.stream=judge"))


def test_streams_are_apart_and_todays_seeds_stay() -> None:
    assert stream_seed(7, None) == 7
    seeds = {stream_seed(seed, name) for seed in (0, 7, 2**64 - 1) for name in ("a", "b", "ab")}
    assert len(seeds) == 9 and seeds.isdisjoint((0, 7, 2**64 - 1))
    assert stream_seed(-1, "a") == stream_seed(2**64 - 1, "a") == 7545315518047858772
    assert derive_seed(3, "r1", 1) == 14867302275347556381


@pytest.mark.thorough
def test_rows_that_are_taken_out_change_no_others(model: Path, draft: Path, tmp_path: Path) -> None:
    run(reader(model, draft, tmp_path / "all"))
    where = "dataset.where='row_index not in [1, 4, 5, 9] and (row_index > 2 or sample_index == 1)'"
    run(reader(model, draft, tmp_path / "some", where, "engine.max_num_seqs=3"))
    every, some = tokens(tmp_path / "all"), tokens(tmp_path / "some")
    assert len(every) == 44 and len(some) == 2 * (10 + 2)
    assert some == {key: every[key] for key in some}


def grow(rows: Path, number: int) -> None:
    more = [{"id": f"new{i}", "q": f"And {i}?"} for i in range(number)]
    rows.write_text("".join(json.dumps(row) + "\n" for row in [*ROWS, *more]))


@pytest.mark.thorough
def test_when_the_other_job_grows_this_one_goes_on(
    model: Path, rows: Path, draft: Path, tmp_path: Path
) -> None:
    out, fresh = tmp_path / "judge", tmp_path / "fresh"
    keys = ("dataset.where='row_index != 3'", "dataset.text_as=reply")
    run(reader(model, draft, out, *keys))
    grow(rows, 3)
    run(overrides(model, rows, draft))
    run(reader(model, draft, out, *keys))
    run(reader(model, draft, fresh, *keys))
    assert tokens(out) == tokens(fresh) and len(tokens(out)) == 2 * 2 * 13
    assert contents(out / "data") == contents(fresh / "data")
    history = Manifest.read(out / "manifest.json").history
    assert ["dataset rows: 20 → 26"] == [line for entry in history for line in entry["changed"]]


@pytest.mark.thorough
def test_more_samples_or_another_job_are_refused(
    model: Path, rows: Path, draft: Path, tmp_path: Path
) -> None:
    out = tmp_path / "judge"
    run(reader(model, draft, out))
    kept = contents(out)
    run(overrides(model, rows, draft, "sampling.n=3"))
    with pytest.raises(ConfigError) as error:
        run(reader(model, draft, out))
    assert "row 2 (id 'r1#0')" in str(error.value) and "22 rows → 33 rows" in str(error.value)
    # The number of samples matters to nobody who reads the rows' first ones alone.
    first = ("dataset.where='sample_index == 0'",)
    run(reader(model, draft, tmp_path / "first", *first))
    run(overrides(model, rows, draft, "sampling.n=4"))
    again = run(reader(model, draft, tmp_path / "first", *first))
    assert again.message.startswith("This job is complete already")
    run(overrides(model, rows, draft, "sampling.seed=4", "output.overwrite=true"))
    with pytest.raises(ConfigError) as error:
        run(reader(model, draft, out))
    assert "dataset.path: a different job from the one whose rows were read" in str(error.value)
    assert "row 0 (id 'r0#0')" in str(error.value)
    assert contents(out) == kept


def graded(job: Path, pattern: str) -> None:
    step = StepConfig(target=LENGTH.target, options={**LENGTH.options, "pattern": pattern})
    JobGrades(job).make((step,), "text", ScoreConfig())


@pytest.mark.thorough
def test_new_grades_matter_where_they_are_read(model: Path, draft: Path, tmp_path: Path) -> None:
    graded(draft, "([A-Za-z])")
    read = ("dataset.columns=[q,answer]",)
    run(reader(model, draft, tmp_path / "plain"))
    run(reader(model, draft, tmp_path / "copied", *read))
    run(reader(model, draft, tmp_path / "chosen", "dataset.where='answer is none or true'"))
    graded(draft, "([0-9])")
    for name in ("plain", "chosen"):
        keys = ("dataset.where='answer is none or true'",) if name == "chosen" else ()
        again = run(reader(model, draft, tmp_path / name, *keys))
        assert again.message.startswith("This job is complete already")
    with pytest.raises(ConfigError, match=r"the first finished row that differs is row \d+ \(id"):
        run(reader(model, draft, tmp_path / "copied", *read))


@pytest.mark.thorough
def test_a_job_without_rows_ends_with_its_counts(
    model: Path, draft: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "dataset.where='row_index > 99'"
    assert run_command(reader(model, draft, tmp_path / "judge", where)) == 2
    said = capsys.readouterr().err
    assert "answers: 22; dataset.errors=drop: 22; dataset.where: 0" in said
    assert said.count("\n  r") == 3
    assert not (tmp_path / "judge").exists()


@pytest.mark.thorough
def test_jobs_in_an_object_store_are_read(
    model: Path, rows: Path, draft: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use(monkeypatch, FaultyFiles())
    run([*overrides(model, rows, Path("x"))[:-1], "output.dir=s3://jobs/draft"])
    keys = ("dataset.text_as=reply", "prompt.user='{{ reply }}'", "dataset.rows=rows")
    run(reader(model, "s3://jobs/draft", "s3://jobs/judge", *keys))
    run(reader(model, draft, tmp_path / "judge", *keys))
    both = "[s3://jobs/draft,s3://jobs/judge]"
    run(reader(model, both, tmp_path / "both", "dataset.columns=[q]"))
    found = output_rows(tmp_path / "both")
    assert found[0]["row_id"] == "draft/r0#0" and found[-1]["row_id"] == "judge/r10#1"
    with pytest.raises(ConfigError, match=r"nowhere is not the output of a job"):
        run(reader(model, "s3://jobs/nowhere", tmp_path / "none"))


@pytest.mark.thorough
def test_counted_rows_grow(model: Path, tmp_path: Path) -> None:
    def command(out: Path, limit: int) -> list[str]:
        given = overrides(model, Path("x"), out, "prompt.user='{{ row_index }} + 1'")
        kept = [one for one in given if not one.startswith("dataset")]
        return ["dataset=count", f"dataset.limit={limit}", *kept]

    run(command(tmp_path / "grown", 3))
    run(command(tmp_path / "grown", 7))
    run(command(tmp_path / "whole", 7))
    assert contents(tmp_path / "grown" / "data") == contents(tmp_path / "whole" / "data")
    assert list(tokens(tmp_path / "whole"))[::2] == [(str(i), 0) for i in range(7)]
    run(reader(model, tmp_path / "grown", tmp_path / "judge", "prompt.user='{{ text }}'"))
    assert output_rows(tmp_path / "judge")[0]["row_id"] == "0#0"


def test_columns_of_files_get_other_names(model: Path, rows: Path, tmp_path: Path) -> None:
    keys: tuple[Any, ...] = ("dataset.rename={q: question}", "prompt.user='{{ question }}'")
    run(overrides(model, rows, tmp_path / "a", *keys))
    run(overrides(model, rows, tmp_path / "b"))
    assert tokens(tmp_path / "a") == tokens(tmp_path / "b")
    assert [one["question"] for one in output_rows(tmp_path / "a")][::2] == [r["q"] for r in ROWS]
    for rename, said in (("{p: x}", "no column 'p'"), ("{q: id}", "is a column already")):
        with pytest.raises(ConfigError, match=rf"dataset\.rename: .*{said}"):
            run(overrides(model, rows, tmp_path / "c", f"dataset.rename={rename}"))


@pytest.mark.thorough
def test_copied_grades_are_a_column_that_pages_show_and_the_next_job_reads(
    model: Path, draft: Path, tmp_path: Path
) -> None:
    JobGrades(draft).make([LENGTH], "text", ScoreConfig())
    judge, last = tmp_path / "judge", tmp_path / "last"
    prompt = "prompt.user='{{ q }} {{ text }}'"
    assert run(reader(model, draft, judge, prompt, "dataset.columns=[q,grades]")).exit_code == 0
    # The judge has no grades of its own: its column `grades` is one of its data.
    assert run(reader(model, judge, last, prompt, "dataset.rows=rows")).exit_code == 0
    grades = [one["grades"] for one in output_rows(last)]
    assert "answer" in grades[0] and len(grades) == len(output_rows(draft)) * 2
    for job in (judge, last):
        page = read(site(job), "row?n=0").text
        assert "source" in page and "r0" in page
        assert run_command(["report", str(job)]) == 0
