"""Runs an OpenAI batch file as a job, for the verb `batchgen batch IN OUT`.

`write_requests` turns the file IN into a data set, `batch_config` makes the job's configuration,
and `write_results` turns the job's rows into the result lines of OUT.
"""

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

_ROWS_PER_WRITE = 1000
_RESULT_START, _READ_BYTES = b'{"id": "batch_req_', 100
"""How each result line begins (see `_error_line` for a whole one), and the number of bytes of a
file that are read to compare it with that."""
_BATCH_GROUPS = ("dataset", "prompt", "rows")
_USER_KEYS = ("prompt.template_kwargs", "prompt.date", "prompt.too_long")
_BATCH_KEYS = ("sampling.column", "output.dir", "output.text_column")
"""The configuration that a batch decides itself. The user may set no key of the groups
`_BATCH_GROUPS` except those of `_USER_KEYS`, and none of the keys `_BATCH_KEYS`."""


@dataclass
class BatchSummary:
    """A summary of the lines of a batch file.

    Attributes:
        requests: the number of valid requests.
        bad: the number of lines that are not valid requests.
        top_logprobs: the largest number of top log-probabilities that a line asks for; 0 if lines
            ask only for the log-probabilities of their own tokens, None if no line asks for any.
        models: the models that lines name.
    """

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
            # This number becomes a key of the whole job. A line that asks for too many must not
            # make that key invalid.
            self.top_logprobs = max(self.top_logprobs or 0, min(number, 100))


def asked_logprobs(body: Mapping[str, Any]) -> int | None:
    """Return how many top log-probabilities a request body asks for: 0 if it asks only for those of
    the generated tokens, None if it asks for none."""
    logprobs, top = body.get("logprobs"), body.get("top_logprobs")
    numbers = [number for number in (logprobs, top) if type(number) is int and number > 0]
    return max(numbers) if numbers else (0 if logprobs is True else None)


@dataclass(frozen=True)
class BatchPaths:
    """The files of a batch.

    Attributes:
        user_path: the batch file, IN.
        results: the file of result lines, OUT. The job's folder and its data set are next to it.
    """

    user_path: Path
    results: Path

    @property
    def job(self) -> Path:
        """The output folder of the job."""
        return self.results.with_name(f"{self.results.name}.job")

    @property
    def requests(self) -> Path:
        """The Parquet file with the valid requests, which is the data set of the job."""
        return self.results.with_name(f"{self.results.name}.requests.parquet")


def refuse_other_file(paths: BatchPaths, display_name: str) -> None:
    """Check that OUT does not exist or was written by an earlier run of this batch.

    Raises:
        ConfigError: OUT is a link, not a file, the same file as IN, or a file with other contents.
    """
    results = paths.results
    if not os.path.lexists(results):
        return
    if results.is_symlink() or not results.is_file():
        raise ConfigError(f"batch: {display_name} is a link or not a file: name another OUT")
    if results.samefile(paths.user_path):
        raise ConfigError(f"batch: {display_name} is both read and written: name another OUT")
    with results.open("rb") as file:
        first = file.readline(_READ_BYTES)
    if first and not (paths.requests.is_file() and first.startswith(_RESULT_START)):
        raise ConfigError(
            f"batch: {display_name} exists already and is not the result of this batch: is it IN "
            "(batch IN OUT)? Name another OUT, or delete it first"
        )


def write_requests(paths: BatchPaths) -> BatchSummary:
    """Write the valid requests of the batch file as the data set of the job, and return a summary
    of all lines."""
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
            if len(rows) == _ROWS_PER_WRITE:
                writer.write_table(pa.Table.from_pylist(rows, schema))
                rows.clear()
        if rows:
            writer.write_table(pa.Table.from_pylist(rows, schema))
    return summary


def batch_config(paths: BatchPaths, summary: BatchSummary, overrides: Sequence[str]) -> JobConfig:
    """Make the configuration of a batch's job.

    Args:
        summary: the summary of the batch file, which decides the columns of the output.
        overrides: the user's arguments `key=value`.

    Raises:
        ConfigError: an override sets a key that the batch decides.
    """
    for override in overrides:
        key = override.partition("=")[0].lstrip("+~")
        if key in _BATCH_KEYS or (key.partition(".")[0] in _BATCH_GROUPS and key not in _USER_KEYS):
            raise ConfigError(f"{override}: a batch decides {key} itself: drop it")
    columns = []
    if summary.top_logprobs is not None:
        columns = ["output.columns=[logprobs]"]
        if summary.top_logprobs:
            columns = [
                "output.columns=[logprobs,top_logprobs]",
                f"output.top_logprobs={summary.top_logprobs}",
            ]
    batch_overrides = [
        *("dataset=files", f"dataset.path={paths.requests}", "dataset.id_column=custom_id"),
        *("prompt=openai", "sampling.column=body", f"output.dir={paths.job}"),
        *("output.on_all_errors=continue", *columns),
    ]
    return compose({}, [*batch_overrides, *overrides])


def model_warning(summary: BatchSummary, config: JobConfig) -> str | None:
    """Return a warning about models that lines name but that do not answer them; None if there are
    none."""
    name = config.model.name or config.model.path
    others = sorted(summary.models - {name, config.model.path})
    if not others:
        return None
    listed = ", ".join(others[:3]) + (" …" if len(others) > 3 else "")
    return f"lines name the model {listed}; {name} answers all of them"


def write_results(paths: BatchPaths, config: JobConfig, *, any_rows: bool) -> tuple[int, int]:
    """Write one result line for each line of the batch file, in the same order. OUT appears only
    when it is complete.

    Args:
        any_rows: whether the job has rows, that is, the file has at least one valid request.

    Returns:
        The number of lines with an answer, and the number with an error.

    Raises:
        JobError: OUT cannot be written, or the batch file has changed since the job read it.
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
    """Read the job's rows, and return their result lines in order."""
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
    return iter(OpenAILines(rows, where=None, reasoning=reasoning, logprobs=logprobs))


def _error_line(line: BadLine, number: int) -> dict[str, Any]:
    """Make the result line of a line that is not a valid request. `number` is its position among
    the lines, from 0."""
    digest = blake2b(f"{number} {line.message}".encode(), digest_size=12).hexdigest()
    error = {"code": line.code, "message": line.message}
    return {
        "id": f"batch_req_{digest}",
        "custom_id": line.custom_id,
        "response": None,
        "error": error,
    }
