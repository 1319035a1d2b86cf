"""One row of a job as HTML: prompt, answer, marks, counts, tokens. Reports and `view` show it."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
from markupsafe import Markup

from batchgen.folder.job_metrics import OUTCOMES, constraint_outcome
from batchgen.report.prompt_text import PromptText
from batchgen.texts.math.rich_text import rich_text
from batchgen.texts.row_json import json_readers, plain_text
from batchgen.texts.safe_text import Span, environment, shortened
from batchgen.texts.tokens.token_boxes import Decode, TokenView

CSS = (Path(__file__).parent / "base.css", Path(__file__).parent / "row.css")
"""The style sheets that a page with rows needs; it is for the page to embed or to serve them."""
STEP_NAMES = {"DLLMStrategy": "denoise step", "ARSpecStrategy": "forward"}
_KEYS = ("row_id", "row_index", "sample_index")
_MOST_FACT = 2_000
_END_OF_REASONING = "</think>"
_SPAN_OF = re.compile(r"(?P<name>.*answer)_start")
_SHOWN_APART = (
    *("token_ids", "prompt_token_ids", "finish_reason", "stop", "error"),
    *("constraint_satisfied", "parsed"),
)
"""Columns of batchgen that the page shows in places of their own."""


@dataclass(frozen=True, slots=True)
class Limits:
    """How much of a row is shown; None is all.

    Attributes:
        text: characters of the prompt and of the answer.
        tokens: of the token view; with 0 there is none.
    """

    text: int | None = None
    tokens: int | None = None

    @property
    def fact(self) -> int | None:
        """Characters of what stands beside the prompt and the answer."""
        return None if self.text is None else min(self.text, _MOST_FACT)


WHOLE = Limits()


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a row fared, in a word for people and a class for style sheets."""

    name: str
    kind: str


class RowPage:
    """Makes the HTML of rows of one job."""

    def __init__(
        self, config: Mapping[str, Any], schema: pa.Schema, decode: Decode | None = None
    ) -> None:
        """
        Args:
            config: the job's, by group, as in its config.yaml; may be empty.
            schema: of its rows.
            decode: the text of token ids with special tokens; None shows ids.
        """
        output, strategy = config.get("output") or {}, config.get("strategy") or {}
        self.text_column: str = output.get("text_column", "text")
        target = str(strategy.get("_target_", "")).rpartition(".")[2]
        self.tokens = TokenView(schema, decode, STEP_NAMES.get(target, "step"))
        self.prompt = PromptText(config.get("prompt") or {}, schema, decode)
        self._readers = json_readers(schema)
        self._constrained = "constraint_satisfied" in schema.names
        kinds = {field.name: (field.metadata or {}) for field in schema}
        given = b"as in the input"
        self._inputs = [n for n, meta in kinds.items() if meta.get(b"meaning") == given]
        apart = {*_KEYS, *_SHOWN_APART, *self._inputs, self.text_column}
        # What has a scope has a value per token, and is seen there.
        self._counts = [n for n, meta in kinds.items() if n not in apart and b"scope" not in meta]

    def html(
        self,
        row: Mapping[str, Any],
        grades: Mapping[str, Any] | None = None,
        *,
        key: str,
        limits: Limits = WHOLE,
        with_prompt: bool = True,
    ) -> Markup:
        """The row without a heading, as the content of an element of class `row`.

        Args:
            row: all its columns; those with a value per token may be lists or arrays.
            grades: its columns of the job's grades; None if it has none.
            key: makes ids unique in the page: letters, digits and `-`.
            with_prompt: whether the prompt is shown; `prompt_html` makes it alone.
        """
        made = self.htmls(row, grades, key=key, limits=[limits], with_prompt=with_prompt)
        return made[0]

    def prompt_html(self, row: Mapping[str, Any], *, key: str) -> Markup:
        """The prompt of a row alone, as in `html`."""
        prompt = self._prompt(self.read(row), WHOLE)
        template = environment().get_template("prompt.html.jinja")
        return Markup(template.render(prompt=prompt, key=key))

    def htmls(
        self,
        row: Mapping[str, Any],
        grades: Mapping[str, Any] | None = None,
        *,
        key: str,
        limits: Sequence[Limits],
        enough: int = 0,
        with_prompt: bool = True,
    ) -> list[Markup]:
        """The same within several limits, of which each is narrower than the one before.

        Args:
            enough: what has fewer characters is the last one.
        """
        row = self.read(row)
        text: str | None = row[self.text_column]
        spans = answer_spans(grades, text)
        tokens = self.tokens.of(row, key, text, spans[0] if spans else None)
        made: list[Markup] = []
        for limit in limits:
            values = {
                **self._texts(text, reasoning_end(grades, text), spans, limit),
                "prompt": self._prompt(row, limit) if with_prompt else [],
                **self._columns(row, grades, limit),
                "key": key,
                "tokens": tokens.html(limit.tokens),
                "num_tokens": row["num_generated_tokens"],
            }
            made.append(Markup(environment().get_template("row.html.jinja").render(values)))
            if len(made[-1]) < enough:
                break
        return made

    def _prompt(self, row: Mapping[str, Any], limits: Limits) -> list[tuple[str, _Shown]]:
        """The parts of the prompt, as the template shows them."""
        return [(name, _shown(part, limits)) for name, part in self.prompt.parts(row)]

    def _texts(
        self, text: str | None, behind: int, spans: Sequence[Span], limits: Limits
    ) -> dict[str, Any]:
        """Reasoning and answer, as the template shows them.

        Args:
            behind: where the reasoning ends.
        """
        moved = [
            Span(span.start - behind, span.end - behind, span.name)
            for span in spans
            if span.start >= behind
        ]
        return {
            "reasoning": _shown(text[:behind], limits) if text and behind else None,
            "reasoning_length": behind,
            "answer": None if text is None else _shown(text[behind:], limits, moved),
            "has_marks": bool(moved),
        }

    def _columns(
        self, row: Mapping[str, Any], grades: Mapping[str, Any] | None, limits: Limits
    ) -> dict[str, Any]:
        """What stands beside prompt and answer, as the template shows it."""
        named = {
            "grades": _grades(grades),
            "facts": self._facts(row),
            "inputs": [(n, plain_text(row[n])) for n in self._inputs if row.get(n) is not None],
        }
        columns = {
            kind: [(name, shortened(value, limits.fact)) for name, value in values]
            for kind, values in named.items()
        }
        failed = {"error": row["error"], "grade_error": (grades or {}).get("grade_error")}
        return {**columns, **{name: _error(error, limits) for name, error in failed.items()}}

    def read(self, row: Mapping[str, Any]) -> dict[str, Any]:
        """The row with the JSON in its columns parsed, where they hold JSON as text."""
        return {n: r(v) if (r := self._readers.get(n)) else v for n, v in row.items()}

    def _facts(self, row: Mapping[str, Any]) -> list[tuple[str, str]]:
        """What is known of the row in a word each."""
        facts = [("finish_reason", row["finish_reason"])]
        if row["stop"] is not None:
            facts.append(("stop", plain_text(row["stop"])))
        if self._constrained:
            outcome = constraint_outcome(row["finish_reason"], row["constraint_satisfied"])
            facts.append(("constraint", f"{outcome}: {OUTCOMES[outcome]}"))
        if row.get("parsed") is not None:
            facts.append(("parsed", plain_text(row["parsed"])))
        counts = ((name, row.get(name)) for name in self._counts)
        return facts + [
            (name, f"{value:,}" if isinstance(value, int) else plain_text(value))
            for name, value in counts
            if value is not None
        ]


