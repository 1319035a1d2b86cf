"""Kill grading many times, and compare the grades with those of grading that was left alone.

    python scripts/check/check_grading_kills.py --work /tmp/check [--kills 20] [--rows 6000]

Two things are killed (SIGKILL) at random moments at which some shards are graded, and others not:
`batchgen grade` over a finished job of many small shards, and a job with an engine that computes
nothing, which grades its shards while it goes on. Both are done with steps that run in the process
itself (integers) and with such that run in processes of their own (regular expressions).

Then they are left alone. Every part of the grades must be equal, byte for byte, to that of an
undisturbed run; a part that was there at a kill must not be written again; and the data files must
be the same. At last other steps grade the job anew, which must change the grades and nothing else.
"""

from __future__ import annotations

import argparse
import hashlib
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Protocol

sys.path.append(str(Path(__file__).parents[1] / "bench"))

from bench_job_layer import InstantEngine, null_job
from synthetic_job import write_job

from batchgen.config.job_config import StepConfig
from batchgen.jobs.run_job import run_job
from batchgen.shards.shard_files import shard_files

ROWS_PER_SHARD = 20
PER_STEP = 8
EXTRACT = StepConfig(
    target="batchgen.grading.extract.Extract", options={"methods": ["last_number"]}
)
METHODS = ("integer", "regex")
OTHER = "exact"
"""The method of the steps that grade the job anew."""
_GONE = 300.0
"""After so many seconds without a graded shard the check gives up."""


class Process(Protocol):
    """What is killed."""

    @property
    def pid(self) -> int | None:
        """Its id."""

    def join(self, timeout: float | None = None) -> int | None:
        """Wait for its end; returns its exit code, None if it runs still."""


class Command:
    """A command line in a process."""

    def __init__(self, command: list[str]) -> None:
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL)

    @property
    def pid(self) -> int:
        return self._process.pid

    def join(self, timeout: float | None = None) -> int | None:
        try:
            return self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            return None


class Fork:
    """A call in a fork of a process that has imported everything."""

    _context = multiprocessing.get_context("forkserver")
    _context.set_forkserver_preload(["check_grading_kills"])

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        self._process = self._context.Process(target=target, args=args)
        self._process.start()

    @property
    def pid(self) -> int | None:
        return self._process.pid

    def join(self, timeout: float | None = None) -> int | None:
        self._process.join(timeout)
        return self._process.exitcode


def grade_command(out: Path, method: str) -> Process:
    """A process of `batchgen grade`."""
    grade = f"{{_target_: batchgen.grading.grade.Grade, method: {method}, target: answer_is}}"
    extract = f"{{_target_: {EXTRACT.target}, methods: [last_number]}}"
    verb = [sys.executable, "-m", "batchgen", "grade"]
    return Command([*verb, str(out), f"post=[{extract},{grade}]"])


def job(folder: Path, method: str, rows: int, seconds: float) -> Process:
    """A process of a job whose engine takes so many seconds."""
    return Fork(_job, folder, method, rows, seconds)


def _job(folder: Path, method: str, rows: int, seconds: float) -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    options = {"method": method, "target": "answer"}
    grade = StepConfig(target="batchgen.grading.grade.Grade", options=options)
    engine = _SlowEngine(PER_STEP, seconds * PER_STEP / rows)
    config, parts = null_job(folder, rows, engine, (EXTRACT, grade), rows_per_shard=ROWS_PER_SHARD)
    os._exit(run_job(config, parts).exit_code)


class _SlowEngine(InstantEngine):
    """An engine of which every step takes some seconds."""

    def __init__(self, per_step: int, seconds: float) -> None:
        super().__init__(per_step)
        self._seconds = seconds

    def step(self) -> Any:
        time.sleep(self._seconds)
        return super().step()


def digests(folder: Path) -> dict[str, str]:
    """From the names of the files in a folder to digests of their bytes."""
    if not folder.is_dir():
        return {}
    files = shard_files(folder).values()
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def parts(out: Path) -> dict[str, int]:
    """From the names of the parts of the grades to their inodes."""
    grades = out / "grades"
    found = shard_files(grades).values() if grades.is_dir() else ()
    return {path.name: path.stat().st_ino for path in found}


