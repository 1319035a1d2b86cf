"""The values that a program and its testing code exchange, and messages that are damaged."""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from batchgen.evals.programs.inside.copied_values import decode_value, encode


@pytest.mark.parametrize(
    "form",
    [
        ["l"],
        ["d"],
        ["f"],
        ["o"],
        ["o", 7],
        ["D", "x"],
        ["F", "1/0"],
        ["f", "0x1p99999"],
        ["c", "0x1p99999"],
        ["l", [["l", [["D", "x"]]]]],
        [],
        ["?"],
        [["l"]],
        1.5,
    ],
)
def test_a_damaged_form_raises_only_what_is_documented(form: Any) -> None:
    with pytest.raises((ValueError, TypeError)):
        decode_value(form, [].__getitem__)


def test_a_form_with_too_many_levels_is_damaged() -> None:
    form: Any = 1
    for _ in range(100_000):
        form = ["l", [form]]
    with pytest.raises(ValueError, match="no such form"):
        decode_value(form, [].__getitem__)


def _refer(value: Any) -> int:
    raise AssertionError(f"no form for {value!r}")


@pytest.mark.parametrize(
    ("value", "copy"),
    [
        (np.longdouble(1.5), 1.5),
        (np.clongdouble(1 + 2j), 1 + 2j),
        (np.array([1.5, 2], "longdouble"), [1.5, 2.0]),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.bool_(True), True),
    ],
)
def test_values_of_numpy_become_those_of_python(value: Any, copy: Any) -> None:
    numbers: Callable[[int], Any] = [].__getitem__
    decoded = decode_value(encode(value, _refer), numbers)
    assert decoded == copy
    assert type(decoded) is type(copy)
