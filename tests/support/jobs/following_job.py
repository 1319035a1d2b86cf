"""A job without a model that reads the answers of another one, complete or while it runs."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from batchgen.config.compose.config_identity import config_identity
from batchgen.config.compose.step_configs import step_configs
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.config.groups.job_config import JobConfig, StepConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import Prompt
from batchgen.inputs.row_index.open_rows import behind_steps
from batchgen.inputs.upstream.followed_job import Promise
from batchgen.inputs.upstream.open_source import open_source
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from tests.support.jobs.fake_job import FakeEngine, FakeJob

EXTRACT = StepConfig(
    target="batchgen.grading.extract.Extract",
    options={"methods": ["regex"], "pattern": "([0-9]+)$"},
)
STEPS: list[dict[str, Any]] = [
    {"Filter": {"where": "number != 4"}},
    {"Dedupe": {"by": "question", "near": 0.9, "ngram": 1}},
    {"Explode": {"column": "tags", "as": "tag"}},
    {"Balance": {"by": "tag", "most": 40}},
]


@dataclass(frozen=True)
class FollowingJob:
    """What to read and how: the other job's folder, the output folder, keys of the data set, and
    steps of `rows`."""

    path: str
    out: str
    keys: dict[str, Any] = field(default_factory=dict)
    steps: list[dict[str, Any]] = field(default_factory=list)
    rows_per_shard: int = 5
    post: tuple[StepConfig, ...] = ()
    log: str = ""
    samples: int = 2

    def config(self) -> JobConfig:
        fake = FakeJob(self.out, rows_per_shard=self.rows_per_shard, samples=self.samples)
        data = DatasetConfig(kind="job", path=self.path, **self.keys)
        prompt = ChatPromptConfig(user="{{ text }} {{ number }}")
        rows = step_configs(self.steps, "rows")
        return replace(fake.config(), dataset=data, prompt=prompt, rows=rows, post=self.post)

    def parts(self, promised: dict[str, Promise] | None = None) -> ResolvedJob:
        config = self.config()
        data = open_source(config, promised)
        source, found = behind_steps(data, config.rows, config_identity(config)["dataset"], None)
        fake = FakeJob(self.out, samples=self.samples, log=self.log, bad=False)
        return replace(
            fake.parts(),
            source=source,
            prompt=TextPrompt(),
            fingerprints={"model": "fake", **found},
            port=lambda: FakeEngine(fake),
        )


class TextPrompt(Prompt):
    """The bytes of a row's text and number."""

    def token_ids(self, row: Row) -> list[int]:
        fields = row.fields
        return list(f"{fields['text']} {fields['number']} {fields.get('tag')}".encode())


class Unfolding:
    """A job's folder in which the parts of a complete one appear one after the other."""

    def __init__(self, whole: Path, folder: Path) -> None:
        self._whole, self.folder = whole, folder
        for name in ("data", "grades"):
            (folder / name).mkdir(parents=True)
        for name in ("manifest.json", "config.yaml"):
            shutil.copy(whole / name, folder)
        self._metrics = json.loads((whole / "metrics.json").read_text())
        self._say("running")

    def parts(self) -> list[str]:
        """The names of what is to appear, in the order of the shards."""
        found = [*(self._whole / "data").iterdir(), *(self._whole / "grades").glob("part-*")]
        return [str(path.relative_to(self._whole)) for path in sorted(found, key=lambda p: p.name)]

    def show(self, name: str) -> None:
        temporary = self.folder / f"{name}.tmp"
        shutil.copy(self._whole / name, temporary)
        temporary.rename(self.folder / name)

    def end(self) -> None:
        self._say("complete")

    def _say(self, status: str) -> None:
        attempts = [{**one, "status": status} for one in self._metrics["attempts"]]
        text = json.dumps({**self._metrics, "status": status, "attempts": attempts})
        path = self.folder / "metrics.json"
        path.with_suffix(".new").write_text(text)
        path.with_suffix(".new").rename(path)


def written(out: str | Path, *folders: str) -> dict[str, bytes]:
    """What a job wrote, by the names of the files."""
    return {
        f"{folder}/{path.name}": path.read_bytes()
        for folder in folders or ("data",)
        for path in sorted(Path(out, folder).glob("*.parquet"))
    }
