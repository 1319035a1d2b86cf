"""An evaluation in two phases: its requests as files of rows with jobs that compute them, and the
results of these jobs, read back."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, TypeVar

import yaml

from batchgen.folder.read_job import JobFolderReader
from batchgen.plugins.harness_requests import Asked, Request, Scored
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
        self.jobs: dict[Path, None] = {}

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
            {"columns": ["top_logprobs"], "top_logprobs": 1},
        )
        return [(0.0, False)] * len(requests)

    def generate(self, requests: Sequence[Asked]) -> list[str]:
        """Write the rows that generate, with the sampling options of each."""
        longest = max(one.options["max_new_tokens"] for one in requests)
        self._write(
            GENERATE,
            requests,
            {
                "prompt": {"choice": "tokens", "token_ids_column": "prompt_ids"},
                "sampling": {"max_new_tokens": longest, "column": "options"},
            },
            {},
        )
        return [""] * len(requests)

    def _write(
        self,
        kind: str,
        requests: Sequence[Request],
        keys: Mapping[str, Any],
        output: Mapping[str, Any],
    ) -> None:
        rows = self._folder / f"{kind}.jsonl"
        with rows.open("a", encoding="utf-8") as file:
            file.writelines(map(_line, requests))
        job = {
            "dataset": {"path": str(rows), "columns": ["name"]},
            **keys,
            **self._job,
            "output": {"dir": str(self._folder / kind), **output},
        }
        path = self._folder / f"{kind}.yaml"
        path.write_text(yaml.safe_dump(job, sort_keys=False), encoding="utf-8")
        self.jobs[path] = None


class ReplayedAnswers:
    """Hands back what the jobs of a folder have computed.

    The requests must be those that were written, in their order. ConfigError names one that is not,
    and those whose rows are missing or have errors.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._read = dict.fromkeys((SCORE, GENERATE), 0)  # rows that were handed back

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
        requests: Sequence[Request],
        columns: Sequence[str],
        value: Callable[[Mapping[str, Any]], T],
    ) -> list[T]:
        first = self._check(kind, requests)
        job = self._folder / kind
        names = {str(first + i): one.name for i, one in enumerate(requests)}
        found: dict[str, T] = {}
        for row in JobFolderReader(job).rows(["row_id", "error", *columns]):
            if (name := names.get(row["row_id"])) is None:
                continue
            if row["error"] is not None:
                raise ConfigError(f"{name}: its row in {job} has an error: {row['error']}")
            found[row["row_id"]] = value(row)
        if missing := [name for row_id, name in names.items() if row_id not in found]:
            raise ConfigError(
                f"{len(missing)} of {len(names)} rows of {job} are missing "
                f"({some_names(missing)}): run batchgen {job}.yaml to the end"
            )
        return [found[row_id] for row_id in names]

    def _check(self, kind: str, requests: Sequence[Request]) -> int:
        """Check that these are the next requests that were written, and return the first's row."""
        path = self._folder / f"{kind}.jsonl"
        first = self._read[kind]
        self._read[kind] += len(requests)
        try:
            with path.open(encoding="utf-8") as file:
                written = list(islice(file, first, self._read[kind]))
        except FileNotFoundError:
            raise ConfigError(f"{path} is not there: run dump first, with these tasks") from None
        for number, one in enumerate(requests):
            if number >= len(written) or written[number] != _line(one):
                raise ConfigError(
                    f"{one.name}: the request is not line {first + number + 1} of {path}: give "
                    "replay the arguments of dump, or dump anew if the tasks have changed"
                )
        return first


def _line(request: Request) -> str:
    """A request as a line of a file of rows."""
    row: dict[str, Any] = {"name": request.name, "prompt_ids": list(request.prompt)}
    if isinstance(request, Scored):
        row["answer_ids"] = list(request.answer)
    else:
        row["options"] = json.dumps(request.options, sort_keys=True)
    return f"{json.dumps(row)}\n"


def _scored(row: Mapping[str, Any]) -> tuple[float, bool]:
    best = [ids[0] for ids in row["answer_top_logprob_ids"]]
    return sum(row["answer_logprobs"]), best == row["answer_token_ids"]
