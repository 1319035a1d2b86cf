"""The names by which expressions and templates read the columns of rows and of their grades.

With the columns `question` and `text` of rows, and the grades `mark` and `answer`, the expression
`grades.mark > 0 and len(text) < 100` reads `mark` of the grades and `text` of the rows.
"""

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
    """The columns that are to be read for an expression or an export.

    Attributes:
        data, grades: the columns of the rows, and those of the grades.
    """

    data: frozenset[str] = frozenset()
    grades: frozenset[str] = frozenset()

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.data | other.data, self.grades | other.grades)


class VisibleColumns:
    """The names by which expressions read the columns of rows and grades.

    A column of the grades is `grades.mark`, and also `mark` if the rows have no such column.

    Attributes:
        data, grades: the names of the columns.
        has_grades: whether the variable `grades` can be read.
        names: all variables for columns.
    """

    def __init__(
        self, data: Sequence[str], grades: Sequence[str], more: Sequence[str] = ()
    ) -> None:
        """Make the names of some columns. Expressions can also read the variables `more`."""
        self.data, self.grades, self._more = tuple(data), tuple(grades), tuple(more)
        self._both = frozenset(self.data) & frozenset(self.grades)
        self.has_grades = bool(self.grades) and GRADES not in self.data
        alone = [name for name in self.grades if name not in self._both]
        self.names = (*self.data, *alone, *([GRADES] if self.has_grades else []))

    def expression(self, key: str, source: str) -> RowExpression:
        """Compile an expression. `key` names it in messages.

        Raises:
            ConfigError: the expression is wrong, or reads a column that does not exist.
        """
        expression = RowExpression(key, source, (*self.names, *self._more))
        for name in sorted(self._both & set(expression.names)):
            if expression.attributes(name) != frozenset():  # it reads the column or a field of it
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
        """The columns that an expression reads."""
        fields, row_fields = expression.attributes(GRADES), expression.attributes("row")
        # Single grades (`grades.mark`) can be read alone, unless the expression also reads `grades`
        # or `row` as a whole.
        if not self.has_grades or not fields or row_fields is None or GRADES in row_fields:
            return self.named(expression.names)
        variables = self.named([name for name in expression.names if name != GRADES])
        return variables | Wanted(grades=fields)

    def named(self, names: Collection[str]) -> Wanted:
        """The columns for some known names."""
        data = frozenset(name for name in names if name in self.data)
        grades = frozenset(name for name in names if name in self.grades and name not in data)
        if self.has_grades and GRADES in names:
            grades = frozenset(self.grades)
        return Wanted(data, grades)

    def ordered(self, wanted: Wanted) -> tuple[list[str], list[str]]:
        """Columns of the rows and of the grades, in the order of their files."""
        return (
            [name for name in self.data if name in wanted.data],
            [name for name in self.grades if name in wanted.grades],
        )

    def variables(self, fields: Mapping[str, Any], grades: Mapping[str, Any]) -> dict[str, Any]:
        """The values of all variables for a row with these fields and grades."""
        variables = {**fields, **{name: grades[name] for name in grades if name not in self.data}}
        if self.has_grades:
            variables[GRADES] = grades
        return variables
