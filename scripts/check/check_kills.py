"""Kill the processes of a job at random moments, and compare its files with those of a job that ran
undisturbed.

    python scripts/check/check_kills.py --work /tmp/check [--kills 60] [--workers 4]
        [--engine null] [--grade regex] [--launcher] [--store s3]
    python scripts/check/check_kills.py --work /tmp/check --pipeline [--kills 40] [--workers 2]
        [--change judge.sampling.seed=1]
    python scripts/check/check_kills.py --work /tmp/check --only-grading integer
    python scripts/check/check_kills.py --work /tmp/check [--grow sampling.n=4] -- \\
        batchgen dataset=files dataset.path=rows.jsonl output.dir={out}

The first form runs workers of one job that has the small model of batchgen, on the CPU, or with
`--engine null` one that makes answers of seeds alone. They are forks of a process that has imported
everything, so that 60 kills take minutes. At random moments one of them is killed (`kill -9`) and
followed by a new one, or stopped until it was given up and then let go on; clocks are hours off.
With `--grade` the job grades its answers while it runs, by steps of this method: integers are
graded in the process, regular expressions in processes of their own. With `--launcher` real
processes are started by `launcher=local`, and the launcher is killed, too. With `--store s3` the
job lies on a server of this process that fails `--rate` of its requests, before or after they have
happened, or too late.

The second form kills workers of a pipeline of three steps, which run in one engine and follow each
other, and counts what was computed: a row that was finished twice must have been in flight at a
kill, or have been begun by two workers at once. With `--change` the pipeline is another one for a
third of the time, in the same folder, so that its steps get new versions and come back to their old
ones.

The third form kills `batchgen grade` over a finished job, and grades it anew by other steps, which
may change the grades alone. The fourth form kills any command; with `--grow` the job then grows,
once for each of them, and all is done again in the same folder.

A shard whose workers were killed three times before they had finished one of its rows is put in
quarantine. Its workers then end with an error and are started again, as a user would.

At last the job is left alone. Every file of data and grades must be equal, byte for byte (with a
command of one's own: rows and columns, floats within 1e-5), and nothing that was finished may have
been lost or written again on the way.
"""

from __future__ import annotations

import argparse
import dataclasses
import hashlib
import itertools
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Set
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from unittest.mock import patch

from batchgen.compose.compose_config import compose
from batchgen.compose.trust import TYPED
from batchgen.config.job_config import StepConfig
from batchgen.config.workers_config import WorkersConfig
from batchgen.engine.base.outputs import RequestOutput
from batchgen.folder.read_job import JobFolderReader
from batchgen.jobs.job_end import JobResult
from batchgen.jobs.job_parts import job_parts
from batchgen.jobs.run_job import run_job
from batchgen.leases.object_store import connect
from batchgen.pipelines.pipeline import compose_pipeline
from batchgen.pipelines.pipeline_file import read_pipeline
from batchgen.pipelines.run_pipeline import PipelineResult, run_pipeline
from batchgen.shards.row_order import KEYS
from batchgen.shards.shard_files import shard_files
from batchgen.sharing.shared_engine import EnginePort
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import JobError

sys.path.append(str(Path(__file__).parents[2] / "tests/batchgen"))
from fake_job import FakeJob
from job_comparison import attempts, compare_outputs, finished_rows
from s3_server import BUCKET, FaultyS3, served

STALE, BEAT = 1.5, 0.2  # seconds: a paused worker is given up; a worker says that it lives
NULL_STEP = 0.05  # seconds of a step of the null engine
QUARANTINED = 75  # the exit code of a worker that ends because a shard is in quarantine
COMPLETE = {0, 3}
_PER_SHARD = 8
_ENGINE_ROWS = 8  # rows in flight of a pipeline's engine
_URL = f"s3://{BUCKET}/out"
Job = Callable[[], JobResult | PipelineResult]
Safe = Callable[[], Set[object]]
"""Reads what is finished, and must neither be lost nor written again."""


class Process(Protocol):
    """What is killed, with these parts of the interface of `subprocess.Popen`."""

    pid: int

    def poll(self) -> int | None: ...
    def wait(self) -> int: ...
    def kill(self) -> None: ...


def warm_up() -> None:
    """Start the process that has imported everything, and wait until it has."""
    # It reads its path from there, and goes on without a word if it finds no module.
    os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([Path(__file__).stem])
    first = context.Process(target=time.sleep, args=(0.0,))
    first.start()
    first.join()


