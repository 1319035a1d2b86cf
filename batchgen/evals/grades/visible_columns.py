"""The names under which expressions and templates see the columns of rows and of their grades."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names
from batchgen.util.templates.row_expression import RowExpression

GRADES = "grades"
"""The variable that holds the grades of a row."""


@dataclass(frozen=True)
class Wanted:
    """The columns that are to be read."""

    data: frozenset[str] = frozenset()
    grades: frozenset[str] = frozenset()

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.data | other.data, self.grades | other.grades)


class VisibleColumns:
    """The names under which the columns of rows and grades can be read.

    A column of the grades is `grades.mark`, and also `mark` if the rows have no such column.
    """

    def __init__(
        self, data: Sequence[str], grades: Sequence[str], more: Sequence[str] = ()
    ) -> None:
        """The names of the columns; expressions can read `more` variables besides."""
        self.data, self.grades, self._more = tuple(data), tuple(grades), tuple(more)
        self._both = frozenset(self.data) & frozenset(self.grades)
        self.has_grades = bool(self.grades) and GRADES not in self.data
        alone = [name for name in self.grades if name not in self._both]
        self.names = (*self.data, *alone, *([GRADES] if self.has_grades else []))

    def expression(self, key: str, source: str) -> RowExpression:
        """Compile an expression, or raise ConfigError, which names the `key`."""
        expression = RowExpression(key, source, (*self.names, *self._more))
        for name in sorted(self._both & set(expression.names)):
            if expression.attributes(name) != frozenset():
                raise ConfigError(
                    f"{key}: {name} is a column of the data and one of the grades: write "
                    f"grades.{name} or row.{name}"
                )
        for name in sorted(expression.attributes(GRADES) or ()) if self.has_grades else ():
            if name not in self.grades:
                raise ConfigError(
                    f"{key}: the grades have no column {name!r}: choose among "
                    f"{some_names(self.grades, name)}"
                )
        return expression

    def read_by(self, expression: RowExpression) -> Wanted:
        """Which columns an expression reads."""
        fields, of_row = expression.attributes(GRADES), expression.attributes("row")
        if not self.has_grades or not fields or of_row is None or GRADES in of_row:
            return self.named(expression.names)
        plain = self.named([name for name in expression.names if name != GRADES])
        return plain | Wanted(grades=fields)

    def named(self, names: Collection[str]) -> Wanted:
        """The columns with these names, which are all known."""
        data = frozenset(name for name in names if name in self.data)
        grades = frozenset(name for name in names if name in self.grades and name not in data)
        if self.has_grades and GRADES in names:
            grades = frozenset(self.grades)
        return Wanted(data, grades)

    def ordered(self, wanted: Wanted) -> tuple[list[str], list[str]]:
        """Columns of the rows and of the grades, as these have them."""
        return (
            [name for name in self.data if name in wanted.data],
            [name for name in self.grades if name in wanted.grades],
        )

    def variables(self, fields: Mapping[str, Any], grades: Mapping[str, Any]) -> dict[str, Any]:
        """What expressions see of a row with these values, and of its grades."""
        variables = {**fields, **{name: grades[name] for name in grades if name not in self.data}}
        if self.has_grades:
            variables[GRADES] = grades
        return variables
