"""Converts finished rows to the rows that trainers read. `batchgen export --to` uses `TrainerRows`.

- sft: a conversation (`messages`, or `prompt` and `completion`)
- dpo: two answers to one prompt (`prompt`, `chosen`, `rejected`) and their scores
- kto: an answer and whether it is good (`prompt`, `completion`, `label`)
- grpo: a prompt, its right answer, and the mean score of its samples (`pass_rate`)
- prm: a prompt, the steps of its answer (`completions`), and whether each is right (`labels`)
"""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from glob import has_magic
from typing import Any

import pyarrow as pa

from batchgen.pipelines.publish.finished_rows import FinishedRows, LocatedRow, set_row_name
from batchgen.pipelines.publish.row_values import answered_rows, expression_value, number_value
from batchgen.pipelines.publish.trainers.conversations import Conversations, Exchange, field_value
from batchgen.pipelines.publish.trainers.row_groups import (
    GroupMember,
    adjacent_groups,
    pairs,
    scattered_groups,
)
from batchgen.util.errors import ConfigError
from batchgen.util.templates.row_expression import RowExpression
from batchgen.util.text.row_json import json_text, plain_text


@dataclass(frozen=True, kw_only=True)
class ExportRequest:
    """The options of `batchgen export --to`. Texts are expressions over the columns of a row,
    except `to` (the format), `messages` (YAML templates) and `reasoning` (a column). Raises
    ConfigError if an option does not fit the format, or a required one is missing."""

    to: str
    where: str | None = None
    messages: str | None = None
    reasoning: str | None = None
    by: str | None = None
    gap: float | None = None
    pairs: int | None = None
    across: bool = False
    label: str | None = None
    answer: str | None = None
    steps: str | None = None
    labels: str | None = None

    def __post_init__(self) -> None:
        allowed = {"to", "where", *_TAKEN[self.to]}
        for name in (field.name for field in fields(self)):
            if name not in allowed and getattr(self, name) not in (None, False):
                raise ConfigError(f"--{name} is not for --to {self.to}")
        for name in _NEEDED.get(self.to, ()):
            if getattr(self, name) is None:
                raise ConfigError(f"--to {self.to} needs --{name}: {_MEANING[name]}")
        if self.gap is not None and self.gap < 0:
            raise ConfigError(f"--gap {self.gap}: give 0 or more")
        if self.pairs is not None and self.pairs < 1:
            raise ConfigError(f"--pairs {self.pairs}: give at least 1")


_TAKEN = {
    "sft": ("messages", "reasoning"),
    "dpo": ("messages", "reasoning", "by", "gap", "pairs", "across"),
    "kto": ("messages", "reasoning", "label"),
    "grpo": ("messages", "by", "answer"),
    "prm": ("messages", "steps", "labels"),
    "openai": ("reasoning",),
    "kd": ("messages",),
    "kd-v1": ("messages",),
    "kd-packed": (),
    "rl": ("by",),
    "trace_rl": ("by",),
}
"""The options that each format accepts besides `where`."""
_NEEDED = {"dpo": ("by",), "kto": ("label",)}
_MEANING = {
    "by": "the column of numbers by which answers are better or worse, such as mark",
    "label": "an expression that says whether an answer is good, such as 'mark == 1'",
}
FORMATS = tuple(_TAKEN)


