"""Checks constraints from a data set, which may be hostile, within a time limit.

Most constraints are checked at once. One whose check may take long runs in a process of its own,
because nothing else ends a search of Python's `re`, which also keeps all other threads waiting.
"""

from __future__ import annotations

from batchgen.config.groups.constraint_config import AnyConstraintConfig, make_constraint
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.constraint.json_schema.json_text import parse_json
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.evals.graders.grading_pool import WorkerPool
from batchgen.evals.graders.step import GradeFailure

MOST_SECONDS = 10.0
"""The longest time, in seconds, that the check of one constraint may take."""
_MOST_BYTES = 2 << 30
"""The address space of the process."""
_QUICK_LENGTH = 4096
_SLOW_WORDS = ("$ref", "pattern", "\\")
"""Texts in a schema that may make its check slow; the backslash may hide the others in an
escape."""


class TimedConstraints:
    """Makes constraints from the texts of a column."""

    def __init__(self, config: AnyConstraintConfig) -> None:
        self._config = config
        self._pool: WorkerPool[str, Constraint | str] | None = None
        self._slow: set[str] = set()

    def make(self, text: str) -> Constraint:
        """The constraint of a text; ConstraintError if it is none that can be enforced, or takes
        too long."""
        if _is_quick(self._config.kind, text):
            return _make(self._config, text)
        if text in self._slow:
            raise _too_slow()
        if self._pool is None:
            self._pool = WorkerPool(
                _Made(self._config), workers=1, seconds=MOST_SECONDS, memory_bytes=_MOST_BYTES
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


class _Made:
    """Makes constraints in the process; gives the message of one that cannot be enforced."""

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
    """Whether the check takes less than a second for certain."""
    if kind in ("choice", "grammar"):
        return True
    if kind == "regex":
        return len(text) <= _QUICK_LENGTH
    return len(text) <= _QUICK_LENGTH and not any(word in text for word in _SLOW_WORDS)


def choices_of(text: str) -> list[str]:
    """The list of choices that a text from `cell_text` stands for."""
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
