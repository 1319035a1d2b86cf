"""A job without a model whose steps choose, split and join the rows of a file."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.step_configs import step_configs
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.config.groups.job_config import EngineGroup, JobConfig, ModelGroup, StrategyConfig
from batchgen.config.groups.output_config import OutputConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.inputs.dataset.row_source import open_dataset
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.inputs.row_index.open_rows import behind_steps
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.job_end import JobResult
from batchgen.jobs.run.run_job import execute_job
from tests.support.jobs.fake_job import FakeEngine, FakeJob

STEPS: list[dict[str, Any]] = [
    {"Filter": {"where": "number != 3"}},
    {"Explode": {"column": "items", "as": "item"}},
    {"Dedupe": {"by": ["question", "item"]}},
    {"Dedupe": {"by": "question", "near": 0.9, "ngram": 2}},
    {"Pick": {"style": ["terse", "formal"], "times": 2}},
    {"Balance": {"by": ["style", "number"], "most": 25}},
    {"Keep": {"share": 0.9}},
]


@dataclass(frozen=True)
class SteppedJob:
    """What to run: the file with rows, the output folder, and how it goes."""

    rows: str
    out: str
    steps: list[dict[str, Any]] = field(default_factory=lambda: STEPS)
    limit: int | None = None
    streaming: bool = False
    rows_per_shard: int = 16
    step_s: float = 0.0
    report: bool = False
    overwrite: bool = False

    def config(self) -> JobConfig:
        return JobConfig(
            model=ModelGroup(path="fake"),
            dataset=DatasetConfig(
                kind="files",
                path=self.rows,
                id_column="id",
                limit=self.limit,
                streaming=self.streaming,
            ),
            rows=step_configs(self.steps, "rows"),
            prompt=ChatPromptConfig(user="{{ question }}"),
            sampling=SamplingConfig(temperature=1.0, max_new_tokens=16),
            strategy=StrategyConfig(target="fake.Strategy"),
            engine=EngineGroup(max_num_seqs=8),
            output=OutputConfig(
                dir=self.out,
                rows_per_shard=self.rows_per_shard,
                report=self.report,
                overwrite=self.overwrite,
            ),
        )

    def run(self) -> JobResult:
        config, engine = self.config(), FakeEngine(FakeJob(self.out, bad=False, step_s=self.step_s))
        source, found = behind_steps(
            open_dataset(config.dataset), config.rows, config_identity(config)["dataset"], None
        )
        parts = ResolvedJob(
            source=source,
            prompt=QuestionPrompt(),
            bos_id=None,
            max_model_len=1024,
            columns=(),
            fingerprints={"model": "fake", **found},
            port=lambda: engine,
        )
        return execute_job(config, parts)

    def bytes(self) -> dict[str, bytes]:
        return {path.name: path.read_bytes() for path in sorted(Path(self.out, "data").iterdir())}


class QuestionPrompt(Prompt):
    """The bytes of the question and the item."""

    def token_ids(self, row: Row) -> list[int]:
        text = f"{row.fields['question']} {row.fields.get('item')}"
        return list(text.encode())


def write_rows(job: SteppedJob, number: int) -> None:
    """Write the first rows of the data set, some of which are alike."""
    with Path(job.rows).open("w") as file:
        for i in range(number):
            # One in four questions is there again, one in four nearly.
            same = i - i % 4 if i % 4 < 2 else i
            question = " ".join(f"w{same * 7 + k}" for k in range(12)) + " !" * (i % 4 == 1)
            items = [f"item {i % 9} {k}" for k in range(i % 3 + 1)]
            row = {"id": f"q{i}", "question": question, "number": i % 9, "items": items}
            file.write(json.dumps(row) + "\n")


def data(job: SteppedJob) -> list[dict[str, Any]]:
    """The rows of the output."""
    return _rows(Path(job.out) / "data", "part-")


def index(job: SteppedJob) -> list[dict[str, Any]]:
    """The row index."""
    return _rows(Path(job.out) / "rows", "part-")


def dropped(job: SteppedJob) -> list[dict[str, Any]]:
    """The rows that steps took out."""
    return _rows(Path(job.out) / "rows", "dropped-")


def _rows(folder: Path, start: str) -> list[dict[str, Any]]:
    files = [path for path in sorted(folder.iterdir()) if path.name.startswith(start)]
    return [row for path in files for row in pq.read_table(path, partitioning=None).to_pylist()]
