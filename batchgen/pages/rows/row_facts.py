"""The facts about one row that pages and the terminal show.

`row_page` renders them as HTML, `printed_rows` as text.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.engine.interface.hidden_columns import CLASS_SCORES, EMBEDDING
from batchgen.storage.metrics.tally import constraint_outcome
from batchgen.storage.shards.column_kinds import PROMPT_IMAGES, is_per_token
from batchgen.util.shorten import beginning
from batchgen.util.templates.used_columns import used_columns
from batchgen.util.text.row_json import AS_GIVEN, row_reader
from batchgen.util.text.safe_text import Span
from batchgen.util.text.text_table import row_name

REASONING = "reasoning"
"""The column of thoughts, in jobs that tell them apart."""
_END_OF_REASONING = "</think>"
_SPAN_OF = re.compile(r"(?P<name>.*answer)_start")
_GIST = 110  # characters
_SHOWN_APART = (
    *("row_id", "row_index", "sample_index", "token_ids", "prompt_token_ids", "finish_reason"),
    *("stop", "error", "constraint_satisfied", "parsed", PROMPT_IMAGES),
)
"""Columns of batchgen that renderers show in places of their own."""


def class_labels(field: pa.Field) -> list[str]:
    """The names of the classes of a column of scores; none if it is a column of the data set's."""
    scores = field.metadata or {}
    if scores.get(b"meaning") == AS_GIVEN:
        return []
    keys = (f"label_{number}".encode() for number in range(len(scores)))
    return [scores[key].decode(errors="replace") for key in keys if key in scores]


class RowColumns:
    """The columns of a job's rows by their use.

    Args:
        config: the job's, by group, as in its config.yaml; may be empty.
    """

    def __init__(self, config: Mapping[str, Any], schema: pa.Schema) -> None:
        self.text: str = (config.get("output") or {}).get("text_column", "text")
        kinds = {field.name: (field.metadata or {}) for field in schema}
        self.inputs = [n for n, meta in kinds.items() if meta.get(b"meaning") == AS_GIVEN]
        used = used_columns(config.get("prompt") or {})
        self.asked = [n for n in used if n in kinds] or self.inputs  # of the prompt
        has_images = PROMPT_IMAGES in kinds and PROMPT_IMAGES not in self.inputs
        self.images = PROMPT_IMAGES if has_images else None
        # A data set may have a column of that name itself.
        has_reasoning = REASONING in kinds and REASONING not in self.inputs
        self.reasoning = REASONING if has_reasoning else None
        apart = {*_SHOWN_APART, *self.inputs, self.text, self.reasoning}
        # Values of a token are seen there, and nobody reads the numbers of an embedding.
        apart |= {EMBEDDING, CLASS_SCORES}
        self.counts = [f.name for f in schema if f.name not in apart and not is_per_token(f)]
        self.labels = class_labels(schema.field(CLASS_SCORES)) if CLASS_SCORES in kinds else []
        self.read = row_reader(schema)


@dataclass(frozen=True, slots=True)
class OutcomeLabel:
    """The outcome of a row: a word for people and a class for style sheets."""

    name: str
    kind: str


_RIGHT = (OutcomeLabel("wrong", "wrong"), OutcomeLabel("right", "right"))


@dataclass(frozen=True)
class RowFacts:
    """One sample of a row: its columns, as far as they were read, and its grades."""

    row: Mapping[str, Any]
    grades: Mapping[str, Any] | None = None

    @property
    def row_id(self) -> str:
        row_id: str = self.row["row_id"]
        return row_id

    @property
    def number(self) -> int:
        """The index of the sample among those of its row."""
        number: int = self.row["sample_index"]
        return number

    @property
    def finish_reason(self) -> str:
        reason: str = self.row["finish_reason"]
        return reason

    @property
    def tokens(self) -> int:
        tokens: int = self.row["num_generated_tokens"]
        return tokens

    def grade(self, name: str) -> Any:
        """A column of the grades; None without."""
        return None if self.grades is None else self.grades.get(name)

    @property
    def verdict(self) -> OutcomeLabel:
        """The outcome of the row: its mark, or its finish reason with the kind `none` if it has no
        mark."""
        if self.row["error"] is not None:
            return OutcomeLabel(self.row["error"]["type"], "bad")
        if (error := self.grade("grade_error")) is not None:
            return OutcomeLabel(f"not graded: {error['type']}", "bad")
        mark = self.grade("mark")
        if mark is None or self.grades is None:
            return OutcomeLabel(self.finish_reason, "none")
        if mark in (0, 1):
            missing = not mark and "answer" in self.grades and self.grades["answer"] is None
            return OutcomeLabel("no answer", "wrong") if missing else _RIGHT[mark == 1]
        return OutcomeLabel(f"{mark:.3g}", "partly")

    @property
    def constraint(self) -> str | None:
        """The one of `job_metrics.OUTCOMES` that the row has; None without constraints."""
        if "constraint_satisfied" not in self.row:
            return None
        return constraint_outcome(self.finish_reason, self.row["constraint_satisfied"])

    def answers(self, text: str | None) -> list[Span]:
        """Where the answers that `Extract` found stand in the row's text, by steps."""
        spans = []
        for column, start in (self.grades or {}).items():
            match = _SPAN_OF.fullmatch(column)
            if match is None or start is None or text is None:
                continue
            end = self.grade(f"{match['name']}_end")
            if isinstance(end, int) and 0 <= start < end <= len(text):
                spans.append(Span(start, end, match["name"]))
        return spans

    def reasoning_end(self, text: str | None) -> int:
        """How many characters of the row's text are reasoning."""
        for name, value in (self.grades or {}).items():
            if name.endswith("reasoning_end") and isinstance(value, int):
                return value
        if text is None or (at := text.rfind(_END_OF_REASONING)) < 0:
            return 0
        return at + len(_END_OF_REASONING)

    def gist(self, text_column: str) -> str:
        """The result of the row in a line: its error, its answer next to the right one, or its
        text."""
        if self.row["error"] is not None:
            return beginning(self.row["error"]["message"], _GIST)
        answer, target = self.grade("answer"), self.grade("graded_against")
        if answer is None:
            return beginning(self.row[text_column] or "", _GIST)
        text = beginning(str(answer), _GIST)
        is_wrong = target is not None and self.grade("mark") == 0
        return f"{text}  (right is {beginning(str(target), _GIST)})" if is_wrong else text

    @property
    def heading(self) -> str:
        """The row's id, how it ended, and its cost, in a line."""
        facts = [row_name(self.row_id, self.number), self.finish_reason]
        if self.tokens or self.finish_reason != "error":
            facts.append(f"{self.tokens:,} tokens")
        if (forwards := self.row.get("num_forwards")) is not None:
            facts.append(f"{forwards:,} forwards")
        return ", ".join(facts)


def same_sample(samples: Sequence[RowFacts], number: int | None) -> RowFacts | None:
    """The sample with this number, else the first; None if there is none."""
    chosen = [sample for sample in samples if sample.number == number]
    return next(iter([*chosen, *samples]), None)
