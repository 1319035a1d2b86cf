"""Runs an OpenAI batch file as a job, and writes the job's rows as result lines: `batchgen
batch`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from pathlib import Path
from typing import Any

from batchgen.api.batch_files.batch_lines import BadLine, BatchRequest, batch_lines
from batchgen.config.compose.compose_config import compose
from batchgen.config.groups.job_config import JobConfig
from batchgen.storage.stores.whole_file import whole_file
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.row_json import json_text

_ROWS_AT_ONCE = 1000
_BEGINNING, _MOST_BEGINNING = b'{"id": "batch_req_', 100
"""The beginning of each result line, and the bytes of the first one that are compared with it."""
_OURS = ("dataset", "prompt", "rows")
_FREE = ("prompt.template_kwargs", "prompt.date", "prompt.too_long")
_FIXED = ("sampling.column", "output.dir", "output.text_column")
"""Keys, and groups with exceptions, that a batch sets itself and the user may not."""


@dataclass
class BatchSummary:
    """A summary of a batch file: the number of requests and of bad lines, the most top
    log-probabilities that a line asks for (None without any), and the models that lines name."""

    requests: int = 0
    bad: int = 0
    top_logprobs: int | None = None
    models: set[str] = field(default_factory=set)

    def add(self, line: BatchRequest | BadLine) -> None:
        """Count a line."""
        if isinstance(line, BadLine):
            self.bad += 1
            return
        self.requests += 1
        body = line.body
        if isinstance(model := body.get("model"), str):
            self.models.add(model)
        if (number := asked_logprobs(body)) is not None:
            self.top_logprobs = max(self.top_logprobs or 0, min(number, 100))


def asked_logprobs(body: Mapping[str, Any]) -> int | None:
    """The number of top log-probabilities that a body asks for; None if it asks for none at all."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    numbers = [number for number in (logprobs, top) if type(number) is int and number > 0]
    return max(numbers) if numbers else (0 if logprobs is True else None)


@dataclass(frozen=True)
class BatchPaths:
    """The files of a batch: the input, the results, and the job's folder next to the results."""

    user_path: Path
    results: Path

    @property
    def job(self) -> Path:
        """The folder of the job."""
        return self.results.with_name(f"{self.results.name}.job")

    @property
    def requests(self) -> Path:
        """The rows of the job: the requests of the file."""
        return self.results.with_name(f"{self.results.name}.requests.parquet")


def refuse_other_file(paths: BatchPaths, display_name: str) -> None:
    """Refuse to write over a file that no earlier run of this batch has written; ConfigError."""
    results = paths.results
    if not os.path.lexists(results):
        return
    if results.is_symlink() or not results.is_file():
        raise ConfigError(f"batch: {display_name} is a link or not a file: name another OUT")
    if results.samefile(paths.user_path):
        raise ConfigError(f"batch: {display_name} is both read and written: name another OUT")
    with results.open("rb") as file:
        first = file.readline(_MOST_BEGINNING)
    if first and not (paths.requests.is_file() and first.startswith(_BEGINNING)):
        raise ConfigError(
            f"batch: {display_name} exists already and is not the result of this batch: is it IN "
            "(batch IN OUT)? Name another OUT, or delete it first"
        )


def write_requests(paths: BatchPaths) -> BatchSummary:
    """Write the requests of the file as the data set of a job, and tell what they ask for."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    summary = BatchSummary()
    schema = pa.schema([(name, pa.string()) for name in ("custom_id", "url", "body")])
    with (
        whole_file(paths.requests) as temporary,
        pq.ParquetWriter(temporary, schema, compression="zstd") as writer,
    ):
        rows: list[dict[str, str]] = []
        for line in batch_lines(paths.user_path):
            summary.add(line)
            if isinstance(line, BatchRequest):
                body = {"custom_id": line.custom_id, "url": line.url, "body": line.text}
                rows.append(body)
            if len(rows) == _ROWS_AT_ONCE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return summary


def batch_config(paths: BatchPaths, request: BatchSummary, overrides: Sequence[str]) -> JobConfig:
    """The job of a batch. Raises ConfigError for a key that the batch decides."""
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in _FIXED or (key.partition(".")[0] in _OURS and key not in _FREE):
            raise ConfigError(f"{override}: a batch decides {key} itself: drop it")
    columns = []
    if request.top_logprobs is not None:
        columns = ["output.columns=[logprobs]"]
        if request.top_logprobs:
            columns = [
                "output.columns=[logprobs,top_logprobs]",
                f"output.top_logprobs={request.top_logprobs}",
            ]
    batch_overrides = [
        *("dataset=files", f"dataset.path={paths.requests}", "dataset.id_column=custom_id"),
        *("prompt=openai", "sampling.column=body", f"output.dir={paths.job}"),
        *("output.on_all_errors=continue", *columns),
    ]
    return compose({}, [*batch_overrides, *overrides])


def model_warning(request: BatchSummary, config: JobConfig) -> str | None:
    """A warning about models that lines name but that are not used; None if there are none."""
    name = config.model.name or config.model.path
    others = sorted(request.models - {name, config.model.path})
    if not others:
        return None
    listed = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
    return f"lines name the model {listed}; {name} answers all of them"


def write_results(paths: BatchPaths, config: JobConfig, *, any_rows: bool) -> tuple[int, int]:
    """Write a result line for each line of the file, in its order; returns how many have an answer,
    and how many an error. The file appears whole.

    Raises:
        JobError: it cannot be written, or the batch file has changed meanwhile.
    """
    answered = failed = 0
    results = _results(paths, config) if any_rows else iter(())
    with (
        whole_file(paths.results) as temporary,
        temporary.open("w", encoding="utf-8", newline="") as file,
    ):
        for number, line in enumerate(batch_lines(paths.user_path)):
            if isinstance(line, BadLine):
                result = _error_line(line, number)
            else:
                result = next(results, {})
                if result.get("custom_id") != line.custom_id:
                    raise JobError(f"{paths.user_path} has changed: run the same command again")
            file.write(json_text(result) + "\n")
            answered, failed = answered + (not result["error"]), failed + bool(result["error"])
    return answered, failed


def _results(paths: BatchPaths, config: JobConfig) -> Iterator[dict[str, Any]]:
    from batchgen.pages.tokens.decode_tokens import job_vocabulary
    from batchgen.pipelines.publish.finished_rows import open_rows
    from batchgen.pipelines.publish.trainers.choice_logprobs import ChoiceLogprobs
    from batchgen.pipelines.publish.trainers.openai_lines import OpenAILines
    from batchgen.storage.shards.output_fields import REASONING

    rows = open_rows(str(paths.job))
    reasoning = REASONING if REASONING in rows.schema.names else None
    words = job_vocabulary(rows.config) if "logprobs" in rows.schema.names else None
    logprobs = None
    if words is not None:
        logprobs = ChoiceLogprobs(
            rows.schema.names, words, lambda row: asked_logprobs(json.loads(row["body"])), ["body"]
        )
    return iter(OpenAILines(rows, None, reasoning, logprobs))


def _error_line(line: BadLine, number: int) -> dict[str, Any]:
    """The result line of a line that is no request."""
    digest = blake2b(f"{number} {line.message}".encode(), digest_size=12).hexdigest()
    error = {"code": line.code, "message": line.message}
    return {
        "id": f"batch_req_{digest}",
        "custom_id": line.custom_id,
        "response": None,
        "error": error,
    }
