"""A job over many rows of 1 kB of which steps leave some, for bench_job_layer.py."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from synthetic_job import PROMPT, TOKENS, InstantEngine, ReadyPrompt

from batchgen.compose.load_config import identity, step_configs
from batchgen.config.dataset_config import DatasetConfig
from batchgen.config.job_config import (
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    StrategyConfig,
)
from batchgen.config.prompt_config import TextPromptConfig
from batchgen.config.sampling_config import SamplingConfig
from batchgen.dataset.row_source import open_dataset
from batchgen.engine.base.outputs import RequestOutput
from batchgen.jobs.job_parts import JobParts
from batchgen.row_index.chain import ChainPass
from batchgen.row_index.open_rows import behind_steps

_WORDS = 150
_VOCABULARY = 20_000


class StepClock:
    """A step on its way through the rows, with the seconds of the processor that it takes, and what
    is said of the memory that it holds."""

    def __init__(self, running: Any) -> None:
        self._running, self.seconds = running, 0.0
        texts = getattr(running, "_texts", None)
        self.held: Callable[[], int] | None = None if texts is None else lambda: texts.num_bytes

    @property
    def full(self) -> bool:
        return bool(self._running.full)

    def take(self, row: Any) -> Any:
        began = time.thread_time()
        try:
            return self._running.take(row)
        finally:
            self.seconds += time.thread_time() - began

    def close(self) -> None:
        self._running.close()


class WatchedEngine(InstantEngine):
    """One that also notes the memory without the pages of mapped files, which the system takes back
    when it needs them: those of the data set are such."""

    peak = 0.0

    def step(self) -> list[RequestOutput]:
        if not self.stats.finished % 1024:
            self.peak = max(self.peak, anonymous_mib())
        return super().step()


def anonymous_mib() -> float:
    """The MiB of memory that this process holds, without the pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (kib,) = (line.split()[1] for line in lines if line.startswith("RssAnon:"))
    return int(kib) / 1024


def time_steps(running: ChainPass) -> list[StepClock]:
    """Put a clock around each step."""
    clocks = [StepClock(step) for step in running._passes]
    running._passes = clocks
    return clocks


def stepped_job(
    folder: Path, rows: int, engine: InstantEngine, *, dedupe: bool
) -> tuple[JobConfig, JobParts]:
    """The job, whose rows and output are in the folder."""
    path = folder / "rows.jsonl"
    draw = random.Random(0)
    vocabulary = [
        f"{draw.randrange(10**5, 10**6)}"[: draw.randrange(3, 7)] for _ in range(_VOCABULARY)
    ]
    texts: list[list[str]] = []
    with path.open("w") as file:
        for number in range(rows):
            words = draw.choices(vocabulary, k=_WORDS)
            if texts and number % 10 == 1:
                words = draw.choice(texts)
            elif texts and number % 10 == 2:
                words = [*draw.choice(texts)]
                words[draw.randrange(_WORDS)] = "another"
            elif len(texts) < 1000:
                texts.append(words)
            text = " ".join(words)
            file.write(json.dumps({"number": number, "document": f"{text:1000}"[:1000]}) + "\n")
    deduping: list[dict[str, Any]] = [
        {"Dedupe": {"by": "document"}},
        {"Dedupe": {"by": "document", "near": 0.8}},
    ]
    steps = [
        {"Filter": {"where": "number % 10 != 3 and document|length > 100"}},
        *(deduping if dedupe else ()),
        {"Keep": {"share": 0.9}},
    ]
    config = JobConfig(
        model=ModelGroup(path="none"),
        dataset=DatasetConfig(kind="files", path=str(path), id_column="number"),
        rows=step_configs(steps, "rows"),
        prompt=TextPromptConfig(text="{{ document }}"),
        sampling=SamplingConfig(max_new_tokens=len(TOKENS)),
        strategy=StrategyConfig(target="none.Strategy"),
        engine=EngineGroup(),
        output=OutputConfig(dir=str(folder / "out"), report=False),
    )
    source, found = behind_steps(
        open_dataset(config.dataset), config.rows, identity(config)["dataset"], None
    )
    parts = JobParts(
        source=source,
        prompt=ReadyPrompt(),
        bos_id=None,
        max_model_len=len(PROMPT) + len(TOKENS),
        columns=(),
        fingerprints=dict(found),
        build_engine=lambda: engine,
    )
    return config, parts
