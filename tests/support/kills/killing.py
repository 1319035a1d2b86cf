"""Processes that are killed and paused at random moments, and what they have finished."""

from __future__ import annotations

import argparse
import hashlib
import json
import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.jobs.run.job_end import JobResult
from batchgen.pipelines.run.run_pipeline import PipelineResult
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.leases.s3_objects import connect
from batchgen.storage.shards.row_order import KEYS
from batchgen.storage.shards.shard_files import shard_files
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import JobError

STALE, BEAT = 1.5, 0.2  # seconds: a paused worker is given up; a worker says that it lives
QUARANTINED = 75  # the exit code of a worker that ends because a shard is in quarantine
COMPLETE = {0, 3}
PER_SHARD = 8  # rows of a shard
Job = Callable[[], JobResult | PipelineResult]
Safe = Callable[[], Set[object]]
"""Reads what is finished, and must neither be lost nor written again."""


def warm_up(module: str) -> None:
    """Start the process that has imported a module, and wait until it has."""
    # It reads its path from there, and goes on without a word if it finds no module.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([module])
    first = context.Process(target=time.sleep, args=(0.0,))
    first.start()
    first.join()


class Fork:
    """A worker in a fork of a process that has imported everything."""

    def __init__(self, job: Job, log: Path, clock: float = 0.0) -> None:
        context = multiprocessing.get_context("forkserver")
        self._process = context.Process(target=_work, args=(job, log, clock))
        self._process.start()
        assert self._process.pid is not None
        self.pid = self._process.pid

    def poll(self) -> int | None:
        return self._process.exitcode

    def wait(self) -> int:
        self._process.join(600)
        assert self._process.exitcode is not None, "a worker does not end"
        return self._process.exitcode

    def kill(self) -> None:
        self._process.kill()


def _work(job: Job, log: Path, clock: float) -> None:
    """Be a worker, whose clock is this many seconds off."""
    for stream in (1, 2):
        os.dup2(os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT), stream)
    now = time.time
    time.time = lambda: now() + clock
    try:
        code = job().exit_code
    except JobError as error:
        if not any(why in str(error) for why in ("quarantine", "another configuration")):
            raise
        code = QUARANTINED
    os._exit(code)


class Command(subprocess.Popen[bytes]):
    """A command line as a process."""

    def __init__(self, command: list[str], log: Path) -> None:
        self._log = log
        with log.open("wb") as file:
            super().__init__(command, stdout=file, stderr=file)

    def poll(self) -> int | None:
        return self._known(super().poll())

    def wait(self, timeout: float | None = None) -> int:
        code = self._known(super().wait(timeout))
        assert code is not None
        return code

    def _known(self, code: int | None) -> int | None:
        if code in (None, *COMPLETE, -signal.SIGKILL):
            return code
        said = self._log.read_text()
        assert "quarantine" in said, f"the command ended with {code}: {said[-2000:]}"
        return QUARANTINED


Process = Fork | Command


@dataclass
class Peers:
    """Processes that do one piece of work together.

    Attributes:
        start: starts one of them.
        count: how many there are.
        others: lists the processes that they have started, which are killed as well.
    """

    start: Callable[[], Process]
    count: int
    rng: random.Random
    others: Callable[[], list[int]] = list
    all: list[Process] = field(init=False)

    def __post_init__(self) -> None:
        self.all = [self.start() for _ in range(self.count)]

    def disturb(self, pauses: bool) -> str | None:
        """Do something bad to one process; returns what, or None if the work is complete."""
        ended = {process.poll() for process in self.all}
        if ended & COMPLETE:
            return None
        assert ended <= {None, QUARANTINED}, f"workers ended with {ended}"
        if self._start_again(ended):
            return "quarantine"
        if (pids := self.others()) and self.rng.random() < 0.9:
            with suppress(ProcessLookupError):
                os.kill(self.rng.choice(pids), signal.SIGKILL)
            return "kill of a launched worker"
        place = self.rng.choice([i for i, each in enumerate(self.all) if each.poll() is None])
        process = self.all[place]
        if pauses and self.rng.random() < 0.15:
            os.kill(process.pid, signal.SIGSTOP)
            time.sleep(2 * STALE)
            os.kill(process.pid, signal.SIGCONT)
            return "pause"
        process.kill()
        process.wait()
        self.all[place] = self.start()
        return "kill"

    def _start_again(self, ended: set[int | None]) -> bool:
        """Start all processes again if all have ended because of a quarantine."""
        if ended != {QUARANTINED}:
            return False
        self.all = [self.start() for _ in self.all]
        return True

    def join(self) -> None:
        """Leave the processes alone until the work is complete."""
        while True:
            ended: set[int | None] = {process.wait() for process in self.all}
            assert ended <= {*COMPLETE, QUARANTINED}, f"workers ended with {ended}"
            if not self._start_again(ended):
                return


