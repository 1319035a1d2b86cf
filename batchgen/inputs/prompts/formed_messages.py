"""Converts the messages of a conversation into the form that a chat template accepts.

`MessageForms` (message_forms.py) finds out which `MessageForm` a template accepts; `formed_message`
converts a message into it. With `as_objects=False`, the tool call
`{"name": "add", "arguments": {"a": 1}}` becomes `{"name": "add", "arguments": "{\\"a\\": 1}"}`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

from batchgen.engine.constraint.json_schema.json_text import parse_unique_json
from batchgen.engine.interface.outputs import RequestError
from batchgen.util.shorten import beginning

ABSENT = "\0absent"
"""Stands for a message's content whose key is to be left out."""


class MessageForm(NamedTuple):
    """How a chat template renders the messages of one shape.

    Attributes:
        as_objects: whether the arguments of tool calls are passed as objects (True), as JSON texts
            (False) or unchanged (None).
        no_content: the content of messages that have tool calls and no content; ABSENT leaves the
            key out.
        left_out: the index of a message that the template leaves out even so, and its description;
            None if it leaves out none.
    """

    as_objects: bool | None
    no_content: str | None
    left_out: tuple[int, str] | None


def without_absent(message: dict[str, Any]) -> dict[str, Any]:
    """Return the message, without the key `content` if its value is ABSENT."""
    if message["content"] != ABSENT:
        return message
    return {key: value for key, value in message.items() if key != "content"}


def named_call(call: Mapping[str, Any], name: str, arguments: Any) -> dict[str, Any]:
    """Return the tool call, `{function: {name, arguments}}` or `{name, arguments}`, with another
    name and other arguments."""
    changes = {"name": name, "arguments": arguments}
    if "function" in call:
        return {**call, "function": {**call["function"], **changes}}
    return {**call, **changes}


def named_tool(tool: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return the tool with another name."""
    if "function" in tool:
        return {**tool, "function": {**tool["function"], "name": name}}
    return {**tool, "name": name}


def formed_message(message: dict[str, Any], form: MessageForm) -> dict[str, Any]:
    """Return the message in a form: with the arguments of its tool calls, and a missing content, as
    the form says.

    Raises:
        RequestError: bad_messages: the form needs arguments as objects, and they are no JSON
            object.
    """
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
    """Parse the JSON object that the text of a tool call's arguments spells."""
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
