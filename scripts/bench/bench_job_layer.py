"""Measure what the job layer costs: the work of a job besides its engine's, such as reading rows,
writing shards and grading. The engine here computes nothing.

python scripts/bench/bench_job_layer.py job [--rows 200000] [--grade] [--report] [--rounds 3]
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from measuring import Mode, run_mode
from synthetic_job import InstantEngine, instant_job, integer_steps, must_be_flat

from batchgen.jobs.run.graded_job import grade_and_score
from batchgen.jobs.run.run_job import execute_job

KINDS = ("plain", "grades", "report", "grades and report")


class Took(NamedTuple):
    """How long a job took, in seconds."""

    seconds: float  # by the clock
    cpu: float  # of the processor, child processes included
    grading: float  # by the clock, for grading and scoring after the last row


def run_null_job(folder: Path, rows: int, per_step: int, kind: str, *, shown: bool) -> Took:
    """Run one job of a kind of `KINDS` in an empty folder, and return its times. `per_step` rows
    end in each step. With `shown`, print the times and check that memory stayed flat."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    engine, grading, path = InstantEngine(per_step), 0.0, folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(rows):
            row = {"question": f"What is {i} plus {i}? " * 4, "answer": str(2 * i)}
            file.write(json.dumps(row) + "\n")
    values = {
        "dataset": {"choice": "files", "path": str(path), "streaming": True},
        "prompt": {"choice": "text", "text": "{{ question }}"},
        "output.columns": ["logprobs"],
        "output.report": "report" in kind,
    }
    config, parts = instant_job(folder, engine, values)
    config = replace(config, post=integer_steps("answer") if "grades" in kind else ())

    def timed_scores(*args: Any) -> Any:
        nonlocal grading
        began = time.perf_counter()
        try:
            return (yield from grade_and_score(*args))
        finally:
            grading += time.perf_counter() - began

    started, cpu = time.perf_counter(), sum(os.times()[:4])
    with patch("batchgen.jobs.run.run_job.grade_and_score", timed_scores):
        result = execute_job(config, parts)
    took = Took(time.perf_counter() - started, sum(os.times()[:4]) - cpu, grading)
    assert result.exit_code == 0, result.message
    if not shown:
        return took
    print(f"{rows} rows, {per_step} finished per step, {took.seconds:.1f} s, {took.cpu:.1f} s CPU")
    print(f"the job layer costs {took.seconds / rows * 1e6:.0f} us per row")
    must_be_flat(*engine.check_memory(rows, 10))
    return took


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--per-step", type=int, default=32, help="rows that finish in a step")
    parser.add_argument("--grade", action="store_true", help="time integer grades, too")
    parser.add_argument("--report", action="store_true", help="time report.html, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up-rows", type=int, default=5000)


def run_jobs(options: argparse.Namespace) -> list[Any]:
    """Time `execute_job` with an engine that costs nothing, and watch its memory.

    Rows are streamed from JSONL, and prompts are ready-made token ids, so the figures contain
    neither tokenizing nor a model. The exit code is 1 if the resident memory grew by more than 10%
    after a tenth of the rows. With --grade and --report the job runs again in every round with
    integer grades, with report.html or with both. The output is what these add to the plain job of
    the same round, by the clock and in CPU seconds of this process and of its children. Two jobs on
    a shared machine may differ by more than that, so the output also says what grading and scoring
    took within their own job. Each kind first runs with few rows, so that no figure has imports.
    """
    # Memory is read about every 1000 rows, so that many must be in the first tenth.
    least = 10 * (1000 + options.per_step)
    if options.rows < least:
        raise SystemExit(f"--rows must be at least {least}, or there is no figure at 10% of them")
    kinds = [
        kind
        for kind in KINDS[1:]
        if (options.grade or "grades" not in kind) and (options.report or "report" not in kind)
    ]
    # The times of plain jobs; of the other kinds, what they add to them as fractions.
    results: dict[str, list[Took]] = {kind: [] for kind in ("plain", *kinds)}
    with tempfile.TemporaryDirectory(prefix="bench_job_layer") as temporary:
        folder = Path(temporary) / "job"
        for kind in kinds:
            run_null_job(folder, options.warm_up_rows, options.per_step, kind, shown=False)
        for _ in range(options.rounds):
            plain = run_null_job(folder, options.rows, options.per_step, "plain", shown=True)
            results["plain"].append(plain)
            for kind in kinds:
                took = run_null_job(folder, options.rows, options.per_step, kind, shown=False)
                own = took.grading / (took.seconds - took.grading)  # in its own job
                added = Took(took.seconds / plain.seconds - 1, took.cpu / plain.cpu - 1, own)
                results[kind].append(added)
                print(
                    f"{kind}: {took.seconds:.1f} s ({added.seconds:+.1%}), {took.cpu:.1f} s CPU "
                    f"({added.cpu:+.1%}); grading took {took.grading:.2f} s, {own:.1%} of the rest",
                    flush=True,
                )
    for kind in kinds:
        clock, cpu, own = (median(values) for values in zip(*results[kind], strict=True))
        print(
            f"{kind} add {clock:.1%}, and {cpu:.1%} of CPU; grading takes {own:.1%} of the "
            f"rest of its job (medians of {options.rounds})"
        )
    return [{kind: [took._asdict() for took in all_took]} for kind, all_took in results.items()]


MODES = {"job": Mode(add_job_arguments, run_jobs)}


if __name__ == "__main__":
    run_mode(__doc__, MODES)
