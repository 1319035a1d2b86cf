"""Arms of folders: sweeps, seeds, jobs that are not done, other exams, values of a column."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from batchgen.cli.verb_table import run_verb
from batchgen.evals.arms.arm_folders import arm_folders
from batchgen.evals.arms.arm_table import ArmTable, arm_table
from batchgen.evals.arms.job_arms import job_arms
from batchgen.util.errors import ConfigError
from tests.support.jobs.finished_job import finished_job, row

QUESTIONS = 12


def job(path: Path, right: int, *, n: int = 1, **more: Any) -> Path:
    """A complete job that answers the first `right` questions well."""
    sampling = {"temperature": 0.5, "n": n, "seed": 0, **more.pop("sampling", {})}
    rows = more.pop("rows", None) or [
        row(i, k, text="yes" if i < right else "no") for i in range(QUESTIONS) for k in range(n)
    ]
    config = {"sampling": sampling, **more.pop("config", {})}
    return finished_job(path, rows, graded=more.pop("graded", True), config=config, **more)


def table(*given: Path, **options: Any) -> ArmTable:
    return arm_table(*job_arms(arm_folders([str(path) for path in given]), **options))


def names(found: ArmTable) -> Sequence[str]:
    return [row.arm.name for row in found.rows]


@pytest.fixture
def sweep(tmp_path: Path) -> Path:
    """Temperature by seed, in folders with = in their names."""
    for temperature, seed, right in ((0.5, 1, 6), (0.5, 2, 8), (1.0, 1, 3), (1.0, 2, 5)):
        name = f"sampling.temperature={temperature},sampling.seed={seed}"
        job(tmp_path / "sweep" / name, right, sampling={"temperature": temperature, "seed": seed})
    return tmp_path / "sweep"


def test_a_sweep_stands_for_its_jobs_and_seeds_are_averaged(sweep: Path) -> None:
    found = table(sweep)
    assert names(found) == ["sampling.temperature=0.5", "sampling.temperature=1.0"]
    assert [row.arm.seeds for row in found.rows] == [("1", "2")] * 2
    assert [row.arm.settings for row in found.rows] == [
        {"sampling.temperature": "0.5"},
        {"sampling.temperature": "1.0"},
    ]
    scores = [row.score.estimate for row in found.rows if row.score is not None]
    assert scores == pytest.approx([7 / 12, 4 / 12])
    assert [(row.questions, row.answers) for row in found.rows] == [(12, 24)] * 2
    assert found.rows[1].difference is not None
    assert found.rows[1].difference.estimate == pytest.approx(-3 / 12)


def test_the_mean_over_seeds_is_the_mean_of_their_jobs(tmp_path: Path) -> None:
    """With several samples each, whatever these are."""
    rng = np.random.default_rng(0)
    for seed in range(3):
        rows = [
            row(i, k, text="yes" if rng.random() < 0.5 else "no")
            for i in range(QUESTIONS)
            for k in range(2)
        ]
        for temperature in (0.5, 1.0):
            own = {"seed": seed, "temperature": temperature}
            job(tmp_path / f"s/{temperature}-{seed}", 0, n=2, rows=rows, sampling=own)
    each = [table(path).rows[0].score for path in sorted((tmp_path / "s").glob("0.5-*"))]
    mean = np.mean([score.estimate for score in each if score is not None])
    found = table(tmp_path / "s")
    assert [row.answers for row in found.rows] == [72, 72]
    assert found.rows[0].score is not None
    assert found.rows[0].score.estimate == pytest.approx(mean)
    assert found.rows[1].difference is not None and found.rows[1].difference.estimate == 0


def test_jobs_that_differ_in_seed_alone_are_compared_where_they_are_named(sweep: Path) -> None:
    one, two = sorted(sweep.glob("*=0.5,*"))
    assert names(table(one, two)) == [one.name, two.name]
    assert len(table(one, two, sweep / "sampling.temperature=1.0,sampling.seed=1").rows) == 2


def test_arms_without_a_score_say_why_and_hold_up_nothing(
    sweep: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job(sweep / "killed", 3, sampling={"top_p": 0.5}, metrics={"status": "killed"})
    job(sweep / "bare", 3, sampling={"top_p": 0.6}, graded=False)
    other = job(sweep / "damaged", 3, sampling={"top_p": 0.7})
    next((other / "data").glob("*.parquet")).write_bytes(b"PAR1")
    (sweep / "begun").mkdir()
    assert run_verb("compare", [str(sweep)]) == 0
    said = capsys.readouterr().out
    for text in ("the job is not complete", "has no grades", "is damaged"):
        assert text in said
    assert said.count("has no score") == 3 and "begun" not in said


@pytest.mark.thorough
def test_other_exams_are_named_or_compared_anyway(sweep: Path) -> None:
    job(sweep / "the_other", 6, config={"prompt": {"kind": "chat", "user": "So {{ question }}"}})
    found = {row.arm.name: row for row in table(sweep).rows}
    assert found["the_other"].difference is None
    assert "12 of 12 rows have another prompt" in found["the_other"].arm.other_exam
    anyway = {row.arm.name: row for row in table(sweep, anyway=True).rows}
    assert anyway["the_other"].difference is not None and anyway["the_other"].p_holm is not None


def test_arms_are_values_of_a_column(tmp_path: Path) -> None:
    """As rows that several adapters answer: each question by each of them."""
    import pyarrow as pa

    rows = [
        row(i, k, text="yes" if i < 4 + 4 * k else "no", adapter=name)
        for i in range(QUESTIONS)
        for k, name in enumerate(("base", "mine"))
    ]
    path = job(tmp_path / "out", 0, rows=rows, fields=[pa.field("adapter", pa.string())])
    found = table(path, by="adapter")
    assert names(found) == ["base", "mine"] and found.rows[1].shared == QUESTIONS
    assert found.rows[1].difference is not None
    assert found.rows[1].difference.estimate == pytest.approx(4 / 12)
    with pytest.raises(ConfigError, match=r"--by: the rows of .* have no column 'adaptor'"):
        table(path, by="adaptor")


@pytest.mark.thorough
def test_any_column_of_numbers_is_compared(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    column = "score.column=num_generated_tokens"
    assert run_verb("compare", [str(sweep), column, "--format", "csv"]) == 0
    header, first, _ = capsys.readouterr().out.splitlines()
    assert header.startswith("arm,score,low,high") and first.split(",")[1].startswith("2.58")
    assert run_verb("compare", [str(sweep), "score.column=nothing"]) == 2
    assert "have no column 'nothing': choose among" in capsys.readouterr().err


def test_scores_by_a_number(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("compare", [str(sweep), "--x", "sampling.temperature"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].split()[-1] == "sampling.temperature"
    assert any("A" in line for line in lines if "┤" in line)
    # All ran at the same second on one machine, so that nobody knows how fast one alone is.
    assert run_verb("compare", [str(sweep), "--x", "tokens_per_s"]) == 2
    assert "shared its machine with another arm" in capsys.readouterr().err
    assert run_verb("compare", [str(sweep), "--x", "tokens_per_answr"]) == 2
    assert "choose among tokens_per_answer" in capsys.readouterr().err


def test_a_number_without_scores_is_refused(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    finished_job(tmp_path / "sweep" / "job", [row(0)])
    assert run_verb("report", [str(tmp_path / "sweep"), "--x", "rows"]) == 2
    assert "--x rows: no arm has a score" in capsys.readouterr().err


def test_the_page_about_a_sweep(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_verb("report", [str(sweep)]) == 0
    assert capsys.readouterr().out.strip() == str(sweep / "report.html")
    page = (sweep / "report.html").read_text()
    assert "sampling.temperature=0.5" in page and "Score by sampling.temperature" in page
    assert "averaged over sampling.seed 1, 2" in page and "<script" not in page


def test_files_of_a_sweep_are_no_jobs(sweep: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As a shell makes them of SWEEP/*; any other file is a mistake of every verb."""
    for name in ("multirun.yaml", "report.html"):
        (sweep / name).write_text("x")
    assert len(table(*sorted(sweep.iterdir())).rows) == 2
    (sweep / "notes.txt").write_text("x")
    for verb in ("compare", "score", "grade"):
        more = [str(sweep)] if verb == "compare" else []
        assert run_verb(verb, [str(sweep / "notes.txt"), *more]) == 2
        assert "notes.txt is a file, and not the output of a job" in capsys.readouterr().err
