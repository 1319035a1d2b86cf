"""The row index of a job: equal however it came about, and told where people look."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.cli.verbs import status
from batchgen.inputs.row_index import index_files, make_index
from batchgen.util.errors import ConfigError
from tests.support.jobs.forked import fork_server
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.stepped_job import STEPS, SteppedJob, data, dropped, index, write_rows


def lines(rows: Sequence[Mapping[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


OWN_STEPS = '''
from dataclasses import dataclass

from datasets import Features, Value

from batchgen import BadRow, Dropped, TableStep


@dataclass(frozen=True, kw_only=True)
class Unsaid(TableStep):
    pass


@dataclass(frozen=True, kw_only=True)
class EveryOther(TableStep):
    """Takes out every other row."""

    stable = True
    has_state = True

    def start(self, tools):
        return Count()


class Count:
    full = False
    rows = 0

    def take(self, row):
        self.rows += 1
        return Dropped("an even one") if self.rows % 2 else [{}]

    def close(self):
        pass


@dataclass(frozen=True, kw_only=True)
class Halves(TableStep):
    """Makes two rows of one."""

    stable = True
    splits = True
    field_names = ("question", "number")

    def made(self, features):
        return Features({"half": Value("string")})

    def take(self, row):
        if row.fields["number"] == 5:
            raise BadRow("the number is 5")
        text = row.fields["question"]
        return [{"half": text[:4]}, {"half": text[4:]}]
'''


@pytest.fixture
def job(tmp_path: Path) -> SteppedJob:
    return SteppedJob(str(tmp_path / "rows.jsonl"), str(tmp_path / "out"))


def test_a_job_has_the_rows_that_steps_leave(job: SteppedJob) -> None:
    write_rows(job, 60)
    assert job.run().exit_code == 0
    found = data(job)
    made = index(job)
    assert len(found) == len(made) > 0
    assert [row["row_id"] for row in found] == [
        "#".join([f"q{one['row_index']}", *map(str, one["path"])]) for one in made
    ]
    for row, one in zip(found, made, strict=True):
        assert row["style"] == one["made"]["style"]
        assert row["item"] == f"item {one['row_index'] % 9} {one['path'][0]}"
        assert "items" not in row
    facts = json.loads((Path(job.out) / "rows.json").read_text())
    steps = facts["steps"]
    assert facts["rows"] == steps[-1]["rows_out"] == len(found)
    assert [a["rows_out"] for a in steps[:-1]] == [b["rows_in"] for b in steps[1:]]
    assert sum(step["dropped"] for step in steps) == len(dropped(job))
    assert {row["row_id"] for row in dropped(job)}.isdisjoint(row["row_id"] for row in found)


def test_the_funnel_is_told_where_people_look(
    job: SteppedJob, capsys: pytest.CaptureFixture[str]
) -> None:
    write_rows(job, 60)
    facts = "60 rows of the data set → Filter 53 → Explode 113 → "
    assert facts in replace(job, report=True).run().message
    assert facts in (Path(job.out) / "README.md").read_text()
    page = (Path(job.out) / "report.html").read_text()
    assert facts in page and "q3: number != 3 is false" in page
    assert status.main([job.out]) == 0
    assert f"\nsteps of rows: {facts}" in capsys.readouterr().out


def test_dropped_rows_leave_the_tokens_of_others(job: SteppedJob, tmp_path: Path) -> None:
    write_rows(job, 60)
    explode = {"Explode": {"column": "items", "as": "item"}}
    few_steps = [explode, {"Filter": {"where": "row_index % 5"}}]
    plain = replace(job, out=str(tmp_path / "all"), steps=[explode])
    few = replace(job, out=str(tmp_path / "few"), steps=few_steps)
    assert plain.run().exit_code == few.run().exit_code == 0
    whole = {row["row_id"]: row["token_ids"] for row in data(plain)}
    some = {row["row_id"]: row["token_ids"] for row in data(few)}
    assert 0 < len(some) < len(whole)
    assert some == {row_id: whole[row_id] for row_id in some}


def test_a_job_that_grows_has_the_index_of_one_that_was_whole(
    job: SteppedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(make_index, "GROUP", 8)
    monkeypatch.setattr(index_files, "GROUP", 8)
    monkeypatch.setattr(make_index, "PART_ROWS", 24)
    for rows in (20, 21, 60):
        write_rows(job, rows)
        assert job.run().exit_code == 0
    write_rows(whole := replace(job, out=str(tmp_path / "whole")), 60)
    assert whole.run().exit_code == 0
    assert data(job) == data(whole)
    assert index(job) == index(whole) and dropped(job) == dropped(whole)
    assert job.bytes() == whole.bytes()


def test_a_limit_below_what_is_finished_is_refused(job: SteppedJob) -> None:
    write_rows(job, 60)
    assert job.run().exit_code == 0
    before = job.bytes()
    with pytest.raises(ConfigError, match=r"the steps make \d+ rows of the first 5 .*number \d+"):
        replace(job, limit=5).run()
    assert job.bytes() == before
    assert job.run().exit_code == 0


def test_other_steps_are_another_job(job: SteppedJob) -> None:
    write_rows(job, 30)
    assert job.run().exit_code == 0
    steps = [{"Filter": {"where": "number > 2"}}, *STEPS[1:]]
    with pytest.raises(ConfigError, match=r"rows: .*number != 3.* → .*number > 2"):
        replace(job, steps=steps).run()


def test_a_row_that_changed_is_found(job: SteppedJob) -> None:
    write_rows(job, 30)
    assert job.run().exit_code == 0
    text = Path(job.rows).read_text()
    Path(job.rows).write_text(text.replace("item 4 0", "item 5 0", 1))
    with pytest.raises(ConfigError, match="the first row that differs is one of 0 to 29"):
        job.run()


def test_a_stream_has_the_rows_of_random_access(job: SteppedJob, tmp_path: Path) -> None:
    write_rows(job, 60)
    stream = replace(job, out=str(tmp_path / "stream"), streaming=True)
    assert job.run().exit_code == stream.run().exit_code == 0
    assert stream.bytes() == job.bytes()
    assert not (Path(stream.out) / "rows.json").exists()


@pytest.mark.parametrize("streaming", [False, True])
def test_steps_that_leave_nothing_say_what_they_took_out(job: SteppedJob, streaming: bool) -> None:
    write_rows(job, 12)
    steps = [{"Filter": {"where": "number > 0"}}, {"Filter": {"where": "number > 90"}}]
    with pytest.raises(ConfigError) as raised:
        replace(job, steps=steps, streaming=streaming).run()
    said = str(raised.value)
    assert "drop every row: 12 rows of the data set → Filter 10 → Filter 0" in said
    assert "rows[0] Filter dropped 2 of 12:\n    q0: number > 0 is false\n    q9: " in said
    assert "rows[1] Filter dropped 10 of 10:\n    q1: number > 90 is false\n" in said
    assert said.count("number > 90 is false") == 3
    assert not (Path(job.out) / "rows.json").exists()


def test_bad_rows_are_error_rows(job: SteppedJob) -> None:
    write_rows(job, 6)
    bad = [{"id": "none", "question": "?", "number": 4, "items": None}]
    bad.append({"id": "many", "question": "??", "number": 4, "items": ["x"] * 1001})
    bad.append({"id": "null", "question": "???", "number": None, "items": ["x"]})
    with Path(job.rows).open("a") as file:
        file.write(lines(bad))
    steps = [{"Filter": {"where": "number != 3"}}, {"Explode": {"column": "items", "as": "item"}}]
    job = replace(job, steps=[{"Filter": {"where": "number + 1"}}, *steps])
    assert job.run().exit_code == 3
    errors = {row["row_id"]: row["error"] for row in data(job) if row["error"]}
    assert {row_id: error["type"] for row_id, error in errors.items()} == {
        "none#0": "bad_row", "many#0": "bad_row", "null#0": "bad_row"
    }  # fmt: skip
    assert "must hold a list, got null" in errors["none#0"]["message"]
    assert "1,001 items, more than most=1,000" in errors["many#0"]["message"]
    assert "null in this row: number" in errors["null#0"]["message"]


def test_answers_of_another_job_are_joined(job: SteppedJob, tmp_path: Path) -> None:
    write_rows(job, 12)
    draft = replace(job, out=str(tmp_path / "draft"), steps=[{"Filter": {"where": "number < 6"}}])
    assert draft.run().exit_code == 0
    join = {"path": draft.out, "on": "row_id", "columns": {"text": "draft"}, "missing": "null"}
    assert replace(job, steps=[{"Join": join}]).run().exit_code == 0
    texts = {row["row_id"]: row["text"] for row in data(draft)}
    assert {row["row_id"]: row["draft"] for row in data(job)} == {
        f"q{i}": texts.get(f"q{i}") for i in range(12)
    }
    # Another generation of the drafts is another table, so the job is another one.
    again = replace(draft, steps=[{"Filter": {"where": "number < 4"}}], overwrite=True)
    assert again.run().exit_code == 0
    with pytest.raises(ConfigError, match=r"fingerprint.rows\[0\] Join\.path"):
        replace(job, steps=[{"Join": join}]).run()


@pytest.mark.thorough
def test_a_job_in_a_bucket_keeps_its_index_there(
    job: SteppedJob, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A second run finds all there; one that has grown reads the parts before and adds to them."""
    use(monkeypatch, files := FaultyFiles())
    stored = replace(job, out="s3://jobs/a")
    for rows in (30, 30, 60):
        write_rows(job, rows)
        assert stored.run().exit_code == 0
    assert job.run().exit_code == 0
    names = {path.removeprefix("jobs/a/") for path in files.store}
    assert {"rows.json", "rows/part-00000.parquet", "rows/part-00001.parquet"} <= names
    found = {Path(path).name: file for path, file in files.store.items()
             if path.startswith("jobs/a/data/")}  # fmt: skip
    assert found == job.bytes()
    (folder := tmp_path / "copy" / "rows").mkdir(parents=True)
    for path, file in files.store.items():
        if path.startswith("jobs/a/rows/"):
            (folder / Path(path).name).write_bytes(file)
    assert index(replace(job, out=str(tmp_path / "copy"))) == index(job)


