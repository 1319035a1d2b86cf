"""How templates treat absent values of a row: a missing field of an object is null, a missing
column is an error. `row_environment` uses AbsentField."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import (
    StrictUndefined,
)


class WholeRow(dict[str, Any]):
    """All columns of a row. Reading a column that the row lacks is an error."""


class AbsentField(StrictUndefined):
    """The Jinja value of a name that does not exist.

    A field that an object in a row lacks behaves like null, because some file formats omit fields
    that others fill with null. A variable that does not exist raises an error, as with
    StrictUndefined. In both cases, printing the value or reading a field of it raises.
    """

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, WholeRow):
            return f"the row has no column {self._undefined_name!r}"
        return super()._undefined_message

    @property
    def is_null(self) -> bool:
        """Whether this is a missing field of an object, and not a missing variable or column."""
        obj = self._undefined_obj
        return isinstance(obj, Mapping) and not isinstance(obj, WholeRow)

    def __bool__(self) -> bool:  # type: ignore[override]
        if not self.is_null:
            self._fail_with_undefined_error()
        return False

    def __eq__(self, other: object) -> bool:  # type: ignore[override]
        if not self.is_null:
            self._fail_with_undefined_error()
        return other is None or isinstance(other, AbsentField)

    def __ne__(self, other: object) -> bool:  # type: ignore[override]
        return not self == other

    def __hash__(self) -> int:  # type: ignore[override]
        if not self.is_null:
            self._fail_with_undefined_error()
        return hash(None)


def is_null(value: object) -> bool:
    """Whether a value in a template is null; implements the test `is none`."""
    return value is None or (isinstance(value, AbsentField) and value.is_null)