def disturb(
    start: Callable[[], Process], out: Path, shards: int, kills: int, rng: random.Random
) -> int:
    """Start and kill until it was killed so often, and let it end; returns the number of kills.

    Raises:
        AssertionError: a part that was there is written again, or the process fails.
    """
    done, there = 0, parts(out)
    while True:
        process = start()
        # What is left is more than enough for the kills that are left.
        share = (shards - len(there)) / (kills - done + 1)
        wanted = len(there) + rng.uniform(0, share) if done < kills else shards + 1
        code = _wait(process, out, wanted, rng)
        now = parts(out)
        assert there.items() <= now.items(), "a part that was finished is written again"
        there = now
        if code is not None:
            assert code == 0, f"it ended with exit code {code}"
            return done
        if 0 < len(now) < shards:
            done += 1


def _wait(process: Process, out: Path, wanted: float, rng: random.Random) -> int | None:
    """Kill the process a moment after more than `wanted` parts are there; returns its exit code,
    None if it was killed."""
    since, seen = time.monotonic(), -1
    while (code := process.join(0.001)) is None:
        number = len(parts(out))
        if number > wanted:
            time.sleep(rng.uniform(0, 0.02))
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            return None if process.join() == -signal.SIGKILL else process.join()
        if number > seen:
            since, seen = time.monotonic(), number
        if time.monotonic() - since > _GONE:
            sys.exit(f"nothing was graded in {out} for {_GONE:g} s")
    return code


def check_command(work: Path, method: str, rows: int, kills: int, rng: random.Random) -> None:
    """Kill `batchgen grade`."""
    expected, found = work / "expected", work / "killed"
    write_job(expected, rows, 1, rows_per_shard=ROWS_PER_SHARD)
    shutil.copytree(expected, found)
    data = digests(expected / "data")
    assert grade_command(expected, method).join() == 0
    began = time.monotonic()
    done = disturb(lambda: grade_command(found, method), found, len(data), kills, rng)
    _compare(f"batchgen grade, {method}", expected, found, done, kills, began)
    before = digests(found / "grades")
    assert grade_command(found, OTHER).join() == 0
    again = digests(found / "grades")
    assert again.keys() == before.keys() and not again.items() & before.items()
    assert digests(found / "data") == data, "grading anew has changed the data"
    print(f"graded anew ({OTHER}): all {len(again)} parts changed, and no data file")


def check_job(work: Path, method: str, rows: int, kills: int, rng: random.Random) -> None:
    """Kill a job that grades beside itself."""
    expected, found = work / "expected", work / "killed"
    for folder in (expected, found):
        folder.mkdir(parents=True)
    assert job(expected, method, rows, 0.0).join() == 0
    began, shards = time.monotonic(), -(-rows // ROWS_PER_SHARD)
    # Grading looks for new shards every second, and each attempt has to get so far.
    start = lambda: job(found, method, rows, 2.5 * (kills + 2))  # noqa: E731
    done = disturb(start, found / "out", shards, kills, rng)
    _compare(f"a job, {method}", expected / "out", found / "out", done, kills, began)


def _compare(what: str, expected: Path, found: Path, done: int, kills: int, began: float) -> None:
    """Compare the data and grades of two jobs, and say what was found."""
    data, grades = digests(found / "data"), digests(found / "grades")
    assert data == digests(expected / "data"), f"{what}: other data"
    assert grades == digests(expected / "grades"), f"{what}: other grades"
    assert len(grades) == len(data)
    seconds = time.monotonic() - began
    print(f"{what}: {done} kills in {seconds:.0f} s, {len(grades)} parts and the data are equal")
    if done < kills:
        sys.exit(f"only {done} kills before all was graded: use more --rows")


def main() -> None:
    parser = argparse.ArgumentParser(description="Check that grading survives kill -9.")
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; is emptied")
    parser.add_argument("--kills", type=int, default=20, help="of each command and of each job")
    parser.add_argument("--rows", type=int, default=6000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    shutil.rmtree(args.work, ignore_errors=True)
    rng = random.Random(args.seed)
    for method in METHODS:
        for name, check in {"command": check_command, "job": check_job}.items():
            check(args.work / f"{name}_{method}", method, args.rows, args.kills, rng)


if __name__ == "__main__":
    main()