def test_a_step_of_ones_own(job: SteppedJob, monkeypatch: pytest.MonkeyPatch) -> None:
    write_rows(job, 12)
    (folder := Path(job.rows).parent / "own").mkdir()
    (folder / "own_steps.py").write_text(OWN_STEPS)
    monkeypatch.syspath_prepend(str(folder))
    steps = [{"_target_": "own_steps.EveryOther"}, {"_target_": "own_steps.Halves"}]
    assert replace(job, steps=steps).run().exit_code == 3
    found = {row["row_id"]: row["half"] for row in data(job)}
    assert found["q1#0"] == "w0 w" and found["q1#1"].endswith("!") and "q0#0" not in found
    assert [row["reason"] for row in dropped(job)] == ["an even one"] * 6
    errors = [row["error"]["message"] for row in data(job) if row["error"]]
    assert errors == ["rows[1] Halves: the number is 5"]
    with pytest.raises(ConfigError, match=r"rows\[0\]._target_: own_steps.Unsaid must say `stable"):
        replace(job, steps=[{"_target_": "own_steps.Unsaid"}]).run()


def test_a_damaged_index_is_made_again(job: SteppedJob) -> None:
    write_rows(job, 60)
    assert job.run().exit_code == 0
    before, part = index(job), Path(job.out) / "rows" / "part-00000.parquet"
    part.write_bytes(part.read_bytes()[:100])
    assert job.run().exit_code == 0
    assert index(job) == before


