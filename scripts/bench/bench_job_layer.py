"""Time the job layer and watch its memory: `run_job` with an engine that costs nothing.

    python scripts/bench/bench_job_layer.py [--rows 200000] [--grade] [--report] [--rounds 3]

A data set of that many rows is written as JSONL and streamed from there. Prompts are ready-made
token ids, so the figures contain neither tokenizing nor a model. Printed are the resident memory at
10% and at 100% of the rows, and the microseconds per row of everything but the engine: reading,
requests, journal and shards. The exit code is 1 if the memory grew by more than 10% in between.
With --grade and --report the job runs again in every round with integer grades, with report.html or
with both. Printed is what these add to the plain job of the same round, in seconds of the clock and
in CPU seconds of this process and of all that it started, and then the medians over the rounds. On
a machine that is shared two jobs may differ by more than that, so printed is also what grading and
scoring took within its own job, where they come when all rows are there.
Before the rounds each kind runs once with few rows, so that none of them counts the imports.
"""

import argparse
import json
import os
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
import numpy.typing as npt
from this_process import resident_mib

from batchgen.config.dataset_config import DatasetConfig
from batchgen.config.job_config import (
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    SamplingConfig,
    StepConfig,
    StrategyConfig,
)
from batchgen.config.prompt_config import TextPromptConfig
from batchgen.dataset.row_source import Row, open_dataset
from batchgen.engine.base.outputs import OutputColumn, RequestOutput
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.jobs.graded_job import scores_of
from batchgen.jobs.job_parts import JobParts
from batchgen.jobs.run_job import run_job
from batchgen.prompts.row_prompts import Prompt

PROMPT = list(range(1000, 1100))
TOKENS = list(range(2000, 2100))
TEXT = "an answer of some length " * 16 + r"\boxed{14}"
GRADES = (
    StepConfig(target="batchgen.grading.extract.Extract"),
    StepConfig(
        target="batchgen.grading.grade.Grade", options={"method": "integer", "target": "answer"}
    ),
)
LOGPROBS = {"logprobs": np.linspace(-3, 0, len(TOKENS), dtype=np.float32)}


@dataclass
class Stats:
    """The count that the job reads from an engine's statistics."""

    finished: int = 0


class InstantEngine:
    """An engine that finishes the `per_step` oldest requests in every step, with ready-made output.

    Attributes:
        resident: (finished rows, resident MiB), about every 1000 rows.
    """

    def __init__(self, per_step: int) -> None:
        self.stats = Stats()
        self.memory = MemoryPlan(0, 0, 0, num_blocks=0, kv_tokens=0, total=None)
        self.batch_dependence: str | None = None
        self.max_num_seqs = 256
        self.generated_tokens = 0
        self.resident: list[tuple[int, float]] = []
        self._per_step = per_step
        self._waiting: list[str] = []

    def add_request(self, request_id: str, prompt_token_ids: list[int], params: object) -> None:
        assert isinstance(params, SamplingParams)
        self._waiting.append(request_id)

    @property
    def num_running(self) -> int:
        return len(self._waiting)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        return np.zeros(len(self._waiting), np.int64)

    def close(self) -> None:
        """It has nothing in the background."""

    def step(self) -> list[RequestOutput]:
        done = self._waiting[: self._per_step]
        del self._waiting[: self._per_step]
        before = self.stats.finished
        self.stats.finished += len(done)
        self.generated_tokens += len(done) * len(TOKENS)
        if self.stats.finished // 1000 != before // 1000:
            self.resident.append((self.stats.finished, resident_mib()))
        return [
            RequestOutput(request_id, PROMPT, TOKENS, TEXT, "stop", stop="</s>", columns=LOGPROBS)
            for request_id in done
        ]


class ReadyPrompt(Prompt):
    """A prompt that is the same token ids for every row."""

    def token_ids(self, row: Row) -> list[int]:
        return PROMPT


class Took(NamedTuple):
    """What a job took, in seconds of the clock and of the processor.

    Attributes:
        grading: of `seconds`, those in which the rows were graded and scored when all were there.
    """

    seconds: float
    cpu: float
    grading: float


def run(
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


def null_job(
    folder: Path,
    rows: int,
    engine: InstantEngine,
    post: tuple[StepConfig, ...] = (),
    *,
    report: bool = False,
    rows_per_shard: int = 1000,
) -> tuple[JobConfig, JobParts]:
    """A job whose rows and output are in the folder, for `run_job`."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(rows):
            row = {"question": f"What is {i} plus {i}? " * 4, "answer": str(2 * i)}
            file.write(json.dumps(row) + "\n")
    config = JobConfig(
        model=ModelGroup(path="none"),
        dataset=DatasetConfig(kind="files", path=str(path), streaming=True),
        prompt=TextPromptConfig(text="{{ question }}"),
        sampling=SamplingConfig(max_new_tokens=len(TOKENS)),
        strategy=StrategyConfig(target="none.Strategy"),
        engine=EngineGroup(),
        output=OutputConfig(
            dir=str(folder / "out"),
            columns=("logprobs",),
            report=report,
            rows_per_shard=rows_per_shard,
        ),
        post=post,
    )
    parts = JobParts(
        source=open_dataset(config.dataset),
        prompt=ReadyPrompt(),
        bos_id=None,
        max_model_len=4096,
        columns=(OutputColumn("logprobs", np.dtype(np.float32)),),
        fingerprints={},
        build_engine=lambda: engine,
    )
    return config, parts


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost and memory of the job layer.")
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--per-step", type=int, default=32, help="rows that finish in a step")
    parser.add_argument("--grade", action="store_true", help="time integer grades, too")
    parser.add_argument("--report", action="store_true", help="time report.html, too")
    parser.add_argument("--rounds", type=int, default=1)
    args = parser.parse_args()
    # Memory is read about every 1000 rows, and once at least in the first tenth of them.
    least = 10 * (1000 + args.per_step)
    if args.rows < least:
        parser.error(f"--rows must be at least {least}, or there is no figure at 10% of them")
    more = {
        "grades": (GRADES, False),
        "report": ((), True),
        "grades and report": (GRADES, True),
    }
    kinds = [
        name
        for name, (post, report) in more.items()
        if (args.grade or not post) and (args.report or not report)
    ]
    folder = Path(tempfile.mkdtemp(prefix="bench_job_layer")) / "job"
    try:
        for name in kinds:
            post, report = more[name]
            run(folder, 5000, args.per_step, post, report=report, quiet=True)
        found: dict[str, list[Took]] = {name: [] for name in kinds}
        for _ in range(args.rounds):
            plain = run(folder, args.rows, args.per_step)
            for name in kinds:
                post, report = more[name]
                took = run(folder, args.rows, args.per_step, post, report=report, quiet=True)
                own = took.grading / (took.seconds - took.grading)
                added = Took(took.seconds / plain.seconds - 1, took.cpu / plain.cpu - 1, own)
                found[name].append(added)
                print(
                    f"{name}: {took.seconds:.1f} s ({added.seconds:+.1%}), "
                    f"{took.cpu:.1f} s CPU ({added.cpu:+.1%}); grading took {took.grading:.2f} s, "
                    f"{own:.1%} of the rest of this job",
                    flush=True,
                )
        for name, all_added in found.items():
            clock, cpu, own = (median(values) for values in zip(*all_added, strict=True))
            print(
                f"{name} add {clock:.1%}, and {cpu:.1%} of CPU; grading takes {own:.1%} of the "
                f"rest of its job (medians of {args.rounds})"
            )
    finally:
        shutil.rmtree(folder.parent)


if __name__ == "__main__":
    main()