class Fork:
    """A worker in a fork of that process."""

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
        if "quarantine" not in str(error):
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
    ) -> None:
        """Disturb processes until as many were killed as asked for, then leave them alone.

        Args:
            seconds: from `undisturbed`. Some kills come while workers start, and all so late that
                some get to work.
            safe: must only grow.
            enough: whether it is an error if the work was complete before.
        """
        kills, done, before = self.args.kills, Counter[str](), safe()
        most = 1.2 * seconds[0] + seconds[1] / kills / team.count
        while killed(done) < kills:
            time.sleep(self.rng.uniform(0.0, most))
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


# --- workers of a job -----------------------------------------------------------------------------


def steps(method: str | None, target: str) -> list[StepConfig]:
    """Steps that grade the last number of an answer."""
    if method is None:
        return []
    extract, grade = {"methods": ["last_number"]}, {"method": method, "target": target}
    return [
        StepConfig(target="batchgen.grading.extract.Extract", options=extract),
        StepConfig(target="batchgen.grading.grade.Grade", options=grade),
    ]


def step_override(method: str | None, target: str) -> str:
    """Those steps as a user types them."""
    found = [{"_target_": step.target, **step.options} for step in steps(method, target)]
    return "post=" + json.dumps(found).replace('"', "")


@dataclass(frozen=True)
class NullJob(FakeJob):
    """A job whose engine makes answers of prompts and seeds, and is as slow as it is told."""

    grade: str | None = None

    def config(self) -> Any:
        workers = WorkersConfig(heartbeat=BEAT, stale_after=STALE)
        post = tuple(steps(self.grade, "number"))
        return dataclasses.replace(super().config(), workers=workers, post=post)


def arguments(out: object, rows: Path, grade: str | None = None) -> list[str]:
    """The command line of a job with the small model."""
    return [
        *("+experiment=nano_sdar", "dataset=files", f"dataset.path={rows}"),
        *("prompt.user={{ q }}", "sampling=sample", "sampling.n=2", "sampling.max_new_tokens=16"),
        *("engine.device=cpu", "engine.max_num_seqs=8", "engine.kv_cache_gib=0.02"),
        *(f"output.rows_per_shard={_PER_SHARD}", "output.columns=[logprobs]", f"output.dir={out}"),
        *(f"workers.heartbeat={BEAT}", f"workers.stale_after={STALE}", step_override(grade, "a")),
    ]


def run_real(command: list[str]) -> JobResult:
    config = compose({}, command)
    return run_job(config, job_parts(config))


