"""Kill the processes of a job at random moments, and compare its files with those of a job that ran
undisturbed.

    python -m tests.support.kills --work /tmp/check [--kills 60] [--workers 4]
        [--engine null] [--grade regex] [--launcher] [--store s3] [--grid] [--rules]
    python -m tests.support.kills --work /tmp/check --long 400 [--rows 60] [--kills 40]
        [--model nano_hybrid] [--workers 2] [--store s3]
    python -m tests.support.kills --work /tmp/check --pipeline [--kills 40] [--workers 2]
        [--histories 20] [--change judge.sampling.seed=1]
    python -m tests.support.kills --work /tmp/check --only-grading integer
    python -m tests.support.kills --work /tmp/check [--grow sampling.n=4] -- \\
        batchgen dataset=files dataset.path=rows.jsonl output.dir={out}

The first form runs workers of one job that has the small model of batchgen, on the CPU, or with
`--engine null` one that makes answers of seeds alone. They are forks of a process that has imported
everything, so that 60 kills take minutes. At random moments one of them is killed (`kill -9`) and
followed by a new one, or stopped until it was given up and then let go on; clocks are hours off.
With `--grade` the job grades its answers while it runs, by steps of this method: integers are
graded in the process, regular expressions in processes of their own. With `--launcher` real
processes are started by `launcher=local`, and the launcher is killed, too. With `--grid` each row
runs with each of two adapters and without one, which share one adapter slot. With `--rules` rows
have the unmasking rules of block diffusion in turn. With `--store s3` the job lies on a server of
this process that fails `--rate` of its requests, before or after they have happened, or too late.

The second form has answers of so many tokens that hardly one is finished between two kills, and
counts the tokens that were computed more than once.

The third form kills workers of a pipeline of three steps, which run in one engine and follow each
other, and counts what was computed: a row that was finished twice must have been in flight at a
kill, or have been begun by two workers at once. Its exports and pipeline.json are compared, too.
With `--histories` all is done so many times, each with other moments. With `--change` the pipeline
is another one for a third of the time, in the same folder, so that its steps get new versions and
come back to their old ones.

The fourth form kills `batchgen grade` over a finished job, and grades it anew by other steps, which
may change the grades alone. The fifth form kills any command; with `--grow` the job then grows,
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
import json
import logging
import os
import random
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import resources
from pathlib import Path
from typing import TYPE_CHECKING, Any

from batchgen.config.compose.compose_config import compose
from batchgen.config.compose.step_configs import step_configs
from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.storage.leases.s3_objects import connect
from tests.support.engine.lora_files import write_adapter
from tests.support.jobs.fake_job import FakeJob
from tests.support.jobs.job_comparison import attempts, compare_outputs, finished_rows
from tests.support.kills.killed_pipelines import check_pipeline
from tests.support.kills.killing import (
    BEAT,
    PER_SHARD,
    STALE,
    Check,
    Command,
    Finished,
    Fork,
    Job,
    Peers,
    digests,
    parts,
    warm_up,
    write_questions,
)

if TYPE_CHECKING:
    from tests.support.jobs.s3_server import FaultyS3

NULL_STEP = 0.05  # seconds of a step of the null engine
COLUMNS = {
    "nano_sdar": "logprobs,entropy,step_map,tail_token_ids,tail_step_map",
    "nano_hybrid": "logprobs",
}
"""What is compared besides tokens, by model."""
RULES: list[dict[str, Any]] = [
    {"unmasking": "low_confidence_dynamic", "confidence_threshold": 0.7},
    {"unmasking": "low_confidence_static", "denoising_steps": 2},
    {"unmasking": "sequential", "denoising_steps": 2},
    {"unmasking": "entropy_bound", "entropy_bound": 0.5},
    {"unmasking": "joint_threshold", "edit_threshold": 0.1},
]
"""The unmasking rules that rows have in turn with `--rules`."""
WAIT_SECONDS = 60.0  # the most between two kills with --long
RECORD_SECONDS = 0.5  # between two records of what is begun, with --long


def steps(method: str | None, target: str) -> list[dict[str, Any]]:
    """Steps that grade the last number of an answer."""
    extract = {"Extract": {"methods": ["last_number"]}}
    grade = {"Grade": {"method": method, "target": target}}
    return [extract, grade] if method else []


def step_override(method: str | None, target: str) -> str:
    """Those steps as a user types them."""
    return "post=" + json.dumps(steps(method, target)).replace('"', "")


@dataclass(frozen=True)
class NullJob(FakeJob):
    """A job whose engine makes answers of prompts and seeds, and is as slow as it is told."""

    grade: str | None = None

    def config(self) -> Any:
        workers = WorkersConfig(heartbeat=BEAT, stale_after=STALE)
        post = step_configs(steps(self.grade, "number"), "post")
        return dataclasses.replace(super().config(), workers=workers, post=post)


def arguments(
    out: object, rows: Path, grade: str | None = None, model: str = "nano_sdar"
) -> list[str]:
    """The command line of a job with a small model."""
    return [
        *(f"+experiment={model}", "dataset=files", f"dataset.path={rows}"),
        *("prompt.user={{ q }}", "sampling=sample", "sampling.n=2", "sampling.max_new_tokens=16"),
        *("engine.device=cpu", "engine.max_num_seqs=8", "engine.kv_cache_gib=0.02"),
        *(
            f"output.rows_per_shard={PER_SHARD}",
            f"output.columns=[{COLUMNS[model]}]",
            f"output.dir={out}",
        ),
        *(f"workers.heartbeat={BEAT}", f"workers.stale_after={STALE}", step_override(grade, "a")),
    ]


def long_arguments(args: argparse.Namespace) -> list[str]:
    """What makes answers long, and records of them frequent."""
    return [
        *("sampling.n=1", f"sampling.max_new_tokens={args.long}", "sampling.ignore_eos=true"),
        f"output.begun_every={RECORD_SECONDS}",
    ]


def grid_arguments(folder: Path, model: str) -> list[str]:
    """Two adapters for a small model, of which a worker has one on the device at once."""
    base = Path(str(resources.files("batchgen"))) / "data" / model
    paths = [folder / name for name in ("one", "two")]
    for seed, path in enumerate(paths):
        if not path.exists():
            write_adapter(path, base, seed=seed, strength=0.2)
    places = ",".join(map(str, paths))
    return [f"model.lora=[{places},base]", "model.lora_grid=true", "engine.lora_slots=1"]


def run_real(command: list[str], computed: Path | None = None) -> JobResult:
    """Run a job. How many tokens each step commits is appended to the file `computed`."""
    if computed is not None:
        _count_tokens(computed)
    config = compose({}, command)
    return execute_job(config, resolve_job(config))


def _count_tokens(path: Path) -> None:
    """Let all engines of this process append to a file how many tokens a step commits."""
    step, file = LLMEngine.step, os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)

    def counted(self: LLMEngine) -> list[RequestOutput]:
        running = self.scheduler.running
        before = running.num_committed
        outputs = step(self)
        os.write(file, b"%d\n" % (running.num_committed - before))
        return outputs

    LLMEngine.step = counted  # type: ignore[method-assign]


def num_computed(path: Path) -> int:
    """How many tokens were computed, as `_count_tokens` has written."""
    return sum(map(int, path.read_text().split())) if path.exists() else 0


def _wait_for_tokens(
    args: argparse.Namespace, rng: random.Random, computed: tuple[Path, Path]
) -> None:
    """Wait until workers have computed further tokens: so many that they end after the last kill,
    and now and then none."""
    whole, out = computed
    needed = num_computed(out) + rng.uniform(-0.2, 1.8) * num_computed(whole) / args.kills / 1.1
    waited = time.monotonic()
    while num_computed(out) < needed and time.monotonic() - waited < WAIT_SECONDS:
        time.sleep(0.05)


def check_workers(check: Check, server: FaultyS3 | None = None, url: str = "") -> None:
    """Kill and pause the workers of a job, which lies at a URL of a server or in a folder."""
    args, rng, log = check.args, check.rng, check.args.work / "log"
    whole, out = args.work / "whole", url if server else args.work / "out"
    data = write_questions(args.work / "rows.jsonl", args.rows, RULES if args.rules else ())

    def job(folder: Path | str, step_s: float = 0.0) -> Job:
        if args.engine == "null":
            rows = {"rows": args.rows, "rows_per_shard": PER_SHARD}
            return NullJob(str(folder), **rows, step_s=step_s, grade=args.grade).run
        more = ["output.report=false"] if server else []
        more += long_arguments(args) if args.long else []
        more += grid_arguments(args.work, args.model) if args.grid else []
        more += ["sampling.column=options"] if args.rules else []
        where = computed[folder != whole] if args.long else None
        return partial(run_real, [*arguments(folder, data, args.grade, args.model), *more], where)

    computed = args.work / "whole.computed", args.work / "out.computed"
    seconds = check.undisturbed(Fork(job(whole), log), Finished(whole))
    if server:
        server.rate = args.rate
    if args.launcher:
        line = arguments(out, data, args.grade)
        line += grid_arguments(args.work, args.model) if args.grid else []
        team = _launched(line, args, rng)
    else:
        slow = job(out, NULL_STEP)
        clocks = (0.0, 7200.0, -7200.0) if args.workers > 1 else (0.0,)
        team = Peers(lambda: Fork(slow, log, rng.choice(clocks)), args.workers, rng)
    check.disturb(
        team,
        seconds,
        Finished(out),
        lambda: f"; requests failed: {server.faults}" if server else "",
        wait=partial(_wait_for_tokens, args, rng, computed) if args.long else None,
    )
    if server:
        server.rate = 0.0
        left, requests = set(connect(url).names("")), f", {server.requests:,} requests"
    else:
        left, requests = {path.name for path in Path(out).iterdir()}, ""
    assert digests(out, "data", "grades") == digests(whole, "data", "grades"), "the files differ"
    rows = [each for each in Finished(out)() if isinstance(each, tuple) and type(each[0]) is int]
    assert len(rows) == (1 if args.long else 2) * (3 if args.grid else 1) * args.rows
    left &= {"leases", "workers", "journal", "differing"}
    assert server or not left, f"{left} are left"
    print(f"the files equal those of one worker, byte for byte{requests}")
    if args.long:
        once, tokens = map(num_computed, computed)
        again = tokens - once
        print(f"{once:,} tokens, of which {again:,} ({again / once:.0%}) were computed again")


def _launched(command: list[str], args: argparse.Namespace, rng: random.Random) -> Peers:
    """The workers that `launcher=local` has started, with the launcher."""
    more = ["launcher=local", f"launcher.workers={args.workers}", "launcher.restarts=1000"]
    line = [sys.executable, "-m", "batchgen", *command, *more]

    def living() -> list[int]:
        paths = (args.work / "out/workers").glob("0*.json")
        beats = [json.loads(path.read_bytes()) for path in paths]
        return [beat["pid"] for beat in beats if beat["ended"] is None]

    return Peers(lambda: Command(line, args.work / "log"), 1, rng, living)


def check_grading(check: Check) -> None:
    """Kill `batchgen grade` over a finished job."""
    args = check.args
    whole, out = args.work / "whole", args.work / "out"
    NullJob(str(whole), rows=args.rows, rows_per_shard=PER_SHARD, max_num_seqs=64).run()
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


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=Path, required=True, help="folder to work in; is emptied")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=3000)
    parser.add_argument("--long", type=int, metavar="TOKENS", help="how long the answers are")
    parser.add_argument("--model", choices=["nano_sdar", "nano_hybrid"], default="nano_sdar")
    parser.add_argument("--engine", choices=["real", "null"], default="real")
    parser.add_argument("--grade", choices=["integer", "regex"], help="grade the job while it runs")
    parser.add_argument("--launcher", action="store_true", help="start workers by launcher=local")
    parser.add_argument("--grid", action="store_true", help="run rows with each of two adapters")
    parser.add_argument("--rules", action="store_true", help="rows of nano_sdar with every rule")
    parser.add_argument("--store", choices=["folder", "s3"], default="folder")
    parser.add_argument("--rate", type=float, default=0.02, help="share of requests that fail")
    parser.add_argument("--pipeline", action="store_true", help="kill workers of a pipeline")
    parser.add_argument(
        "--change", action="append", default=[], metavar="KEY=VALUE",
        help="with --pipeline: workers in between run the pipeline with this argument",
    )  # fmt: skip
    parser.add_argument("--histories", type=int, default=1, help="of --pipeline")
    parser.add_argument("--only-grading", choices=["integer", "regex"], metavar="METHOD")
    parser.add_argument("--grow", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("command", nargs="*")
    args = parser.parse_args(arguments)
    if args.launcher and (args.engine == "null" or args.store == "s3"):
        parser.error("--launcher starts the command: it has no null engine, and finds no store")
    if args.grade and args.store == "s3":
        parser.error("a job on S3 is not graded while it runs")
    shutil.rmtree(args.work, ignore_errors=True)
    args.work.mkdir(parents=True)
    check = Check(args, random.Random(args.seed))
    if not (args.command or args.only_grading or args.store == "s3"):
        warm_up("tests.support.kills.check_kills")
    if args.command:
        check_command(check)
    elif args.pipeline:
        check_pipeline(check)
    elif args.only_grading:
        check_grading(check)
    elif args.store == "folder":
        check_workers(check)
    else:
        from tests.support.jobs.s3_server import BUCKET, served

        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        with served(args.seed, timeout=1.0) as server:
            warm_up("tests.support.kills.check_kills")  # with the environment of the server
            check_workers(check, server, f"s3://{BUCKET}/out")