@dataclass(frozen=True, slots=True)
class _Shown:
    """A text as it is written and, if it has Markdown or formulas, with these rendered."""

    plain: Markup
    rich: Markup | None


def _shown(text: str, limits: Limits, spans: Sequence[Span] = ()) -> _Shown:
    return _Shown(shortened(text, limits.text, spans), rich_text(text, limits.text, spans))


def verdict(row: Mapping[str, Any], grades: Mapping[str, Any] | None) -> Verdict | None:
    """How a row fared; None where nothing marks it and it has no error.

    Args:
        row: with `error`.
        grades: its columns of the job's grades.
    """
    if row["error"] is not None:
        return Verdict(row["error"]["type"], "bad")
    if grades is None:
        return None
    if (error := grades.get("grade_error")) is not None:
        return Verdict(f"not graded: {error['type']}", "bad")
    mark = grades.get("mark")
    if mark is None:
        return None
    if mark in (0, 1):
        missing = not mark and "answer" in grades and grades["answer"] is None
        return Verdict("no answer", "wrong") if missing else _RIGHT[mark == 1]
    return Verdict(f"{mark:.3g}", "partly")


_RIGHT = (Verdict("wrong", "wrong"), Verdict("right", "right"))


def answer_spans(grades: Mapping[str, Any] | None, text: str | None) -> list[Span]:
    """Where the answers that `Extract` found stand in the text; the first step's is the first."""
    spans = []
    for column, start in (grades or {}).items():
        match = _SPAN_OF.fullmatch(column)
        if match is None or start is None or text is None or grades is None:
            continue
        end = grades.get(f"{match['name']}_end")
        if isinstance(end, int) and 0 <= start < end <= len(text):
            spans.append(Span(start, end, match["name"]))
    return spans


def reasoning_end(grades: Mapping[str, Any] | None, text: str | None) -> int:
    """Where the reasoning ends in a text, in characters; 0 if there is none."""
    for name, value in (grades or {}).items():
        if name.endswith("reasoning_end") and isinstance(value, int):
            return value
    if text is None or (at := text.rfind(_END_OF_REASONING)) < 0:
        return 0
    return at + len(_END_OF_REASONING)


def _error(error: Mapping[str, str] | None, limits: Limits) -> dict[str, Any] | None:
    """The type and the message of an error, as the template shows them."""
    if error is None:
        return None
    return {name: shortened(text, limits.fact) for name, text in error.items()}


def _grades(grades: Mapping[str, Any] | None) -> list[tuple[str, str]]:
    """The columns of the grades that people read: without places in the text."""
    places = ("_start", "_end", "grade_error")
    return [
        (name, "–" if value is None else plain_text(value))
        for name, value in (grades or {}).items()
        if name not in _KEYS and not name.endswith(places)
    ]
