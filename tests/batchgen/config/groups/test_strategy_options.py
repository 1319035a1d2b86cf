"""A class that a user names as `strategy._target_`: it is checked before it is called."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, Optional, TypeVar

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.groups.job_config import StrategyConfig
from batchgen.config.groups.named_code import strategy_options
from batchgen.jobs.resolve.build_strategy import build_strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.util.errors import ConfigError

CALLED: list[str] = []


class NotAStrategy:
    def __init__(self, width: int = 1) -> None:
        CALLED.append("NotAStrategy")


class HalfAStrategy:
    """Says what a strategy must say, and lacks what Strategy would add."""

    name = "half"
    step_inputs = None

    def decide(self) -> None: ...


class Custom(ARStrategy):
    def __init__(self, plain=None, widths: list[int] = [1], limit: int = 0):  # type: ignore # noqa: B006
        super().__init__()
        self.given = (plain, widths, limit)


@pytest.fixture(autouse=True)
def module(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Makes the classes of this file importable as `users_module.NAME`."""
    users = types.ModuleType("users_module")
    users.__dict__.update(globals())
    monkeypatch.setitem(sys.modules, "users_module", users)
    CALLED.clear()
    yield


@pytest.mark.parametrize(
    ("target", "lacks"),
    [
        ("users_module.NotAStrategy", "name, step_inputs, decide"),
        ("subprocess.Popen", "name, step_inputs, decide"),
        ("batchgen.engine.strategy.Strategy", "name, step_inputs, decide"),
    ],
)
def test_a_class_that_is_no_strategy_is_never_called(target: str, lacks: str) -> None:
    with pytest.raises(ConfigError, match=rf"_target_: {target} is not a Strategy: .*no {lacks}"):
        build_strategy(StrategyConfig(target=target, options={"width": 3}))
    assert not CALLED


@pytest.mark.parametrize("target", ["os.getcwd", "users_module.CALLED"])
def test_what_is_no_class_is_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=f"{target} is not a Strategy: it is not a class"):
        build_strategy(StrategyConfig(target=target))


def test_a_strategy_that_lacks_something_is_told_what() -> None:
    with pytest.raises(ConfigError, match=r"HalfAStrategy .*\bcolumns\b.*engine.strategy.Strategy"):
        build_strategy(StrategyConfig(target="users_module.HalfAStrategy"))


def test_unannotated_and_list_parameters() -> None:
    options = {"plain": {"a": [1, None]}, "widths": [2, 3], "limit": 4}
    strategy: Any = build_strategy(StrategyConfig(target="users_module.Custom", options=options))
    assert strategy.given == ({"a": [1, None]}, [2, 3], 4)
    with pytest.raises(ConfigError, match=r"^strategy\.widths\[1\] must be an integer, got 'x'$"):
        build_strategy(StrategyConfig(target="users_module.Custom", options={"widths": [2, "x"]}))


T = TypeVar("T")
Text = str


@pytest.mark.parametrize(
    ("hint", "value", "expected"),
    [
        (list[int], [1, 2], [1, 2]),
        (list, [1, "a"], [1, "a"]),
        (tuple[float, ...], [1, 2.5], (1.0, 2.5)),
        (tuple[int, str], [1, "a"], (1, "a")),
        (Sequence[str], ["a"], ["a"]),
        (dict[str, list[int]], {"a": [1]}, {"a": [1]}),
        (Mapping[str, Any], {"a": None}, {"a": None}),
        (dict, {"a": 1}, {"a": 1}),
        (Optional[list[int]], None, None),  # noqa: UP045
        (bool | None, True, True),
        (int | str, "a", "a"),
        (float | int, 3, 3),
        (int | list[int], [1], [1]),
        (set[int] | float, 1, 1.0),
        (tuple, [1, "a"], (1, "a")),
        (Literal["a", 2], 2, 2),
        (Annotated[int, "tokens"], 3, 3),
        (None, None, None),
        (Any, [1], [1]),
        ("list[Text]", ["a"], ["a"]),
    ],
)
def test_annotations_that_a_configuration_can_give(hint: Any, value: Any, expected: Any) -> None:
    found = strategy_options(_class_with(hint), {"x": value})["x"]
    assert found == expected and type(found) is type(expected)


