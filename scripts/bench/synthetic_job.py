"""Jobs without a model: an engine that costs nothing, and its rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from measuring import resident_mib

from batchgen.config.dataset_config import DatasetConfig
from batchgen.config.job_config import (
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    StepConfig,
    StrategyConfig,
)
from batchgen.config.prompt_config import TextPromptConfig
from batchgen.config.sampling_config import SamplingConfig
from batchgen.dataset.row_source import open_dataset
from batchgen.dataset.source import Row
from batchgen.engine.base.outputs import OutputColumn, RequestOutput
from batchgen.engine.images.image import Image
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.jobs.job_parts import JobParts
from batchgen.prompts.row_prompts import Prompt

LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))
PROMPT = list(range(1000, 1100))
TOKENS = list(range(2000, 2100))
TEXT = "an answer of some length " * 16 + r"\boxed{14}"
_VALUES = {"logprobs": np.linspace(-3, 0, len(TOKENS), dtype=np.float32)}


def integer_steps(target: str, **extract: object) -> tuple[StepConfig, ...]:
    """The steps that grade whole numbers against the field `target`."""
    return (
        StepConfig(target="batchgen.grading.extract.Extract", options=extract),
        StepConfig(
            target="batchgen.grading.grade.Grade", options={"method": "integer", "target": target}
        ),
    )


@dataclass
class Stats:
    finished: int = 0


class InstantEngine:
    """An engine that finishes the `per_step` oldest requests in every step, with ready-made output.

    `resident` holds (finished rows, resident MiB), about every 1000 rows.
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

    def add_request(
        self,
        request_id: str,
        prompt_token_ids: list[int],
        params: object,
        answer_token_ids: list[int] | None = None,
        images: Sequence[Image] = (),
    ) -> None:
        assert isinstance(params, SamplingParams)
        self._waiting.append(request_id)

    @property
    def num_running(self) -> int:
        return len(self._waiting)

    @property
    def running_lengths(self) -> npt.NDArray[np.int64]:
        return np.zeros(len(self._waiting), np.int64)

    def measure_costs(self) -> None:
        """Nothing is measured: no step takes a device's time."""

    def take_costs(self, *, wait: bool = False) -> list[tuple[str, float]]:
        return []

    def close(self) -> None:
        pass

    def step(self) -> list[RequestOutput]:
        done = self._waiting[: self._per_step]
        del self._waiting[: self._per_step]
        before = self.stats.finished
        self.stats.finished += len(done)
        self.generated_tokens += len(done) * len(TOKENS)
        if self.stats.finished // 1000 != before // 1000:
            self.resident.append((self.stats.finished, resident_mib()))
        return [
            RequestOutput(request_id, PROMPT, TOKENS, TEXT, "stop", stop="</s>", columns=_VALUES)
            for request_id in done
        ]


class ReadyPrompt(Prompt):
    """A prompt that is the same token ids for every row."""

    def token_ids(self, row: Row) -> list[int]:
        return PROMPT


def null_job(
    folder: Path,
    rows: int,
    engine: InstantEngine,
    post: tuple[StepConfig, ...] = (),
    *,
    report: bool = False,
) -> tuple[JobConfig, JobParts]:
    """A job whose rows and output are in the folder, for `run_job`."""
    path = folder / "rows.jsonl"
    with path.open("w") as file:
        for i in range(rows):
            row = {"question": f"What is {i} plus {i}? " * 4, "answer": str(2 * i)}
            file.write(json.dumps(row) + "\n")
    out = OutputConfig(dir=str(folder / "out"), columns=("logprobs",), report=report)
    config = JobConfig(
        model=ModelGroup(path="none"),
        dataset=DatasetConfig(kind="files", path=str(path), streaming=True),
        prompt=TextPromptConfig(text="{{ question }}"),
        sampling=SamplingConfig(max_new_tokens=len(TOKENS)),
        strategy=StrategyConfig(target="none.Strategy"),
        engine=EngineGroup(),
        output=out,
        post=post,
    )
    parts = JobParts(
        source=open_dataset(config.dataset),
        prompt=ReadyPrompt(),
        bos_id=None,
        max_model_len=4096,
        columns=(LOGPROBS,),
        fingerprints={},
        build_engine=lambda: engine,
    )
    return config, parts
