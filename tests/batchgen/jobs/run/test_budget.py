"""A budget stops a job cleanly, over attempts and workers, and a higher one goes on."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.groups.workers_config import BudgetConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.jobs.generation.spending import Used
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.util.errors import ConfigError
from tests.support.jobs.fake_job import FakeEngine, FakeJob
from tests.support.jobs.forked import fork_server
from tests.support.jobs.job_comparison import attempts, compare_outputs, finished_rows

ROWS = 60


def job(out: Path, **more: Any) -> FakeJob:
    return FakeJob(str(out), rows=ROWS, bad=False, **more)


def run(fake: FakeJob, **budget: float) -> JobResult:
    return execute_job(replace(fake.config(), budget=BudgetConfig(**budget)), fake.parts())


def used(out: Path) -> int:
    return sum(one["prompt_tokens"] + one["generated_tokens"] for one in attempts(out))


def test_a_job_goes_on_with_a_higher_budget(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    job(whole).run()
    total = used(whole)
    stops = []
    for tokens in range(200, total + 200, 200):
        result = run(job(out), tokens=tokens)
        if result.exit_code == 0:
            break
        assert result.exit_code == 4
        assert f"of {tokens:,} tokens. A higher budget.tokens continues" in result.message
        assert used(out) >= tokens
        stops.append(finished_rows(out))
        assert json.loads((out / "metrics.json").read_text())["status"] == "stopped"
        assert f"{stops[-1]:,} answers done" in result.message
    assert len(stops) > 2 and stops == sorted(set(stops))
    assert compare_outputs(whole, out) == 2 * ROWS
    # What was in flight is computed again, and not counted twice.
    assert used(out) == total


def test_a_spent_budget_loads_no_weights(tmp_path: Path) -> None:
    fake = job(tmp_path)
    assert run(fake, tokens=100).exit_code == 4
    rows = finished_rows(tmp_path)

    def no_engine() -> Any:
        raise AssertionError("the engine was built")

    config = replace(fake.config(), budget=BudgetConfig(tokens=100))
    assert execute_job(config, replace(fake.parts(), port=no_engine)).exit_code == 4
    assert finished_rows(tmp_path) == rows > 0


def test_other_jobs_share_a_budget(tmp_path: Path) -> None:
    fake = job(tmp_path)
    config = replace(fake.config(), budget=BudgetConfig(tokens=1000))
    result = execute_job(config, replace(fake.parts(), elsewhere=lambda: [attempt(990)]))
    assert result.exit_code == 4
    assert 10 <= used(tmp_path) < 500


@pytest.mark.parametrize(
    ("budget", "said"),
    [
        ({"minutes": 0.002}, "of 0.1 s. A higher budget.minutes"),
        ({"gpu_hours": 0.00003}, "of 3e-05 GPU hours. A higher budget.gpu_hours"),
        ({"price": 0.0003, "price_per_hour": 10}, "price 0.00 of 0.00. A higher budget.price"),
    ],
)
def test_time_and_price_are_limits(tmp_path: Path, budget: dict[str, float], said: str) -> None:
    result = run(job(tmp_path, step_s=0.02), **budget)
    assert result.exit_code == 4 and said in result.message
    assert json.loads((tmp_path / "metrics.json").read_text())["budget"]
    assert run(job(tmp_path)).exit_code == 0  # without a limit


class _Endless(FakeEngine):
    """An engine whose rows never end."""

    def step(self) -> list[RequestOutput]:
        self.stats.steps += 1
        time.sleep(0.01)
        return []


def test_a_budget_is_looked_at_after_each_step(tmp_path: Path) -> None:
    fake = job(tmp_path)
    config = replace(fake.config(), budget=BudgetConfig(minutes=0.005))
    result = execute_job(config, replace(fake.parts(), port=lambda: _Endless(fake)))
    assert result.exit_code == 4 and "0 answers done" in result.message


def attempt(tokens: int = 0, second: int = 0, wall_s: float = 0.0, **more: Any) -> dict[str, Any]:
    given = {"prompt_tokens": tokens, "generated_tokens": 0, "wall_s": wall_s, "host": "here"}
    return {**given, "started": f"2026-01-01T00:00:{second:02}+0000", "pid": 1, **more}


def test_the_time_of_a_process_counts_once() -> None:
    beside = [attempt(1, 0, 10), attempt(2, 5, 10)]  # two jobs in one process
    assert Used.of(beside) == Used(3, 15.0, 15.0)
    other = attempt(4, 8, 4, pid=2, devices=2)
    assert Used.of([*beside, other]) == Used(7, 15.0, 23.0)
    later = attempt(0, 40, 2.5)
    assert Used.of([later, *beside]) == Used(3, 17.5, 17.5)


def test_a_budget_that_suffices_changes_nothing(tmp_path: Path) -> None:
    job(tmp_path / "whole").run()
    assert run(job(tmp_path / "out"), tokens=1e6, minutes=100.0).exit_code == 0
    assert compare_outputs(tmp_path / "whole", tmp_path / "out") == 2 * ROWS


def _work(fake: FakeJob, tokens: float) -> None:
    import os

    from batchgen.jobs.generation import spending
    from batchgen.storage.metrics import job_metrics

    job_metrics.SAVE_SECONDS = 0.05
    spending.SAVE_SECONDS = 0.05  # type: ignore[attr-defined]
    os._exit(run(fake, tokens=tokens).exit_code)


@pytest.mark.slow
def test_two_workers_share_one_budget(tmp_path: Path) -> None:
    whole, out = tmp_path / "whole", tmp_path / "out"
    job(whole, rows_per_shard=4).run()
    total = used(whole)
    fake = job(out, rows_per_shard=4, step_s=0.02)
    context = fork_server()
    workers = [context.Process(target=_work, args=(fake, total / 2)) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(60)
    assert [worker.exitcode for worker in workers] == [4, 4]
    assert total / 2 <= used(out) < 0.9 * total
    assert run(job(out, rows_per_shard=4)).exit_code == 0
    assert compare_outputs(whole, out) == 2 * ROWS


def test_wrong_budgets_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"budget\.price=5 needs the price of one device"):
        BudgetConfig(price=5)
    with pytest.raises(ConfigError, match=r"budget\.minutes must be null or above 0, got 0"):
        BudgetConfig(minutes=0)