@pytest.mark.parametrize(
    ("hint", "value", "message"),
    [
        (list[int], "a", r"strategy\.x.* must be an integer"),
        (tuple[int, str], [1], r"strategy\.x must be a list of 2 values"),
        (dict[str, int], {"a": "b"}, r"strategy\.x\.a must be an integer"),
        (dict[str, int], {1: 1}, r"strategy\.x must be a mapping of names"),
        (bool, 1, r"strategy\.x must be true or false"),
        (int, None, r"strategy\.x must be an integer, got None"),
        (int | str, [1], r"strategy\.x must be int or str, got \[1\]"),
        (float, 10**400, r"strategy\.x must be a number"),
        (Literal[1], True, r"strategy\.x must be one of 1, got True"),
        (None, 1, r"strategy\.x must be null, got 1"),
        (set[int], [1], r"strategy\.x: .*\.Made declares it as set\[int\], which a configuration"),
        (Callable[[], int], 1, r"strategy\.x: .*\.Made declares it as .*Callable"),
        (int | set[int], "a", r"strategy\.x: .*\.Made declares it as int \| set\[int\]"),
        (types.GenericAlias(dict, (int,)), {}, r"strategy\.x: .*Made declares it as dict\[int\]"),
        (T, 1, r"strategy\.x: .*\.Made declares it as ~T"),
        ("Missing", 1, r"strategy\._target_: an annotation of .*\.Made is wrong: name 'Missing'"),
        ("1 +", 1, r"strategy\._target_: an annotation of .*\.Made is wrong"),
    ],
)
def test_annotations_and_values_that_are_refused(hint: Any, value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        strategy_options(_class_with(hint), {"x": value})


def test_a_parameter_by_position_only() -> None:
    class Positional:
        def __init__(self, x: int, /) -> None: ...

    with pytest.raises(ConfigError, match="takes x by position only"):
        strategy_options(Positional, {"x": 1})


PLAIN = [int, float, bool, str, None, Any, object, list, dict, tuple, Literal["a", 1, True]]
ODD = [set, bytes, complex, type, T, "int", "no_such", 3, Ellipsis, Callable[[int], str], Sequence]
LEAVES = st.sampled_from([*PLAIN, *ODD])


def _wider(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    generic = st.sampled_from([list, set, dict, tuple, Sequence, Mapping])
    arguments = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.builds(lambda kind, args: types.GenericAlias(kind, tuple(args)), generic, arguments),
        st.builds(_union, inner, inner),
    )


def _union(one: Any, other: Any) -> Any:
    kinds = (type, types.GenericAlias, types.UnionType)
    return one | other | None if isinstance(one, kinds) and isinstance(other, kinds) else one


HINTS = st.recursive(LEAVES, _wider, max_leaves=5)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.text(max_size=3) | st.integers() | st.booleans(), inner, max_size=3)
    ),
    max_leaves=6,
)


@given(HINTS, VALUES)
def test_any_annotation_takes_any_value_or_refuses_it_by_name(hint: Any, value: Any) -> None:
    try:
        found = strategy_options(_class_with(hint), {"x": value})
    except ConfigError as error:
        assert str(error).startswith(("strategy.x", "strategy._target_: an annotation of"))
    else:
        assert list(found) == ["x"]
        if hint in (int, float, bool, str, list, dict, tuple):
            assert type(found["x"]) is hint


def _class_with(hint: Any) -> type:
    def __init__(self, x) -> None: ...  # type: ignore[no-untyped-def]

    __init__.__annotations__ = {"x": hint}
    return type("Made", (), {"__init__": __init__, "__module__": __name__})
