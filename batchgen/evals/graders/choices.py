"""The row step `OrderChoices`, which orders the choices of a multiple-choice question, and
`RowStep`, the interface of steps that add columns to a row."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import factorial
from typing import Any, Literal, Protocol, TypeVar

from batchgen.evals.graders.step import Column
from batchgen.util.errors import ConfigError

T = TypeVar("T")

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"


class BadChoices(Exception):
    """The choices of a row cannot be read. The message names the column."""


class RowStep(Protocol):
    """A step that adds columns to a row of the data set before its prompt is made.

    Steps are frozen dataclasses. The same options, `version` and row give the same values.
    """

    @property
    def version(self) -> int:
        """A number that increases when the same options may give other values than before."""

    @property
    def writes(self) -> tuple[Column, ...]:
        """The columns that the step adds."""

    @property
    def field_names(self) -> tuple[str, ...]:
        """The columns that a row must have."""

    def apply(self, row_index: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The values of the step's columns.

        Args:
            row_index: the row's position in the data set, from 0.

        Raises:
            BadChoices: the row lacks what the step needs.
        """


def rotate_choices(choices: Sequence[T], by: int) -> list[T]:
    """The choices rotated left by `by` places; `by` may be any integer."""
    by %= len(choices)
    return [*choices[by:], *choices[:by]]


def shuffle_choices(choices: Sequence[T], key: str) -> list[T]:
    """The choices in an order that depends only on the key; all orders are equally likely.

    The order is number d of all orders in lexicographic order, where d is the SHA-256 digest of the
    key (UTF-8), read as a big-endian integer, modulo the number of orders.
    """
    digest = hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
    rest = int.from_bytes(digest, "big") % factorial(len(choices))
    left, order = list(choices), []
    while left:  # the digits of the number in the factorial base
        at, rest = divmod(rest, factorial(len(left) - 1))
        order.append(left.pop(at))
    return order


def letter_of(choices: Sequence[str], right: str) -> str:
    """The letter of the first choice that equals the right one.

    Raises:
        BadChoices: no choice does.
    """
    if right not in choices:
        raise BadChoices(f"the right answer {right!r} is not one of the choices")
    return LETTERS[choices.index(right)]


@dataclass(frozen=True, kw_only=True)
class OrderChoices:
    """A row step that writes the choices of a question in order, and the letter of the right one.

    It writes the columns `choices` (a list of texts) and `target` (a letter). If several choices
    equal the right one, the first gives the letter; method `choice` of `Grade` accepts the others
    as right, too. A row with more than 26 choices becomes an error row.

    Attributes:
        columns: the columns of the choices, the right one first. Each holds one text or number; all
            but the first may hold a list of several. Must be empty with `choices_column`.
        choices_column: the column that holds a list of all choices.
        target_column: with `choices_column`, the column that holds the letter or the position (from
            0) of the right one.
        order: `given` keeps the order. `rotated` begins with choice (row_index + 1) mod n, as
            OpenCompass orders GPQA. `shuffled` depends only on the text of `key_column`, so it is
            the same wherever the row is in the data set.
        key_column: the column for `shuffled`.
    """

    version = 1

    columns: tuple[str, ...] = ()
    choices_column: str | None = None
    target_column: str | None = None
    order: Literal["given", "rotated", "shuffled"] = "given"
    key_column: str | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "columns", tuple(self.columns))
        if (self.choices_column is None) == (not self.columns):
            raise ConfigError(
                "OrderChoices: give either columns, the right choice first, or choices_column"
            )
        if (self.choices_column is None) != (self.target_column is None):
            raise ConfigError("OrderChoices: target_column belongs to choices_column: give both")
        if (self.order == "shuffled") != (self.key_column is not None):
            raise ConfigError("OrderChoices: key_column belongs to order=shuffled: give both")
        if self.order not in ("given", "rotated", "shuffled"):
            raise ConfigError(
                f"OrderChoices: order must be given, rotated or shuffled, got {self.order!r}"
            )

    @property
    def writes(self) -> tuple[Column, ...]:
        """The columns that the step adds."""
        return (
            Column("choices", "strings", "the choices in the order in which the prompt has them"),
            Column("target", "string", "the letter of the right choice"),
        )

    @property
    def field_names(self) -> tuple[str, ...]:
        """The columns that a row must have."""
        names = (*self.columns, self.choices_column, self.target_column, self.key_column)
        return tuple(name for name in names if name is not None)

    def apply(self, row_index: int, fields: Mapping[str, Any]) -> dict[str, Any]:
        """The values of `choices` and `target` for a row.

        Args:
            row_index: the row's position in the data set, from 0.

        Raises:
            BadChoices: the row lacks a column or a choice, or its target is not one of them.
        """
        choices, right = self._choices(fields)
        if self.order == "rotated":
            choices = rotate_choices(choices, row_index + 1)
        elif self.order == "shuffled":
            assert self.key_column is not None
            choices = shuffle_choices(choices, str(self._value(fields, self.key_column)))
        return {"choices": choices, "target": letter_of(choices, right)}

    def _choices(self, fields: Mapping[str, Any]) -> tuple[list[str], str]:
        """The choices in the order of the row, and the text of the right one."""
        if self.choices_column is None:
            right_column, *other_columns = self.columns
            texts = [_text(self._value(fields, right_column), right_column)]
            for name in other_columns:
                value = self._value(fields, name)
                values = value if isinstance(value, list | tuple) else [value]
                texts += [_text(choice, name) for choice in values]
            return _lettered(texts), texts[0]
        assert self.target_column is not None
        listed, name = self._value(fields, self.choices_column), self.choices_column
        if not isinstance(listed, list | tuple):
            raise BadChoices(
                f"column {name!r} must hold a list of choices, got {type(listed).__name__}: name "
                "the columns of the single choices with `columns`, or the list's own column"
            )
        texts = _lettered([_text(choice, name) for choice in listed])
        target = self._value(fields, self.target_column)
        at = target
        if isinstance(target, str) and len(target) == 1:
            at = LETTERS.find(target.upper())
        if type(at) is not int or not 0 <= at < len(texts):
            raise BadChoices(
                f"column {self.target_column!r} must be the letter or the position of one of "
                f"{len(texts)} choices, got {target!r}"
            )
        return texts, texts[at]

    @staticmethod
    def _value(fields: Mapping[str, Any], name: str) -> Any:
        value = fields.get(name)
        if value is None:
            raise BadChoices(f"the row has no value in column {name!r}")
        return value


def _text(choice: Any, column: str) -> str:
    """The text of one choice."""
    if choice is None or isinstance(choice, list | tuple | Mapping):
        raise BadChoices(
            f"column {column!r} must hold a text or a number for each choice, got {choice!r:.100}: "
            "a list of all choices is named with choices_column"
        )
    return str(choice)


def _lettered(choices: list[str]) -> list[str]:
    if len(choices) > len(LETTERS):
        raise BadChoices(f"there are {len(choices)} choices, and only {len(LETTERS)} letters")
    return choices
