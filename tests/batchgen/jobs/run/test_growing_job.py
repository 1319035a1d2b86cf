"""Jobs that grow: equal to a job that ran so from the start, and no finished row computed again."""

import json
import os
import random
import re
import signal
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.forked import fork_server

KILLS = 2
"""How often each stage of a growing job is killed."""


def _data(out: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted((out / "data").iterdir())}


def _manifest(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "manifest.json").read_text())
    return found


def _metrics(out: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((out / "metrics.json").read_text())
    return found


def _computed(job: FakeJob) -> Counter[str]:
    return Counter(Path(job.log).read_text().split() if Path(job.log).exists() else [])


def _stages(out: Path) -> list[FakeJob]:
    """limit 50 → 120, n 1 → 4, rows appended, error rows retried; the errors are mended at last."""
    job = FakeJob(str(out), log=str(out) + ".log", rows=120, limit=50, samples=1, rows_per_shard=16)
    stages = [job]
    for change in (
        {"limit": 120}, {"samples": 4}, {"rows": 150, "limit": None},
        {"retry_errors": True}, {"retry_errors": True, "bad": False},
    ):  # fmt: skip
        stages.append(replace(stages[-1], **change))
    return stages


def _run(job: FakeJob) -> None:
    os._exit(job.run().exit_code)


def _run_killed(job: FakeJob, rng: random.Random, kills: int) -> int:
    """Kill a job so many times, then let it come to its end; returns the kills that came in time.

    Between the end of a request and its way into the journal lies less than a step, so that each
    kill may cost what was finished in one step.
    """
    context, killed = fork_server(), 0
    for attempt in range(kills + 1):
        last = attempt == kills
        before = _computed(job)
        job = replace(job, step_s=0.0 if last else 0.01)
        process = context.Process(target=_run, args=(job,))
        process.start()
        if not last:
            deadline = time.monotonic() + 60
            while _computed(job) == before and process.exitcode is None:
                assert time.monotonic() < deadline
                time.sleep(0.002)
            time.sleep(rng.uniform(0, 0.05))
            process.kill()
        process.join(60)
        killed += process.exitcode == -signal.SIGKILL
        if process.exitcode != -signal.SIGKILL:
            assert process.exitcode in (0, 3)
            break
    return killed


@pytest.mark.thorough
def test_grown_in_every_way_equals_from_the_start(tmp_path: Path) -> None:
    rng = random.Random(5)
    out, killed, computed = tmp_path / "grown", 0, Counter[str]()
    stages = _stages(out)
    for i, job in enumerate(stages):
        killed += _run_killed(job, rng, KILLS)
        whole = replace(job, out=str(tmp_path / f"whole {i}"), log="", retry_errors=False)
        result = whole.run()
        assert _data(out) == _data(Path(whole.out))
        metrics, wholes = _metrics(out), _metrics(Path(whole.out))
        for key in ("status", "rows", "errors", "finish_reasons", "generated_tokens"):
            assert metrics[key] == wholes[key], key
        cards = [(folder / "README.md").read_text() for folder in (out, Path(whole.out))]
        assert _unmarked(cards[0], str(out)) == _unmarked(cards[1], whole.out)
        computed = _computed(job)
        again = replace(job, retry_errors=False).run()
        assert again.exit_code == result.exit_code and "complete already" in again.message
        assert _data(out) == _data(Path(whole.out)) and _computed(job) == computed
    assert killed >= len(stages)
    assert len(computed) == 150 * 4  # in the end each has an answer
    assert computed.total() - len(computed) <= killed * stages[0].max_num_seqs
    history = [line for entry in _manifest(out)["history"] for line in entry["changed"]]
    assert history == [
        "dataset.limit: 50 → 120", "dataset rows: 50 → 120", "sampling.n: 1 → 4",
        "dataset.limit: 120 → null", "dataset rows: 120 → 150",
        "output.retry_errors: 80 rows", "output.retry_errors: 80 rows",
    ]  # fmt: skip
    assert [entry["rows"] for entry in _manifest(out)["history"]] == [50, 120, 480, 520, 520]


def _not_built() -> FakeEngine:
    raise AssertionError("the engine was built")


def _unbuilt(job: FakeJob) -> JobResult:
    return execute_job(job.config(), replace(job.parts(), port=_not_built))


@pytest.fixture(scope="module")
def grown(tmp_path_factory: pytest.TempPathFactory) -> FakeJob:
    """A complete job of 2500 rows and two samples."""
    out = tmp_path_factory.mktemp("grown")
    job = FakeJob(str(out), rows=2500, rows_per_shard=1000, max_num_seqs=256)
    job.run()
    return job


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"samples": 1}, r"sampling\.n: 2 → 1 \(a job can have more samples later, not fewer: "),
        ({"limit": 2499}, r"would have 2,499 rows, .* up to number 2,500 are finished, .* not "),
        ({"rows": 2499}, r"2,500 rows → 2,499 rows; 1 row is gone, the first 2,000 are the same"),
        ({"rows": 2000}, r"2,500 rows → 2,000 rows; 500 rows are gone, the first 2,000 "),
        ({"changed": 2400}, r"2,500 rows → 2,500 rows; .* row 2400 \(id 'id2400'\)"),
        ({"rows": 9999, "changed": 0}, r"2,500 rows → 9,999 rows; .* row 0 \(id 'id0'\)"),
        ({"rows": 1500, "changed": 500}, r"2,500 rows → 1,500 rows; .* row 500 \(id 'id500'\)"),
        ({"prompt_token_ids": False}, r"output\.columns: .*\n.*column prompt_token_ids: list"),
    ],
)  # fmt: skip
def test_what_is_no_growth_is_refused(grown: FakeJob, change: dict[str, Any], message: str) -> None:
    before = _data(Path(grown.out)), _manifest(Path(grown.out))
    with pytest.raises(ConfigError, match=message):
        _unbuilt(replace(grown, **change))
    assert before == (_data(Path(grown.out)), _manifest(Path(grown.out)))
    assert "complete already" in _unbuilt(grown).message


