"""What TRL's trainers demand of a data set, as its pages on formats and its checks say it.

A row is conversational if its prompt, chosen, rejected, completion or messages is a list of
mappings with `role` and `content`. TRL looks at any one of these, so all of them must be alike.
Which of these columns there are, with `label`, says the type of the data set. Before it trains, TRL
writes prompt and prompt with answer by the chat template, and the first text must be the beginning
of the second.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_TALK = ("prompt", "chosen", "rejected", "completion", "messages")
TYPES = {
    frozenset({"messages"}): "language modeling",
    frozenset({"prompt"}): "prompt only",
    frozenset({"prompt", "completion"}): "prompt-completion",
    frozenset({"prompt", "chosen", "rejected"}): "preference",
    frozenset({"prompt", "completion", "label"}): "unpaired preference",
}
ROLES = ("system", "user", "assistant", "tool")


def type_of(row: Mapping[str, Any]) -> str:
    """The type of a row's data set; KeyError if TRL knows none with such columns."""
    return TYPES[frozenset(name for name in row if name in (*_TALK, "label"))]


def is_conversational(row: Mapping[str, Any]) -> bool:
    """Whether a row is conversational; it must not be so in one column and not in another."""
    found = {_is_talk(row[name]) for name in _TALK if name in row}
    assert len(found) == 1, f"columns of two formats: {row}"
    return found.pop()


def _is_talk(value: Any) -> bool:
    if not isinstance(value, list):
        assert isinstance(value, str), value
        return False
    assert value, "an empty conversation"
    for message in value:
        assert message["role"] in ROLES and isinstance(message["content"], str), message
    return True


def check_preference(row: Mapping[str, Any]) -> None:
    """What DPO needs: a prompt that ends with the user's message, and two answers that differ."""
    assert type_of(row) == "preference"
    assert row["chosen"] != row["rejected"]
    if is_conversational(row):
        assert row["prompt"][-1]["role"] == "user"
        for name in ("chosen", "rejected"):
            assert [message["role"] for message in row[name]] == ["assistant"]


def check_stepwise(row: Mapping[str, Any]) -> None:
    """What PRM needs: texts only, and a label for each step."""
    assert isinstance(row["prompt"], str)
    assert all(isinstance(step, str) for step in row["completions"])
    assert all(isinstance(label, bool) for label in row["labels"])
    assert len(row["completions"]) == len(row["labels"]) > 0


def check_templates(row: Mapping[str, Any], tokenizer: Any) -> None:
    """The prompt by the chat template begins the text of prompt and each answer."""
    prompt = tokenizer.apply_chat_template(
        row["prompt"], tokenize=False, add_generation_prompt=True
    )
    for name in {"chosen", "rejected", "completion"} & set(row):
        whole = tokenizer.apply_chat_template([*row["prompt"], *row[name]], tokenize=False)
        assert whole.startswith(prompt)
        assert row[name][-1]["content"] in whole[len(prompt) :]
