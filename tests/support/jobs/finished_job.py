"""Writes folders of finished jobs without running one."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import yaml

from batchgen.config.groups.job_config import StepConfig
from batchgen.config.groups.output_config import ScoreConfig
from batchgen.evals.grades.folder_grades import JobGrades
from batchgen.evals.scores.job_score import job_scores, save_score
from batchgen.evals.scores.samples import Samples
from batchgen.storage.shards.checked_file import seal
from batchgen.storage.shards.shard_files import shard_path
from batchgen.storage.stores.manifest import FORMAT_VERSION

ERROR = pa.struct([("type", pa.string()), ("message", pa.string())])
FIELDS = [
    ("row_id", pa.string()),
    ("row_index", pa.int64()),
    ("sample_index", pa.int32()),
    pa.field("question", pa.string(), metadata={"meaning": "as in the input"}),
    pa.field("target", pa.string(), metadata={"meaning": "as in the input"}),
    ("text", pa.string()),
    ("token_ids", pa.list_(pa.int32())),
    ("finish_reason", pa.string()),
    ("stop", pa.string()),
    ("error", ERROR),
    ("num_prompt_tokens", pa.int32()),
    ("num_generated_tokens", pa.int32()),
]
LOGPROBS = pa.field("logprobs", pa.list_(pa.float32()), metadata={"scope": "output"})
POST = (
    StepConfig(target="batchgen.grading.extract.Extract", options={"methods": ["whole"]}),
    StepConfig(target="batchgen.grading.grade.Grade", options={"method": "exact"}),
)
Row = dict[str, Any]


def row(index: int, sample: int = 0, text: str | None = "yes", **values: Any) -> Row:
    """A row; without a text it is an error row."""
    ids = list(map(ord, text or ""))
    return {
        "row_id": f"id{index}",
        "row_index": index,
        "sample_index": sample,
        "question": f"question {index}",
        "target": "yes",
        "text": text,
        "token_ids": ids,
        "finish_reason": "error" if text is None else "stop",
        "stop": None,
        "error": {"type": "bad_row", "message": f"row {index}"} if text is None else None,
        "num_prompt_tokens": None if text is None else 10 + index,
        "num_generated_tokens": len(ids),
        "logprobs": [-0.5] * len(ids),
        **values,
    }


def finished_job(
    path: Path,
    rows: Sequence[Row],
    fields: Sequence[pa.Field] = (),
    *,
    in_shard: int = 1000,
    graded: bool = False,
    metrics: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Write the folder of a complete job and return it.

    Args:
        fields: of the rows, besides FIELDS and LOGPROBS.
        in_shard: rows of a shard, all samples of each.
        graded: grade the rows with POST, and score them.
        metrics: keys of metrics.json that differ.
        config: groups of config.yaml that differ.
    """
    (path / "data").mkdir(parents=True)
    schema = pa.schema([*FIELDS, *fields, LOGPROBS])
    samples = 1 + max((given["sample_index"] for given in rows), default=0)
    for shard, start in enumerate(range(0, len(rows), in_shard)):
        table = pa.Table.from_pylist(list(rows[start : start + in_shard]), schema=schema)
        pq.write_table(table, shard_path(path / "data", shard), row_group_size=64)
        seal(shard_path(path / "data", shard))
    _write_facts(path, rows, in_shard // samples, metrics or {}, config or {})
    if graded:
        JobGrades(path).make(POST, "text", ScoreConfig())
        save_score(path, job_scores(Samples(path, ScoreConfig())))
    return path


def _write_facts(
    job: Path,
    rows: Sequence[Row],
    rows_per_shard: int,
    metrics: Mapping[str, Any],
    config: Mapping[str, Any],
) -> None:
    """Write the files beside the data."""
    given = {
        "model": {"path": "nowhere", "name": "a model"},
        "dataset": {"kind": "files", "path": "rows.jsonl"},
        "prompt": {"kind": "chat", "user": "Q: {{ question }}"},
        "sampling": {"temperature": 0.5, "n": 1},
        "strategy": {"_target_": "batchgen.strategies.ar.strategy.ARStrategy"},
        "output": {"text_column": "text"},
        **config,
    }
    (job / "config.yaml").write_text(yaml.safe_dump(given, allow_unicode=True), encoding="utf-8")
    manifest = {
        "identity": {"output": {"text_column": "text", "rows_per_shard": rows_per_shard}},
        "format_version": FORMAT_VERSION,
        "growing": {},
        "versions": {"torch": "2.8"},
        "fingerprints": {"model": "abc"},
    }
    (job / "manifest.json").write_text(json.dumps(manifest), encoding="utf-8")
    tokens = sum(row["num_generated_tokens"] for row in rows)
    attempt = {
        "started": "2026-01-01T00:00:00+0000", "host": "here", "status": "complete",
        "rows": len(rows), "wall_s": 3.0, "generate_s": 2.0, "generated_tokens": tokens,
        "peak_rss_mib": 100.0, "memory": {"total": None}, "engine": {}, "batch_dependence": None,
    }  # fmt: skip
    found = {
        "status": "complete", "rows": len(rows), "prompt_tokens": 10 * len(rows),
        "generated_tokens": tokens, "counts": {}, "wall_s": 3.0, "generate_s": 2.0,
        "tokens_per_s": 50.0, "attempts": [attempt], **metrics,
    }  # fmt: skip
    (job / "metrics.json").write_text(json.dumps(found), encoding="utf-8")
