"""Options that rows bring along: what each one becomes, and what is refused by name."""

from __future__ import annotations

import json
from typing import Any

import pytest
from datasets import Value
from datasets.features import Json
from hypothesis import given
from hypothesis import strategies as st

from batchgen.config.compose.compose_config import compose
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.constraint.row_params import RowParams
from batchgen.inputs.dataset.source import Row
from batchgen.strategies.dllm.rules.low_confidence_dynamic import LowConfidenceDynamic
from batchgen.util.errors import ConfigError

SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
FORMAT = {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}


def of_row(cell: Any, *arguments: str, feature: Any = None) -> RequestParams:
    config = compose(
        {},
        ["model.path=m", "dataset.path=d", "sampling.column=body", "sampling.seed=5", *arguments],
    )
    features = {"body": feature or Json(), "c": Value("string")}
    rows = RowParams(config, features, lambda params: None)
    row = Row(0, "0", {"body": cell, "c": None})
    return rows.constrained(row, rows.sampling(row))


def test_a_row_may_have_a_rule_of_block_diffusion() -> None:
    own = {"unmasking": "low_confidence_dynamic", "min_tokens_per_step": 2.0}
    params = of_row({"strategy": own, "temperature": 0}, "strategy=dllm")
    assert params.decoding == LowConfidenceDynamic(min_tokens_per_step=2)
    for options, message in (
        ({"unmasking": "sequential", "entropy_bound": 1}, "has no such option"),
        ({"unmasking": "sequential", "block_length": 8}, "no rule has"),
        ({"unmasking": "entropy_bound", "entropy_bound": "low"}, "must be a number, got 'low'"),
        ({"entropy_bound": 0.1}, "unmasking must be low_confidence_dynamic or"),
        ("sequential", "strategy must have options by name"),
    ):
        found = error({"strategy": options}, "strategy=dllm")
        assert found.startswith("bad_option: ") and message in found
    assert "rows of strategy ar have no options" in error({"strategy": own})


def error(cell: Any, *arguments: str) -> str:
    with pytest.raises(RequestError) as caught:
        of_row(cell, *arguments)
    return f"{caught.value.type}: {caught.value}"


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("option", "expected"),
    [
        ({"temperature": 1}, {"temperature": 1.0}),
        ({"top_p": 0.5, "top_k": 7, "min_p": 0.1}, {"top_p": 0.5, "top_k": 7, "min_p": 0.1}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"seed": 9}, {"seed": 9}),
        ({"stop": "END"}, {"stop": ("END",)}),
        ({"stop": ["a", "b"]}, {"stop": ("a", "b")}),
        ({"max_tokens": 7}, {"max_new_tokens": 7}),
        ({"max_completion_tokens": 7.0}, {"max_new_tokens": 7}),
        ({"max_new_tokens": 7, "min_tokens": 2}, {"max_new_tokens": 7, "min_new_tokens": 2}),
        ({"presence_penalty": 1, "frequency_penalty": -1}, {"presence_penalty": 1.0}),
        ({"repetition_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"stop_token_ids": [3], "ignore_eos": True}, {"stop_token_ids": (3,), "ignore_eos": True}),
        ({"n": 1, "logit_bias": {}, "stream": True, "user": "u", "model": "gpt"}, {}),
        ({"metadata": {"a": 1}, "response_format": {"type": "text"}, "tool_choice": "auto"}, {}),
        ({"temperature": None, "nobody": None, "logprobs": False}, {}),
    ],
)
def test_what_an_option_becomes(option: dict[str, Any], expected: dict[str, Any]) -> None:
    params = of_row(option)
    assert {name: getattr(params, name) for name in expected} == expected
    if not expected:
        assert params == of_row(None)
    assert of_row(json.dumps(option), feature=Value("string")) == params


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"temprature": 1}, "bad_option: column 'body': unknown option 'temprature'"),
        ({"temperature": "hot"}, "temperature must be a number, got 'hot'"),
        ({"temperature": -1}, "temperature must be at least 0 and finite, got -1.0"),
        ({"max_tokens": 0}, "max_tokens must be at least 1, got 0"),
        ({"max_tokens": 3.5}, "max_tokens must be an integer, got 3.5"),
        ({"max_tokens": 3, "max_completion_tokens": 3}, "max_tokens and max_completion_tokens are"),
        ({"stop": [""]}, "stop must be non-empty strings"),
        ({"seed": 2**64}, "seed must be a 64-bit integer"),
        ({"n": 2}, "n=2 differs from sampling.n=1"),
        ({"logit_bias": {"5": 1}}, "logit_bias can only be {} here"),
        ({"best_of": 2}, "best_of can only be 1 here"),
        ({"tool_choice": "required"}, "tool_choice can only be 'auto' here"),
        ({"tools": [{}]}, "unknown option 'tools'"),
        ({"messages": [{}]}, "unknown option 'messages'"),
        ({"logprobs": True}, "the job writes no logprobs: set output.columns"),
        ({"logprobs": "yes"}, "logprobs must be true or false"),
        ({"response_format": "json"}, "response_format must be {type: text}"),
        ({"response_format": {"type": "json_schema"}}, "bad_constraint: .*must have a schema"),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": 1}}}},
            "bad_constraint: column 'body': response_format: ",
        ),
        ("{", "bad_option: column 'body': it is not JSON"),
        ([1], "column 'body' must hold options by name, got \\[1\\]"),
    ],
)
def test_what_is_refused_by_name(option: Any, message: str) -> None:
    import re

    assert re.search(message.replace("{}", r"\{\}").replace("{type", r"\{type"), error(option))


