"""The marker quick(n) leaves n cases of a test, the same ones wherever they are collected."""

import pytest

from tests.support.cases import mark_all_but_quick


def quick_cases(request: pytest.FixtureRequest, count: int, *marks: pytest.MarkDecorator) -> str:
    """Which of the cases of a test are left by quick(3), if the first has more markers."""
    items = [
        pytest.Function.from_parent(request.node.parent, name=f"test[{i}]", callobj=lambda: None)
        for i in range(count)
    ]
    for item in items:
        item.add_marker(pytest.mark.quick(3))
    for mark in marks:
        items[0].add_marker(mark)
    mark_all_but_quick([*items])
    return " ".join(
        str(i) for i, item in enumerate(items) if not item.get_closest_marker("thorough")
    )


def test_the_cases_are_spread(request: pytest.FixtureRequest) -> None:
    assert quick_cases(request, 10) == "0 2 6"
    assert quick_cases(request, 60) == "0 14 37"


def test_few_cases_are_all_quick(request: pytest.FixtureRequest) -> None:
    assert quick_cases(request, 3) == "0 1 2"


def test_slow_cases_do_not_count(request: pytest.FixtureRequest) -> None:
    assert quick_cases(request, 4, pytest.mark.slow) == "0 1 2 3"
    assert quick_cases(request, 11, pytest.mark.slow) == "0 1 3 7"


def test_many_cases_are_slow(request: pytest.FixtureRequest) -> None:
    items = [
        pytest.Function.from_parent(request.node.parent, name=f"test[{i}]", callobj=lambda: None)
        for i in range(10)
    ]
    for item in items:
        item.add_marker(pytest.mark.quick(1, thorough=2))
    mark_all_but_quick([*items])
    markers = [
        next((name for name in ("thorough", "slow") if name in item.keywords), "quick")
        for item in items
    ]
    assert [markers.index("quick"), markers.count("thorough"), markers.count("slow")] == [0, 2, 7]
