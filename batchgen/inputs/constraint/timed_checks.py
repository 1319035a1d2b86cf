"""Makes constraints from texts of a data set, which may be malicious, within a time limit.
`RowConstraints` and `RowParams` use `TimedConstraints`.

Most constraints are checked in this process. If a check may take long, it runs in another process:
Python's `re` cannot be interrupted otherwise, and blocks all other threads.
"""

from __future__ import annotations

from batchgen.config.groups.constraint_config import AnyConstraintConfig, make_constraint
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.json_text import parse_json
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.evals.graders.grading_pool import WorkerPool
from batchgen.evals.graders.step import GradeFailure

MOST_SECONDS = 10.0
"""The maximum time for the check of one constraint."""
_MOST_BYTES = 2 << 30
"""The maximum address space of the other process."""
_QUICK_LENGTH = 4096
"""The maximum length of a regex or a schema that is checked in this process."""
_SLOW_WORDS = ("$ref", "pattern", "\\")
"""Texts in a schema that may make its check slow. A backslash could be an escape that hides one of
the others."""


class TimedConstraints:
    """Makes constraints of one kind from the texts of a column."""

    def __init__(self, config: AnyConstraintConfig) -> None:
        self._config = config
        self._pool: WorkerPool[str, Constraint | str] | None = None
        self._slow: set[str] = set()

    def make(self, text: str) -> Constraint:
        """Return the constraint that a text describes.

        Raises:
            ConstraintError: it is invalid, cannot be enforced, or its check takes too long.
        """
        if _is_quick(self._config.kind, text):
            return _make(self._config, text)
        if text in self._slow:
            raise _too_slow()
        if self._pool is None:
            self._pool = WorkerPool(
                _Maker(self._config), workers=1, seconds=MOST_SECONDS, memory_bytes=_MOST_BYTES
            )
        (constraint,) = self._pool.map([text])
        if isinstance(constraint, Constraint):
            return constraint
        if isinstance(constraint, GradeFailure):
            if constraint.type == "timeout":
                self._slow.add(text)
                raise _too_slow()
            raise ConstraintError(f"cannot be checked: {constraint.type}: {constraint}")
        raise ConstraintError(constraint)


class _Maker:
    """Makes constraints in the other process: returns the constraint, or the error message."""

    def __init__(self, config: AnyConstraintConfig) -> None:
        self._config = config

    def __call__(self, text: str) -> Constraint | str:
        try:
            return _make(self._config, text)
        except ConstraintError as error:
            return str(error)


def _too_slow() -> ConstraintError:
    return ConstraintError(f"its check takes longer than {MOST_SECONDS:g} s: make it simpler")


def _is_quick(kind: str, text: str) -> bool:
    """Whether the check certainly takes less than a second."""
    if kind in ("choice", "grammar"):
        return True
    if kind == "regex":
        return len(text) <= _QUICK_LENGTH
    return len(text) <= _QUICK_LENGTH and not any(word in text for word in _SLOW_WORDS)


def choices_of(text: str) -> list[str]:
    """Parse the list of choices in a text from `cell_text`. Raises ConstraintError if it is not a
    list of strings."""
    try:
        choices = parse_json(text)
    except (ValueError, RecursionError) as error:
        raise ConstraintError(f"must hold a list of texts, or JSON text of one: {error}") from None
    if not (isinstance(choices, list) and all(isinstance(choice, str) for choice in choices)):
        raise ConstraintError(
            f"must hold a list of texts, or JSON text of one, got {choices!r:.100}"
        )
    return choices


def _make(config: AnyConstraintConfig, text: str) -> Constraint:
    return make_constraint(config, choices_of(text) if config.kind == "choice" else text)
