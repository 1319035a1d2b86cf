"""`kill -9` at random moments over jobs that share an engine, one of which follows the other.

tests/support/kills with --pipeline does the same to a pipeline with a real model.
"""

from __future__ import annotations

import os
import random
import time
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.inputs.upstream.followed_job import Promise
from batchgen.jobs.run.checked_rows import job_manifest, output_schema
from batchgen.jobs.run.run_job import execute_job
from batchgen.jobs.run.run_jobs import SharingJob, run_jobs
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.following_job import STEPS, FollowingJob, written
from tests.support.jobs.forked import fork_server
from tests.support.jobs.until_job import UntilJob

ENGINE_ROWS = 8
KEYS = {"where": "num_generated_tokens > 3"}


def draft_of(folder: Path, rows: int, width: float | None) -> FakeJob:
    out = str(folder / "draft")
    if width is None:
        return FakeJob(out, rows=rows, rows_per_shard=8, bad=False)
    where = "num_generated_tokens % 2 == 0"
    return UntilJob(out, rows=rows, rows_per_shard=8, bad=False, where=where, width=width, most=5)


def judge_of(folder: Path, *, follow: bool) -> FollowingJob:
    keys = {**KEYS, "follow": follow}
    return FollowingJob(str(folder / "draft"), str(folder / "judge"), keys, STEPS)


def _run(folder: Path, rows: int, width: float | None, step_s: float) -> None:
    draft, judge = draft_of(folder, rows, width), judge_of(folder, follow=True)
    workers = WorkersConfig(heartbeat=0.2, stale_after=1.5)
    config = replace(draft.config(), workers=workers)
    parts = draft.parts()
    schema = output_schema(config, parts)
    promise = Promise.of(config, job_manifest(config, parts, schema), schema.arrow)
    engine = FakeEngine(replace(draft, log=str(folder / "log"), step_s=step_s))
    follower = replace(judge.config(), workers=workers)
    results = run_jobs(
        {
            "draft": SharingJob(config, parts),
            "judge": SharingJob(follower, judge.parts({judge.path: promise})),
        },
        lambda: engine,
    )
    os._exit(max(result.exit_code for result in results.values()))


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("workers", "kills", "rows", "width"),
    [
        (1, 4, 80, None),
        pytest.param(3, 25, 800, None, marks=pytest.mark.slow),
        pytest.param(2, 12, 100, 0.6, marks=pytest.mark.slow),
    ],
)
def test_killed_jobs_write_what_undisturbed_ones_write(
    tmp_path: Path, workers: int, kills: int, rows: int, width: float | None
) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    first, second = draft_of(whole, rows, width), judge_of(whole, follow=False)
    execute_job(first.config(), first.parts())
    execute_job(second.config(), second.parts())
    rng, context, done = random.Random(kills), fork_server(), 0
    out.mkdir()

    def start(step_s: float) -> Any:
        process = context.Process(target=_run, args=(out, rows, width, step_s))
        process.start()
        return process

    team = [start(0.02) for _ in range(workers)]
    while done < kills:
        # However slow the machine is, some attempts come to something.
        before = _finished(out)
        for _ in range(500 if done % 2 else 0):
            if _finished(out) >= before + 8 or any(p.exitcode == 0 for p in team):
                break
            time.sleep(0.02)
        time.sleep(rng.uniform(0, 0.3))
        if any(process.exitcode == 0 for process in team):
            break
        at = rng.randrange(workers)
        team[at].kill()
        team[at].join()
        done += 1
        team[at] = start(0.02 if done < kills else 0.0)
    for process in team:
        process.join(120)
        assert process.exitcode == 0
    assert done > kills // 2
    for name in ("draft", "judge"):
        assert written(out / name) == written(whole / name) != {}
    lines = (out / "log").read_text().splitlines()
    computed = Counter(zip(lines[::2], lines[1::2], strict=True))
    answers = sum(len(content) for content in (_good(whole / "draft"), _good(whole / "judge")))
    # A row that ends by an interval may have samples under way, which then are not its own.
    assert len(computed) == answers if width is None else len(computed) >= answers
    twice = computed.total() - len(computed)
    # What a step finished just before a kill; and rows that two workers compute at the end.
    assert twice <= (done + 4 * (workers - 1)) * ENGINE_ROWS


def _finished(out: Path) -> int:
    log = out / "log"
    return len(log.read_text().splitlines()) // 2 if log.exists() else 0


def _good(job: Path) -> list[object]:
    """The answers of a job that an engine has computed."""
    import pyarrow.parquet as pq

    tables = [pq.read_table(path, columns=["error"]) for path in (job / "data").iterdir()]
    return [row for table in tables for row in table.to_pylist() if row["error"] is None]
