"""Exports the rows of a job as the result lines of an OpenAI batch (`batchgen export --to
openai`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime
from hashlib import blake2b
from itertools import groupby
from typing import Any

from batchgen.evals.grades.visible_columns import Wanted
from batchgen.pipelines.publish.finished_rows import FinishedRows, LocatedRow
from batchgen.pipelines.publish.row_values import is_true
from batchgen.pipelines.publish.trainers.choice_logprobs import ChoiceLogprobs
from batchgen.util.errors import ConfigError
from batchgen.util.text.row_json import AS_GIVEN

_READ = (
    *("row_id", "row_index", "sample_index", "finish_reason", "error"),
    *("num_prompt_tokens", "num_generated_tokens"),
)
_CALLS = "tool_calls"
_REASONS = {"stop": "stop", "tool_call": "tool_calls"}


class OpenAILines:
    """Yields one line per input row, in order, with a choice for each sample.

    If no sample of a row has an answer, the line has an `error` and no `response`. Ids are digests
    of the job and the row, so repeated exports are equal.

    Attributes:
        left_out: the number of samples left out, by reason; filled during the iteration.
    """

    def __init__(
        self,
        rows: FinishedRows,
        where: str | None,
        reasoning: str | None,
        logprobs: ChoiceLogprobs | None = None,
    ) -> None:
        """Check the options. Raises ConfigError for a set, whose rows do not record how generation
        ended.

        Args:
            where: an expression; samples for which it is false are left out.
            reasoning: the column that becomes `reasoning_content`.
            logprobs: makes the log-probabilities of a choice; None for none.
        """
        rows.refuse_set("--to openai")
        columns = rows.columns
        self._rows, self._reasoning, self.left_out = rows, reasoning, Counter[str]()
        self._where = None if where is None else columns.expression("--where", where)
        kind = rows.group("prompt").get("kind")
        self._is_chat = kind != "text"
        # A batch file may have requests for chats and for completions.
        self._url = "url" if kind == "openai" and "url" in columns.names else None
        self._logprobs = logprobs
        logprob_columns = () if logprobs is None else logprobs.columns
        kinds = {field.name: (field.metadata or {}) for field in rows.schema}
        # `tool_calls` may also be a column of the data set, which is no answer.
        is_as_given = kinds.get(_CALLS, {}).get(b"meaning") == AS_GIVEN
        self._calls = [] if is_as_given or _CALLS not in kinds else [_CALLS]
        extras = filter(None, [reasoning, self._url, *self._calls])
        names = [*_READ, *logprob_columns, rows.text_column, *extras]
        if reasoning is not None and reasoning not in columns.names:
            raise ConfigError(f"--reasoning: {rows.user_path} has no column {reasoning!r}")
        self._wanted: Wanted = columns.named(names)
        if self._where is not None:
            self._wanted |= columns.read_by(self._where)
        model = rows.group("model")
        self._model = str(model.get("name") or model.get("path") or "")
        self._created = _started(rows)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        rows = self._rows.rows(self._wanted)
        for _, samples in groupby(rows, key=lambda row: row.variables["row_index"]):
            kept = [row for row in samples if self._passes(row)]
            if kept:
                yield self._line(kept)

    def _passes(self, row: LocatedRow) -> bool:
        if self._where is None or row.variables["error"] is not None:
            return True
        if not is_true(self._where, row):
            self.left_out["by --where"] += 1
            return False
        return True

    def _line(self, samples: Sequence[LocatedRow]) -> dict[str, Any]:
        """Return the line of one input row."""
        rows = [row.variables for row in samples]
        answered = [row for row in rows if row["error"] is None]
        name = str(rows[0]["row_id"])
        digest = blake2b(f"{self._rows.digest} {name}".encode(), digest_size=12).hexdigest()
        line: dict[str, Any] = {
            "id": f"batch_req_{digest}",
            "custom_id": name,
            "response": None,
            "error": None,
        }
        if not answered:
            error = rows[0]["error"]
            line["error"] = {"code": error["type"], "message": error["message"]}
            return line
        is_chat = self._is_chat and (self._url is None or "/chat/" in str(rows[0][self._url]))
        prompt = answered[0]["num_prompt_tokens"] or 0
        completion = sum(row["num_generated_tokens"] for row in answered)
        body = {
            "id": f"{'chatcmpl' if is_chat else 'cmpl'}-{digest}",
            "object": "chat.completion" if is_chat else "text_completion",
            "created": self._created,
            "model": self._model,
            "choices": [self._choice(row, is_chat) for row in answered],
            "usage": {
                "prompt_tokens": prompt,
                "completion_tokens": completion,
                "total_tokens": prompt + completion,
            },
        }
        line["response"] = {"status_code": 200, "request_id": f"req_{digest}", "body": body}
        return line

    def _choice(self, row: Mapping[str, Any], is_chat: bool) -> dict[str, Any]:
        """Return the choice of one sample."""
        text = row[self._rows.text_column]
        message: dict[str, Any] = {"role": "assistant", "content": text}
        if self._reasoning is not None:
            message["reasoning_content"] = row[self._reasoning]
        if self._calls and row[_CALLS] is not None:
            name = f"call_{row['row_index']}_{row['sample_index']}"
            message["tool_calls"] = [
                {"id": f"{name}_{number}", "type": "function", "function": call}
                for number, call in enumerate(row[_CALLS])
            ]
        return {
            "index": row["sample_index"],
            **({"message": message} if is_chat else {"text": text}),
            "logprobs": self._logprobs and self._logprobs.of(row, None if is_chat else text),
            # OpenAI's API has only `length` for an answer that ended before it was complete.
            "finish_reason": _REASONS.get(row["finish_reason"], "length"),
        }


def _started(rows: FinishedRows) -> int:
    """Return when the job was started, in seconds since 1970; 0 if unknown."""
    attempts = rows.metrics.get("attempts") or [{}]
    try:
        when = datetime.strptime(attempts[0]["started"], "%Y-%m-%dT%H:%M:%S%z")
    except (KeyError, ValueError):
        return 0
    return int(when.timestamp())
