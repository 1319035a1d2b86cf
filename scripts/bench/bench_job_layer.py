"""Measure what a job costs beside its engine: rows, grading, pages.

python scripts/bench/bench_job_layer.py job [--rows 200000] [--grade] [--report] [--rounds 3]
python scripts/bench/bench_job_layer.py grading [--integers 100000] [--math 4000]
python scripts/bench/bench_job_layer.py view [--rows 2000000] [--folder FOLDER]
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

from measuring import Mode, resident_mib, run_mode
from modes import view
from synthetic_job import InstantEngine, integer_steps, null_job

from batchgen.config.job_config import StepConfig
from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
from batchgen.grading.grade_rows import Grader
from batchgen.jobs.graded_job import scores_of
from batchgen.jobs.run_job import run_job

GRADES = integer_steps("answer")


class Took(NamedTuple):
    """The seconds of the clock and of the processor that a job took, and of the clock those in
    which the rows were graded and scored when all were there."""

    seconds: float
    cpu: float
    grading: float


def run_null_job(
    folder: Path,
    rows: int,
    per_step: int,
    post: tuple[StepConfig, ...] = (),
    *,
    report: bool = False,
    quiet: bool = False,
) -> Took:
    """Run one job in an empty folder."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    engine = InstantEngine(per_step)
    config, parts = null_job(folder, rows, engine, post, report=report)
    before = resident_mib()
    grading = 0.0

    def timed_scores(*args: Any) -> Any:
        nonlocal grading
        began = time.perf_counter()
        try:
            return scores_of(*args)
        finally:
            grading += time.perf_counter() - began

    started, cpu = time.perf_counter(), sum(os.times()[:4])
    with patch("batchgen.jobs.run_job.scores_of", timed_scores):
        result = run_job(config, parts)
    took = Took(time.perf_counter() - started, sum(os.times()[:4]) - cpu, grading)
    assert result.exit_code == 0, result.message
    if quiet:
        return took
    early = max(mib for done, mib in engine.resident if done <= rows / 10)
    peak = max(mib for _, mib in engine.resident)
    print(f"{rows} rows, {per_step} finished per step, {took.seconds:.1f} s, {took.cpu:.1f} s CPU")
    print(f"peak RSS: {early:.0f} MiB at 10%, {peak:.0f} MiB at 100% ({before:.0f} MiB before)")
    print(f"the job layer costs {took.seconds / rows * 1e6:.0f} us per row")
    if peak > 1.1 * early:
        raise SystemExit("memory is not flat: more than 10% above that of the first tenth")
    return took


def add_job_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--per-step", type=int, default=32, help="rows that finish in a step")
    parser.add_argument("--grade", action="store_true", help="time integer grades, too")
    parser.add_argument("--report", action="store_true", help="time report.html, too")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--warm-up-rows", type=int, default=5000)


def run_jobs(options: argparse.Namespace) -> list[Any]:
    """Time `run_job` with an engine that costs nothing, and watch its memory.

    Rows are streamed from JSONL, and prompts are ready-made token ids, so the figures contain
    neither tokenizing nor a model: reading, requests, journal and shards remain. The exit code is 1
    if the resident memory grew by more than 10% after a tenth of the rows. With --grade and
    --report the job runs again in every round with integer grades, with report.html or with both.
    Printed is what these add to the plain job of the same round, by the clock and in CPU seconds of
    this process and of all that it started. On a machine that is shared two jobs may differ by more
    than that, so printed is also what grading and scoring took within its own job. Before the
    rounds each kind runs once with few rows, so that none of them counts the imports.
    """
    # Memory is read about every 1000 rows, and once at least in the first tenth of them.
    least = 10 * (1000 + options.per_step)
    if options.rows < least:
        raise SystemExit(f"--rows must be at least {least}, or there is no figure at 10% of them")
    more = {"grades": (GRADES, False), "report": ((), True), "grades and report": (GRADES, True)}
    kinds = [
        name
        for name, (post, report) in more.items()
        if (options.grade or not post) and (options.report or not report)
    ]
    found: dict[str, list[Took]] = {name: [] for name in ("plain", *kinds)}
    with tempfile.TemporaryDirectory(prefix="bench_job_layer") as temporary:
        folder = Path(temporary) / "job"

        def run_kind(name: str, rows: int) -> Took:
            post, report = more[name]
            return run_null_job(folder, rows, options.per_step, post, report=report, quiet=True)

        for name in kinds:
            run_kind(name, options.warm_up_rows)
        for _ in range(options.rounds):
            plain = run_null_job(folder, options.rows, options.per_step)
            found["plain"].append(plain)
            for name in kinds:
                took = run_kind(name, options.rows)
                own = took.grading / (took.seconds - took.grading)
                added = Took(took.seconds / plain.seconds - 1, took.cpu / plain.cpu - 1, own)
                found[name].append(added)
                print(
                    f"{name}: {took.seconds:.1f} s ({added.seconds:+.1%}), "
                    f"{took.cpu:.1f} s CPU ({added.cpu:+.1%}); grading took {took.grading:.2f} s, "
                    f"{own:.1%} of the rest of this job",
                    flush=True,
                )
    for name in kinds:
        clock, cpu, own = (median(values) for values in zip(*found[name], strict=True))
        print(
            f"{name} add {clock:.1%}, and {cpu:.1%} of CPU; grading takes {own:.1%} of the "
            f"rest of its job (medians of {options.rounds})"
        )
    return [{name: [took._asdict() for took in all_took]} for name, all_took in found.items()]


