"""Constraints of rows whose check takes long, or more memory than there is."""

from __future__ import annotations

import json
import time

import pytest

from batchgen.config.groups.constraint_config import (
    JsonSchemaConstraintConfig,
    RegexConstraintConfig,
)
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.inputs.constraint import timed_checks as timed
from batchgen.inputs.constraint.timed_checks import TimedConstraints

ENDLESS = json.dumps({"enum": ["a" * 60 + "!"], "pattern": "(a+)+$"})
REFERENCE = json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"type": "string"}}})


def test_a_check_without_end_ends_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timed, "MOST_SECONDS", 1.0)
    constraints = TimedConstraints(JsonSchemaConstraintConfig(column="c"))
    for _ in range(2):
        with pytest.raises(ConstraintError, match="takes longer than 1 s: make it simpler"):
            constraints.make(ENDLESS)
    started = time.monotonic()
    with pytest.raises(ConstraintError):
        constraints.make(ENDLESS)
    assert time.monotonic() - started < 0.5
    assert constraints.make(REFERENCE) == Constraint.make("json_schema", REFERENCE)


@pytest.mark.quick(1)
@pytest.mark.parametrize("text", [REFERENCE, '{"type": "string"}', '{"pattern": "a*"}'])
def test_the_process_makes_what_is_made_without_it(text: str) -> None:
    constraints = TimedConstraints(JsonSchemaConstraintConfig(column="c", max_whitespace=1))
    assert constraints.make(text) == Constraint.make("json_schema", text, max_whitespace=1)


@pytest.mark.parametrize("text", ['{"$ref": "#/$defs/a"}', '{"type": "int"}', '{"pattern": "("}'])
def test_the_process_refuses_with_the_same_words(text: str) -> None:
    with pytest.raises(ConstraintError) as here:
        Constraint.make("json_schema", text)
    with pytest.raises(ConstraintError) as there:
        TimedConstraints(JsonSchemaConstraintConfig(column="c")).make(text)
    assert str(here.value) == str(there.value)


def test_a_long_pattern_is_checked_in_the_process(monkeypatch: pytest.MonkeyPatch) -> None:
    pattern = "a|" * 5000 + "b"
    monkeypatch.setattr(timed, "_make", lambda *_: pytest.fail("it was checked here"))
    assert TimedConstraints(RegexConstraintConfig(column="c")).make(pattern).text == pattern