def write_questions(path: Path, rows: int) -> Path:
    lines = (
        json.dumps({"q": f"What is {i} + {i % 7}?" * (1 + i % 3), "a": i + i % 7})
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


def check_workers(check: Check, server: FaultyS3 | None) -> None:
    """Kill and pause the workers of a job."""
    args, rng, log = check.args, check.rng, check.args.work / "log"
    whole, out = args.work / "whole", _URL if server else args.work / "out"
    data = write_questions(args.work / "rows.jsonl", args.rows)

    def job(folder: Path | str, step_s: float = 0.0) -> Job:
        if args.engine == "null":
            rows = {"rows": args.rows, "rows_per_shard": _PER_SHARD}
            return NullJob(str(folder), **rows, step_s=step_s, grade=args.grade).run
        more = ["output.report=false"] if server else []
        return partial(run_real, [*arguments(folder, data, args.grade), *more])

    warm_up()
    seconds = check.undisturbed(Fork(job(whole), log), Finished(whole))
    if server:
        server.rate = args.rate
    if args.launcher:
        team = _launched(arguments(out, data, args.grade), args, rng)
    else:
        slow = job(out, NULL_STEP)
        clocks = (0.0, 7200.0, -7200.0) if args.workers > 1 else (0.0,)
        team = Peers(lambda: Fork(slow, log, rng.choice(clocks)), args.workers, rng)
    check.disturb(
        team,
        seconds,
        Finished(out),
        lambda: f"; requests failed: {server.faults}" if server else "",
    )
    if server:
        server.rate = 0.0
        left, requests = set(connect(_URL).names("")), f", {server.requests:,} requests"
    else:
        left, requests = {path.name for path in Path(out).iterdir()}, ""
    assert digests(out, "data", "grades") == digests(whole, "data", "grades"), "the files differ"
    assert len(finished_keys(Finished(out))) == 2 * args.rows
    left &= {"leases", "workers", "journal", "differing"}
    assert server or not left, f"{left} are left"
    print(f"the files equal those of one worker, byte for byte{requests}")


def finished_keys(safe: Safe) -> list[object]:
    """The rows among what is finished."""
    return [each for each in safe() if isinstance(each, tuple) and isinstance(each[0], int)]


def _launched(command: list[str], args: argparse.Namespace, rng: random.Random) -> Peers:
    """The workers that `launcher=local` has started, with the launcher."""
    more = ["launcher=local", f"launcher.workers={args.workers}", "launcher.restarts=1000"]
    line = [sys.executable, "-m", "batchgen", *command, *more]

    def living() -> list[int]:
        paths = (args.work / "out/workers").glob("0*.json")
        beats = [json.loads(path.read_bytes()) for path in paths]
        return [beat["pid"] for beat in beats if beat["ended"] is None]

    return Peers(lambda: Command(line, args.work / "log"), 1, rng, living)


# --- commands -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class PipelineJob:
    """A pipeline of three steps with the small model, as one worker runs it, with further
    arguments. `log` is a file that gets a line for every request that an engine has finished."""

    out: Path
    rows: Path
    log: Path
    arguments: tuple[str, ...] = ()

    def values(self) -> dict[str, Any]:
        """What its file would hold."""
        draft = {"sampling.n": 2, "post": [{"_target_": "batchgen.grading.extract.Extract",
                 "methods": ["last_number"]}]}  # fmt: skip
        where = {"where": "answer is none or sample_index == 1", "text_as": "reply"}
        judge = {"from": "draft", "dataset": where, "prompt.user": "{{ reply }} {{ q }}"}
        some = [{"Filter": {"where": "verdict|length % 5 != 0"}}, {"Dedupe": {"by": "verdict"}}]
        last = {"from": "judge", "dataset.text_as": "verdict", "rows": some,
                "prompt.user": "{{ verdict }}"}  # fmt: skip
        return {
            "experiment": "nano_sdar",
            "dataset": {"choice": "files", "path": str(self.rows)},
            "prompt.user": "{{ q }}",
            "sampling": {"choice": "sample", "max_new_tokens": 8},
            "engine": {"device": "cpu", "max_num_seqs": _ENGINE_ROWS, "kv_cache_gib": 0.02},
            "post": [],
            "output": {
                "dir": str(self.out), "rows_per_shard": _PER_SHARD, "report": False, "columns": []
            },
            "workers": {"heartbeat": BEAT, "stale_after": STALE},
            "steps": {"draft": draft, "judge": judge, "last": last},
        }  # fmt: skip

    def run(self) -> PipelineResult:
        """Be a worker until the pipeline is complete."""
        receive = EnginePort.receive

        def received(port: EnginePort, request_id: str, output: RequestOutput) -> None:
            with self.log.open("a") as file:
                file.write(f"{port.name} {request_id}\n")
            receive(port, request_id, output)

        with patch.object(EnginePort, "receive", received):
            given = read_pipeline(self.values(), {}, self.arguments)
            return run_pipeline(compose_pipeline(given, TYPED))


def check_pipeline(check: Check) -> None:
    """Kill and pause the workers of a pipeline."""
    args, rng = check.args, check.rng
    data = write_questions(args.work / "rows.jsonl", args.rows)
    whole, job = (
        PipelineJob(args.work / name, data, args.work / f"{name}.requests")
        for name in ("whole", "out")
    )

    def safe(of: PipelineJob) -> set[object]:
        folders = [path.parent for path in of.out.glob("*/manifest.json")]
        return {(at.name, each) for at in folders for each in Finished(at)()}

    def files(of: PipelineJob) -> dict[str, dict[str, str]]:
        folders = [path.parent for path in of.out.glob("*/manifest.json")]
        return {at.name: digests(at, "data", "grades") for at in folders}

    warm_up()
    log = args.work / "log"
    seconds = check.undisturbed(Fork(whole.run, log), partial(safe, whole))
    changed = dataclasses.replace(job, log=args.work / "changed", arguments=tuple(args.change))
    started = itertools.count()

    def start() -> Fork:
        # Workers of the second third of all run the changed pipeline, in the same folder.
        third = 3 * next(started) // (args.kills + args.workers)
        return Fork((changed if args.change and third == 1 else job).run, log)

    team = Peers(start, args.workers, rng)
    check.disturb(team, seconds, partial(safe, job))
    expected = files(whole)
    found = {name: of_step for name, of_step in files(job).items() if name in expected}
    assert found == expected, "the files differ"
    assert len(found) == 3 and all(found.values())
    asked = [Counter(of.log.read_text().splitlines()) for of in (whole, job)]
    assert set(asked[0].values()) == {1} and asked[1].keys() <= asked[0].keys()
    # Rows of a changed step may be there already as those of the other version.
    assert args.change or asked[1].keys() == asked[0].keys()
    twice = asked[1].total() - len(asked[1])
    # A kill loses what its last step finished; at the end of a step workers begin rows of others.
    most = args.kills * _ENGINE_ROWS + (args.workers - 1) * len(found) * 2 * _ENGINE_ROWS
    assert twice <= most, f"{twice} requests were finished twice, and {most} could have been"
    print(
        f"the files of {len(found)} steps equal those of an undisturbed run, byte for byte; "
        f"{len(asked[1]):,} requests, {twice} of them finished twice"
    )


def check_grading(check: Check) -> None:
    """Kill `batchgen grade` over a finished job."""
    args = check.args
    whole, out = args.work / "whole", args.work / "out"
    NullJob(str(whole), rows=args.rows, rows_per_shard=_PER_SHARD, max_num_seqs=64).run()
    shutil.copytree(whole, out)
    data = digests(out, "data")

    def grade(folder: Path, method: str) -> Command:
        verb = [sys.executable, "-m", "batchgen", "grade", str(folder)]
        return Command([*verb, step_override(method, "number")], args.work / "log")

    seconds = check.undisturbed(grade(whole, args.only_grading), lambda: parts(whole))
    team = Peers(lambda: grade(out, args.only_grading), 1, check.rng)
    check.disturb(team, seconds, lambda: parts(out))
    grades = digests(out, "grades")
    assert grades == digests(whole, "grades") and len(grades) == len(data), "other grades"
    assert grade(out, "exact").wait() == 0
    again = digests(out, "grades")
    assert again.keys() == grades.keys() and not again.items() & grades.items()
    assert digests(out, "data") == data, "grading has changed the data"
    print(f"{len(grades)} parts are equal; graded anew, all of them changed, and no data file")


def check_command(check: Check) -> None:
    """Kill a command, and let its job grow."""
    args, out = check.args, check.args.work / "killed"
    for stage in range(1 + len(args.grow)):
        if grown := args.grow[:stage]:
            print(f"grown by {grown[-1]}")
        # A later value of a key takes the place of an earlier one.
        line = list({part.split("=", 1)[0]: part for part in [*args.command, *grown]}.values())
        whole = args.work / f"expected{stage}"
        there: dict[int, int] = {}

        def start(folder: Path, line: list[str] = line) -> Command:
            return Command([part.replace("{out}", str(folder)) for part in line], args.work / "log")

        def again(
            start: Callable[[Path], Command] = start, there: dict[int, int] = there
        ) -> Command:
            # An attempt that is killed while it starts is not among the attempts.
            there[len(attempts(out))] = finished_rows(out)
            return start(out)

        seconds = check.undisturbed(start(whole), Finished(whole))
        team = Peers(again, 1, check.rng)
        check.disturb(team, seconds, Finished(out), enough=not stage)
        resumed = {i: attempt["rows_resumed"] for i, attempt in enumerate(attempts(out))}
        if "output.retry_errors=true" not in line:
            wrong = {i: rows for i, rows in there.items() if resumed.get(i, rows) != rows}
            assert not wrong, f"{wrong} finished rows were there, and {resumed} were taken over"
        rows = compare_outputs(whole, out)
        print(f"{rows} rows: equal to those of the undisturbed job")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; is emptied")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--engine", choices=["real", "null"], default="real")
    parser.add_argument("--grade", choices=["integer", "regex"], help="grade the job while it runs")
    parser.add_argument("--launcher", action="store_true", help="start workers by launcher=local")
    parser.add_argument("--store", choices=["folder", "s3"], default="folder")
    parser.add_argument("--rate", type=float, default=0.02, help="share of requests that fail")
    parser.add_argument("--pipeline", action="store_true", help="kill workers of a pipeline")
    parser.add_argument(
        "--change", action="append", default=[], metavar="KEY=VALUE",
        help="with --pipeline: workers in between run the pipeline with this argument",
    )  # fmt: skip
    parser.add_argument("--only-grading", choices=["integer", "regex"], metavar="METHOD")
    parser.add_argument("--grow", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args()
    if args.launcher and (args.engine == "null" or args.store == "s3"):
        parser.error("--launcher starts the command: it has no null engine, and finds no store")
    if args.grade and args.store == "s3":
        parser.error("a job on S3 is not graded while it runs")
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    check = Check(args, random.Random(args.seed))
    if args.command:
        check_command(check)
    elif args.pipeline:
        check_pipeline(check)
    elif args.only_grading:
        check_grading(check)
    elif args.store == "folder":
        check_workers(check, None)
    else:
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        with served(args.seed, timeout=1.0) as server:
            check_workers(check, server)


if __name__ == "__main__":
    main()
