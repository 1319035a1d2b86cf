"""The columns that expressions and templates see: those of the rows, and those of their grades."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from batchgen.templates.row_expression import RowExpression
from batchgen.texts.row_json import row_reader
from batchgen.util.errors import ConfigError
from batchgen.util.shorten import some_names

GRADES = "grades"
"""The variable that holds the grades of a row."""


@dataclass(frozen=True)
class Wanted:
    """Which columns are to be read."""

    data: frozenset[str] = frozenset()
    grades: frozenset[str] = frozenset()

    def __or__(self, other: Wanted) -> Wanted:
        return Wanted(self.data | other.data, self.grades | other.grades)


class VisibleColumns:
    """The names under which the columns of rows and grades can be read.

    A column of the grades is `grades.mark`, and also `mark` if the rows have no such column.
    """

    def __init__(self, data: pa.Schema, grades: pa.Schema | None) -> None:
        self._schema = data
        self.data = tuple(data.names)
        self.grades = () if grades is None else tuple(grades.names)
        self._both = frozenset(self.data) & frozenset(self.grades)
        self.has_grades = bool(self.grades) and GRADES not in self.data
        own = [name for name in self.grades if name not in self._both]
        self.names = (*self.data, *own, *([GRADES] if self.has_grades else []))

    def expression(self, key: str, source: str) -> RowExpression:
        """Compile an expression, or raise ConfigError, which names the `key`."""
        found = RowExpression(key, source, self.names)
        for name in sorted(self._both & set(found.names)):
            if found.attributes(name) != frozenset():
                raise ConfigError(
                    f"{key}: {name!r} is a column of the rows and of their grades: write "
                    f"grades.{name} or row.{name}"
                )
        for name in sorted(found.attributes(GRADES) or ()) if self.has_grades else ():
            if name not in self.grades:
                raise ConfigError(
                    f"{key}: the grades have no column {name!r}: choose among "
                    f"{some_names(self.grades, name)}"
                )
        return found

    def read_by(self, expression: RowExpression) -> Wanted:
        """Which columns an expression reads."""
        wanted = self.named(expression.names)
        fields = expression.attributes(GRADES)
        if GRADES in expression.names and self.has_grades and fields:
            plain = self.named([name for name in expression.names if name != GRADES])
            return plain | Wanted(grades=fields)
        return wanted

    def named(self, names: Collection[str]) -> Wanted:
        """The columns with these names, which are all known."""
        data = frozenset(name for name in names if name in self.data)
        grades = frozenset(name for name in names if name in self.grades and name not in data)
        if self.has_grades and GRADES in names:
            grades = frozenset(self.grades)
        return Wanted(data, grades)

    @property
    def everything(self) -> Wanted:
        return Wanted(frozenset(self.data), frozenset(self.grades))

    def reader(self, wanted: Wanted) -> Callable[[Mapping[str, Any], Mapping[str, Any]], Any]:
        """A function that makes the variables of a row from its columns and its grades."""
        parse = row_reader(pa.schema([self._schema.field(n) for n in self._ordered(wanted)]))
        bare = [name for name in self.grades if name in wanted.grades and name not in self._both]

        def variables(fields: Mapping[str, Any], grades: Mapping[str, Any]) -> dict[str, Any]:
            found = parse(fields)
            found |= {name: grades[name] for name in bare}
            if self.has_grades:
                found[GRADES] = grades
            return found

        return variables

    def _ordered(self, wanted: Wanted) -> Sequence[str]:
        return [name for name in self.data if name in wanted.data]
