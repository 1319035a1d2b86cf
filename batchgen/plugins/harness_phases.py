"""An evaluation in two phases: its requests as files of rows with jobs that compute them, and the
results of these jobs, read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import yaml

from batchgen.folder.read_job import JobFolderReader
from batchgen.plugins.harness_requests import Asked, Scored
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

SCORE, GENERATE = "score", "generate"
"""The names of the two jobs of an evaluation."""
T = TypeVar("T")


class DumpedAnswers:
    """Writes requests as rows, and a job that computes them; its own answers mean nothing.

    Args:
        job: keys of both jobs, such as those of the group `model`.
    """

    def __init__(self, folder: Path, job: Mapping[str, Any]) -> None:
        self._folder, self._job = folder, job
        for kind in (SCORE, GENERATE):
            for suffix in ("jsonl", "yaml"):
                (folder / f"{kind}.{suffix}").unlink(missing_ok=True)
        self.jobs: list[Path] = []

    def score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        """Write the rows of log-probabilities."""
        self._write(
            SCORE,
            requests,
            {
                "prompt": {
                    "choice": "tokens",
                    "token_ids_column": "prompt_ids",
                    "answer_ids_column": "answer_ids",
                },
                "sampling.max_new_tokens": 0,
            },
            {"columns": ["answer_logprobs", "answer_top_logprobs"], "top_logprobs": 1},
        )
        return [(0.0, False)] * len(requests)

    def generate(self, requests: Sequence[Asked]) -> list[str]:
        """Write the rows that generate, with the sampling options of each."""
        self._write(
            GENERATE,
            requests,
            {
                "prompt": {"choice": "tokens", "token_ids_column": "prompt_ids"},
                "sampling.column": "options",
            },
            {},
        )
        return [""] * len(requests)

    def _write(
        self,
        kind: str,
        requests: Sequence[Scored] | Sequence[Asked],
        keys: Mapping[str, Any],
        output: Mapping[str, Any],
    ) -> None:
        rows = self._folder / f"{kind}.jsonl"
        with rows.open("w", encoding="utf-8") as file:
            file.writelines(f"{json.dumps(_row(one))}\n" for one in requests)
        job = {
            "dataset": {"path": str(rows), "columns": ["name"]},
            **keys,
            **self._job,
            "output": {"dir": str(self._folder / kind), **output},
        }
        path = self._folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
        self.jobs.append(path)


class ReplayedAnswers:
    """Hands back what the jobs of a folder have computed.

    The requests must be those that were written, in their order. ConfigError names one that is not,
    and those whose rows are missing or have errors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        """The sums of the rows' log-probabilities, and whether each token is the most likely."""
        columns = ["answer_token_ids", "answer_logprobs", "answer_top_logprob_ids"]
        return self._results(SCORE, requests, columns, _scored)

    def generate(self, requests: Sequence[Asked]) -> list[str]:
        """The texts of the rows."""
        return self._results(GENERATE, requests, ["text"], lambda row: str(row["text"]))

    def _results(
        self,
        kind: str,
        requests: Sequence[Scored] | Sequence[Asked],
        columns: Sequence[str],
        value: Callable[[Mapping[str, Any]], T],
    ) -> list[T]:
        self._check(kind, requests)
        reader = JobFolderReader(self._folder / kind)
        found: dict[int, T] = {}
        for row in reader.rows(["row_id", "error", *columns]):
            if row["error"] is not None:
                name = requests[int(row["row_id"])].name
                raise ConfigError(
                    f"{name}: the row has an error: {row['error']}: see {self._folder / kind}"
                )
            found[int(row["row_id"])] = value(row)
        missing = [one.name for i, one in enumerate(requests) if i not in found]
        if missing:
            raise ConfigError(
                f"{len(missing)} of {len(requests)} rows of {self._folder / kind} are missing "
                f"({some_names(missing)}): run batchgen {self._folder / kind}.yaml to the end"
            )
        return [found[i] for i in range(len(requests))]

    def _check(self, kind: str, requests: Sequence[Scored] | Sequence[Asked]) -> None:
        """Check that these requests are those that were written."""
        path = self._folder / f"{kind}.jsonl"
        try:
            written = _lines(path)
        except FileNotFoundError:
            raise ConfigError(f"{path} is not there: run dump first, with these tasks") from None
        number = -1
        for number, (line, one) in enumerate(zip(written, requests, strict=False)):
            if line != json.loads(json.dumps(_row(one))):
                raise ConfigError(
                    f"{one.name}: the request is not line {number + 1} of {path}: give replay the "
                    "arguments of dump, or dump anew if the tasks or the tokenizer have changed"
                )
        if number + 1 != len(requests) or next(written, None) is not None:
            raise ConfigError(
                f"{path} has not the {len(requests)} requests of these tasks: give replay the "
                "arguments of dump"
            )


def _row(request: Scored | Asked) -> dict[str, Any]:
    row: dict[str, Any] = {"name": request.name, "prompt_ids": list(request.prompt)}
    if isinstance(request, Scored):
        return {**row, "answer_ids": list(request.answer)}
    return {**row, "options": json.dumps(request.options, sort_keys=True)}


def _lines(path: Path) -> Iterator[Any]:
    with path.open(encoding="utf-8") as file:
        return iter([json.loads(line) for line in file])


def _scored(row: Mapping[str, Any]) -> tuple[float, bool]:
    best = [ids[0] for ids in row["answer_top_logprob_ids"]]
    return sum(row["answer_logprobs"]), best == row["answer_token_ids"]
