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
"""The column of reasoning, in jobs that separate it from the answer."""
_END_OF_REASONING = "</think>"
"""Where reasoning ends in the text of other jobs."""
_SPAN_OF = re.compile(r"(?P<name>.*answer)_start")
"""The columns of grades that hold where a step found an answer in the text."""
_GIST = 110
"""The maximum number of characters of a text in `gist`."""
_SHOWN_APART = (
    *("row_id", "row_index", "sample_index", "token_ids", "prompt_token_ids", "finish_reason"),
    *("stop", "error", "constraint_satisfied", "parsed", PROMPT_IMAGES),
)
"""Columns of batchgen that pages show in special places, so they are not listed with the others."""


def class_labels(field: pa.Field) -> list[str]:
    """Return the names of the classes of the column of class scores, from its metadata. The list is
    empty if the column comes from the data set."""
    scores = field.metadata or {}
    if scores.get(b"meaning") == AS_GIVEN:
        return []
    keys = (f"label_{number}".encode() for number in range(len(scores)))
    return [scores[key].decode(errors="replace") for key in keys if key in scores]


class RowColumns:
    """The names of the columns of a job's rows, by use.

    Args:
        config: the job's configuration, as in its config.yaml; may be empty.
        schema: the columns of the job's rows.

    Attributes:
        text: the column of the generated text.
        inputs: the columns that come from the data set.
        prompt_columns: the columns of the data set that the prompt uses; all if no use is known.
        images: the column of the prompt's images, or None.
        reasoning: the column of reasoning, or None.
        counts: the other columns of batchgen, such as numbers of tokens.
        labels: the names of the classes that a classifier scores; empty for other models.
        read: a function that decodes the columns of a row that hold JSON.
    """

    def __init__(self, config: Mapping[str, Any], schema: pa.Schema) -> None:
        self.text: str = (config.get("output") or {}).get("text_column", "text")
        kinds = {field.name: (field.metadata or {}) for field in schema}
        self.inputs = [name for name, meta in kinds.items() if meta.get(b"meaning") == AS_GIVEN]
        used = used_columns(config.get("prompt") or {})
        self.prompt_columns = [name for name in used if name in kinds] or self.inputs
        has_images = PROMPT_IMAGES in kinds and PROMPT_IMAGES not in self.inputs
        self.images = PROMPT_IMAGES if has_images else None
        # A column of this name may come from the data set.
        has_reasoning = REASONING in kinds and REASONING not in self.inputs
        self.reasoning = REASONING if has_reasoning else None
        others = {*_SHOWN_APART, *self.inputs, self.text, self.reasoning}
        # The token view shows values per token, and nobody reads the numbers of an embedding.
        others |= {EMBEDDING, CLASS_SCORES}
        self.counts = [
            field.name for field in schema if field.name not in others and not is_per_token(field)
        ]
        self.labels = class_labels(schema.field(CLASS_SCORES)) if CLASS_SCORES in kinds else []
        self.read = row_reader(schema)


@dataclass(frozen=True, slots=True)
class OutcomeLabel:
    """The outcome of a row: a word for people and a class for style sheets."""

    name: str
    kind: str


_WRONG, _RIGHT = OutcomeLabel("wrong", kind="wrong"), OutcomeLabel("right", kind="right")


@dataclass(frozen=True)
class RowFacts:
    """One sample of a row.

    Attributes:
        row: the values of the columns that were read, by name.
        grades: the values of the columns of its grades, by name; None without grades.
    """

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
        """Return the value of a column of the grades; None if it is missing."""
        return None if self.grades is None else self.grades.get(name)

    @property
    def verdict(self) -> OutcomeLabel:
        """The outcome of the row: its mark, or its finish reason with the kind `none` if it has no
        mark."""
        if self.row["error"] is not None:
            return OutcomeLabel(self.row["error"]["type"], kind="bad")
        if (error := self.grade("grade_error")) is not None:
            return OutcomeLabel(f"not graded: {error['type']}", kind="bad")
        mark = self.grade("mark")
        if mark is None or self.grades is None:
            return OutcomeLabel(self.finish_reason, kind="none")
        if mark in (0, 1):
            if mark == 1:
                return _RIGHT
            missing = "answer" in self.grades and self.grades["answer"] is None
            return OutcomeLabel("no answer", kind="wrong") if missing else _WRONG
        return OutcomeLabel(f"{mark:.3g}", kind="partly")

    @property
    def constraint(self) -> str | None:
        """Whether the text satisfies the job's constraint, as a key of `tally.OUTCOMES`; None in a
        job without constraints."""
        if "constraint_satisfied" not in self.row:
            return None
        return constraint_outcome(self.finish_reason, self.row["constraint_satisfied"])

    def answers(self, text: str | None) -> list[Span]:
        """Return where the grading steps `Extract` found answers in the row's text. The name of a
        span is that of the column of the answer."""
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
        """Return how many characters at the start of the row's text are reasoning: as the grades
        say, otherwise up to the last </think>."""
        for name, value in (self.grades or {}).items():
            if name.endswith("reasoning_end") and isinstance(value, int):
                return value
        if text is None or (at := text.rfind(_END_OF_REASONING)) < 0:
            return 0
        return at + len(_END_OF_REASONING)

    def gist(self, text_column: str) -> str:
        """Return the result of the row in a line: its error; its answer, followed by the right one
        if it is wrong; or its text."""
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
        """The row's id, how it ended, and its numbers of tokens and forwards, in a line."""
        facts = [row_name(self.row_id, self.number), self.finish_reason]
        if self.tokens or self.finish_reason != "error":
            facts.append(f"{self.tokens:,} tokens")
        if (forwards := self.row.get("num_forwards")) is not None:
            facts.append(f"{forwards:,} forwards")
        return ", ".join(facts)


def same_sample(samples: Sequence[RowFacts], number: int | None) -> RowFacts | None:
    """Return the sample with this number, otherwise the first; None if there are no samples."""
    chosen = [sample for sample in samples if sample.number == number]
    return next(iter([*chosen, *samples]), None)