FILLER = "the next step follows from the one before it. " * 24
MATHEMATICS = [
    (r"\frac{1}{N}", r"\frac{1}{N}"), (r"\frac{1}{N}", "1/N"), ("N", "N1"),
    (r"\sqrt{4 \cdot N}", r"2\sqrt{N}"), (r"N\pi", "9.4"), ("x^2+N", "N+x^2"),
    (r"\left(N,\frac{\pi}{2}\right)", r"(N, \pi/2)"), ("6-Ni", "6-Ni"), (r"\frac{N}{4}", "N/4"),
    (r"\{1,N\}", r"\{N,1\}"), ("p-Nq", "q-Np"), (r"\text{Evelyn}", "Evelyn"),
    ("[-2,N]", "[-2,N)"), (r"\frac{\sqrt{N}}{2}", r"\sqrt{N}/2"), ("N", "N"), (r"N^\circ", "N"),
]  # fmt: skip
"""Targets and answers, in which N is the row's number."""


def processor_seconds(pids: list[int]) -> float:
    """What these processes and this one have spent so far."""
    ticks = 0
    for pid in pids:
        with open(f"/proc/{pid}/stat") as file:
            ticks += sum(map(int, file.read().rpartition(")")[2].split()[11:13]))
    return time.process_time() + ticks / os.sysconf("SC_CLK_TCK")


def add_grading_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--integers", type=int, default=100_000)
    parser.add_argument("--math", type=int, default=4000)


def run_grading(options: argparse.Namespace) -> list[Any]:
    """Time the grading of whole numbers and of mathematics, at the end of texts of about 1,100
    characters.

    Printed are the microseconds of one answer and the answers of a second, by the clock and by the
    time that processors spent, which other programs on the machine disturb less. The mathematics is
    a mix of equal texts, equal values and wrong answers, with numbers that no other row has, so
    that nothing is remembered.
    """
    integers = ((f"{i % 999}", f"{i % 1000}") for i in range(options.integers))
    mathematics = (
        (target.replace("N", str(number)), answer.replace("N", str(number)))
        for number, (target, answer) in enumerate(islice(cycle(MATHEMATICS), options.math), 2)
    )
    found = []
    for name, grade, pairs, count in (
        ("integers", Grade(method="integer"), integers, options.integers),
        ("mathematics", Grade(method="math"), mathematics, options.math),
    ):
        rows = (
            (rf"{FILLER}So \boxed{{{answer}}}.", {"target": target}) for target, answer in pairs
        )
        with Grader([Extract(), grade]) as grader:
            clock, spent = time.perf_counter(), processor_seconds(grader.pids)
            marks = [values["mark"] for values in grader.grade(rows)]
            clock = time.perf_counter() - clock
            spent = processor_seconds(grader.pids) - spent
        assert len(marks) == count and None not in marks
        print(
            f"{name}: {count} answers, {sum(marks) / count:.1%} right; by the clock "
            f"{clock / count * 1e6:.0f} µs each, {count / clock:.0f}/s; of processors "
            f"{spent / count * 1e6:.0f} µs each, {count / spent:.0f}/s on each"
        )
        found.append({"name": name, "answers": count, "seconds": clock, "cpu_seconds": spent})
    return found


MODES = {
    "job": Mode(add_job_arguments, run_jobs),
    "grading": Mode(add_grading_arguments, run_grading),
    "view": Mode(view.add_view_arguments, view.run_view),
}


if __name__ == "__main__":
    run_mode(__doc__, MODES)
