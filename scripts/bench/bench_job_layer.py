"""Measure what a job costs beside its engine: rows, grading, leases, pages, busy neighbours.

python scripts/bench/bench_job_layer.py job [--rows 200000] [--grade] [--report] [--rounds 3]
python scripts/bench/bench_job_layer.py grading [--integers 100000] [--math 4000]
python scripts/bench/bench_job_layer.py leases [--shards 1000] [--workers 64] [--folder FOLDER]
python scripts/bench/bench_job_layer.py view [--rows 2000000] [--folder FOLDER]
python scripts/bench/bench_job_layer.py neighbours --rounds 3 -- sampling.max_new_tokens=24
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch
from urllib.request import urlopen

import pyarrow.parquet as pq
from measuring import Mode, resident_mib, run_mode
from synthetic_job import InstantEngine, grade_job, integer_steps, null_job, write_job

from batchgen.config.job_config import StepConfig
from batchgen.config.workers_config import WorkersConfig
from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
from batchgen.grading.grade_rows import Grader
from batchgen.jobs.graded_job import scores_of
from batchgen.jobs.run_job import run_job
from batchgen.leases.lease_files import mark_name
from batchgen.leases.store_operations import Create
from batchgen.workers.worker import Worker

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


CALLS = {"Create": 4, "Overwrite": 2, "Read": 1, "Names": 1, "Same": 1}
"""Calls of the file system per operation: a made object is created, written, linked, unlinked."""


def add_lease_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--shards", type=int, default=1000)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument("--folder", type=Path, help="where to make a folder for it")


def run_leases(options: argparse.Namespace) -> list[Any]:
    """Time many simulated workers, each of which does nothing but take shards.

    Each worker is a thread with its own view of the folder, its own heartbeat and a null engine: a
    shard is done as soon as it is taken. They all run at once, so this is a job whose shards take
    no time, the worst case for leases.
    """
    shards, count = options.shards, options.workers
    taken: list[int] = []
    spent: list[float] = []

    def work(worker: Worker) -> None:
        worker.begin(set(), shards)
        while True:
            started = time.thread_time()
            task = worker.next_task(idle=True)
            if task.kind in ("shard", "backup"):
                if task.kind == "shard":
                    taken.append(task.shard)
                worker.store.do(Create(mark_name(task.shard, "done"), b"{}"))
                worker.has_completed(task.shard)
            spent.append(time.thread_time() - started)
            if task.kind == "over":
                return
            if task.kind == "wait":
                time.sleep(0.05)

    joined, operations = Counter[str](), Counter[str]()
    with tempfile.TemporaryDirectory(prefix="bench_leases", dir=options.folder) as temporary:
        folder = Path(temporary)
        for name in ("data", "journal"):
            (folder / name).mkdir()
        config = WorkersConfig(heartbeat=15.0, stale_after=60.0)
        workers = [Worker(folder, config, 1) for _ in range(count)]
        for worker in workers:
            joined.update(worker.store.operations)
            worker.store.operations.clear()
        threads = [threading.Thread(target=work, args=(worker,)) for worker in workers]
        started = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - started
        for worker in workers:
            operations.update(worker.store.operations)
            worker.end("complete")
    assert sorted(taken) == list(range(shards)), "a shard was taken twice, or never"
    calls = sum(CALLS[kind] * n for kind, n in operations.items())
    print(f"{shards} shards, {count} workers, {seconds:.1f} s in all")
    print(f"to join: {sum(joined.values()) / count:.1f} operations per worker")
    per_shard = {kind: round(n / shards, 2) for kind, n in sorted(operations.items())}
    print(f"operations per shard: {per_shard}")
    print(f"calls of the file system per shard: about {calls / shards:.1f}")
    cpu = sum(spent) / shards
    print(f"{cpu * 1e3:.2f} ms of CPU per shard: {cpu / 60:.4%} of a shard of one minute")
    return [{"seconds": seconds, "operations_per_shard": per_shard, "cpu_s_per_shard": cpu}]


RANDOM_ROWS = 100
_MOST_MIB = 100


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
    with tempfile.TemporaryDirectory() as temporary:
        folder = options.folder or Path(temporary, "out")
        began = time.perf_counter()
        if not folder.exists():
            write_job(folder, options.rows, 1, ids="shuffled")
            grade_job(folder, scored=False)
            files = [path for path in folder.rglob("*") if path.is_file()]
            size = sum(path.stat().st_size for path in files) / 2**30
            print(
                f"{options.rows:,} rows in {len(files):,} files of {size:.2f} GiB, written in "
                f"{time.perf_counter() - began:.0f} s"
            )
        command = [sys.executable, "-m", "batchgen", "view", str(folder)]
        began = time.perf_counter()
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
            try:
                assert process.stdout is not None
                url = process.stdout.readline().split(": ", 1)[1].split(" ")[0]
                print(f"the server is there after {time.perf_counter() - began:.2f} s")
                found, slow = _time_pages(folder, url, process.pid)
            finally:
                process.terminate()
        began = time.perf_counter()
        subprocess.run([sys.executable, "-m", "batchgen", "report", str(folder)], check=True)
        size = (folder / "report.html").stat().st_size / 2**20
        seconds = time.perf_counter() - began
        print(f"the report took {seconds:.0f} s, and has {size:.1f} MiB")
    if slow:
        raise SystemExit(1)
    return [*found, {"name": "report", "ms": seconds * 1e3}]


def _time_pages(folder: Path, url: str, pid: int) -> tuple[list[Any], bool]:
    """Ask for pages of all kinds; returns their times, and whether a limit was passed."""
    found: list[Any] = []

    def timed(name: str, targets: list[str]) -> float:
        """The median of some pages, in milliseconds."""
        times = sorted(_get_ms(url + target) for target in targets)
        line = f"{name:<34}{median(times):>8.1f} ms"
        line += f"  (slowest of {len(times)}: {times[-1]:.1f})" if len(times) > 1 else ""
        print(f"{line:<72}{resident_mib(pid):>6.0f} MiB")
        found.append({"name": name, "ms": median(times), "slowest_ms": times[-1]})
        return median(times)

    shards = sorted((folder / "data").iterdir())
    rows = sum(pq.read_metadata(shard).num_rows for shard in shards)
    draw = random.Random(0)
    first = timed("first page", ["rows"])
    start = resident_mib(pid)
    some = [draw.randrange(rows) for _ in range(RANDOM_ROWS)]
    one = timed("random rows", [f"row?n={n}" for n in some])
    timed("their tokens", [f"row?n={n}&tokens=yes" for n in some])
    timed("random pages of rows", [f"rows?from={n}" for n in some])
    timed("rows with wrong answers", [f"rows?mark=wrong&from={n}" for n in some[:20]])
    timed("rows with errors (one in 1,000)", [f"rows?reason=error&from={n}" for n in some[:5]])
    timed("a text, 2 s of search", [f"rows?text=no+such+text&from={n}" for n in some[:5]])
    timed("overview", [""] * 5)
    timed("longest first, as far as 2 s go", ["rows?sort=longest"] * 2)
    timed("wrong answers with votes", ["rows?mark=wrong&show=votes"] * 5)
    grown = resident_mib(pid) - start
    last = pq.read_table(shards[-1], columns=["row_id"])["row_id"][-1].as_py()
    timed("the id of the last row", [f"find?id={last}"])
    timed("again", [f"find?id={last}"] * 3)
    print(f"memory grew by {grown:.0f} MiB, and by {resident_mib(pid) - start:.0f} with the ids")
    return found, first > 1000 or one > 100 or grown > _MOST_MIB


def _get_ms(url: str) -> float:
    """Read a page, and again as long as it goes on searching; returns milliseconds."""
    began = time.perf_counter()
    while True:
        with urlopen(url, timeout=60) as answer:
            if b'http-equiv="refresh"' not in answer.read():
                return 1000 * (time.perf_counter() - began)


WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
WAYS_TO_WAIT = {
    "spin (OpenMP's own)": {"GOMP_SPINCOUNT": "300000"},  # GCC's, if nothing is set
    "short spin (batchgen's)": {"GOMP_SPINCOUNT": "2000"},
    "sleep": {"OMP_WAIT_POLICY": "PASSIVE"},
}


def add_neighbour_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--loops", type=int, default=2, help="busy processes")
    parser.add_argument("overrides", nargs="+", help="of batchgen, after --")


def run_neighbours(options: argparse.Namespace) -> list[Any]:
    """Time a job on a CPU by how its threads wait for each other, quiet and beside busy processes.

    The job runs once per round for each way to wait. What the machine's other users do comes on
    top: the load before each job is shown.
    """
    rates: dict[tuple[str, int], list[float]] = {}
    for number in range(options.rounds):
        for loops in dict.fromkeys((0, options.loops)):
            for name, variables in WAYS_TO_WAIT.items():
                load = os.getloadavg()[0]
                with busy_loops(loops):
                    rate = tokens_per_s(options.overrides, variables)
                rates.setdefault((name, loops), []).append(rate)
                shown = f"round {number}, load {load:.1f}: {name}, {loops} loops"
                print(f"{shown}: {rate:.1f} tokens/s", flush=True)
    for (name, loops), values in rates.items():
        print(f"{name}, {loops} loops: {median(values):.1f} tokens/s")
    return [
        {"name": name, "loops": loops, "tokens_per_s": all_rates}
        for (name, loops), all_rates in rates.items()
    ]


def tokens_per_s(overrides: list[str], variables: dict[str, str]) -> float:
    """Run a job in a new process and folder."""
    environment = {k: v for k, v in os.environ.items() if k not in WAIT_VARIABLES} | variables
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "job"
        command = [sys.executable, "-m", "batchgen", *overrides, f"output.dir={out}"]
        subprocess.run(command, env=environment, check=True, capture_output=True)
        metrics = json.loads((out / "metrics.json").read_text())
    return float(metrics["tokens_per_s"])


@contextmanager
def busy_loops(count: int) -> Iterator[None]:
    loops = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


MODES = {
    "job": Mode(add_job_arguments, run_jobs),
    "grading": Mode(add_grading_arguments, run_grading),
    "leases": Mode(add_lease_arguments, run_leases),
    "view": Mode(add_view_arguments, run_view),
    "neighbours": Mode(add_neighbour_arguments, run_neighbours),
}


if __name__ == "__main__":
    run_mode(__doc__, MODES)