@dataclass
class Check:
    """One run of this script."""

    args: argparse.Namespace
    rng: random.Random

    def undisturbed(self, process: Process, safe: Safe) -> tuple[float, float]:
        """Return the seconds until something was finished, and from then on until all was."""
        started = time.monotonic()
        while not safe() and process.poll() is None:
            time.sleep(0.02)
        first = time.monotonic() - started
        assert process.wait() in COMPLETE, "the undisturbed job failed"
        rest = time.monotonic() - started - first
        print(f"undisturbed: {len(safe()):,} finished, in {first:.1f} + {rest:.1f} s", flush=True)
        return first, rest

    def disturb(
        self,
        team: Peers,
        seconds: tuple[float, float],
        safe: Safe,
        remark: Callable[[], str] = lambda: "",
        enough: bool = True,
        wait: Callable[[], None] | None = None,
    ) -> None:
        """Disturb processes until as many were killed as asked for, then leave them alone.

        Args:
            seconds: from `undisturbed`. Some kills come while workers start, and all so late that
                some get to work.
            safe: must only grow.
            enough: whether it is an error if the work was complete before.
            wait: waits until it is time for the next kill; None waits for a random time.
        """
        kills, done, before = self.args.kills, Counter[str](), safe()
        most = 1.2 * seconds[0] + seconds[1] / kills / team.count
        while killed(done) < kills:
            if wait is None:
                time.sleep(self.rng.uniform(0.0, most))
            else:
                wait()
            if (what := team.disturb(pauses=team.count > 1)) is None:
                break
            done[what] += 1
            now = safe()
            assert before <= now, f"{len(before - now)} finished things are lost"
            before = now
            print(f"{what}: {len(now):,} are finished{remark()}", flush=True)
        team.join()
        assert before <= safe(), "something that was finished is lost or was written again"
        print(dict(done))
        if killed(done) < kills and enough:
            raise SystemExit("all was complete before there were so many kills: give more --rows")


def killed(done: Counter[str]) -> int:
    return sum(count for what, count in done.items() if what.startswith("kill"))


def write_questions(path: Path, rows: int, rules: Sequence[Mapping[str, Any]] = ()) -> Path:
    """Write questions; with `rules`, these are the options of their strategy in turn."""
    turns = [{"options": {"strategy": rule}} for rule in rules] or [{}]
    lines = (
        json.dumps(
            {"q": f"What is {i} + {i % 7}?" * (1 + i % 3), "a": i + i % 7} | turns[i % len(turns)]
        )
        for i in range(rows)
    )
    path.write_text("\n".join(lines), encoding="utf-8")
    return path


class Finished:
    """Reads the rows in shards and journals, and the parts of the grades as they lie on the disk.

    The rows of a published shard are read once.
    """

    def __init__(self, out: Path | str) -> None:
        self._out = out
        self._published: dict[int, set[object]] = {}

    def __call__(self) -> set[object]:
        storage = open_storage(str(self._out), WorkersConfig())
        try:
            if not storage.exists(storage.path / "manifest.json"):
                return set()
            reader = JobFolderReader(storage.path, storage)
            data = storage.path / "data"
            published = shard_files(data, storage.names(data)) if storage.exists(data) else {}
            found = set[object]()
            for number in reader.shards():
                rows = self._published.get(number) or {
                    tuple(row.values())
                    for batch in reader.shard(number).batches(KEYS)
                    for row in batch.to_pylist()
                }
                if number in published:
                    self._published[number] = rows
                found |= rows
            return found | parts(storage.path)
        finally:
            storage.close()


def parts(out: Path) -> set[object]:
    """The parts of the grades: their names and inodes."""
    grades = out / "grades"
    found = shard_files(grades).values() if grades.is_dir() else ()
    return {(path.name, path.stat().st_ino) for path in found}


def digests(out: Path | str, *folders: str) -> dict[str, str]:
    """The names of the Parquet files in folders of a job, with the hashes of what they hold."""
    store = connect(str(out)) if str(out).startswith("s3:") else None
    found: dict[str, bytes] = {}
    for folder in folders:
        if store is not None:
            found |= {
                f"{folder}/{n}": store.read(f"{folder}/{n}") or b"" for n in store.names(folder)
            }
        elif Path(out, folder).is_dir():
            paths = sorted(Path(out, folder).glob("*.parquet"))
            found |= {f"{folder}/{path.name}": path.read_bytes() for path in paths}
    return {name: hashlib.sha256(content).hexdigest() for name, content in found.items()}
