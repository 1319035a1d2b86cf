"""The texts of the page docs/reference/extractions.md have the answers that a person found."""

from typing import Any

import pytest
from extractions import answers, groups

METHODS = ("boxed", "last_number", "letter", "regex", "json_path", "whole", "ParseScore")


def method(group: dict[str, Any]) -> str:
    return str(*group["options"].get("methods", [group["step"]]))


@pytest.mark.parametrize("name", METHODS)
def test_steps_find_what_a_person_finds(name: str) -> None:
    chosen = [group for group in groups() if method(group) == name]
    wanted = [tuple(pair) for group in chosen for pair in group["texts"]]
    found = [pair for group in chosen for pair in answers(group)]
    assert len(set(wanted)) >= 30
    assert found == wanted
