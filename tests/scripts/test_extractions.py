"""The texts of the page docs/reference/extractions.md have the answers that a person finds."""

from typing import Any

import pytest
from extractions import answers, groups, model_answers, tallies

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


def test_there_are_400_texts_and_no_false_answers_in_those_of_a_model() -> None:
    counts = list(tallies())
    invented = sum(tally.texts for _, source, tally in counts if source == "invented")
    assert invented + len(set(model_answers())) >= 400
    for step, source, tally in counts:
        if source == "SmolLM2" and "last_number" not in step:
            assert (tally.texts, tally.answered, tally.found) == (200, 0, 0), step


def test_the_last_number_is_that_of_answers_that_end() -> None:
    (tally,) = [c for step, source, c in tallies() if source == "SmolLM2" and "last_number" in step]
    assert (tally.answered, tally.right) == (13, 12)
