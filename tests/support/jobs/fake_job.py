"""A job without a model: a deterministic engine, prompt and source, for tests of the job layer.

Run as a program (`python fake_job.py '{"out": "/tmp/x", "rows": 100}'`) it takes the fields of
`FakeJob` and exits as the command line does.
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from datasets import Features

from batchgen.config.compose.load_config import constraint_config
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.config.groups.job_config import EngineGroup, JobConfig, ModelGroup, StrategyConfig
from batchgen.config.groups.output_config import OutputConfig, ProgressConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.engine.interface.outputs import Begun, OutputColumn, RequestError, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.vision.image import Image
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from batchgen.util.request_id import RequestId

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
TOP_LOGPROBS = OutputColumn("top_logprobs", np.dtype(np.float32), (2, 3))
STEP_COST = 0.25
MEMORY = MemoryPlan(2**30, 0, 2**29, num_blocks=65, kv_tokens=1024, total=None)
BAD_PROMPT, BAD_REQUEST = 13, 17  # rows whose index is a multiple of one of these fail


@dataclass(frozen=True)
class FakeJob:
    """What to run and how it goes wrong.

    Attributes:
        out: the output folder.
        log: a file that gets a line for every request that the engine computes.
        step_s: seconds that a step of the engine takes.
        limit: dataset.limit.
        changed: index of a row with another question than usual, -1 for none.
        bad: whether rows BAD_PROMPT*k (no prompt) and BAD_REQUEST*k (refused) fail.
        straggler: index of a row that never finishes before all others have, -1 for none.
        fail_at_step: the engine raises in this step, -1 for never.
        constraint: the group of that name.
        answers: text, finish reason and constraint_satisfied that rows take in turns; empty for
            texts of tokens.
        show: every how many seconds an answer is shown.
        report: whether the job ends with a report, which takes longer than the job.
    """

    out: str
    rows: int = 100
    samples: int = 2
    rows_per_shard: int = 16
    max_num_seqs: int = 8
    log: str = ""
    step_s: float = 0.0
    bad: bool = True
    straggler: int = -1
    fail_at_step: int = -1
    prompt_token_ids: bool = True
    overwrite: bool = False
    temperature: float = 1.0
    constraint: dict[str, Any] = field(default_factory=lambda: {"kind": "none"})
    parsed: bool = False
    batch_dependence: str = ""
    limit: int | None = None
    changed: int = -1
    retry_errors: bool = False
    on_all_errors: Literal["stop", "continue"] = "stop"
    text_column: str = "text"
    answers: tuple[tuple[str, str, bool | None], ...] = ()
    show: float = 0.0
    report: bool = False

    def engine(self) -> FakeEngine:
        """The engine, which says that it is there, as those that load weights do."""
        print(f"memory: {MEMORY}", file=sys.stderr, flush=True)
        return FakeEngine(self, batch_dependence=self.batch_dependence or None)

    def config(self) -> JobConfig:
        asked = {"prompt_token_ids": self.prompt_token_ids, "parsed": self.parsed}
        columns = ("logprobs", *(name for name, wanted in asked.items() if wanted))
        return JobConfig(
            model=ModelGroup(path="fake"),
            dataset=DatasetConfig(kind="demo", limit=self.limit),
            prompt=ChatPromptConfig(user="{{ question }}"),
            sampling=SamplingConfig(
                n=self.samples, temperature=self.temperature, max_new_tokens=16
            ),
            strategy=StrategyConfig(target="fake.Strategy"),
            constraint=constraint_config(self.constraint),
            engine=EngineGroup(max_num_seqs=self.max_num_seqs),
            output=OutputConfig(
                dir=self.out,
                columns=columns,
                rows_per_shard=self.rows_per_shard,
                overwrite=self.overwrite,
                retry_errors=self.retry_errors,
                on_all_errors=self.on_all_errors,
                text_column=self.text_column,
                report=self.report,
            ),
            progress=ProgressConfig(show=self.show),
        )

    def parts(self) -> ResolvedJob:
        return ResolvedJob(
            source=FakeSource(self.rows, self.limit, self.changed),
            prompt=FakePrompt(self.bad),
            bos_id=None,
            max_model_len=1024,
            columns=(LOGPROBS, TOP_LOGPROBS),
            fingerprints={"model": "fake"},
            port=self.engine,
        )

    def run(self) -> JobResult:
        return execute_job(self.config(), self.parts())


class FakeSource(Source):
    """Rows `{"question": "q7", "number": 7, "tags": ["a"] * (7 % 3)}`.

    The fingerprint is of all rows, also those from the limit on, as that of a file is.
    """

    schema = pa.schema(
        [("question", pa.string()), ("number", pa.int64()), ("tags", pa.list_(pa.string()))]
    )
    features = Features.from_arrow_schema(schema)
    num_rows: int | None = None
    fingerprint: str = ""

    def __init__(self, num_rows: int, limit: int | None = None, changed: int = -1) -> None:
        self.num_rows = num_rows if limit is None else min(num_rows, limit)
        self.fingerprint = f"fake-{num_rows}-{changed}"
        self._changed = changed

    def rows(self, start: int = 0) -> Iterator[Row]:
        return self.rows_at(range(start, self.num_rows or 0))

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        for i in indices:
            question = "another" if i == self._changed else f"q{i}"
            yield Row(i, f"id{i}", {"question": question, "number": i, "tags": ["a"] * (i % 3)})

    def passthrough(self, row: Row) -> dict[str, Any]:
        return row.fields

    def tables(self, stop: int, size: int) -> Iterator[pa.Table]:
        rows = [row.fields for row in self.rows()][:stop]
        for start in range(0, stop, size):
            yield pa.Table.from_pylist(rows[start : start + size], schema=self.schema)


@dataclass(frozen=True)
class FakePrompt(Prompt):
    bad: bool

    def token_ids(self, row: Row) -> list[int]:
        if self.bad and row.index % BAD_PROMPT == 0:
            raise RequestError("template_error", f"row {row.index} has no prompt")
        return [row.index, row.index + 1, 2]


@dataclass
class FakeStats:
    steps: int = 0


@dataclass
class _Running:
    request_id: RequestId
    prompt: list[int]
    params: RequestParams
    steps_left: int


@dataclass
class FakeEngine:
    """Computes `outcome` of every request, over as many steps as its seed says."""

    job: FakeJob
    stats: FakeStats = field(default_factory=FakeStats)
    memory: MemoryPlan = MEMORY
    batch_dependence: str | None = None
    closed: bool = False
    generated_tokens: int = 0
    _running: dict[RequestId, _Running] = field(default_factory=dict)
    _costs: dict[RequestId, float] = field(default_factory=dict)

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: list[int],
        params: RequestParams,
        answer: GivenAnswer | None = None,
        images: Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        assert request_id not in self._running
        if self.job.bad and prompt_token_ids[0] % BAD_REQUEST == 0:
            raise RequestError("kv_cache_too_small", f"request {request_id} can never run")
        self._running[request_id] = _Running(
            request_id, prompt_token_ids, params, 1 + params.seed % 5
        )
        return False

    def begun_lengths(self) -> dict[RequestId, int]:
        return {}

    def begun(self, request_id: RequestId, start: int = 0) -> Begun | None:
        return None

    @property
    def num_running(self) -> int:
        return min(len(self._running), self.job.max_num_seqs)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        return np.zeros(self.num_running, np.int64)

    @property
    def running_ids(self) -> list[RequestId]:
        return list(self._running)[: self.num_running]

    def abort(self, request_id: RequestId) -> bool:
        return self._running.pop(request_id, None) is not None

    @property
    def max_num_seqs(self) -> int:
        return self.job.max_num_seqs

    def measure_costs(self) -> None:
        assert not self._running

    def take_costs(self, *, wait: bool = False) -> list[tuple[RequestId, float]]:
        """A request costs STEP_COST for each of its steps."""
        found, self._costs = self._costs, {}
        return [*found.items()]

    def close(self) -> None:
        self.closed = True

    def step(self) -> list[RequestOutput]:
        assert not self.closed
        self.stats.steps += 1
        if self.stats.steps == self.job.fail_at_step:
            raise RuntimeError("the device fell off the bus")
        time.sleep(self.job.step_s)
        finished = []
        for running in list(self._running.values())[: self.job.max_num_seqs]:
            running.steps_left -= 1
            name = running.request_id
            self._costs[name] = self._costs.get(name, 0.0) + STEP_COST
            waits = running.prompt[0] == self.job.straggler and self._others_run()
            if running.steps_left <= 0 and not waits:
                finished.append(self._finish(running))
        return finished

    def _others_run(self) -> bool:
        return any(running.prompt[0] != self.job.straggler for running in self._running.values())

    def _finish(self, running: _Running) -> RequestOutput:
        del self._running[running.request_id]
        if self.job.log:
            fd = os.open(self.job.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
            job = f"{running.request_id.job}\n" if running.request_id.job else ""
            os.write(fd, f"{job}{running.request_id}\n".encode())
            os.close(fd)
        output = outcome(running.request_id, running.prompt, running.params)
        if self.job.answers:
            text, reason, satisfied = self.job.answers[running.prompt[0] % len(self.job.answers)]
            output = replace(
                output,
                text=text,
                finish_reason=reason,  # type: ignore[arg-type]
                constraint_satisfied=satisfied,
            )
        self.generated_tokens += len(output.token_ids)
        return output


def outcome(request_id: RequestId, prompt: list[int], params: RequestParams) -> RequestOutput:
    """A function of prompt and seed alone."""
    digest = blake2b(repr((prompt, params.seed)).encode(), digest_size=16).digest()
    tokens = list(digest[: 1 + digest[0] % 16])
    values = np.array(tokens, np.float32)
    return RequestOutput(
        request_id=request_id,
        prompt_token_ids=prompt,
        token_ids=tokens,
        text=" ".join(map(str, tokens)),
        finish_reason="length" if len(tokens) == 16 else "stop",
        stop=None if len(tokens) == 16 else "</s>",
        columns={
            "logprobs": -values,
            "top_logprobs": np.repeat(values, 6).reshape(-1, 2, 3),
        },
    )


def main(fields: str) -> int:
    from batchgen.cli.job_outcome import report

    return report(lambda: FakeJob(**json.loads(fields)).run())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
