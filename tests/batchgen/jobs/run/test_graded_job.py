"""Grades of a job: made when it ends, once and for all rows; what a kill or new rows change."""

import itertools
import json
import os
import random
import signal
import time
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest

from batchgen.cli.verb_table import run_verb
from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.grade import Grade
from batchgen.evals.grades.changed_marks import ChangedMarks
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.grades.grading_queue import GradingQueue
from batchgen.evals.scores.samples import Samples
from batchgen.jobs.generation.turns import alone
from batchgen.jobs.run.run_job import execute_job
from batchgen.util.errors import ConfigError
from tests.support.cases import some_slow
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.forked import fork_server

EXTRACT = StepConfig(
    target="batchgen.grading.extract.Extract", options={"methods": ["last_number"]}
)
GRADE = StepConfig(
    target="batchgen.grading.grade.Grade", options={"method": "integer", "target": "number"}
)
ANSWERS = tuple((f"so {n}", "stop" if n % 3 else "length", None) for n in range(10))


def job(path: Path, **fields: Any) -> FakeJob:
    return FakeJob(str(path), rows=40, samples=2, rows_per_shard=7, answers=ANSWERS, **fields)


def run(fake: FakeJob, *post: StepConfig, **score: Any) -> int:
    config = replace(fake.config(), post=post, score=ScoreConfig(**score))
    return execute_job(config, fake.parts()).exit_code


def tables(path: Path) -> tuple[pa.Table, pa.Table]:
    rows, grades = (
        pa.concat_tables(pq.read_table(file) for file in sorted((path / name).glob("part-*")))
        for name in ("data", "grades")
    )
    return rows, grades


def test_a_job_ends_with_grades_and_scores(tmp_path: Path) -> None:
    out = tmp_path / "out"
    assert run(job(out), EXTRACT, GRADE) == 3
    rows, grades = tables(out)
    for name in ("row_id", "row_index", "sample_index"):
        assert rows[name].equals(grades[name])
    for row, grade in zip(rows.to_pylist(), grades.to_pylist(), strict=True):
        failed = row["error"] is not None
        assert grade["answer"] == (None if failed else row["text"].removeprefix("so "))
        right = None if failed else float(grade["answer"] == str(row["number"]))
        assert (grade["mark"], grade["grade_error"]) == (right, None)
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["status"] == "complete"
    errors = sum(error is not None for error in rows["error"].to_pylist())
    assert metrics["score"]["rates"]["error"] == errors / 80
    assert metrics["score"]["samples"] == 80
    steps = JobGrades(out).steps
    versions = [Extract(methods=("last_number",)).version, Grade(method="integer").version]
    assert steps is not None and [step["version"] for step in json.loads(steps)] == versions
    card = (out / "README.md").read_text()
    assert card.count("## Grades") == 1 and "| `mark` | `double` |" in card


def test_grades_are_no_part_of_the_job(tmp_path: Path) -> None:
    """A job that is complete gets grades, other ones and none without computing a row again."""
    out, log = tmp_path / "out", tmp_path / "log"
    fake = job(out, log=str(log))
    run(fake)
    computed = log.read_text()
    assert not (out / "grades").exists()
    run(fake, EXTRACT)
    assert tables(out)[1].column_names[3:] == [
        *("answer", "answer_start", "answer_end", "reasoning_end", "grade_error"),
    ]
    assert "score" not in json.loads((out / "metrics.json").read_text())
    run(fake, EXTRACT, GRADE, subset="tags")
    assert set(json.loads((out / "metrics.json").read_text())["score"]["subsets"]) == {
        *("[]", "['a']", "['a', 'a']"),
    }
    before = {path.name: path.stat().st_ino for path in (out / "grades").iterdir()}
    run(fake, EXTRACT, GRADE)
    assert {path.name: path.stat().st_ino for path in (out / "grades").iterdir()} == before
    run(fake)
    assert tables(out)[1].num_rows == 80 and log.read_text() == computed


