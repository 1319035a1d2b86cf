"""Writes the folder of a complete, graded job of any size without running one."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batchgen.config import (
    ChatPromptConfig,
    DatasetConfig,
    EngineGroup,
    JobConfig,
    ModelGroup,
    OutputConfig,
    SamplingConfig,
    StrategyConfig,
    growing,
    identity,
    resolved,
)
from batchgen.engine.outputs import OutputColumn
from batchgen.grading.extract import Extract
from batchgen.grading.grade import Grade
from batchgen.grading.step import GRADE_ERROR, arrow_schema
from batchgen.output.manifest import ROWS, Manifest
from batchgen.output.schema import OutputSchema
from batchgen.output.shards import shard_path

WORDS = 40
"""About how many words an answer has."""
_MOST_TOKENS = 120
_CORPUS = 2**20
LOGPROBS = OutputColumn("logprobs", np.dtype(np.float32))


def write_job(folder: Path, rows: int, samples: int, rows_per_shard: int, ids: str) -> None:
    """Write the folder.

    Every answer is a run of random words with a log-probability for each token; one in 1,000 has an
    error, and seven in ten are right.

    Args:
        ids: `position` for the ids that rows have without dataset.id_column, `shuffled` for ids in
            no order.
    """
    config = _config(folder, samples, rows_per_shard)
    (folder / "data").mkdir(parents=True)
    (folder / "grades").mkdir()
    table = pa.schema([("question", pa.string()), ("answer_is", pa.int64())])
    schema = OutputSchema.build(table, [LOGPROBS], [], prompt_token_ids=False)
    maker = _Shards(schema, samples, ids)
    for shard, first in enumerate(range(0, rows, rows_per_shard)):
        data, grades = maker.tables(first, min(rows_per_shard, rows - first))
        pq.write_table(data, shard_path(folder / "data", shard), compression="zstd")
        pq.write_table(grades, shard_path(folder / "grades", shard), compression="zstd")
    (folder / "grades" / "steps.json").write_text(json.dumps({"steps": []}))
    (folder / "config.yaml").write_text(yaml.safe_dump(resolved(config)), encoding="utf-8")
    manifest = Manifest.build(
        identity(config), {"model": "none"}, growing={**growing(config), ROWS: rows}
    )
    manifest.write(folder / "manifest.json")
    metrics = {
        "status": "complete", "rows": rows * samples, "error_rows": maker.errors,
        "finish_reasons": {"stop": rows * samples - maker.errors, "error": maker.errors},
        "errors": {"bad_messages": maker.errors}, "prompt_tokens": 0,
        "generated_tokens": maker.tokens, "tokens_per_s": 1000.0,
        "attempts": [{"status": "complete", "rows_total": rows * samples, "rows": rows * samples}],
    }  # fmt: skip
    (folder / "metrics.json").write_text(json.dumps(metrics), encoding="utf-8")


class _Shards:
    """Makes the tables of one shard after the other."""

    def __init__(self, schema: OutputSchema, samples: int, ids: str) -> None:
        self._random = np.random.default_rng(0)
        self._schema, self._samples, self._ids = schema, samples, ids
        letters = "".join(map(chr, self._random.integers(97, 123, _CORPUS)))
        spaces = np.cumsum(self._random.integers(3, 10, _CORPUS // 6))
        corpus = np.frombuffer(letters.encode(), np.uint8).copy()
        corpus[spaces[spaces < _CORPUS]] = ord(" ")
        self._corpus = corpus.tobytes().decode()
        extract, grade = Extract(methods=("last_number",)), Grade(method="integer")
        keys = pa.schema([schema.arrow.field(n) for n in ("row_id", "row_index", "sample_index")])
        made = arrow_schema((*extract.columns, *grade.columns, GRADE_ERROR))
        self._grades = pa.schema([*keys, *made])
        self.errors = self.tokens = 0

    def tables(self, first: int, rows: int) -> tuple[pa.Table, pa.Table]:
        """The rows of a shard and their grades."""
        random, count = self._random, rows * self._samples
        index = np.repeat(np.arange(first, first + rows), self._samples)
        sample = np.tile(np.arange(self._samples, dtype=np.int32), rows)
        failed = random.random(count) < 0.001
        starts = random.integers(0, _CORPUS - 8 * WORDS, count)
        lengths = random.integers(2 * WORDS, 8 * WORDS, count)
        tokens = np.where(failed, 0, random.integers(20, _MOST_TOKENS, count))
        self.errors, self.tokens = self.errors + int(failed.sum()), self.tokens + int(tokens.sum())
        right = random.random(count) < 0.7
        answers = [str(i if r else i + 1) for i, r in zip(index, right, strict=True)]
        texts = [
            None if bad else f"{self._corpus[start : start + length]} {answer}"
            for bad, start, length, answer in zip(failed, starts, lengths, answers, strict=True)
        ]
        error = {"type": "bad_messages", "message": "no messages"}
        offsets = pa.array(np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32))
        total = int(tokens.sum())
        ids = pa.array(random.integers(0, 50_000, total, dtype=np.int32))
        logprobs = pa.array(-random.exponential(0.5, total).astype(np.float32))
        keys = {"row_id": [self._id(int(i)) for i in index], "row_index": index,
                "sample_index": sample}  # fmt: skip
        values = keys | {
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
        ends = [None if text is None else len(text) for text in texts]
        answer = [None if bad else text for bad, text in zip(failed, answers, strict=True)]
        grades = keys | {
            "answer": answer,
            "answer_start": [None if n is None else n - len(a)
                             for n, a in zip(ends, answers, strict=True)],
            "answer_end": ends,
            "reasoning_end": np.zeros(count, np.int32),
            "mark": [None if bad else float(ok) for bad, ok in zip(failed, right, strict=True)],
            "answer_key": answer,
            "graded_against": [str(i) for i in index],
            "grade_error": [None] * count,
        }  # fmt: skip
        return (
            pa.table(values, schema=self._schema.arrow),
            pa.table(grades, schema=self._grades),
        )

    def _id(self, index: int) -> str:
        # A multiplication by an odd number is a permutation of the numbers of 32 bits.
        return str(index) if self._ids == "position" else f"{index * 2654435761 % 2**32:08x}"


def _config(folder: Path, samples: int, rows_per_shard: int) -> JobConfig:
    return JobConfig(
        model=ModelGroup(path="none"),
        dataset=DatasetConfig(kind="demo"),
        prompt=ChatPromptConfig(user="{{ question }}"),
        sampling=SamplingConfig(n=samples, temperature=1.0, max_new_tokens=_MOST_TOKENS),
        strategy=StrategyConfig(target="batchgen.strategies.ar.strategy.ARStrategy"),
        engine=EngineGroup(),
        output=OutputConfig(
            dir=str(folder), columns=("logprobs",), rows_per_shard=rows_per_shard
        ),
    )
