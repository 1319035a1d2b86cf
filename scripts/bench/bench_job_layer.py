"""Measure what a job costs beside its engine: rows, grading, steps of a pipeline, pages.

python scripts/bench/bench_job_layer.py job [--rows 200000] [--grade] [--report] [--rounds 3]
python scripts/bench/bench_job_layer.py grading [--integers 100000] [--math 4000]
python scripts/bench/bench_job_layer.py steps [--rows 1000000] [--without-dedupe]
python scripts/bench/bench_job_layer.py until [--rows 100] [--valid 2] [--most 16]
python scripts/bench/bench_job_layer.py pipeline [--rows 500] [--batch 64] [--rounds 3]
python scripts/bench/bench_job_layer.py view [--rows 2000000] [--folder FOLDER]
python scripts/bench/bench_job_layer.py images [--rows 10000] [--width 640] [--height 480]
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import subprocess
import sys
import tempfile
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch
from urllib.request import urlopen

import pyarrow.parquet as pq
from image_rows import add_image_arguments, run_images
from interleaved_steps import add_pipeline_arguments, run_pipelines
from measuring import Mode, resident_mib, run_mode
from modes import until
from stepped_rows import StepClock, WatchedEngine, anonymous_mib, stepped_job, time_steps
from synthetic_job import InstantEngine, integer_steps, null_job

from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
from batchgen.grading.grade_rows import Grader
from batchgen.jobs.graded_job import scores_of
from batchgen.jobs.run_job import run_job
from batchgen.row_index.indexed_source import IndexedSource

sys.path.append(str(Path(__file__).parents[2] / "tests/batchgen"))
from written_job import grade_job, write_job

KINDS = ("plain", "grades", "report", "grades and report")
_MOST_MIB = 100
"""By how much the server's memory may grow."""


class Took(NamedTuple):
    """The seconds of the clock and of the processor that a job took, and of the clock those in
    which the rows were graded and scored when all were there."""

    seconds: float
    cpu: float
    grading: float


