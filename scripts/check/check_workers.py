"""Kill, pause and misdate the workers of a job at random moments, and compare its data with that of
one undisturbed worker.

    python scripts/check/check_workers.py --kills 60 --work /tmp/check

The job has the small model that comes with batchgen, on the CPU, or with `--engine null` one that
makes answers of seeds alone, so that nearly all of the time goes into what is checked. Processes of
this script are its workers: each is a fork of one that has imported everything, so that 60 kills
take minutes and not hours. At random moments one of them is

- killed (`kill -9`) and followed by a new one,
- stopped (SIGSTOP) until it was given up, and then let go on,
- started with a clock that is hours off, in both directions.

With `--launcher` the workers are started by `launcher=local` instead, in real processes, and the
launcher itself is killed, too; then the same command is run again.

A shard whose workers happened to be killed three times before they had finished one of its rows is
put in quarantine. Its workers then end with an error, and are started again, as a user would.

At last the job is left alone. Every data file must be equal, byte for byte, no row may be there
twice, and no row that was finished may have been lost on the way.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from multiprocessing.context import ForkServerContext
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import batchgen.jobs.job_parts
import batchgen.jobs.run_job
import batchgen.python.llm
from batchgen.compose.compose_config import compose
from batchgen.config.workers_config import WorkersConfig
from batchgen.folder.read_job import JobFolderReader
from batchgen.jobs.job_end import JobResult
from batchgen.util.errors import JobError

sys.path.append(str(Path(__file__).parents[2] / "tests/batchgen"))
from fake_job import FakeJob

STALE = 1.5  # seconds after which a paused worker is given up
BEAT = 0.2
NULL_STEP = 0.05  # seconds of a step of the null engine
QUARANTINED = 75  # the exit code of a worker that ends because a shard is in quarantine
Job = Callable[[], JobResult]
"""Runs the job as one of its workers."""


@dataclass(frozen=True)
class NullJob(FakeJob):
    """A job whose engine makes answers of prompts and seeds, and is as slow as it is told."""

    def config(self) -> Any:
        workers = WorkersConfig(heartbeat=BEAT, stale_after=STALE)
        return dataclasses.replace(super().config(), workers=workers)


def arguments(out: Path, rows: Path) -> list[str]:
    return [
        *("+experiment=nano_sdar", "dataset=files", f"dataset.path={rows}"),
        *("prompt.user={{ q }}", "sampling=sample", "sampling.n=2", "sampling.max_new_tokens=16"),
        *("engine.device=cpu", "engine.max_num_seqs=8", "engine.kv_cache_gib=0.02"),
        *("output.rows_per_shard=8", "output.columns=[logprobs]", "post=[]"),
        *(f"workers.heartbeat={BEAT}", f"workers.stale_after={STALE}", f"output.dir={out}"),
    ]


def run_real(command: list[str]) -> JobResult:
    config = compose({}, command)
    return batchgen.jobs.run_job.run_job(config, batchgen.jobs.job_parts.job_parts(config))


def work(job: Job, clock: float) -> None:
    """Be a worker, whose clock is so many seconds off."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    now = time.time
    time.time = lambda: now() + clock
    try:
        code = job().exit_code
    except JobError as error:
        if "quarantine" not in str(error):
            raise
        os._exit(QUARANTINED)
    os._exit(code)


def finished(out: Path) -> set[tuple[int, int]]:
    """The rows that are safe in shards and journals."""
    if not (out / "manifest.json").is_file():
        return set()
    rows = JobFolderReader(out).rows(["row_index", "sample_index"])
    return {(row["row_index"], row["sample_index"]) for row in rows}


def digests(out: Path) -> dict[str, str]:
    files = sorted((out / "data").iterdir())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def warm_context() -> ForkServerContext:
    """The context whose processes are forks of one that has imported everything by now."""
    # The server reads its path from there, and goes on without a word if it finds no module.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["check_workers"])
    first = context.Process(target=time.sleep, args=(0.0,))
    first.start()
    first.join()
    return context


class Forks:
    """Workers that are forks of a process which has imported everything."""

    def __init__(self, job: Job, count: int, rng: random.Random) -> None:
        self._job = job
        self._rng = rng
        self._context = warm_context()
        self._all: list[BaseProcess] = [self._start() for _ in range(count)]

    def _start(self) -> BaseProcess:
        clock = self._rng.choice([0.0, 7200.0, -7200.0])
        process = self._context.Process(target=work, args=(self._job, clock))
        process.start()
        return process

    def disturb(self) -> str | None:
        """Do something bad to one of them; returns what, or None if the job is complete."""
        ended = {process.exitcode for process in self._all}
        if ended & {0, 3}:
            return None
        assert ended <= {None, QUARANTINED}, f"workers ended with {ended}"
        if self._start_again():
            return "quarantine"
        living = [i for i, process in enumerate(self._all) if process.exitcode is None]
        place = self._rng.choice(living)
        process = self._all[place]
        assert process.pid is not None
        if self._rng.random() < 0.15:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(2 * STALE)
            os.kill(process.pid, signal.SIGCONT)
            return "pause"
        process.kill()
        process.join()
        self._all[place] = self._start()
        return "kill"

    def _start_again(self) -> bool:
        """Start all workers again if they have ended because of a quarantine."""
        if any(process.exitcode != QUARANTINED for process in self._all):
            return False
        self._all = [self._start() for _ in self._all]
        return True

    def join(self) -> None:
        """Leave them alone until the job is complete.

        Raises:
            AssertionError: a worker has failed.
        """
        while True:
            for process in self._all:
                process.join(600)
                ended = process.exitcode
                assert ended in (0, 3, QUARANTINED), f"a worker ended with {ended}"
            if not self._start_again():
                return


