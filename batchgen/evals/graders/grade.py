"""The post step `Grade`, which compares the extracted answer of a row with the row's target.

With method integer, the answer "$1,000.00" and the target "1000": mark 1.0, answer_key "1000" (the
normal form of the answer) and graded_against "1000".
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

from batchgen.config.groups.named_code import named_code
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.evals.graders.answer_forms import (
    check_json_schema,
    choice_letter,
    equal_choices,
    matches_whole,
    normal_integer,
    normal_text,
    repr_json,
    short_integer_marks,
    valid_json,
)
from batchgen.evals.graders.step import AnswerRow, AnswerRows, Column, GradeFailure, num_groups
from batchgen.evals.math.same import MOST_CHARACTERS, forms, same_math
from batchgen.util.errors import ConfigError

Method = Literal[
    "integer", "math", "choice", "exact", "contains", "regex", "json_schema", "function"
]
METHODS: tuple[str, ...] = get_args(Method)
_Values = tuple[float | None, str | None, str | None]  # mark, answer_key, graded_against


@dataclass(frozen=True, kw_only=True)
class Grade:
    """Marks the answer of a row: 1 if it is right, 0 if it is wrong or there is none.

    - `integer`: both are the same whole number, as `normal_integer` reads them.
    - `math`: both are mathematically the same, as `batchgen.same_math` compares them.
    - `choice`: the answer is the letter of the target, or the text of that choice or of an equal
      one. If the target has several letters ("A, C"), the answer must name all of them, in any
      order.
    - `exact`: the same text, apart from white space at the ends and runs of it. The case of a
      target true or false does not matter.
    - `contains`: the target is a text or a list of texts; the mark is the share of these that the
      answer contains, ignoring case.
    - `regex`: the target is a regular expression that matches the whole answer.
    - `json_schema`: the answer is JSON that is valid against `schema`, or against the target.
    - `function`: the result of `function`: true or false, or a number from 0 to 1.

    Attributes:
        method: how answer and target are compared.
        answer: the column with the answer, which an earlier step wrote.
        target: the column with the right answer.
        target_pattern: a regular expression; the last match of its group 1 in the column is the
            target. GSM8K has its targets at the end of a text.
        choices: for `choice`, the column with the texts of the choices; null accepts only letters.
        ignore_case: whether `exact` and `regex` ignore case.
        schema: for `json_schema`, as JSON text or a mapping; null takes the target.
        function: `_target_` is the import path of a function, which is called with the keyword
            arguments answer (None if there is none), target, text and fields, and with the other
            keys of this mapping.
        prefix: put before the names of the columns.
    """

    method: Method
    answer: str = "answer"
    target: str = "target"
    target_pattern: str | None = None
    choices: str | None = "choices"
    ignore_case: bool = False
    schema: str | Mapping[str, Any] | None = None
    function: Mapping[str, Any] | None = None
    prefix: str = ""

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise ConfigError(
                f"Grade: method must be one of {', '.join(METHODS)}, got {self.method!r}"
            )
        if (self.method == "function") != (self.function is not None):
            raise ConfigError("Grade: function belongs to method=function: give both")
        if self.function is not None:
            object.__setattr__(self, "function", dict(self.function))
            _resolve(self.function.get("_target_"))
        if self.schema is not None:
            if self.method != "json_schema":
                raise ConfigError("Grade: schema belongs to method=json_schema")
            try:
                check_json_schema(self.schema)
            except (ConstraintError, ValueError) as error:
                raise ConfigError(f"Grade: schema: {error}") from None
        if self.target_pattern is not None:
            if num_groups(self.target_pattern, "Grade: target_pattern") < 1:
                raise ConfigError("Grade: target_pattern must have a group: put it in parentheses")

    @property
    def version(self) -> int:
        """3 for methods whose keys or letters changed. Other methods keep 2: with `sampling.until`,
        and in pipelines, another version means other rows, which would all be computed again."""
        return 3 if self.method in ("math", "choice") else 2

    # The members from here to `apply_all` are those of `ColumnStep`. A step is isolated if `apply`
    # may hang or crash, so that it must run in a worker process.
    @property
    def columns(self) -> tuple[Column, ...]:
        answer, target = self.answer, self.target
        mark, key, against = self._names
        return (
            Column(
                mark,
                "float64",
                f"1 if {answer} is right, 0 if it is wrong or missing ({self.method}); null if "
                "that is not known",
            ),
            Column(
                key,
                "string",
                f"{answer} in a normal form, in which votes are counted; null if there is none",
            ),
            Column(
                against,
                "string",
                f"what {answer} was compared with, from {target}; null if nothing",
            ),
        )

    @property
    def isolated(self) -> bool:
        return self.method in ("regex", "json_schema", "function")

    @property
    def reads_text(self) -> bool:
        return self.method == "function"

    @property
    def field_names(self) -> tuple[str, ...] | None:
        if self.method == "function":
            return None
        names = [self.target]
        if self.method == "choice" and self.choices is not None:
            names.append(self.choices)
        return tuple(names)

    @property
    def value_names(self) -> tuple[str, ...]:
        # A function also gets the text, and may do without the column of that default name.
        return () if (self.method, self.answer) == ("function", "answer") else (self.answer,)

    def prepare(self) -> None:
        pass

    @cached_property
    def _names(self) -> tuple[str, str, str]:
        return self.prefix + "mark", self.prefix + "answer_key", self.prefix + "graded_against"

    def apply(self, row: AnswerRow) -> dict[str, Any]:
        answer = row.values.get(self.answer)
        if self.method == "function":
            target = self._target(row.fields.get(self.target))
            values: _Values = self._call(answer, target, row), answer, target
        else:
            choices = None if self.choices is None else row.fields.get(self.choices)
            values = self._values(answer, row.fields.get(self.target), choices)
        return dict(zip(self._names, values, strict=True))

    def apply_all(
        self, rows: AnswerRows, failures: dict[int, GradeFailure]
    ) -> dict[str, list[Any]]:
        none = [None] * len(rows.texts)
        answers = rows.values.get(self.answer, none)
        targets = rows.fields.get(self.target, none)
        choices = none if self.choices is None else rows.fields.get(self.choices, none)
        marks: list[float | None] = list(none)
        keys: list[str | None] = list(none)
        against: list[str | None] = list(none)
        indices: Sequence[int] = range(len(none))
        if self.method == "integer" and self.target_pattern is None:
            marks, keys, against, indices = short_integer_marks(answers, targets)
        for index in indices:
            arguments = answers[index], targets[index], choices[index]
            try:
                marks[index], keys[index], against[index] = self._values(*arguments)
            except GradeFailure as failure:
                failures[index] = failure
        return dict(zip(self._names, (marks, keys, against), strict=True))

    def _values(self, answer: Any, value: Any, choices: Any) -> _Values:
        """The values of the columns, from a row's answer, its target and the texts of its
        choices."""
        if self.method == "contains":
            return self._contained(answer, value)
        texts = choices if isinstance(choices, list | tuple) else ()
        target = self._target(value, texts)
        if answer is None:
            return 0.0, None, target
        ignore_case = self.ignore_case or isinstance(value, bool)
        right, key = self._compare(str(answer), target, texts, ignore_case)
        return float(right), key, target

    def _contained(self, answer: Any, value: Any) -> _Values:
        """The values of the columns for the method contains."""
        wanted = [value] if isinstance(value, str) else value
        if (
            not isinstance(wanted, list)
            or not wanted
            or not all(isinstance(text, str) and text for text in wanted)
        ):
            raise GradeFailure(
                "no_target" if value is None else "bad_target",
                f"column {self.target!r} must hold a text or a list of texts, got {value!r:.100}",
            )
        against = ", ".join(wanted)
        if answer is None:
            return 0.0, None, against
        text = str(answer).casefold()
        share = sum(part.casefold() in text for part in wanted) / len(wanted)
        return share, normal_text(str(answer)), against

    def _target(self, value: Any, choices: Sequence[Any] = ()) -> str | None:
        """The text of the target; None if the method needs none.

        Raises:
            GradeFailure: the row has no target.
        """
        if self.method != "function" and (value != value or not str(value).strip()):
            value = None  # NaN and an empty text are no target either
        if value is None:
            if self.method == "function" or self.schema is not None:
                return None
            raise GradeFailure("no_target", f"the row has no value in column {self.target!r}")
        text = str(value) if self.method == "function" else self._text_of(value, choices)
        if self.target_pattern is not None:
            matches = [match[1] for match in re.finditer(self.target_pattern, text)]
            if not matches or matches[-1] is None:
                raise GradeFailure(
                    "no_target", f"column {self.target!r}: target_pattern does not match it"
                )
            text = matches[-1].strip()
        return text

    def _text_of(self, value: Any, choices: Sequence[Any]) -> str:
        """The text of a target, which may be of another type.

        Raises:
            GradeFailure: the value is not one target.
        """
        if isinstance(value, Mapping) and self.method == "json_schema":
            return repr_json(value)
        if isinstance(value, list) and self.method == "choice":
            if value and all(isinstance(item, str) for item in value):
                return ", ".join(value)  # the letters of several choices
        is_list = isinstance(value, list)
        if (
            isinstance(value, Mapping)
            or (is_list and not all(type(item) in (int, float) for item in value))
            # As text, a list of two numbers is an interval.
            or (is_list and self.method == "math" and len(value) != 1)
        ):
            raise GradeFailure(
                "bad_target",
                f"column {self.target!r} must hold one target, and holds {value!r:.100}: join "
                "them into one text, or grade with method=function",
            )
        if self.method == "choice" and type(value) is int and str(value) not in map(str, choices):
            raise GradeFailure(
                "bad_target",
                f"the target {value} is neither a letter nor the text of a choice: the row step "
                "OrderChoices turns a position into a letter",
            )
        return str(value)

    def _compare(
        self, answer: str, target: str | None, choices: Sequence[Any], ignore_case: bool
    ) -> tuple[bool, str | None]:
        """Whether the answer is right, and its normal form.

        Raises:
            GradeFailure: the target is not of the method's kind.
        """
        if self.method == "json_schema":
            return valid_json(answer, self.schema if self.schema is not None else target)
        assert target is not None
        if self.method == "integer":
            normal_target, normal_answer = normal_integer(target), normal_integer(answer)
            if normal_target is None:
                raise GradeFailure("bad_target", f"the target {target!r} is not a whole number")
            key = normal_text(answer) if normal_answer is None else normal_answer
            return normal_answer == normal_target, key
        if self.method == "math":
            right = same_math(target, answer)
            if not right and len(answer) > MOST_CHARACTERS:
                raise GradeFailure("too_long", f"the answer has {len(answer)} characters")
            # The same key for all forms of the right answer, so that votes count them together. A
            # wrong answer has another one: for the target `5 cm`, `5 m` is not `5`.
            right_key, form = forms(target).shortest, forms(answer)
            if right:
                return right, right_key
            return right, form.main if form.shortest == right_key else form.shortest
        if self.method == "choice":
            key, normal_target = choice_letter(answer, choices), choice_letter(target, choices)
            return key == normal_target or equal_choices(key, normal_target, choices), key
        normal_answer = normal_text(answer, ignore_case)
        if self.method == "exact":
            return normal_answer == normal_text(target, ignore_case), normal_answer
        return matches_whole(target, answer, ignore_case), normal_answer

    def _call(self, answer: Any, target: str | None, row: AnswerRow) -> float:
        """The mark that the user's function returns."""
        assert self.function is not None
        options = {key: value for key, value in self.function.items() if key != "_target_"}
        call = _resolve(self.function["_target_"])
        mark = call(answer=answer, target=target, text=row.text, fields=row.fields, **options)
        if not isinstance(mark, bool | int | float) or not 0 <= mark <= 1:
            raise GradeFailure(
                "failed", f"the function returned {mark!r}: it must be a number from 0 to 1"
            )
        return float(mark)


def _resolve(path: Any) -> Callable[..., Any]:
    """Import the function that a user names."""
    if not isinstance(path, str) or "." not in path:
        raise ConfigError(
            f"Grade: function._target_ must be the import path of a function, got {path!r}"
        )
    function: Callable[..., Any] = named_code(path, "Grade: function._target_")
    if not callable(function):
        raise ConfigError(f"Grade: function._target_: {path} is not a function")
    return function
