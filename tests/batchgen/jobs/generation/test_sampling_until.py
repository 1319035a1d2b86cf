"""What `sampling.until` does with errors, graders that need processes, and other options."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.sampling_config import SamplingConfig, UntilConfig
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.pages.report.write_report import report_html
from batchgen.pages.viewer import overview
from batchgen.pages.viewer.job_view import JobView
from batchgen.storage.folder.job_summary import JobSummary, status_line
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeEngine
from tests.support.jobs.forked import fork_server
from tests.support.jobs.object_files import FaultyFiles, use
from tests.support.jobs.shared_jobs import in_threads
from tests.support.jobs.until_job import Rows, UntilJob, every_sample, expected, is_marked, rows_of


def _metrics(job: UntilJob) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(job.out) / "metrics.json").read_text())
    return found


@pytest.mark.slow
def test_graders_in_processes_give_the_same_rows(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "one"), rows=20)
    slow = replace(job, out=str(tmp_path / "two"), isolated=True, grade_s=0.01)
    job.run()
    slow.run()
    assert rows_of(slow.out) == rows_of(job.out)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("where", "what"),
    [
        ("num_generated_tokens > 8 and sample_index != 1", "no grades"),
        ("grade_error is none and mark == 1", "grades"),
        ("row.tags|length == 2", "the data set"),
    ],
)
def test_expressions_see_the_output_and_its_grades(tmp_path: Path, where: str, what: str) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=20, where=where)
    job.run()
    found = {
        "no grades": lambda row: row["num_generated_tokens"] > 8 and row["sample_index"] != 1,
        "grades": is_marked,
        "the data set": lambda row: len(row["tags"]) == 2,
    }[what]
    assert rows_of(job.out) == expected(every_sample(job, tmp_path / "every"), 2, 6, found)


def test_an_expression_without_a_value_makes_no_sample_valid(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    where = "1 / (num_generated_tokens % 4) > 0"
    job = UntilJob(str(tmp_path / "out"), rows=8, where=where, most=4, bad=False)
    job.run()
    rows = rows_of(job.out)
    null = [row for row in rows if row["num_generated_tokens"] % 4 == 0]
    assert null and {row["valid"] for row in null} == {None}
    assert {row["valid"] for row in rows if row["num_generated_tokens"] % 4} == {True}
    assert capsys.readouterr().err.count("such samples count as not valid") == 1


class _FailingEngine(FakeEngine):
    """Every second sample of a row is an error."""

    def _finish(self, running: Any) -> RequestOutput:
        output = super()._finish(running)
        if output.request_id.sample % 2 == 0:
            return output
        error = RequestError("scripted", "an odd sample")
        return replace(output, text="", finish_reason="error", error=error)


def _run(job: UntilJob, engine: type[FakeEngine] = FakeEngine) -> JobResult:
    parts = replace(job.parts(), port=lambda: engine(job))
    return execute_job(job.config(), parts)


def test_errors_are_samples_that_are_not_valid_and_can_be_retried(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=24, bad=False, one_of=1, most=5)
    assert _run(job, _FailingEngine).exit_code == 3
    every = every_sample(job, tmp_path / "every")
    odd = [{**row, "error": 1} if row["sample_index"] % 2 else row for row in every]
    rows = rows_of(job.out)
    is_valid = [row["valid"] for row in rows]
    assert [row["sample_index"] % 2 == 1 for row in rows] == [one is None for one in is_valid]
    assert {row["num_samples"] for row in rows} <= {3, 5} and len(odd) > len(rows)
    _run(replace(job, retry_errors=True))
    assert rows_of(job.out) == expected(every, 2, 5, lambda row: is_marked(row, 1))
    assert _metrics(job)["until"]["enough"] == 24 - _metrics(job)["until"]["exhausted"]


def test_two_workers_share_a_slow_job(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=30, rows_per_shard=30, step_s=0.002, max_num_seqs=6)
    for result in in_threads([job, replace(job, step_s=0.02)]):
        assert not isinstance(result, Exception)
    assert rows_of(job.out) == expected(every_sample(job, tmp_path / "every"), 2, 6)


def test_the_outcomes_of_a_stopped_job_are_not_shown(tmp_path: Path) -> None:
    """Its metrics do not count those of the shards that its last attempt has published."""
    job = UntilJob(str(tmp_path / "out"), rows=40, rows_per_shard=4, fail_at_step=30)
    with pytest.raises(RuntimeError, match="fell off the bus"):
        job.run()
    reader = JobFolderReader(Path(job.out))
    assert reader.metrics["until"]["valid"] and list((reader.path / "data").iterdir())
    about = overview._facts(JobView(reader, "out"), JobSummary.of(reader.metrics, reader.config))
    assert "until enough" not in dict(about) and "enough" not in status_line(reader, "out")
    replace(job, fail_at_step=-1).run()
    about = overview._facts(JobView(reader, "out"), JobSummary.of(reader.metrics, reader.config))
    assert " of 40 rows have enough" in dict(about)["until enough"]


def test_summary_report_and_scores(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=40)
    message = job.run().message
    rows = rows_of(job.out)
    by_row = {row["row_index"]: row for row in rows}
    counts = Counter(row["outcome"] for row in by_row.values())
    valid = sum(row["valid"] is True for row in rows)
    metrics = _metrics(job)
    assert metrics["until"] == {**counts, "valid": valid}
    assert f"{counts['enough']} of 40 rows have enough, {counts['exhausted']} exhausted" in message
    assert f"{valid} of {len(rows)} samples valid" in message
    # Scores are of the samples that every row has, whatever their marks.
    scored = [r for r in rows if r["sample_index"] < job.valid]
    assert metrics["score"]["samples"] == len(scored)
    reader = JobFolderReader(Path(job.out))
    assert f"{counts['enough']} of 40 rows have enough" in status_line(reader, "out")
    about = overview._facts(JobView(reader, "out"), JobSummary.of(metrics, reader.config))
    assert ("sampling", "until 2 are valid (at most 6): mark == 1") in [
        (name, text.partition(",")[0]) for name, text in about
    ]
    page = report_html(JobFolderReader(Path(job.out)))
    assert "Samples until enough are valid" in page and "Exhausted, with their valid" in page
    exhausted = next(row for row in by_row.values() if row["outcome"] == "exhausted")
    assert f"{exhausted['row_id']} ({exhausted['num_valid']} of 6)" in page


@pytest.mark.parametrize(
    ("sampling", "said"),
    [
        ({"n": 2}, "leave n out"),
        ({"temperature": 0.0}, "copies of one answer"),
        ({"until": {"valid": 2, "width": 0.3}}, "leave one of the two out"),
        ({"until": {"width": 0.7}}, "above 0 and at most 0.65"),
        ({"until": {"width": 0.3, "most": 1001}}, "from 1 to 1,000"),
    ],
)
def test_what_does_not_go_together_is_refused(sampling: dict[str, Any], said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        until = UntilConfig(**{"where": "mark == 1", "most": 4, **sampling.get("until", {})})
        SamplingConfig(**{"temperature": 1.0, **sampling, "until": until})


def test_other_expressions_and_steps_are_other_jobs(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=6, bad=False)
    job.run()
    for other, said in (
        ({"where": "mark > 0.5"}, 'sampling.until.where: "mark == 1" → "mark > 0.5"'),
        ({"one_of": 2}, "sampling.until.post"),
        ({"most": 5}, "sampling.until.most: 6 → 5"),
        ({"valid": 1}, "sampling.until.valid: 2 → 1"),
        ({"where": ""}, "sampling.until.where"),
    ):
        with pytest.raises(ConfigError, match=r"different job") as error:
            replace(job, **other).run()
        assert said in str(error.value)
    with pytest.raises(ConfigError, match="no column 'marc': choose among"):
        replace(job, out=str(tmp_path / "b"), where="marc == 1").run()
    # Steps that the expression does not read may change.
    plain = UntilJob(str(tmp_path / "c"), rows=4, bad=False, where="text|length > 9")
    plain.run()
    assert "complete already" in replace(plain, one_of=2).run().message


def _killed(job: UntilJob) -> None:
    os._exit(job.run().exit_code)


def _kill(job: UntilJob, rng: random.Random, workers: int) -> int:
    """Start workers, kill each at some moment, and return how many kills came in time."""
    context = fork_server()
    processes = [context.Process(target=_killed, args=(job,)) for _ in range(workers)]
    for process in processes:
        process.start()
    for process in processes:
        log = Path(job.log)
        before, deadline = log.stat().st_size if log.exists() else 0, time.monotonic() + 60
        while (log.stat().st_size if log.exists() else 0) <= before:
            if process.exitcode is not None or time.monotonic() > deadline:
                break
            time.sleep(0.002)
        time.sleep(rng.uniform(0, 0.15))
        process.kill()
    for process in processes:
        process.join(60)
    return sum(process.exitcode == -signal.SIGKILL for process in processes)


GROWING: Any = {
    "valid": [
        {"valid": 1, "most": 5},
        {"valid": 2, "most": 5},
        {"most": 8},
        {"valid": 3, "most": 8},
    ],
    "width": [{"width": w, "most": m} for w, m in ((0.65, 4), (0.6, 4), (0.6, 8), (0.5, 8))],
}


@pytest.mark.slow
@pytest.mark.parametrize("rule", GROWING)
def test_kills_of_two_workers(tmp_path: Path, rule: str) -> None:
    """A job that grows by a stronger rule, again and again."""
    rng, killed = random.Random(3), 0
    every: Rows | None = None
    for number, options in enumerate(GROWING[rule]):
        job = UntilJob(
            str(tmp_path / "out"), rows=120, log=str(tmp_path / "log"), rows_per_shard=25,
            max_num_seqs=6, stale_after=2.0, one_of=2 if rule == "width" else 3, **options,
        )  # fmt: skip
        for _ in range(4):
            killed += _kill(replace(job, step_s=0.01), rng, 1 + number % 2)
        job.run()
        every = every or every_sample(replace(job, most=8), tmp_path / "every")
        marked = partial(is_marked, one_of=job.one_of)
        assert rows_of(job.out) == expected(every, job.valid, job.most, marked, job.width)
    computed = Counter(Path(job.log).read_text().split())
    assert killed >= 8
    # A kill costs what was in flight, and workers that share a shard may both begin a row.
    assert computed.total() - len(computed) <= killed * 4 * job.max_num_seqs


def test_parts_without_until_have_no_more_columns(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=3, where="", most=2)
    parts: ResolvedJob = job.parts()
    execute_job(job.config(), parts)
    assert not {"valid", "outcome", "num_valid", "num_samples"} & set(rows_of(job.out)[0])


def test_the_end_of_a_stream_is_found(tmp_path: Path) -> None:
    job = UntilJob(str(tmp_path / "out"), rows=37)
    parts, whole = job.parts(), job.parts().source.rows
    parts.source.num_rows = None  # type: ignore[misc]
    parts.source.rows = whole  # type: ignore[method-assign]
    execute_job(job.config(), parts)
    assert rows_of(job.out) == expected(every_sample(job, tmp_path / "every"), 2, 6)


@pytest.mark.thorough
def test_a_job_in_a_bucket_has_the_rows_of_one_in_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = FaultyFiles()
    use(monkeypatch, files)
    job = UntilJob(str(tmp_path / "out"), rows=40)
    job.run()
    bucket = replace(job, out="s3://jobs/a")
    with pytest.raises(RuntimeError):
        replace(bucket, fail_at_step=20).run()
    for result in in_threads([bucket, bucket]):
        assert not isinstance(result, Exception)
    start = "jobs/a/data/"
    stored = {
        path.removeprefix(start): file
        for path, file in files.store.items()
        if path.startswith(start)
    }
    assert stored == {p.name: p.read_bytes() for p in sorted((Path(job.out) / "data").iterdir())}