class TrainerRows:
    """Yields the rows of one format.

    Attributes:
        schema: the columns of the format.
        left_out: the number of rows left out, by reason; filled during the iteration.
        made_of: (shard, position) of each row from which the last exported row was made.
    """

    def __init__(self, rows: FinishedRows, request: ExportRequest) -> None:
        """Raise ConfigError if an option does not fit the rows."""
        self._rows, self._request, self.left_out = rows, request, Counter[str]()
        self.made_of: list[Place] = []
        columns = rows.columns
        self._of: dict[str, RowExpression] = {  # option → its expression
            name: columns.expression(f"--{name}", text)
            for name, text in self._expressions().items()
        }
        self._wanted = columns.named([n for n in _KEPT_COLUMNS if n in columns.names])
        for expression in self._of.values():
            self._wanted |= columns.read_by(expression)
        self._answers = request.to in ("sft", "dpo", "kto")
        self._conversations = Conversations(
            rows, request.messages, request.reasoning, answers=self._answers
        )
        self._wanted |= self._conversations.wanted
        self._tools = self._tools_column()
        makers = {"sft": self._sft, "dpo": self._dpo, "kto": self._kto, "grpo": self._grpo}
        makers["prm"] = self._prm
        self._make: Callable[[], Iterator[dict[str, Any]]] = makers[request.to]
        self.schema = self._schema()

    def _expressions(self) -> dict[str, str]:
        """Return the expressions of the options, including the format's defaults."""
        request, columns = self._request, self._rows.columns.names
        expressions = {name: getattr(request, name) for name in ("where", "by", "label", "answer")}
        if request.to == "grpo":
            expressions |= {"by": request.by or "mark", "answer": request.answer or "target"}
            if request.by is None and "mark" not in columns:
                raise ConfigError(
                    f"--to grpo takes the share of right answers from the column mark, which "
                    f"{self._rows.user_path} does not have: grade it first, or name another "
                    "column with --by"
                )
            if request.answer is None and "target" not in columns:
                raise ConfigError(
                    f"--to grpo takes the right answer from the column target, which "
                    f"{self._rows.user_path} does not have: name its column with --answer"
                )
        if request.to == "prm":
            expressions |= {"steps": request.steps or "steps", "labels": request.labels or "labels"}
        return {name: source for name, source in expressions.items() if source is not None}

    def _tools_column(self) -> list[str]:
        """Return the path of the column with the tools that the prompts offered; empty if there is
        none."""
        prompt = self._rows.group("prompt")
        named = prompt.get("tools_column")
        if prompt.get("kind") == "openai":
            named = f"{prompt['body_column']}.tools"
        path = str(named or "").split(".") if self._request.to == "sft" else [""]
        if self._request.messages is not None or path[0] not in self._rows.columns.names:
            return []
        self._wanted |= self._rows.columns.named(path[:1])
        return path

    def _schema(self) -> pa.Schema:
        kind, score = self._conversations.kind, pa.float64()
        columns: dict[str, list[tuple[str, pa.DataType]]] = {
            "dpo": [
                *((name, kind) for name in ("prompt", "chosen", "rejected")),
                *((name, score) for name in ("score_chosen", "score_rejected")),
            ],
            "kto": [("prompt", kind), ("completion", kind), ("label", pa.bool_())],
            "grpo": [
                *(("prompt", kind), ("answer", pa.string())),
                *(("pass_rate", score), ("row_id", pa.string())),
            ],
            "prm": [
                ("prompt", pa.string()),
                *(("completions", pa.list_(pa.string())), ("labels", pa.list_(pa.bool_()))),
            ],
        }
        fields = columns.get(self._request.to, [])
        if self._request.to == "sft":
            fields = self._conversations.fields
            if self._tools:
                fields = [*fields, ("tools", pa.string())]
        return pa.schema(fields)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """Yield the rows, with the columns of the schema. Raises ConfigError if a row cannot be
        made."""
        return self._make()

    def _passed(self) -> Iterator[LocatedRow]:
        """Yield the rows that have an answer and pass `where`."""
        for row in answered_rows(self._rows, self._wanted, self._of.get("where"), self.left_out):
            if self._answers and not self._conversations.has_answer(row):
                self.left_out["without a text"] += 1
                continue
            self.made_of = [(row.shard, row.position)]
            yield row

    def _sft(self) -> Iterator[dict[str, Any]]:
        for row in self._passed():
            columns = self._conversations.of(row).columns
            if self._tools:
                value = field_value(row.variables, self._tools)
                is_text = value is None or isinstance(value, str)
                columns["tools"] = value if is_text else json_text(value)
            yield columns

    def _kto(self) -> Iterator[dict[str, Any]]:
        for row in self._passed():
            label = expression_value(self._of["label"], row)
            if label is None:
                self.left_out["without a label"] += 1
                continue
            talk = self._conversations.of(row)
            yield {"prompt": talk.prompt, "completion": talk.answer, "label": bool(label)}

    def _members(
        self, content: Callable[[LocatedRow], dict[str, Any]]
    ) -> Iterator[list[GroupMember]]:
        """Yield the groups of rows. A group has the samples of one input row; with `across`, all
        rows that were made from one row of another job.

        Args:
            content: makes the content of a member from its row.
        """
        members = (
            GroupMember(
                self._key(row),
                number_value(self._of["by"], row),
                {**content(row), _PLACE: (row.shard, row.position)},
            )
            for row in self._passed()
        )
        is_adjacent = not self._rows.is_set and not self._request.across
        return adjacent_groups(members) if is_adjacent else scattered_groups(members)

    def _key(self, row: LocatedRow) -> str:
        """Return the key of a row's group."""
        origin = row.variables.get("source")
        source = origin if isinstance(origin, dict) and "row_id" in origin else None
        if not self._request.across:
            if not self._rows.is_set:
                return str(row.variables["row_index"])
            if source is None:
                return str(row.variables["id"])
            return json_text([source.get("job"), source["row_id"]])
        if source is None:
            raise ConfigError(
                "--across needs rows with the column source, which says what they were made "
                f"from, as with dataset=job; the rows of {self._rows.user_path} do not have it"
            )
        name = str(source["row_id"])
        return name.partition("/")[2] if _reads_several_jobs(self._rows.group("dataset")) else name

    def _dpo(self) -> Iterator[dict[str, Any]]:
        gap, limit = self._request.gap or 0.0, self._request.pairs or 1
        for group in self._members(lambda row: _parts(self._conversations.of(row))):
            scores = [member.score for member in group]
            texts = [member.content["answer"] for member in group]
            if None in scores:
                self.left_out["without a score"] += scores.count(None)
            chosen = pairs(scores, texts, gap, limit)
            if not chosen:
                self.left_out["in groups without a pair"] += len(scores) - scores.count(None)
            for better, worse in chosen:
                if (prompt := group[better].content["prompt"]) != group[worse].content["prompt"]:
                    raise ConfigError(
                        f"answers of {group[better].key} have different prompts, but a pair has "
                        "one prompt: give messages with the same prompt for all of them "
                        "(--messages)"
                    )
                self.made_of = _places([group[better], group[worse]])
                yield {
                    "prompt": prompt,
                    "chosen": texts[better],
                    "rejected": texts[worse],
                    "score_chosen": scores[better],
                    "score_rejected": scores[worse],
                }

    def _grpo(self) -> Iterator[dict[str, Any]]:
        def content(row: LocatedRow) -> dict[str, Any]:
            answer = expression_value(self._of["answer"], row)
            return {
                "prompt": self._conversations.of(row).prompt,
                "answer": None if answer is None else plain_text(answer),
                "row_id": row.variables["id" if self._rows.is_set else "row_id"],
            }

        for group in self._members(content):
            scores = [member.score for member in group if member.score is not None]
            if not scores:
                self.left_out["without a mark"] += len(group)
                continue
            self.made_of = _places(group)
            columns = {name: group[0].content[name] for name in ("prompt", "answer", "row_id")}
            yield {**columns, "pass_rate": statistics.fmean(scores)}

    def _prm(self) -> Iterator[dict[str, Any]]:
        for row in self._passed():
            steps, labels = (expression_value(self._of[n], row) for n in ("steps", "labels"))
            for name, value in (("steps", steps), ("labels", labels)):
                if not isinstance(value, list):
                    raise ConfigError(
                        f"{set_row_name(row)}: --{name} must be a list: {value!r:.80}"
                    )
            if len(steps) != len(labels):
                raise ConfigError(
                    f"{set_row_name(row)} has {len(steps)} steps and {len(labels)} labels: each "
                    "step needs one"
                )
            if not steps or None in labels:
                self.left_out["without steps, or without a label for one"] += 1
                continue
            yield {
                "prompt": _as_text(self._conversations.of(row), row),
                "completions": [plain_text(step) for step in steps],
                "labels": [bool(label) for label in labels],
            }