def run_null_job(folder: Path, rows: int, per_step: int, kind: str, *, shown: bool) -> Took:
    """Run one job in an empty folder, and check that its memory is flat."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    engine, before, grading = InstantEngine(per_step), resident_mib(), 0.0
    post = integer_steps("answer") if "grades" in kind else ()
    config, parts = null_job(folder, rows, engine, post, report="report" in kind)

    def timed_scores(*args: Any) -> Any:
        nonlocal grading
        began = time.perf_counter()
        try:
            return (yield from scores_of(*args))
        finally:
            grading += time.perf_counter() - began

    started, cpu = time.perf_counter(), sum(os.times()[:4])
    with patch("batchgen.jobs.run_job.scores_of", timed_scores):
        result = run_job(config, parts)
    took = Took(time.perf_counter() - started, sum(os.times()[:4]) - cpu, grading)
    assert result.exit_code == 0, result.message
    if not shown:
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
    neither tokenizing nor a model. The exit code is 1 if the resident memory grew by more than 10%
    after a tenth of the rows. With --grade and --report the job runs again in every round with
    integer grades, with report.html or with both. Printed is what these add to the plain job of the
    same round, by the clock and in CPU seconds of this process and of all that it started. Two jobs
    on a shared machine may differ by more than that, so printed is also what grading and scoring
    took within its own job. Each kind first runs with few rows, so that none counts the imports.
    """
    # Memory is read about every 1000 rows, and once at least in the first tenth of them.
    least = 10 * (1000 + options.per_step)
    if options.rows < least:
        raise SystemExit(f"--rows must be at least {least}, or there is no figure at 10% of them")
    kinds = [
        kind
        for kind in KINDS[1:]
        if (options.grade or "grades" not in kind) and (options.report or "report" not in kind)
    ]
    found: dict[str, list[Took]] = {kind: [] for kind in ("plain", *kinds)}
    with tempfile.TemporaryDirectory(prefix="bench_job_layer") as temporary:
        folder = Path(temporary) / "job"
        for kind in kinds:
            run_null_job(folder, options.warm_up_rows, options.per_step, kind, shown=False)
        for _ in range(options.rounds):
            plain = run_null_job(folder, options.rows, options.per_step, "plain", shown=True)
            found["plain"].append(plain)
            for kind in kinds:
                took = run_null_job(folder, options.rows, options.per_step, kind, shown=False)
                own = took.grading / (took.seconds - took.grading)
                added = Took(took.seconds / plain.seconds - 1, took.cpu / plain.cpu - 1, own)
                found[kind].append(added)
                print(
                    f"{kind}: {took.seconds:.1f} s ({added.seconds:+.1%}), {took.cpu:.1f} s CPU "
                    f"({added.cpu:+.1%}); grading took {took.grading:.2f} s, {own:.1%} of the rest",
                    flush=True,
                )
    for kind in kinds:
        clock, cpu, own = (median(values) for values in zip(*found[kind], strict=True))
        print(
            f"{kind} add {clock:.1%}, and {cpu:.1%} of CPU; grading takes {own:.1%} of the "
            f"rest of its job (medians of {options.rounds})"
        )
    return [{kind: [took._asdict() for took in all_took]} for kind, all_took in found.items()]


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
    """Return what these processes and this one have spent so far."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += sum(map(int, fields[11:13]))
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
    integers = [(f"{i % 999}", f"{i % 1000}") for i in range(options.integers)]
    mathematics = [
        (target.replace("N", str(number)), answer.replace("N", str(number)))
        for number, (target, answer) in enumerate(islice(cycle(MATHEMATICS), options.math), 2)
    ]
    found = []
    for name, grade, pairs in (
        ("integers", Grade(method="integer"), integers),
        ("mathematics", Grade(method="math"), mathematics),
    ):
        rows = ((rf"{FILLER}So \boxed{{{said}}}.", {"target": target}) for target, said in pairs)
        count = len(pairs)
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


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--folder", type=Path, help="the job; written there if it is not there")


def run_view(options: argparse.Namespace) -> list[Any]:
    """Time the pages of `batchgen view` as a browser waits for them, and `batchgen report`.

    A graded job with ids in no order is written (about 0.7 GB for 2 million rows, two minutes).
    Beside the milliseconds stands the resident memory of the server. The exit code is 1 if the
    first page takes over a second, the median of random rows over 100 ms, or the memory grows by
    more than 100 MiB from the first page on, apart from the hashes of ids (4 bytes for each row).
    """
    program = [sys.executable, "-m", "batchgen"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "out")
        if not folder.exists():
            write_job(folder, options.rows, 1, ids="shuffled")
            grade_job(folder, scored=False)
        began = time.perf_counter()
        with subprocess.Popen(
            [*program, "view", str(folder)], stdout=subprocess.PIPE, text=True
        ) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split(": ", 1)[1].split(" ")[0]
                print(f"the server is there after {time.perf_counter() - began:.2f} s")
                found, slow = _time_pages(folder, url, process.pid)
            finally:
                process.terminate()
        began = time.perf_counter()
        subprocess.run([*program, "report", str(folder)], check=True)
        seconds = time.perf_counter() - began
        size = (folder / "report.html").stat().st_size / 2**20
        print(f"the report took {seconds:.0f} s, and has {size:.1f} MiB")
    if slow:
        raise SystemExit(1)
    return [*found, {"name": "report", "ms": seconds * 1e3}]


def _time_pages(folder: Path, url: str, pid: int) -> tuple[list[Any], bool]:
    """Ask for pages of all kinds; returns their times, and whether a limit was passed."""
    shards = sorted((folder / "data").iterdir())
    rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
    last = pq.read_table(shards[-1], columns=["row_id"])["row_id"][-1].as_py()
    draw = random.Random(0)
    some = [draw.randrange(rows) for _ in range(100)]
    pages = {
        "first page": ["rows"],
        "random rows": [f"row?n={n}" for n in some],
        "their tokens": [f"row?n={n}&tokens=yes" for n in some],
        "random pages of rows": [f"rows?from={n}" for n in some],
        "rows with wrong answers": [f"rows?mark=wrong&from={n}" for n in some[:20]],
        "rows with errors (one in 1,000)": [f"rows?reason=error&from={n}" for n in some[:5]],
        "a text, 2 s of search": [f"rows?text=no+such+text&from={n}" for n in some[:5]],
        "overview": [""] * 5,
        "longest first, as far as 2 s go": ["rows?sort=longest"] * 2,
        "wrong answers with votes": ["rows?mark=wrong&show=votes"] * 5,
        "the id of the last row": [f"find?id={last}"],
        "again": [f"find?id={last}"] * 3,
    }
    found: dict[str, dict[str, Any]] = {}
    for name, targets in pages.items():
        times = sorted(_get_ms(url + target) for target in targets)
        line = f"{name:<34}{median(times):>8.1f} ms"
        line += f"  (slowest of {len(times)}: {times[-1]:.1f})" if len(times) > 1 else ""
        mib = resident_mib(pid)
        print(f"{line:<72}{mib:>6.0f} MiB")
        found[name] = {"name": name, "ms": median(times), "slowest_ms": times[-1], "mib": mib}
    start = found["first page"]["mib"]
    grown, ids = (found[name]["mib"] - start for name in ("wrong answers with votes", "again"))
    print(f"memory grew by {grown:.0f} MiB, and by {ids:.0f} with the ids")
    slow = found["first page"]["ms"] > 1000 or found["random rows"]["ms"] > 100
    return list(found.values()), slow or grown > _MOST_MIB


def _get_ms(url: str) -> float:
    """Read a page, and again as long as it goes on searching; returns milliseconds."""
    began = time.perf_counter()
    while True:
        with urlopen(url, timeout=60) as answer:
            if b'http-equiv="refresh"' not in answer.read():
                return 1000 * (time.perf_counter() - began)


def add_steps_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--without-dedupe", action="store_true", help="leave out both kinds of it")


def run_steps(options: argparse.Namespace) -> list[Any]:
    """Time the steps of `rows` over rows of 1 kB, and a job of what they leave.

    A tenth of the rows fails the filter, a tenth are copies of others and a tenth nearly so. Times
    are of the processor, which neighbours disturb less: of each step for one of its rows, of the
    pass with reading and the index for a row of the data set, and of the job, whose engine costs
    nothing. Memory is without the pages of mapped files.
    """
    with tempfile.TemporaryDirectory(prefix="bench_job_layer") as temporary:
        engine = WatchedEngine(32)
        deduped = not options.without_dedupe
        config, parts = stepped_job(Path(temporary), options.rows, engine, dedupe=deduped)
        source = parts.source
        assert isinstance(source, IndexedSource)
        clocks, took = list[StepClock](), list[float]()
        start, open_index = source.chain.start, source.open_index

        def timed_start(tokenizer: Any = None) -> Any:
            running = start(tokenizer)
            clocks.extend(time_steps(running))
            return running

        def timed_open(*given: Any, **more: Any) -> None:
            began = time.process_time()
            open_index(*given, **more)
            took.extend([time.process_time() - began, anonymous_mib()])

        before, began = anonymous_mib(), time.process_time()
        with (
            patch.object(source.chain, "start", timed_start),
            patch.object(source, "open_index", timed_open),
        ):
            result = run_job(config, parts)
        facts, seconds = source.facts, time.process_time() - began - took[0]
        assert result.exit_code == 0 and facts is not None
        found = {"rows": options.rows, "pass_us": took[0] / options.rows * 1e6}
        found |= {"before_mib": before, "pass_mib": took[1], "peak_mib": engine.peak}
        found["job_us"] = seconds / facts.rows * 1e6
        print(facts.funnel)
        for clock, step in zip(clocks, facts.steps, strict=True):
            found[step.name] = clock.seconds / step.rows_in * 1e6
            held = "" if clock.held is None else f", {clock.held() / step.rows_out:.0f} bytes a row"
            print(f"{step.name}: {found[step.name]:.1f} us a row{held}")
        print("pass: {pass_us:.0f} us a row of the data set; job: {job_us:.0f} us".format(**found))
        print(
            "MiB: {before_mib:.0f}, {pass_mib:.0f} behind the pass, {peak_mib:.0f}".format(**found)
        )
    return [found]


MODES = {
    "job": Mode(add_job_arguments, run_jobs),
    "grading": Mode(add_grading_arguments, run_grading),
    "steps": Mode(add_steps_arguments, run_steps),
    "until": Mode(until.add_arguments, until.run),
    "images": Mode(add_image_arguments, run_images),
    "pipeline": Mode(add_pipeline_arguments, run_pipelines),
    "view": Mode(add_view_arguments, run_view),
}


if __name__ == "__main__":
    run_mode(__doc__, MODES)
