"""Reads the arguments of an IFEval or IFBench instruction, which come with the row, and checks
them: {"num_words": 200, "relation": "at least"} for a number of words."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

LESS, AT_LEAST = "less than", "at least"


class InstructionArguments:
    """The arguments of one instruction by name; null means that an argument is missing.

    The methods raise ValueError, which names the argument, if it is missing or of another type.
    """

    def __init__(self, instruction_id: str, values: Mapping[str, Any]) -> None:
        self._id = instruction_id
        self._values = {name: value for name, value in values.items() if value is not None}

    def text(self, name: str) -> str:
        """An argument that is a text."""
        value = self._values.get(name)
        if not isinstance(value, str):
            raise self._wrong(name, "a text")
        return value

    def texts(self, name: str) -> list[str]:
        """An argument that is a list of one or more texts."""
        value = self._values.get(name)
        if isinstance(value, str) or not isinstance(value, Sequence) or not value:
            raise self._wrong(name, "a list of texts")
        if not all(isinstance(item, str) for item in value):
            raise self._wrong(name, "a list of texts")
        return list(value)

    def number(self, name: str) -> int:
        """An argument that is a whole number, even if it is written as 3.0."""
        value = self._values.get(name)
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if type(value) is not int:
            raise self._wrong(name, "a whole number")
        return value

    def compares(self, count: int, number: str, relation: str = "relation") -> bool:
        """Whether a count has the relation, named by one argument, to the number that is another
        argument."""
        how = self.text(relation)
        if how not in (LESS, AT_LEAST):
            raise self._wrong(relation, f"{LESS!r} or {AT_LEAST!r}")
        return (count < self.number(number)) == (how == LESS)

    def _wrong(self, name: str, kind: str) -> ValueError:
        value = self._values.get(name)
        return ValueError(f"{self._id}: {name} must be {kind}, got {value!r:.80}")
