"""Converts messages into one of the forms that chat templates accept; see `message_forms`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchgen.engine.constraint.json_schema.json_text import parse_unique_json
from batchgen.engine.interface.outputs import RequestError
from batchgen.util.shorten import beginning

ABSENT = "\0absent"
"""Stands for a content whose key is not there."""


class MessageForm(NamedTuple):
    """How messages of one shape are rendered: the arguments of tool calls as objects, as texts or
    as they are (None); the content of messages that have tool calls instead (ABSENT: no such key);
    and which message the template leaves out all the same, in words with its index, None if none.
    """

    as_objects: bool | None
    no_content: str | None
    left_out: tuple[int, str] | None


def without_absent(message: dict[str, Any]) -> dict[str, Any]:
    """The message without the key of a content that is ABSENT."""
    if message["content"] != ABSENT:
        return message
    return {key: value for key, value in message.items() if key != "content"}


def named_call(call: Mapping[str, Any], name: str, arguments: Any) -> dict[str, Any]:
    """The tool call with another name and other arguments."""
    other = {"name": name, "arguments": arguments}
    return (
        {**call, "function": {**call["function"], **other}}
        if "function" in call
        else {**call, **other}
    )


def named_tool(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The tool with another name."""
    if "function" in tool:
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}


def formed_message(message: dict[str, Any], form: MessageForm) -> dict[str, Any]:
    """A message in a form: its tool calls' arguments, and a content that is not there."""
    if not (calls := message.get("tool_calls")):
        return message
    content = message["content"] or form.no_content
    formed = [_formed_call(call, form.as_objects) for call in calls]
    return {**message, "content": content, "tool_calls": formed}


def _formed_call(call: Mapping[str, Any], as_object: bool | None) -> Mapping[str, Any]:
    function = call.get("function", call)
    arguments = function.get("arguments")
    if arguments is None or arguments == "":
        arguments = {}
    if as_object is False and not isinstance(arguments, str):
        arguments = json.dumps(arguments, ensure_ascii=False)
    elif as_object and isinstance(arguments, str):
        arguments = _object(arguments)
    changed = {**function, "arguments": arguments}
    return {**call, "function": changed} if "function" in call else changed


def _object(arguments: str) -> dict[str, Any]:
    """The object that a text of arguments spells."""
    try:
        parsed = parse_unique_json(arguments)
    except (ValueError, RecursionError):
        parsed = None
    if not isinstance(parsed, dict):
        raise RequestError(
            "bad_messages",
            "the model's chat template takes the arguments of a tool call as an object, and "
            f"{beginning(arguments, 80)!r} is not a JSON object",
        )
    return parsed