def test_the_scores_of_a_job_count_cut_texts_as_it_says(tmp_path: Path) -> None:
    found = {}
    for count_as in ("as_marked", "wrong", "left_out"):
        run(job(tmp_path / "out"), EXTRACT, GRADE, cut_texts=count_as)
        score = json.loads((tmp_path / "out/metrics.json").read_text())["score"]
        assert score["cut_texts"] == count_as
        found[count_as] = score["avg"]["value"], score["marked"]
    rows, grades = tables(tmp_path / "out")
    cut = pc.equal(rows["finish_reason"], "length")
    right = pc.sum(pc.and_(pc.equal(grades["mark"], 1), cut)).as_py()
    assert right and found["wrong"][0] < found["as_marked"][0]
    marked = found["as_marked"][1]
    assert found["wrong"][1] == marked > found["left_out"][1] == marked - pc.sum(cut).as_py()


def test_a_folder_without_its_card_can_be_graded(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(job(out), EXTRACT)
    (out / "README.md").unlink()
    run(job(out), EXTRACT, GRADE)
    assert "score" in json.loads((out / "metrics.json").read_text())
    assert not (out / "README.md").exists()


def test_rows_that_are_computed_again_are_graded_again(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(replace(job(out), rows=20), EXTRACT, GRADE)
    part = out / "grades/part-00000.parquet"
    before, old = part.stat().st_ino, tables(out)[1]
    run(replace(job(out), rows=20, retry_errors=True, bad=False), EXTRACT, GRADE)
    assert part.stat().st_ino != before
    rows, grades = tables(out)
    assert old["mark"].null_count and not grades["mark"].null_count
    assert rows["row_id"].equals(grades["row_id"])


def graded_as(method: str, **options: Any) -> StepConfig:
    return replace(GRADE, options={**GRADE.options, "method": method, **options})


def changes(out: Path, *post: StepConfig, **options: Any) -> tuple[list[str], list[dict[str, Any]]]:
    """What is said of changed marks, and all that is written of them."""
    written: list[str] = []
    found = ChangedMarks(written.append)
    JobGrades(out).make(post, "text", ScoreConfig(**options), changes=found)
    return found.lines(": there"), [json.loads(line) for line in "".join(written).splitlines()]


WRONG = graded_as("exact", target="text")  # "so 5" is what no answer is
NINES = graded_as("regex", target="number", target_pattern="(9)$")


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("first", "second"),
    some_slow(
        itertools.product([GRADE, NINES], [WRONG, NINES, GRADE]),
        quick=[(GRADE, WRONG), (GRADE, GRADE), (NINES, WRONG)],
    ),
)
def test_marks_that_change_are_told(tmp_path: Path, first: StepConfig, second: StepConfig) -> None:
    """All of them are written and the first are shown: those in which the files differ."""
    out = tmp_path / "out"
    run(job(out))
    assert changes(out, EXTRACT, first) == ([], [])
    before = tables(out)[1].to_pylist()
    # Other options of a step, so that all is made anew.
    extract = replace(EXTRACT, options={**EXTRACT.options, "which": "first"})
    lines, written = changes(out, extract, second, workers=2)
    after = tables(out)[1].to_pylist()
    wanted = [
        {
            **{name: new[name] for name in ("row_index", "sample_index", "row_id")},
            **{"mark_before": old["mark"], "mark": new["mark"]},
            **{"answer_before": old["answer"], "answer": new["answer"]},
        }
        for old, new in zip(before, after, strict=True)
        if old["mark"] != new["mark"]
    ]
    assert sorted(written, key=lambda row: (row["row_index"], row["sample_index"])) == wanted
    assert bool(wanted) == (first is not second)
    if not wanted:
        assert lines == ["None of the 80 marks has changed."]
        return
    assert lines[0].startswith(f"{len(wanted)} of 80 marks have changed: ")
    assert [line.split(": ")[0].split()[0] for line in lines[1:11]] == [
        row["row_id"] for row in wanted[:10]
    ]
    assert len(wanted) <= 10 or lines[11] == f"  … {len(wanted) - 10} more: there"


def test_right_and_wrong_marks_that_change_are_counted_apart() -> None:
    def grades(*rows: tuple[float | None, str | None]) -> pa.Table:
        made = [(f"r{n}", n, 0, *row) for n, row in enumerate(rows)]
        kinds = {"row_id": pa.string(), "row_index": pa.int64(), "sample_index": pa.int32()}
        kinds |= {"mark": pa.float64(), "answer": pa.string()}
        return pa.table(dict(zip(kinds, zip(*made, strict=True), strict=True)), pa.schema(kinds))

    found = ChangedMarks()
    found.add(
        grades((1, "5"), (0, "5"), (0, None), (None, "x"), (0.5, "y" * 99), (1, "5"), (None, None)),
        grades((0, "5"), (1, "6"), (1, "7"), (1, "x"), (0.25, "z\x1b[2J"), (1, "6"), (None, None)),
    )
    assert found.lines() == [
        "5 of 7 marks have changed: 1 from right to wrong, 2 from wrong to right, 2 in another way",
        '  r0: right → wrong, answer "5"',
        '  r1: wrong → right, answer "5" → "6"',
        '  r2: wrong → right, answer none → "7"',
        '  r3: no mark → right, answer "x"',
        f'  r4: 0.5 → 0.25, answer "{"y" * 39}…" → "z⟨U+001B⟩[2J"',
    ]


def test_marks_of_other_texts_and_of_none_are_no_changes(tmp_path: Path) -> None:
    """Grades of rows that were computed anew, damaged ones, and such without marks."""
    out = tmp_path / "out"
    run(job(out))
    assert changes(out, EXTRACT) == ([], [])
    assert changes(out, EXTRACT, GRADE) == ([], [])
    part = pq.read_table(out / "grades/part-00004.parquet")
    other = part.schema.metadata | {b"batchgen.shard": b"another"}
    pq.write_table(part.replace_schema_metadata(other), out / "grades/part-00004.parquet")
    (out / "grades/part-00005.parquet").write_bytes(b"PAR1")
    lines, written = changes(out, EXTRACT, WRONG)
    assert f"{len(written)} of 56 marks have changed: {len(written)} from right" in lines[0]


def test_a_job_that_is_graded_anew_says_what_changes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only the version of a step grew."""
    out, file = tmp_path / "out", tmp_path / "changes.jsonl"
    run(job(out), EXTRACT, GRADE)
    assert "changed" not in capsys.readouterr().err
    monkeypatch.setattr(Grade, "version", 9)
    run(job(out), EXTRACT, GRADE)
    assert "None of the 80 marks has changed.\n" in capsys.readouterr().err
    run(job(out), EXTRACT, WRONG)
    assert "marks have changed: " in capsys.readouterr().err
    post = "post=[{_target_: batchgen.grading.extract.Extract, methods: [last_number]}, "
    post += "{_target_: batchgen.grading.grade.Grade, method: integer, target: number}]"
    file.write_text("{}\n")
    assert run_verb("grade", [str(out), post, "--changes", str(file)]) == 0
    shown = capsys.readouterr().out
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    assert f"{len(rows) - 1} of 80 marks have changed: {len(rows) - 1} from wrong" in shown
    assert f"more: {file}\n" in shown and rows[0] == {} and rows[1]["mark_before"] == 0
    refused = run_verb("grade", [str(out), "--changes", str(tmp_path / "no/where"), post])
    assert refused == 2 and "--changes " in capsys.readouterr().err


def grading(out: Path, config: JobConfig, *, at_once: bool = False) -> closing[GradingQueue]:
    return closing(GradingQueue(out, config, lambda: True, needed=True, at_once=at_once))


@pytest.mark.thorough
def test_grades_that_are_there_are_left_to_the_end_of_the_job(tmp_path: Path) -> None:
    """It is the end that says what changes."""
    out = tmp_path / "out"
    run(job(out), EXTRACT, NINES)
    other = graded_as("regex", target="number", target_pattern="(8)$")
    (out / "grades/part-00002.parquet").unlink()
    before = {path.name: path.stat().st_ino for path in (out / "grades").iterdir()}
    config = replace(job(out).config(), post=(EXTRACT, other))
    with grading(out, config) as queue:
        queue.look()
        deadline = time.monotonic() + 60
        while not (out / "grades/part-00002.parquet").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)
    after = {path.name: path.stat().st_ino for path in (out / "grades").iterdir()}
    assert after.items() >= before.items() and len(after) == 6


@pytest.mark.thorough
def test_a_job_never_waits_for_the_process_that_grades(tmp_path: Path) -> None:
    """However often it is told of shards while it stands still."""
    out = tmp_path / "out"
    run(job(out))
    other = graded_as("regex", target="number", target_pattern="(8)$")
    with grading(out, replace(job(out).config(), post=(EXTRACT, other))) as queue:
        queue.look()
        assert queue._process is not None
        queue._process.send_signal(signal.SIGSTOP)
        for _ in range(2**17):  # a pipe has 2**16 bytes
            queue._wake()
        queue._process.send_signal(signal.SIGCONT)
        deadline = time.monotonic() + 60
        while not (out / "grades/part-00005.parquet").exists():
            assert time.monotonic() < deadline
            time.sleep(0.02)


def test_grades_of_other_rows_or_steps_are_not_taken(tmp_path: Path) -> None:
    out = tmp_path / "out"
    grades = JobGrades(out)
    run(job(out))
    with pytest.raises(ConfigError, match="has no grades: `batchgen grade"):
        grades.finished()
    assert grades.make([EXTRACT, GRADE], "text", ScoreConfig()) == 80
    assert len(grades.finished()) == 6
    (out / "grades/part-00002.parquet").unlink()
    with pytest.raises(ConfigError, match="1 of 6 shards"):
        grades.finished()
    assert grades.make([EXTRACT, GRADE], "text", ScoreConfig()) == 14
    assert grades.make([EXTRACT, GRADE], "text", ScoreConfig()) == 0
    assert grades.make([EXTRACT], "text", ScoreConfig(), stop=lambda: True) is None
    with pytest.raises(ConfigError, match="6 of 6 shards"):
        grades.finished()
    assert len(JobGrades(out).finished()) == 6  # those from before are whole
    stops = iter([False] * 4)
    stopped = JobGrades(out).make([EXTRACT], "text", ScoreConfig(), stop=lambda: next(stops, True))
    assert stopped is None
    with pytest.raises(ConfigError, match=r"[1-5] of 6 shards"):
        JobGrades(out).finished()


@pytest.mark.quick(1)
@pytest.mark.parametrize("steps", ['{"steps": []}', "not JSON"])
def test_the_folder_of_grades_is_a_data_set(tmp_path: Path, steps: str) -> None:
    """What an earlier version put there is deleted when grades are asked for, though all are there
    already; until then it does no harm."""
    out, old = tmp_path / "out", tmp_path / "out/grades/steps.json"
    run(job(out), EXTRACT, GRADE)
    before = {path.name: path.stat().st_ino for path in (out / "grades").iterdir()}
    old.write_text(steps)
    assert len(JobGrades(out).finished()) == 6 and old.exists()
    run(job(out), EXTRACT, GRADE)
    assert {path.name: path.stat().st_ino for path in (out / "grades").iterdir()} == before
    read = pyarrow.dataset.dataset(out / "grades").to_table()
    assert read.equals(tables(out)[1].replace_schema_metadata(read.schema.metadata))
    marks = pd.read_parquet(out / "grades")["mark"]
    assert len(marks) == 80 and marks.sum() == pc.sum(read["mark"]).as_py() > 0


def test_a_column_that_the_rows_lack_is_refused_before_anything_changes(tmp_path: Path) -> None:
    out = tmp_path / "out"
    run(job(out), EXTRACT)
    wrong = StepConfig(target=GRADE.target, options={"method": "integer", "target": "xyz"})
    with pytest.raises(ConfigError, match=r"post\[1\]: Grade reads the column 'xyz'"):
        JobGrades(out).make([EXTRACT, wrong], "text", ScoreConfig())
    assert len(JobGrades(out).finished()) == 6


@pytest.mark.thorough
def test_shards_are_graded_while_the_job_goes_on(tmp_path: Path) -> None:
    """A process beside the job writes the same parts; ended at any time it leaves the rest."""
    out, grade = tmp_path / "out", replace(GRADE, options={**GRADE.options, "method": "regex"})
    run(job(out))
    config = replace(job(out).config(), post=(EXTRACT, grade))
    with grading(out, config) as queue:
        queue.look()
        alone(queue.finish(lambda: False))
        assert len(list((out / "grades").glob("part-*"))) == 6
    parts = {path: path.stat().st_ino for path in (out / "grades").glob("part-*")}
    assert JobGrades(out).make([EXTRACT, grade], "text", ScoreConfig()) == 0
    assert {path: path.stat().st_ino for path in parts} == parts
    rows, grades = tables(out)
    assert grades["row_id"].equals(rows["row_id"])

    for part in sorted(parts)[1:]:
        part.unlink()
    with pytest.raises(KeyError), grading(out, config) as queue:
        queue.look()
        raise KeyError
    made = JobGrades(out).make([EXTRACT, grade], "text", ScoreConfig())
    assert made is not None and 80 - 14 >= made > 0


def test_samples_that_are_kept_are_those_that_are_read(tmp_path: Path) -> None:
    """A score needs no file of a shard that was graded in the same session."""
    out, config = tmp_path / "out", ScoreConfig(subset="tags", cluster="number")
    run(job(out))
    session = Samples(out, config)
    session.grades.make([EXTRACT, GRADE], "text", config)
    read = Samples(out, config).table()
    for part in (out / "grades").glob("part-*"):
        part.rename(part.with_suffix(".kept"))
        part.write_bytes(b"")
    assert session.table().equals(read) and len(read) == 80
    for part in (out / "grades").glob("*.kept"):
        part.rename(part.with_suffix(".parquet"))
    (out / "grades/part-00002.parquet").unlink()
    with pytest.raises(ConfigError, match="1 of 6 shards"):
        session.table()


def test_steps_that_take_columns_wait_for_the_end_of_the_job(tmp_path: Path) -> None:
    config = replace(job(tmp_path / "out").config(), post=(EXTRACT, GRADE))
    run(job(tmp_path / "out"))
    for at_once, parts in ((False, 0), (True, 6)):
        with grading(tmp_path / "out", config, at_once=at_once) as queue:
            queue.look()
        assert len(list((tmp_path / "out/grades").glob("part-*"))) == parts


def test_what_fails_beside_the_job_is_told_when_it_ends(tmp_path: Path) -> None:
    wrong = replace(GRADE, options={**GRADE.options, "method": "regex", "target": "tagret"})
    out = tmp_path / "out"
    run(job(out))
    config = replace(job(out).config(), post=(EXTRACT, wrong))
    with grading(out, config) as queue:
        queue.look()
        alone(queue.finish(lambda: False))
    with pytest.raises(ConfigError, match="tagret"):
        JobGrades(out).make([EXTRACT, wrong], "text", ScoreConfig())


def _grade(out: str, log: str, isolated: bool) -> None:
    slow = StepConfig(
        target="tests.support.jobs.slow_grade.SlowMark", options={"log": log, "isolated": isolated}
    )
    JobGrades(Path(out)).make([EXTRACT, slow], "text", ScoreConfig(workers=2))
    os._exit(0)


@pytest.mark.thorough
@pytest.mark.parametrize(("isolated", "most"), [(False, 10), (True, 3)])
def test_killed_again_and_again_while_grading(tmp_path: Path, isolated: bool, most: int) -> None:
    """Every row has its grade exactly once, and parts that were finished stay."""
    rng = random.Random(0)
    out, log = tmp_path / "out", tmp_path / "log"
    log.touch()
    run(job(out, bad=False))
    data = {path.name: path.read_bytes() for path in (out / "data").iterdir()}
    context, kills = fork_server(), 0
    finished: dict[str, int] = {}
    while True:
        process = context.Process(target=_grade, args=(str(out), str(log), isolated))
        process.start()
        if kills < most:
            before = log.stat().st_size
            deadline = time.monotonic() + 60
            while process.is_alive() and log.stat().st_size == before:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.08))
            process.kill()
        process.join(60)
        now = {path.name: path.stat().st_ino for path in (out / "grades").glob("part-*")}
        assert now.items() >= finished.items()
        finished = now
        if process.exitcode != -signal.SIGKILL:
            break
        kills += 1
    assert process.exitcode == 0 and kills >= min(most, 4)
    assert len(JobGrades(out).finished()) == 6
    rows, grades = tables(out)
    for name in ("row_id", "sample_index"):
        assert rows[name].equals(grades[name])
    assert grades["mark"].to_pylist() == [0.5] * 80
    assert {path.name: path.read_bytes() for path in (out / "data").iterdir()} == data