@pytest.mark.parametrize(
    ("step", "words"),
    [
        ({"Filtr": {"where": "1"}}, "rows.0.: there is no step 'Filtr': choose among Filter"),
        ({"Filter": {"were": "1"}}, r"rows.0..Filter.were is not a key: choose among where"),
        ({"Filter": {"where": "nmber"}}, r"rows.0. Filter: where: there is no column 'nmber'"),
        ({"Filter": {"where": "number >"}}, r"rows.0. Filter: where: "),
        ({"Explode": {"column": "items", "most": 0}}, "rows.0..Explode: most must be at least 1"),
        (
            {"Join": {"path": "none.jsonl", "on": "id", "columns": "x"}},
            "rows.0. Join: path: .*none",
        ),
        ({"Keep": {}}, "rows.0..Keep: give either share or rows"),
        ({"Cross": {"style": "none.jsonl"}}, "none.jsonl"),
        ({"Cross": {"style": 3}}, "style must be a list of pieces"),
        ({"Chunk": {"column": "question", "tokens": 4}}, "Chunk needs a model whose tokenizer"),
    ],
)
def test_mistakes_are_refused(job: SteppedJob, step: dict[str, Any], words: str) -> None:
    write_rows(job, 6)
    with pytest.raises(ConfigError, match=words):
        replace(job, steps=[step]).run()


def _run(job: SteppedJob) -> None:
    os._exit(job.run().exit_code)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2))
def test_killed_grown_and_shared_it_has_the_same_bytes(tmp_path: Path, seed: int) -> None:
    """Twenty kills of three workers while the data set grows."""
    job = SteppedJob(str(tmp_path / "rows.jsonl"), str(tmp_path / "out"), step_s=0.012)
    draw = random.Random(seed)
    forked = fork_server()
    kills = 0
    for rows in (150, 151, 300, 400):
        write_rows(job, rows)
        for _ in range(6):
            workers = [forked.Process(target=_run, args=(job,)) for _ in range(3)]
            for worker in workers:
                worker.start()
            time.sleep(draw.uniform(0.2, 0.8))
            for worker in workers:
                if worker.is_alive():
                    assert worker.pid is not None
                    os.kill(worker.pid, signal.SIGKILL)
                    kills += 1
                worker.join()
        assert job.run().exit_code == 0
    assert kills >= 20
    whole = replace(job, out=str(tmp_path / "whole"), step_s=0.0)
    assert whole.run().exit_code == 0
    assert job.bytes() == whole.bytes()
    assert index(job) == index(whole)
    other = replace(whole, out=str(tmp_path / "other"), rows_per_shard=50)
    assert other.run().exit_code == 0
    assert data(other) == data(whole)
