"""Every wrong value is refused with its name; the rest is kept as given."""

from dataclasses import replace
from typing import Any

import pytest

from batchgen.engine.sampling.sampling_params import RequestParams

NAN = float("nan")
INF = float("inf")

WRONG: list[tuple[str, Any]] = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("top_k", -1),
    ("top_k", NAN),
    ("top_p", 0.0),
    ("top_p", 1.0001),
    ("top_p", NAN),
    ("min_p", -0.01),
    ("min_p", 1.01),
    ("min_p", NAN),
    ("repetition_penalty", 0.0),
    ("repetition_penalty", -1.0),
    ("repetition_penalty", NAN),
    ("repetition_penalty", INF),
    ("presence_penalty", 2.1),
    ("presence_penalty", -2.1),
    ("presence_penalty", NAN),
    ("frequency_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("frequency_penalty", NAN),
    ("max_new_tokens", -1),
    ("min_new_tokens", -1),
    ("min_new_tokens", 257),
    ("stop", "text"),
    ("stop", ("",)),
    ("stop", (1,)),
    ("stop_token_ids", (-1,)),
    ("seed", 2**64),
    ("seed", -(2**63) - 1),
    ("top_logprobs", -1),
    ("top_logprobs", 257),
    ("logprobs_mode", "both"),
]


@pytest.mark.parametrize(("name", "value"), WRONG)
def test_a_wrong_value_is_named(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"^{name} must be .*got .*") as error:
        RequestParams(**{name: value})
    assert repr(value) in str(error.value)


def test_min_new_tokens_may_equal_max_new_tokens() -> None:
    params = RequestParams(min_new_tokens=7, max_new_tokens=7)
    assert params.min_new_tokens == 7
    with pytest.raises(ValueError, match=r"min_new_tokens must be <= max_new_tokens, got 8"):
        RequestParams(min_new_tokens=8, max_new_tokens=7)


def test_lists_become_tuples_so_that_rows_share_nothing() -> None:
    stop, ids = ["a"], [1, 2]
    params = RequestParams(stop=stop, stop_token_ids=ids)  # type: ignore[arg-type]
    stop.append("b")
    ids.append(3)
    assert params.stop == ("a",)
    assert params.stop_token_ids == (1, 2)
    assert hash(params) == hash(RequestParams(stop=("a",), stop_token_ids=(1, 2)))


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_any_64_bit_seed_is_kept(seed: int) -> None:
    assert RequestParams(seed=seed).seed == seed


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        (RequestParams(), False),
        (RequestParams(repetition_penalty=1.1), True),
        (RequestParams(repetition_penalty=0.9), True),
        (RequestParams(presence_penalty=-0.5), True),
        (RequestParams(frequency_penalty=0.1), True),
    ],
)
def test_has_penalties(params: RequestParams, expected: bool) -> None:
    assert params.has_penalties is expected


def test_greedy_is_temperature_zero_only() -> None:
    assert RequestParams(temperature=0).greedy
    assert not RequestParams(temperature=1e-5).greedy


def test_another_seed_changes_nothing_else() -> None:
    """Every field is copied, also of those that come later, and the one copied from stays."""
    params = RequestParams(
        temperature=0.5, stop=("a",), stop_token_ids=(3,), columns=("x",), seed=1
    )
    other = params.with_seed(2**64 - 1)
    assert other == replace(params, seed=2**64 - 1) and params.seed == 1
    assert hash(other) == hash(replace(params, seed=2**64 - 1))