def _reads_several_jobs(dataset: Mapping[str, Any]) -> bool:
    """Whether a job reads several jobs, so that its row ids begin with the name of the job they
    came from."""
    path = dataset.get("path")
    is_several = len(path) > 1 if isinstance(path, list) else has_magic(str(path))
    return dataset.get("kind") == "job" and is_several


_KEPT_COLUMNS = ("error", "row_id", "row_index", "id", "source")
"""The columns that every format reads, if the rows have them."""
_PLACE = "place"
"""The key in a member's content under which the location of its row is kept."""
Place = tuple[int, int]  # shard, position


def _places(members: Sequence[GroupMember]) -> list[Place]:
    return [tuple(member.content[_PLACE]) for member in members]


def _parts(talk: Exchange) -> dict[str, Any]:
    return {"prompt": talk.prompt, "answer": talk.answer}


def _as_text(talk: Exchange, row: LocatedRow) -> str:
    """Return a prompt as one text, as trainers of process reward models expect. Raises ConfigError
    for a prompt of several messages."""
    if isinstance(talk.prompt, str):
        return talk.prompt
    if len(talk.prompt) != 1:
        raise ConfigError(
            f"{set_row_name(row)}: --to prm needs a prompt of one message, and this one has "
            f"{len(talk.prompt)}: give one with --messages"
        )
    return str(talk.prompt[0]["content"])
