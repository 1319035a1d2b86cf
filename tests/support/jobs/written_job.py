"""Folders of complete jobs of any size, written without a model."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml
from synthetic_job import LOGPROBS, integer_steps

from batchgen.config.compose.config_identity import config_identity, growing
from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.dataset_config import DatasetConfig
from batchgen.config.groups.job_config import EngineGroup, JobConfig, ModelGroup, StrategyConfig
from batchgen.config.groups.output_config import OutputConfig, ScoreConfig
from batchgen.config.groups.prompt_config import ChatPromptConfig
from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.scores.job_score import job_scores, save_score
from batchgen.evals.scores.samples import Samples
from batchgen.storage.shards.checked_file import seal
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.shard_files import shard_path
from batchgen.storage.stores.manifest import ROWS, Manifest
from batchgen.storage.stores.whole_file import write_atomic

_WORDS = 40
"""About how many words an answer has."""
_MOST_TOKENS = 120
_CORPUS = 2**20


def write_job(
    folder: Path,
    rows: int,
    samples: int,
    *,
    rows_per_shard: int = 1000,
    ids: str = "position",
    texts: Sequence[str] = (),
    seed: int = 0,
    errors: float = 0.001,
) -> None:
    """Write the folder of a complete job.

    Every answer is a run of random words, or of `texts` in turns, with a log-probability for each
    token. Seven in ten are right, and the share `errors` of rows has an error. `ids` is `position`
    for those that rows have without dataset.id_column, `shuffled` for ids in no order.
    """
    config = JobConfig(
        model=ModelGroup(path="none"),
        dataset=DatasetConfig(kind="demo"),
        prompt=ChatPromptConfig(user="{{ question }}"),
        sampling=SamplingConfig(n=samples, temperature=1.0, max_new_tokens=_MOST_TOKENS),
        strategy=StrategyConfig(target="batchgen.strategies.ar.strategy.ARStrategy"),
        engine=EngineGroup(),
        output=OutputConfig(dir=str(folder), columns=("logprobs",), rows_per_shard=rows_per_shard),
    )
    (folder / "data").mkdir(parents=True)
    maker = _Shards(samples, ids, texts, np.random.default_rng(seed), errors)
    for shard, first in enumerate(range(0, rows, rows_per_shard)):
        data = maker.table(first, min(rows_per_shard, rows - first))
        pq.write_table(data, shard_path(folder / "data", shard), compression="zstd")
        seal(shard_path(folder / "data", shard))
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved(config)), encoding="utf-8")
    manifest = Manifest.build(
        config_identity(config),
        {"model": "none", "dataset": "none"},
        growing={**growing(config), ROWS: rows},
    )
    write_atomic(folder / "manifest.json", manifest.text())
    counts = {"rows": rows * samples, "generated_tokens": maker.tokens}
    attempt = {
        "started": "2026-01-01T00:00:00+0000", "host": "here", "status": "complete",
        "rows_total": rows * samples, "wall_s": 3.0, "generate_s": 2.0, "peak_rss_mib": 100.0,
        "memory": {"total": None}, "engine": {}, "batch_dependence": None, **counts,
    }  # fmt: skip
    metrics = {
        "status": "complete", "error_rows": maker.errors,
        "finish_reasons": {"stop": rows * samples - maker.errors, "error": maker.errors},
        "errors": {"bad_messages": maker.errors}, "prompt_tokens": 12 * rows * samples,
        "counts": {}, "wall_s": 3.0, "generate_s": 2.0, "tokens_per_s": 1000.0,
        "attempts": [attempt], **counts,
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")


def grade_job(folder: Path, *, scored: bool) -> None:
    """Grade the answers, and if `scored` make the scores, for which all marks are in memory."""
    steps = integer_steps("answer_is", methods=["last_number"])
    JobGrades(folder).make(steps, "text", ScoreConfig())
    if scored:
        save_score(folder, job_scores(Samples(folder, ScoreConfig())))


class _Shards:
    """Makes the tables of one shard after the other."""

    def __init__(
        self,
        samples: int,
        ids: str,
        texts: Sequence[str],
        random: np.random.Generator,
        share: float,
    ) -> None:
        self._random, self._share = random, share
        table = pa.schema([("question", pa.string()), ("answer_is", pa.int64())])
        self._schema = OutputSchema.build(table, [LOGPROBS], [], prompt_token_ids=False)
        self._samples, self._ids, self._texts = samples, ids, texts
        letters = self._random.integers(97, 123, _CORPUS).astype(np.uint8)
        spaces = np.cumsum(self._random.integers(3, 10, _CORPUS // 6))
        letters[spaces[spaces < _CORPUS]] = ord(" ")
        self._corpus = letters.tobytes().decode()
        self.errors = self.tokens = 0

    def table(self, first: int, rows: int) -> pa.Table:
        random, count = self._random, rows * self._samples
        index = np.repeat(np.arange(first, first + rows), self._samples)
        failed = random.random(count) < self._share
        tokens = np.where(failed, 0, random.integers(20, _MOST_TOKENS, count))
        self.errors, self.tokens = self.errors + int(failed.sum()), self.tokens + int(tokens.sum())
        answers = index + (random.random(count) > 0.7)
        texts = [
            None if bad else f"{said} {answer}"
            for bad, said, answer in zip(failed, self._said(count), answers, strict=True)
        ]
        error = {"type": "bad_messages", "message": "no messages"}
        offsets = pa.array(np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32))
        total = int(tokens.sum())
        ids = pa.array(random.integers(0, 50_000, total, dtype=np.int32))
        logprobs = pa.array(-random.exponential(0.5, total).astype(np.float32))
        values = {
            "row_id": [self._id(int(i)) for i in index],
            "row_index": index,
            "sample_index": np.tile(np.arange(self._samples, dtype=np.int32), rows),
            "question": [f"What is {i} plus 0?" for i in index],
            "answer_is": index,
            "text": texts,
            "token_ids": pa.ListArray.from_arrays(offsets, ids),
            "finish_reason": np.where(failed, "error", "stop").tolist(),
            "stop": [None] * count,
            "error": [error if bad else None for bad in failed],
            "num_prompt_tokens": np.full(count, 12, np.int32),
            "num_generated_tokens": tokens.astype(np.int32),
            "logprobs": pa.ListArray.from_arrays(offsets, logprobs),
        }
        return pa.table(values, schema=self._schema.arrow)

    def _said(self, count: int) -> list[str]:
        if self._texts:
            return [self._texts[i % len(self._texts)] for i in range(count)]
        starts = self._random.integers(0, _CORPUS - 8 * _WORDS, count)
        lengths = self._random.integers(2 * _WORDS, 8 * _WORDS, count)
        pairs = zip(starts, lengths, strict=True)
        return [self._corpus[start : start + length] for start, length in pairs]

    def _id(self, index: int) -> str:
        # A multiplication by an odd number is a permutation of the numbers of 32 bits.
        return str(index) if self._ids == "position" else f"{index * 2654435761 % 2**32:08x}"
