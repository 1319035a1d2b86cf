"""The verbs over marks: what they write, and what they warn of."""

from pathlib import Path

import pytest
from finished_job import finished_job, row

from batchgen.command.verbs import run_verb

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
        assert "cannot be told" in shown.out