def test_changed_rows_beyond_those_of_the_job_do_not_matter(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path), rows=100, limit=20, bad=False)
    job.run()
    assert "complete already" in _unbuilt(replace(job, changed=50)).message
    (entry,) = _manifest(tmp_path)["history"]
    assert entry["changed"] == ["dataset: other files with the same rows"]
    assert "complete already" in _unbuilt(replace(job, rows=30)).message
    with pytest.raises(ConfigError, match=r"finished row that differs is row 5 \(id 'id5'\) "):
        _unbuilt(replace(job, changed=5))


def test_a_changed_row_that_is_not_finished_lies_in_a_range(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path), rows=100, bad=False, fail_at_step=6)
    with pytest.raises(RuntimeError):
        job.run()
    with pytest.raises(ConfigError, match="the first row that differs is one of 0 to 99 "):
        _unbuilt(replace(job, changed=99))


def test_a_limit_that_was_too_high_can_be_lowered_to_what_is_done(tmp_path: Path) -> None:
    job = FakeJob(str(tmp_path / "out"), rows=1000, fail_at_step=9, log=str(tmp_path / "log"))
    with pytest.raises(RuntimeError):
        job.run()
    done = 1 + max(row["row_index"] for row in JobFolderReader(tmp_path / "out").rows())
    assert done < 100
    job = replace(job, fail_at_step=-1)
    with pytest.raises(ConfigError, match=f"use dataset.limit={done} or more, or another output"):
        _unbuilt(replace(job, limit=done - 1))
    replace(job, limit=done).run()
    whole = replace(job, rows=done, out=str(tmp_path / "whole"), log="")
    whole.run()
    assert _data(tmp_path / "out") == _data(tmp_path / "whole")
    assert _manifest(tmp_path / "out")["history"][-1]["changed"] == [
        f"dataset.limit: null → {done}", f"dataset rows: 1000 → {done}",
    ]  # fmt: skip


def test_attempts_that_begin_in_the_same_second_are_all_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "strftime", lambda form: "2026-01-01T00:00:00+0000")
    for samples in (1, 2, 3):
        FakeJob(str(tmp_path / "out"), rows=6, samples=samples).run()
    metrics = _metrics(tmp_path / "out")
    assert [attempt["rows"] for attempt in metrics["attempts"]] == [6, 6, 6]
    assert metrics["device_s"] == sum(attempt["device_s"] for attempt in metrics["attempts"])


def test_metrics_count_while_the_job_runs_and_after_a_kill(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file is what a kill leaves: it is written every SAVE_SECONDS, here with every step."""
    monkeypatch.setattr("batchgen.storage.metrics.job_metrics.SAVE_SECONDS", 0.0)
    seen: list[dict[str, Any]] = []

    class Watched(FakeEngine):
        def step(self) -> Any:
            finished = super().step()
            seen.append(_metrics(tmp_path))
            found = JobFolderReader(tmp_path).rows(["num_generated_tokens", "error"])
            rows = list(found)
            assert seen[-1]["rows"] == len(rows)
            tokens = sum(row["num_generated_tokens"] for row in rows)
            assert seen[-1]["generated_tokens"] == tokens
            assert seen[-1]["error_rows"] == sum(row["error"] is not None for row in rows)
            if self.stats.steps == 10:
                raise KeyboardInterrupt  # as sudden as a kill: nothing is saved on the way out
            return finished

    job = FakeJob(str(tmp_path), rows=60, rows_per_shard=7)
    for _ in range(2):
        parts = replace(job.parts(), port=lambda: Watched(job))
        with pytest.raises(KeyboardInterrupt):
            execute_job(job.config(), parts)
    assert {found["status"] for found in seen} == {"running"}
    assert seen[8]["in_flight"] > 0 and 0 < seen[8]["rows"] <= seen[10]["rows"] < seen[18]["rows"]
    assert [attempt["status"] for attempt in seen[-1]["attempts"]] == ["killed", "running"]


def _unmarked(card: str, folder: str) -> str:
    """The card without its folder, without the mark that makes its header like no other, and
    without what the rows took of the device."""
    card = re.sub(r"\n- Time of the device: .*", "", card)
    return re.sub(r"batchgen \([0-9a-f]{16}\)", "batchgen", card.replace(folder, ""))
