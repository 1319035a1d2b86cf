"""Jobs with an engine that computes nothing, to measure and test everything else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from measuring import anonymous_mib

from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.engine.interface.outputs import Begun, OutputColumn, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.vision.image import Image
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.jobs.resolve.open_job import resolve_job
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.util.request_id import RequestId

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
PROMPT = list(range(1000, 1100))
TOKENS = list(range(2000, 2100))
TEXT = "an answer of some length " * 16 + r"\boxed{14}"
_VALUES = {"logprobs": np.linspace(-3, 0, len(TOKENS), dtype=np.float32)}


def integer_steps(target: str, **extract: object) -> tuple[StepConfig, ...]:
    """Return the steps that grade whole numbers against the field `target`."""
    return (
        StepConfig(target="Extract", options=extract),
        StepConfig(target="Grade", options={"method": "integer", "target": target}),
    )


@dataclass
class Stats:
    finished: int = 0


class InstantEngine:
    """An engine that computes nothing. Each step loads the images of the `per_step` oldest requests
    and ends them, all with the same answer. It has the methods that a job calls of `LLMEngine`.

    `memory_used` has an entry about every `every` rows: (finished rows, MiB of the process).
    """

    def __init__(self, per_step: int, every: int = 1000) -> None:
        self.stats = Stats()
        self.memory = MemoryPlan(0, 0, 0, num_blocks=0, kv_tokens=0, total=None)
        self.batch_dependence: str | None = None
        self.max_num_seqs = 256
        self.generated_tokens = 0
        self.columns: dict[str, npt.NDArray[Any]] = {}
        self.memory_used: list[tuple[int, float]] = []
        self._per_step, self._every = per_step, every
        self._waiting: list[tuple[RequestId, Sequence[Image]]] = []

    def add_request(
        self,
        request_id: RequestId,
        prompt_token_ids: list[int],
        params: object,
        answer: GivenAnswer | None = None,
        images: Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> bool:
        self._waiting.append((request_id, images))
        return False

    def begun_lengths(self) -> dict[RequestId, int]:
        return {}

    def begun(self, request_id: RequestId, start: int = 0) -> Begun | None:
        return None

    @property
    def num_running(self) -> int:
        return len(self._waiting)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        return np.zeros(len(self._waiting), np.int64)

    def measure_costs(self) -> None:
        """Nothing is measured: no step takes a device's time."""

    def take_costs(self, *, wait: bool = False) -> list[tuple[RequestId, float]]:
        return []

    def close(self) -> None:
        pass

    def step(self) -> list[RequestOutput]:
        done = self._waiting[: self._per_step]
        del self._waiting[: self._per_step]
        for image in (image for _, images in done for image in images):
            image.load()
        before = self.stats.finished
        self.stats.finished += len(done)
        self.generated_tokens += len(done) * len(TOKENS)
        if self.stats.finished // self._every != before // self._every:
            self.memory_used.append((self.stats.finished, anonymous_mib()))
        return [
            RequestOutput(name, PROMPT, TOKENS, TEXT, "stop", stop="</s>", columns=self.columns)
            for name, _ in done
        ]

    def check_memory(self, rows: int, part: int) -> tuple[float, float]:
        """Print and return the peak MiB in the first 1/`part` of the rows, and in all rows."""
        early = max(mib for done, mib in self.memory_used if done <= rows / part)
        peak = max(mib for _, mib in self.memory_used)
        print(f"memory: {early:.0f} MiB in the first {part}th of the rows, {peak:.0f} MiB in all")
        return early, peak


def must_be_flat(early: float, peak: float) -> None:
    """Exit with 1 if memory has grown by more than 10%."""
    if peak > 1.1 * early:
        raise SystemExit("memory is not flat: more than 10% above that of the first rows")


class ReadyPrompt(Prompt):
    """A prompt that is the same token ids for every row."""

    def token_ids(self, row: Row) -> list[int]:
        return PROMPT


def instant_job(
    folder: Path, engine: InstantEngine, values: Mapping[str, Any]
) -> tuple[JobConfig, ResolvedJob]:
    """Compose a job with the settings `values`, and resolve it with `engine` instead of a model's.
    Its output is in `folder`. Prompts are the same token ids for all rows, unless rows have images.
    Returns the configuration and the resolved job, for `execute_job`."""
    common = {
        "model": "nano_hybrid",
        "sampling": {"choice": "greedy", "max_new_tokens": len(TOKENS)},
        "output.dir": str(folder / "out"),
        "engine": {"device": "cpu", "max_model_len": None},
        "output.columns": [],
        "output.report": False,
    }
    config = compose({**common, **values})
    job = resolve_job(config)
    old = {each.name: getattr(job, each.name) for each in fields(ResolvedJob)}
    parts = ResolvedJob(**{**old, "port": lambda: engine, "strategy": None})
    engine.columns = {name: _VALUES[name] for name in config.output.columns}
    return config, parts if parts.images else replace(parts, prompt=ReadyPrompt())
