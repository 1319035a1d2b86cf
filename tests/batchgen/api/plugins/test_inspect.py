"""inspect_ai calls the provider as its own command does."""

from __future__ import annotations

import asyncio
import tomllib
from pathlib import Path
from typing import Any

import pytest

from batchgen import LLM, SamplingParams
from batchgen.util.errors import ConfigError

pytest.importorskip("inspect_ai")

from inspect_ai import Task
from inspect_ai import eval as inspect_eval
from inspect_ai._util.registry import registry_find
from inspect_ai.dataset import Sample
from inspect_ai.model import (
    ChatMessageTool,
    ChatMessageUser,
    GenerateConfig,
    ResponseSchema,
    get_model,
)
from inspect_ai.scorer import includes
from inspect_ai.tool import ToolInfo
from inspect_ai.util import JSONSchema

from batchgen.api.plugins.inspect_provider import BatchgenAPI, _message, _tool_calls

GREEDY = GenerateConfig(temperature=0, max_tokens=8)


def ask(model: Path, text: str, config: GenerateConfig, **others: Any) -> Any:
    """What the provider answers to one message."""
    api = BatchgenAPI(str(model), device="cpu")
    found = asyncio.run(
        api.generate(
            [ChatMessageUser(content=text)],
            others.get("tools", []),
            others.get("tool_choice", "auto"),
            config,
        )
    )
    api.close()
    return found


def test_the_entry_point_is_the_provider() -> None:
    project = tomllib.loads((Path(__file__).parents[4] / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["inspect_ai"] == {"batchgen": BatchgenAPI.__module__}
    assert registry_find(lambda one: one.name == "batchgen" and one.type == "modelapi")


def test_an_evaluation_has_the_answers_of_the_engine(model: Path, tmp_path: Path) -> None:
    questions = [f"What is {i}?" for i in range(20)]
    task = Task(dataset=[Sample(input=text, target="x") for text in questions], scorer=includes())
    lm = get_model(f"batchgen/{model}", device="cpu", config=GREEDY)
    (log,) = inspect_eval(task, model=lm, log_dir=str(tmp_path), display="none")
    assert log.status == "success" and log.samples is not None
    with LLM(str(model), device="cpu") as llm:
        outputs = llm.chat(questions, SamplingParams(temperature=0, max_tokens=8))
    for sample, (output,) in zip(log.samples, outputs, strict=True):
        assert sample.output.completion == output.text
        assert sample.output.stop_reason == "max_tokens"
        usage = sample.output.usage
        assert usage is not None and usage.input_tokens == len(output.prompt_token_ids)


def test_options_are_honoured(model: Path) -> None:
    config = GenerateConfig(
        max_tokens=6, num_choices=3, logprobs=True, top_logprobs=2, temperature=1.0, seed=4
    )
    found = ask(model, "Hi", config)
    assert len({choice.message.text for choice in found.choices}) == 3
    assert [len(choice.logprobs.content) for choice in found.choices] == [6, 6, 6]
    assert [len(one.top_logprobs) for one in found.choices[0].logprobs.content] == [2] * 6
    schema = ResponseSchema(name="yes", json_schema=JSONSchema(type="boolean"))
    found = ask(model, "Hi", GREEDY.merge(GenerateConfig(response_schema=schema)))
    assert found.completion in ("true", "false") and found.stop_reason == "stop"


@pytest.mark.parametrize(
    ("config", "others", "why"),
    [
        ({"best_of": 2}, {}, "best_of=2 cannot be honoured"),
        ({"reasoning_tokens": 9}, {}, "reasoning_tokens=9 cannot be honoured"),
        ({}, {"tools": [ToolInfo(name="f", description="")], "tool_choice": "any"}, "tool_choice"),
    ],
)
def test_other_options_are_refused(
    config: dict[str, Any], others: dict[str, Any], why: str, model: Path
) -> None:
    with pytest.raises(ConfigError, match=why):
        ask(model, "Hi", GenerateConfig(**config), **others)


def test_a_long_prompt_ends_with_the_models_length(model: Path) -> None:
    assert ask(model, "x" * 5000, GREEDY).stop_reason == "model_length"


def test_calls_of_tools_are_read_and_written() -> None:
    call = '<tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    text = f"So {call}<tool_call>{{</tool_call>"
    rest, (one, other) = _tool_calls(text, "7-0")
    assert (rest, one.function, one.arguments, one.parse_error) == ("So", "add", {"a": 1}, None)
    assert other.parse_error is not None and "'{' is not a tool call" in other.parse_error
    made = _message(ChatMessageTool(content="3", function="add", tool_call_id="c"))
    assert made == {"role": "tool", "content": "3", "name": "add", "tool_call_id": "c"}
