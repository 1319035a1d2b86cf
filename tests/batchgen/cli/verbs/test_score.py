"""The verbs over marks: what they write, and what they warn of."""

import json
from pathlib import Path

import pyarrow as pa
import pytest

from batchgen.cli.verb_table import run_verb
from batchgen.pages.viewer.job_view import JobView
from batchgen.pages.viewer.jobs_below import jobs_below
from batchgen.pages.viewer.overview import overview
from batchgen.storage.folder.read_job import JobFolderReader
from tests.support.jobs.finished_job import finished_job, row

COPIES = (
    "warning: {job} has sampling.n=2 at sampling.temperature=0: the 2 answers to a row are copies"
)


def files(job: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in job.rglob("*") if path.is_file()}


def test_score_only_looks(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(i, text="yes" if i % 2 else "no") for i in range(6)]
    job = finished_job(tmp_path / "job", rows, graded=True)
    assert run_verb("report", [str(job)]) == 0
    before = files(job)
    for arguments in ([], ["--json"], ["score.ks=1", "score.subset=question"]):
        assert run_verb("score", [str(job), *arguments]) == 0
        assert "question 3" in capsys.readouterr().out or "score.subset=question" not in arguments
    assert files(job) == before
    assert run_verb("score", [str(job), "score.subset=question", "--save"]) == 0
    changed = {path for path, content in files(job).items() if before.get(path) != content}
    assert {Path(path).name for path in changed} - {".lock"} == {"metrics.json", "report.html"}
    assert b"question 3" in (job / "metrics.json").read_bytes()


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("count_as", "shown", "marked"),
    [
        ("as_marked", "75.0%", "50.0% truncated (50.0% of all have an answer)"),
        ("wrong", "37.5%", "50.0% truncated (counted as wrong)"),
        ("left_out", "75.0%", "50.0% truncated (left out)"),
    ],
)
def test_an_exam_says_what_cut_texts_count_as(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    count_as: str,
    shown: str,
    marked: str,
) -> None:
    """In `score`, in what it saves and the report shows, and in `compare`."""
    rows = [
        row(i, text="no" if i < 2 else "yes", finish_reason="length" if i % 2 else "stop")
        for i in range(8)
    ]
    option = f"score.cut_texts={count_as}"
    job = finished_job(tmp_path / "job", rows, graded=True)
    assert run_verb("score", [str(job), option, "--save"]) == 0
    text = capsys.readouterr().out
    assert f"score         {shown}" in text and marked in text
    assert json.loads((job / "metrics.json").read_bytes())["score"]["cut_texts"] == count_as
    assert run_verb("report", [str(job)]) == 0
    page = (job / "report.html").read_text()
    assert ("cut at max_new_tokens are" in page) == (count_as != "as_marked")
    assert shown in page

    other = finished_job(
        tmp_path / "other", rows, graded=True, config={"score": {"cut_texts": "wrong"}}
    )
    capsys.readouterr()
    refused = run_verb("compare", [str(job), str(other)])
    assert refused == 2 and "score.cut_texts is as_marked and wrong" in capsys.readouterr().err
    assert run_verb("compare", [str(job), str(other), option]) == 0
    lines = capsys.readouterr().out
    questions = 4 if count_as == "left_out" else 8
    assert f"{questions} in both" in lines and f"A          {shown}" in lines


@pytest.mark.quick(1)
@pytest.mark.parametrize("temperature", [0, 0.7])
def test_verbs_warn_of_copies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], temperature: float
) -> None:
    rows = [row(i, k, text="yes" if i % 2 else "no") for i in range(6) for k in range(2)]
    config = {"sampling": {"temperature": temperature, "n": 2}}
    job = finished_job(tmp_path / "job", rows, graded=True, config=config)
    grade = [
        "post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]}, "
        "{_target_: batchgen.grading.grade.Grade, method: exact}]"
    ]
    for verb, arguments in (("score", []), ("grade", grade), ("compare", [str(job)])):
        capsys.readouterr()
        assert run_verb(verb, [str(job), *arguments]) == 0
        shown = capsys.readouterr()
        assert (COPIES.format(job=job) in shown.err) == (temperature == 0)
        said = "uncertainty unknown" if verb == "compare" else "all samples of a question agree"
        assert said in shown.out


