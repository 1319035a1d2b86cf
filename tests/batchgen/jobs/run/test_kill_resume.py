"""`kill -9` at random moments: nothing lost, nothing twice, nothing computed again.

tests/support/kills does the same to any command, such as a job with a real model.
"""

import os
import random
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.forked import fork_server
from tests.support.jobs.job_comparison import attempts, compare_outputs, finished_rows

KILLS = 16


def _run(job: FakeJob) -> None:
    os._exit(job.run().exit_code)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("rows_per_shard", "seed"),
    [(3, 1), *(pytest.param(*case, marks=pytest.mark.slow) for case in ((16, 0), (1000, 2)))],
)
def test_killed_again_and_again(tmp_path: Path, rows_per_shard: int, seed: int) -> None:
    rng = random.Random(seed)
    whole = FakeJob(str(tmp_path / "whole"), rows=240, rows_per_shard=rows_per_shard)
    assert whole.run().exit_code == 3
    out, log = tmp_path / "killed", tmp_path / "log"
    job = replace(whole, out=str(out), log=str(log))
    context = fork_server()
    kills, safe = 0, [0]
    while True:
        # Slow enough not to be complete before it was killed many times.
        pace = 0.02 if kills < KILLS else 0.0
        process = context.Process(target=_run, args=(replace(job, step_s=pace),))
        process.start()
        if kills < KILLS:
            _wait_for_attempt(out, len(safe))
            if kills % 3 == 0:  # however slow the machine is, some attempts come to something
                _wait_for_rows(log, 12)
            time.sleep(rng.uniform(0, 0.12))
            process.kill()
        process.join(60)
        # Every attempt starts with all that was there when the one before it was killed.
        resumed = [attempt["rows_resumed"] for attempt in attempts(out)]
        assert resumed == safe
        if process.exitcode != -signal.SIGKILL:
            break
        kills += 1
        safe.append(finished_rows(out))
    assert process.exitcode == 3 and kills > KILLS // 2
    assert compare_outputs(tmp_path / "whole", out) == 480
    for path in (tmp_path / "whole/data").iterdir():
        assert path.read_bytes() == (out / "data" / path.name).read_bytes()
    computed = log.read_text().split()
    expected = 480 - 2 * sum(i % 13 == 0 or i % 17 == 0 for i in range(240))
    assert len(set(computed)) == expected
    # Between the end of a request and its way into the journal lies less than a step.
    assert len(computed) - expected <= kills * job.max_num_seqs
    assert safe == sorted(safe) and len(set(safe)) > 5


def _wait_for_attempt(out: Path, number: int) -> None:
    deadline = time.monotonic() + 60
    while len(attempts(out)) < number and time.monotonic() < deadline:
        time.sleep(0.002)


def _wait_for_rows(log: Path, number: int) -> None:
    """Wait until that many more requests have ended."""
    deadline = time.monotonic() + 60
    before = _size(log)
    while _size(log) < before + number and time.monotonic() < deadline:
        time.sleep(0.002)


def _size(log: Path) -> int:
    return len(log.read_text().split()) if log.exists() else 0