class Launched:
    """Workers that `launcher=local` has started, with the launcher."""

    def __init__(self, command: list[str], count: int, rng: random.Random) -> None:
        more = ["launcher=local", f"launcher.workers={count}", "launcher.restarts=1000"]
        self._command = [sys.executable, "-m", "batchgen", *command, *more]
        self._rng = rng
        self._out = Path(command[-1].partition("=")[2])
        self._start()

    def _start(self) -> None:
        quiet = subprocess.DEVNULL
        self._launcher = subprocess.Popen(self._command, stdout=quiet, stderr=quiet)

    def disturb(self) -> str | None:
        if (code := self._launcher.poll()) is not None:
            assert code in (0, 3), f"the launcher ended with {code}"
            return None
        if self._rng.random() < 0.1:
            self._launcher.kill()
            self._launcher.wait()
            self._start()
            return "kill of the launcher"
        pids = [json.loads(path.read_bytes()) for path in (self._out / "workers").glob("0*.json")]
        living = [beat["pid"] for beat in pids if beat["ended"] is None]
        if not living:
            return "nothing"
        try:
            os.kill(self._rng.choice(living), signal.SIGKILL)
        except ProcessLookupError:
            return "nothing"
        return "kill"

    def join(self) -> None:
        code = self._launcher.wait(600)
        assert code in (0, 3), f"the launcher ended with {code}"


def write_questions(path: Path, rows: int) -> None:
    """Write a data set of so many rows."""
    lines = (json.dumps({"q": f"What is {i} + {i % 7}?" * (1 + i % 3)}) for i in range(rows))
    path.write_text("\n".join(lines), encoding="utf-8")


def run_undisturbed(job: Job, out: Path, rng: random.Random) -> float:
    """Run a job in a folder to its end, and return the seconds until its first row was safe."""
    warm_context()
    started = time.monotonic()
    alone = Forks(job, 1, rng)
    while not finished(out):
        time.sleep(0.05)
    startup = time.monotonic() - started
    alone.join()
    print(
        f"one undisturbed worker: {len(finished(out)):,} rows, first after {startup:.1f} s",
        flush=True,
    )
    return startup


def disturb(
    workers: Launched | Forks,
    kills: int,
    pause: Callable[[], float],
    safe_rows: Callable[[], set[tuple[int, int]]],
    remark: Callable[[], str] = lambda: "",
) -> dict[str, int]:
    """Disturb workers until so many were killed or the job is complete, then leave them alone.

    Args:
        pause: the seconds before the next one is disturbed.
        safe_rows: reads the rows that are safe.
        remark: what is printed besides.

    Returns:
        How often what was done.

    Raises:
        AssertionError: a row that was safe is lost, or a worker has failed.
    """
    safe: set[tuple[int, int]] = set()
    done: Counter[str] = Counter()
    while _num_kills(done) < kills:
        time.sleep(pause())
        if (what := workers.disturb()) is None:
            break
        done[what] += 1
        now = safe_rows()
        assert safe <= now, f"{len(safe - now)} finished rows are lost"
        safe = now
        print(f"{what}: {len(safe):,} rows are safe{remark()}", flush=True)
    workers.join()
    return dict(done)


def refuse_fewer(kills: int, done: Mapping[str, int]) -> None:
    """End the check if the job was complete before so many were killed.

    Raises:
        SystemExit: it was.
    """
    if _num_kills(done) < kills:
        raise SystemExit("the job was complete before there were so many kills: give more --rows")


def _num_kills(done: Mapping[str, int]) -> int:
    return sum(count for what, count in done.items() if what.startswith("kill"))


def check(args: argparse.Namespace) -> None:
    """Run the job undisturbed and disturbed, and compare.

    Raises:
        AssertionError: the data differ, or a finished row was lost.
    """
    work_dir, kills, rows = args.work, args.kills, args.rows
    rng = random.Random(args.seed)
    whole, out = work_dir / "whole", work_dir / "out"
    data = work_dir / "rows.jsonl"
    write_questions(data, rows)

    def job(folder: Path, step_s: float) -> Job:
        if args.engine == "null":
            return NullJob(str(folder), rows=rows, rows_per_shard=8, step_s=step_s).run
        return partial(run_real, arguments(folder, data))

    startup = run_undisturbed(job(whole, 0.0), whole, rng)
    workers: Launched | Forks
    if args.launcher:
        workers = Launched(arguments(out, data), args.workers, rng)
    else:
        workers = Forks(job(out, NULL_STEP), args.workers, rng)
    # Some come while workers start, and all so late that some get to work.
    done = disturb(workers, kills, lambda: rng.uniform(0.0, 1.2 * startup), lambda: finished(out))
    assert digests(out) == digests(whole), "the data differ"
    assert len(finished(out)) == len(finished(whole)) == 2 * rows
    left = {path.name for path in out.iterdir()} & {"leases", "workers", "journal", "differing"}
    assert not left, f"{left} are left"
    attempts = json.loads((out / "metrics.json").read_text())["attempts"]
    print(f"{done}, {len(attempts)} workers: the data equal those of one worker, byte for byte")
    refuse_fewer(kills, done)


def main() -> None:
    parser = argparse.ArgumentParser(description="Check workers that share a folder.")
    parser.add_argument("--kills", type=int, default=60)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--engine", choices=["real", "null"], default="real")
    parser.add_argument(
        "--launcher", action="store_true", help="use launcher=local, with the real engine"
    )
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; is emptied")
    args = parser.parse_args()
    if args.launcher and args.engine == "null":
        parser.error("--launcher starts the command, which has no null engine")
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    check(args)


if __name__ == "__main__":
    main()
