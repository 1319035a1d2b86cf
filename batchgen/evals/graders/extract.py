r"""The post step `Extract`, which finds the answer in the text of a model's output.

"<think>…</think> So it is \boxed{18}."  →  answer "18", and where it begins and ends in the text
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from batchgen.engine.constraint.json_schema.json_text import NotJson, parse_json
from batchgen.evals.graders.latex import Span, boxes, stripped
from batchgen.evals.graders.letters import letter_spans
from batchgen.evals.graders.step import (
    AnswerRow,
    AnswerRows,
    Column,
    GradeFailure,
    TextStep,
    num_groups,
)
from batchgen.evals.programs.code_blocks import code_spans
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    import pyarrow as pa

    from batchgen.evals.graders.boxed_fast import LoneBoxes

Method = Literal["boxed", "last_number", "letter", "regex", "json_path", "code", "whole"]
METHODS = ("boxed", "last_number", "letter", "regex", "json_path", "code", "whole")
Which = Literal["first", "last"]

_SPACED = r"\d{1,3}(?:(?:[\u00a0\u2009\u202f]\d{3})+|(?: \d{3}){2,}| 0\d{2})(?!\d)"
_NUMBER = re.compile(
    r"(?<![\w.])(?:(?<![\w)\]}.])[-−–+])?"
    rf"(?:(?:{_SPACED}|\d{{1,3}}(?:,\d{{3}})+(?!\d)|\d+)(?:\.\d+)?|\.\d+)"
    r"(?:[eE][-+]?\d+(?!\w)|(?::\d+)+)?(?!\.?\d)",
    re.A,
)
"""A number with its sign, thousands, decimals and power of ten, or a time such as 10:30, that is no
part of a word or of a version number. `_SPACED` is a number with spaces between thousands; with one
plain space only before 0xx, because `3 500` may be two numbers."""
_STEP = re.compile(r"\.([^.\[\]]+)|\[(\d+)\]")
"""A key or a position in a path: `.a` or `[0]`."""
# A fenced block of JSON in a text.
_FENCE = re.compile(r"```(?:json)?[ \t]{0,8}\n(.*?)```", re.S)


@dataclass(frozen=True, kw_only=True)
class Extract(TextStep):
    r"""Finds the answer in the text of a row.

    First the reasoning is cut off: everything up to the last `reasoning_end`, and everything from
    an unclosed `reasoning_start` on. Then the methods are tried in turn; the first that finds
    something wins.

    - `boxed`: the content of a box (`\boxed{…}`).
    - `last_number`: a number with its sign, thousands (`1,000`, `1 000 000`), decimals and power of
      ten (`1e6`); a time or ratio (`10:30`) is one number.
    - `letter`: one of `letters`, in the first of these places that has one: after a statement
      ("Answer: C", "the answer is (C)", "option B is correct", "答案：C"); in a box; alone in the
      first or last line ("C", "(C)"); after a decision ("it must be C"); at the start of the answer
      ("C. because"); after a bare label ("option C"). Two letters ("A, B") do not count.
    - `regex`: group `group` of `pattern`.
    - `json_path`: the value at `path`, such as `$.result[0].answer`, in the JSON that the answer is
      or contains. Strings are taken as they are, other values as JSON text. The span is that of the
      whole JSON.
    - `code`: the content of a block of code, between lines of three backticks.
    - `whole`: the whole text.

    Attributes:
        methods: one of these or several.
        which: whether the first or the last match counts, if there are several.
        reasoning_start: the text that begins the reasoning; null for none.
        reasoning_end: the text that ends the reasoning; null for none.
        reasoning_required: whether a text without `reasoning_end` has no answer. For models whose
            chat template begins the reasoning, so that a text that was cut contains neither mark.
        letters: the letters for `letter`.
        pattern: the regular expression for `regex`.
        group: the group of `pattern` that is the answer; 0 is the whole match.
        path: the path for `json_path`.
        prefix: put before the names of the columns.
    """

    methods: tuple[Method, ...] = ("boxed",)
    which: Which = "last"
    reasoning_start: str | None = "<think>"
    reasoning_end: str | None = "</think>"
    reasoning_required: bool = False
    letters: str = "ABCD"
    pattern: str | None = None
    group: int = 1
    path: str | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        object.__setattr__(self, "methods", tuple(self.methods))
        for method in self.methods:
            if method not in METHODS:
                raise ConfigError(
                    f"Extract: methods must be one of {', '.join(METHODS)}, got {method!r}"
                )
        if not self.methods:
            raise ConfigError(f"Extract: methods is empty: choose among {', '.join(METHODS)}")
        if self.which not in ("first", "last"):
            raise ConfigError(f"Extract: which must be first or last, got {self.which!r}")
        if ("regex" in self.methods) != (self.pattern is not None):
            raise ConfigError("Extract: pattern belongs to the method regex: give both")
        if ("json_path" in self.methods) != (self.path is not None):
            raise ConfigError("Extract: path belongs to the method json_path: give both")
        if not re.fullmatch(r"[A-Z]+", self.letters):
            raise ConfigError(f"Extract: letters must be letters A to Z, got {self.letters!r}")
        self._check_pattern()
        if self.path is not None:
            _steps(self.path)

    def _check_pattern(self) -> None:
        if self.pattern is None:
            return
        groups = num_groups(self.pattern, "Extract: pattern")
        if not 0 <= self.group <= groups:
            raise ConfigError(f"Extract: group {self.group}: the pattern has {groups} groups")

    @property
    def version(self) -> int:
        """A number that increases for the methods whose answers change, so that other grades stay
        valid."""
        if "letter" in self.methods:
            return 5
        return 3 if "last_number" in self.methods else 2

    @cached_property
    def _names(self) -> tuple[str, ...]:
        names = ("answer", "answer_start", "answer_end", "reasoning_end")
        return tuple(self.prefix + name for name in names)

    # The members from here to `apply_all` are those of `ColumnStep`.
    @property
    def columns(self) -> tuple[Column, ...]:
        answer, start, end, reasoning = self._names
        return (
            Column(answer, "string", "the answer extracted from text; null if there is none"),
            Column(start, "int32", f"where {answer} begins in text, in characters"),
            Column(end, "int32", f"where {answer} ends in text, in characters"),
            Column(
                reasoning, "int32", "where the reasoning ends in text, in characters; 0 if none"
            ),
        )

    @property
    def isolated(self) -> bool:
        return "regex" in self.methods

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        return dict(zip(self._names, self._values(row.text), strict=True))

    def apply_all(
        self, rows: AnswerRows, failures: dict[int, GradeFailure]
    ) -> dict[str, list[Any]]:
        from batchgen.evals.graders.boxed_fast import parts_of  # workers need no numpy

        texts = rows.texts
        lone = self._lone_boxes(texts)
        answers: list[str | None] = parts_of(texts, lone.first, lone.last).to_pylist()
        starts: list[int | None] = lone.first.tolist()
        ends: list[int | None] = lone.last.tolist()
        reasoning_ends = [0] * len(texts)
        for index in lone.others:
            values = self._values(texts[index].as_py())
            answers[index], starts[index], ends[index], reasoning_ends[index] = values
        return dict(zip(self._names, (answers, starts, ends, reasoning_ends), strict=True))

    def _lone_boxes(self, texts: pa.StringArray) -> LoneBoxes:
        """The `lone_boxes` of texts without a mark of the reasoning; none if another method comes
        before `boxed`."""
        from batchgen.evals.graders.boxed_fast import LoneBoxes, lone_boxes

        marks = [mark for mark in (self.reasoning_start, self.reasoning_end) if mark is not None]
        if self.methods[0] != "boxed" or self.reasoning_required or "" in marks:
            return LoneBoxes.none(len(texts))
        return lone_boxes(texts, "".join({mark[0] for mark in marks}))

    def _values(self, text: str) -> tuple[str | None, int | None, int | None, int]:
        """The values of the four columns for a text."""
        start = 0
        # Python finds one character many times faster than a word.
        if self._first_of_marks in text or self.reasoning_required:
            start, end = self._after_reasoning(text)
            text = text[start:end]
        match = self._find(text)
        if match is None:
            return None, None, None, start
        answer, (first, last) = match
        return answer, start + first, start + last, start

    @cached_property
    def _first_of_marks(self) -> str:
        """The first character of both marks of the reasoning; empty if they differ, which every
        text contains."""
        firsts = {mark[:1] for mark in (self.reasoning_start, self.reasoning_end) if mark}
        return firsts.pop() if len(firsts) == 1 else ""

    def _after_reasoning(self, text: str) -> Span:
        """The span of the text after the reasoning."""
        start, end = 0, len(text)
        if self.reasoning_end is not None:
            at = text.rfind(self.reasoning_end)
            if at >= 0:
                start = at + len(self.reasoning_end)
            elif self.reasoning_required:
                return end, end
        if self.reasoning_start is not None:
            at = text.find(self.reasoning_start, start)
            end = at if at >= 0 else end
        return start, end

    def _find(self, text: str) -> tuple[str, Span] | None:
        """The answer and its span, in the text after the reasoning."""
        for method in self.methods:
            if method == "json_path":
                if (from_json := self._json_path(text)) is not None:
                    return from_json
            elif (span := self._span(method, text)) is not None:
                whole = text[span[0] : span[1]]
                # The indentation of a program's first line is kept.
                if answer := whole.strip("\n").rstrip() if method == "code" else whole.strip():
                    start = span[0] + whole.find(answer)
                    return answer, (start, start + len(answer))
        return None

    def _span(self, method: Method, text: str) -> Span | None:
        """The span that a method finds; None if it finds nothing."""
        if method == "boxed":
            return self._pick(boxes(text))
        if method == "last_number":
            return self._pick([match.span() for match in _NUMBER.finditer(text)])
        if method == "letter":
            return self._letter(text)
        if method == "regex":
            return self._regex(text)
        if method == "code":
            return self._pick(code_spans(text))
        return 0, len(text)

    def _pick(self, spans: list[Span]) -> Span | None:
        """The first or the last span, as `which` says."""
        if not spans:
            return None
        return spans[0] if self.which == "first" else spans[-1]

    def _regex(self, text: str) -> Span | None:
        assert self.pattern is not None
        spans = [m.span(self.group) for m in re.finditer(self.pattern, text)]
        return self._pick([span for span in spans if span[0] >= 0])

    def _letter(self, text: str) -> Span | None:
        return self._pick(letter_spans(text, self.letters))

    def _json_path(self, text: str) -> tuple[str, Span] | None:
        """The value at `path` as text, and the span of the JSON that has it; None without one."""
        assert self.path is not None
        parsed = _json_in(text)
        if parsed is None:
            return None
        value, span = parsed
        for key in _steps(self.path):
            if isinstance(key, int) and isinstance(value, list) and key < len(value):
                value = value[key]
            elif isinstance(key, str) and isinstance(value, dict) and key in value:
                value = value[key]
            else:
                return None
        if value is None:
            return None
        return (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)), span


def _json_in(text: str) -> tuple[Any, Span] | None:
    """The JSON value, and its span, that a text is, that its last fenced block contains, or that
    begins with its first brace."""
    spans = [stripped(text, (0, len(text)))]
    spans += [stripped(text, match.span(1)) for match in _FENCE.finditer(text)][-1:]
    for span in spans:
        try:
            return parse_json(text[slice(*span)]), span
        except (NotJson, ValueError, RecursionError):
            continue
    start = text.find("{")
    if start < 0:
        return None
    try:
        value, end = json.JSONDecoder().raw_decode(text, start)
    except (ValueError, RecursionError):
        return None
    return value, (start, end)


def _steps(path: str) -> list[str | int]:
    """The keys and positions of a path such as `$.a.b[0]`.

    Raises:
        ConfigError: the path has another form.
    """
    at, steps = 1, []
    while path.startswith("$") and (match := _STEP.match(path, at)):
        steps.append(match[1] if match[1] is not None else int(match[2]))
        at = match.end()
    if not path.startswith("$") or at != len(path):
        raise ConfigError(f"Extract: path must be like $.a.b[0], got {path!r}")
    return steps
