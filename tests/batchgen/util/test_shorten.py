"""Messages that list names stay short, and have the name that was meant."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from batchgen.util.shorten import some_names


def test_few_names_are_all_there_in_their_order() -> None:
    assert some_names(["b", "a", "c"], "a") == "b, a, c"


def test_of_many_names_the_nearest_come_first() -> None:
    names = [f"column_{i}" for i in range(1000)] + ["question"]
    shown = some_names(names, "qeustion")
    assert shown.startswith("question, column_0, ") and shown.endswith(" and 981 more")


@given(st.lists(st.text(max_size=200), max_size=60, unique=True), st.text(max_size=400))
def test_a_message_has_a_bound(names: list[str], meant: str) -> None:
    assert len(some_names(names, meant)) <= 20 * 62 + 20
