"""The values that a template sees for a row: all its columns, and null for a field that is
missing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jinja2 import (
    StrictUndefined,
)


class WholeRow(dict[str, Any]):
    """All columns of a row; to read one that it lacks is an error."""


class AbsentField(StrictUndefined):
    """A field that an object of a row lacks, which acts as null does: files of one format leave
    out what those of another one pad with null. A variable that is not there raises, as in
    StrictUndefined; so does either where it is printed or read further."""

    __slots__ = ()

    @property
    def _undefined_message(self) -> str:
        if isinstance(self._undefined_obj, WholeRow):
            return f"the row has no column {self._undefined_name!r}"
        return super()._undefined_message

    @property
    def is_null(self) -> bool:
        """Whether an object lacks it, and not the template's variables."""
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
    """Whether a value of a template is null: the test `is none`."""
    return value is None or (isinstance(value, AbsentField) and value.is_null)