def test_numbers_of_a_judge_are_scored_and_shown_everywhere(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """By their mean with an interval, not as shares: in `score`, the report, the overview, the list
    and `compare`; rows without a number are left out."""
    judged = [7.5, 9.0, None, 4.0, 8.0, 6.5]
    rows = [row(i, text="?" if v is None else f"Score: {v}") for i, v in enumerate(judged)]
    post = "post=[{ParseScore: {}}]"
    job = finished_job(tmp_path / "job", rows, config={"score": {"column": "score"}})
    assert run_verb("grade", [str(job), post, "score.column=score"]) == 0
    said = capsys.readouterr().out
    assert (
        "score         7, new questions 4.636 to 9.364" in said and "range         4 to 9" in said
    )
    assert "16.7% no answer found" in said
    scores = json.loads((job / "metrics.json").read_bytes())["score"]
    assert scores["column"] == "score" and scores["marked"] == 5 and "pass@1" not in scores
    assert run_verb("report", [str(job)]) == 0
    assert "4.636 to 9.364" in (job / "report.html").read_text()
    view = overview(JobView(JobFolderReader(job), "job"))
    assert ("score", "7, new questions 4.636 to 9.364") in view.scores
    (listed,) = jobs_below(tmp_path).jobs
    assert (listed.shown_score, listed.interval) == ("score 7", "4.636 to 9.364")
    capsys.readouterr()
    assert run_verb("compare", [str(job), str(job), "score.column=score"]) == 0
    assert "  7  4.636 to 9.364" in capsys.readouterr().out
    assert run_verb("score", [str(job), "score.column=mark"]) == 0
    assert run_verb("score", [str(job), "score.column=text"]) == 2
    assert "have no numbers in 'text': choose among" in capsys.readouterr().err
    refused = run_verb("score", [str(job), "score.column=score", "score.cut_texts=wrong"])
    assert refused == 2 and "choose as_marked or left_out" in capsys.readouterr().err


def test_a_judge_without_marks_is_told_which_column_to_score(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path / "job", [row(i, text="Score: 3") for i in range(3)])
    assert run_verb("grade", [str(job), "post=[{ParseScore: {prefix: good_}}]"]) == 0
    assert run_verb("score", [str(job)]) == 2
    assert "score.column=good_score" in capsys.readouterr().err


def test_the_chance_of_guesses_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    choices = [["yes", "no"], ["yes", "no", "both", "none"]]
    rows = [row(i, text="A", target="A", choices=choices[i % 2]) for i in range(4)]
    job = finished_job(tmp_path / "job", rows, [pa.field("choices", pa.list_(pa.string()))])
    post = "post=[{Extract: {methods: [whole]}}, {Grade: {method: choice}}]"
    assert run_verb("grade", [str(job), post]) == 0
    assert "chance        37.5%" in capsys.readouterr().out
    assert json.loads((job / "metrics.json").read_bytes())["score"]["chance"] == 0.375
    assert run_verb("report", [str(job)]) == 0
    assert "37.5% of random guesses would be right" in (job / "report.html").read_text()


def test_a_judge_is_compared_with_marks_that_are_known(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(i, text="yes" if i % 2 else "no") for i in range(8)]
    for i, one in enumerate(rows):
        one["question"] = str(int(i % 2 == 1 or i == 0))
    job = finished_job(tmp_path / "job", rows, graded=True)
    assert run_verb("score", [str(job), "--agreement", "question"]) == 0
    said = capsys.readouterr().out
    assert "agreement" in said and "with question: 87.5% of 8 answers, kappa 0.75 (" in said
    assert run_verb("score", [str(job), "--agreement", "question", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["agreement"]
    assert (found["answers"], found["left_out"], found["kappa"]) == (8, 0, 0.75)
    assert run_verb("score", [str(job), "--agreement", "other"]) == 2
    assert "there is no column 'other': choose among" in capsys.readouterr().err
    assert run_verb("score", [str(job), "--agreement", "text"]) == 2
    assert "no answer has a mark in both" in capsys.readouterr().err


def test_a_job_that_runs_is_scored_so_far(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The finished rows are graded in memory; words and figures say what they are biased by."""
    rows = [
        row(i, text="yes" if i < 5 else "no", num_generated_tokens=i + 1)
        for i in range(8)
    ]  # fmt: skip
    post = [{"Extract": {"methods": ["whole"]}}, {"Grade": {"method": "exact"}}]
    attempt = {"rows_total": 16, "status": "running", "generate_s": 1.0, "rows": 8}
    metrics = {"status": "stopped", "attempts": [attempt]}
    job = finished_job(tmp_path / "job", rows, metrics=metrics, config={"post": post})
    before = files(job)
    assert run_verb("score", [str(job)]) == 2
    assert "the job is not complete" in capsys.readouterr().err
    assert run_verb("score", [str(job), "--so-far"]) == 0
    said = capsys.readouterr().out
    assert "so far        8 of 16 answers (50.0%)" in said and "score         62.5%" in said
    assert "those of up to 4 tokens have 100.0%, the longer half 25.0%" in said
    assert "31.2% to 81.2%, if all missing answers were wrong, or all right" in said
    assert run_verb("score", [str(job), "--so-far", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)["so_far"]
    assert found["bounds"] == [5 / 16, 13 / 16] and found["of"] == 16
    assert files(job) == before
    assert run_verb("score", [str(job), "--so-far", "--save"]) == 2
    assert run_verb("score", [str(job), "--so-far", "score.column=num_generated_tokens"]) == 0
    assert "num_generated_tokens  4.5" in capsys.readouterr().out


def test_so_far_runs_code_of_others_only_where_it_is_trusted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(
        tmp_path / "job", [row(0)], config={"post": [{"_target_": "tests.support.x.Y"}]}
    )
    assert run_verb("score", [str(job), "--so-far"]) == 2
    assert "--trust" in capsys.readouterr().err


def test_scores_as_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(i, k, text="yes" if i % 2 else "no") for i in range(4) for k in range(2)]
    job = finished_job(tmp_path / "job", rows, graded=True)
    assert run_verb("score", [str(job), "--format", "markdown", "score.subset=target"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| subset | metric | value | low | high | questions |"
    assert lines[2].startswith("|  | score | 50.0% |") and "| yes | score |" in "\n".join(lines)
    assert run_verb("score", [str(job), "--format", "csv"]) == 0
    header, score, *_ = capsys.readouterr().out.splitlines()
    assert header == "subset,metric,value,low,high,questions" and score.startswith(",score,0.5,")