def test_a_response_format_is_a_constraint() -> None:
    made = of_row({"response_format": FORMAT}).constraint
    assert made is not None and made.kind == "json_schema" and json.loads(made.text) == SCHEMA
    free = of_row({"response_format": {"type": "json_object"}}).constraint
    assert free is not None and free.kind == "json"
    assert "the job has a constraint" in error({"response_format": FORMAT}, "constraint=json")
    assert of_row({}, "constraint=json").constraint is not None
    refused = error({"response_format": FORMAT, "ignore_eos": True})
    assert "ignore_eos must be false with a constraint" in refused


def test_log_probabilities_as_far_as_the_job_has_them() -> None:
    columns = "output.columns=[logprobs,top_logprobs]"
    for option in ({"logprobs": True, "top_logprobs": 5}, {"logprobs": 3}, {"top_logprobs": 2}):
        assert of_row(option, columns) == of_row(None, columns)
    assert "top_logprobs=6 is more than the job writes (5)" in error({"top_logprobs": 6}, columns)


def test_what_the_prompt_reads_is_no_option() -> None:
    chat = ["prompt.messages_column=body.messages", "prompt.tools_column=body.tools"]
    body = {"messages": [{}], "tools": [{}], "temperature": 1.0}
    assert of_row(body, *chat).temperature == 1.0
    assert "unknown option 'prompt'" in error({**body, "prompt": "x"}, *chat)


def test_what_a_strategy_cannot_do_is_an_error_of_the_row() -> None:
    config = compose({}, ["model.path=m", "dataset.path=d", "sampling.column=o"])

    def check(params: RequestParams) -> None:
        if params.has_penalties:
            raise ValueError("penalties are not for this strategy")

    rows = RowParams(config, {"o": Json()}, check)
    with pytest.raises(RequestError, match="column 'o': penalties are not for") as caught:
        rows.sampling(Row(0, "0", {"o": {"presence_penalty": 1}}))
    assert caught.value.type == "bad_option"


def test_the_column_must_be_there() -> None:
    config = compose({}, ["model.path=m", "dataset.path=d", "sampling.column=options"])
    with pytest.raises(
        ConfigError, match=r"sampling\.column: the data set has no column 'options'"
    ):
        RowParams(config, {"body": Json()}, lambda params: None)


_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)
_NAMES = ["temperature", "top_k", "stop", "max_tokens", "seed", "n", "response_format", "logprobs"]


@given(st.dictionaries(st.sampled_from([*_NAMES, "logit_bias", "x"]), _VALUES, max_size=4))
def test_any_options_are_parameters_or_a_row_error(options: dict[str, Any]) -> None:
    try:
        made = of_row(options)
    except RequestError as refused:
        assert refused.type in ("bad_option", "bad_constraint")
    else:
        assert isinstance(made, RequestParams)
