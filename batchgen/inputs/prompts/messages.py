"""Checks the messages of a conversation, and converts the formats of data sets into one.

The entry point is `checked_messages`, which `ChatPrompt` calls for each row:
`[{"from": "human", "value": "Hi"}]` → `[{"role": "user", "content": "Hi"}]`.
"""

from __future__ import annotations

import re
from typing import Any

from batchgen.engine.interface.outputs import RequestError

USUAL_ROLES = ("system", "user", "assistant", "tool", "developer")
"""The roles that are always accepted, whether or not a chat template names them."""
_SHAREGPT_ROLES = {"human": "user", "gpt": "assistant"}
"""ShareGPT's names of roles that differ from the usual ones."""
_PART_KINDS = ("image_url", "image", "text")
"""The keys that stand for the type of a part that names no type."""
_SOURCES = ("image_url", "image", "bytes", "path", "url")
"""The keys under which a part names its image."""
_COMPARED_ROLE = re.compile(r"""\brole\b['"]?\]?\s*[!=]=\s*['"]([\w-]+)['"]""")
"""A comparison in a chat template, such as `message['role'] == 'critic'`; the group is the role."""


def known_roles(chat_template: str) -> tuple[str, ...]:
    """Return the roles that messages may have: the usual ones, and those that the template compares
    a message's role with."""
    return tuple(dict.fromkeys([*USUAL_ROLES, *_COMPARED_ROLE.findall(chat_template)]))


def checked_messages(
    value: Any, column: str, roles: tuple[str, ...], *, images: bool = False
) -> list[dict[str, Any]]:
    """Return the messages of a row, each with a role and a content. A message with tool calls may
    have the content None.

    ShareGPT messages, which have `from` and `value`, are converted. Null entries are removed,
    because Arrow adds them if messages have different keys. A content that is a list of parts
    becomes their joined text; with `images` it stays a list, in the form of `checked_parts`.

    Raises:
        RequestError: bad_messages: the value is no list of such messages, or a role is unknown.
    """
    if not isinstance(value, list) or not value:
        raise RequestError(
            "bad_messages",
            f"column {column!r} must hold a list of {{role, content}}, got {short_value(value)}",
        )
    messages = []
    for position, item in enumerate(value):
        message = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
        if "from" in message and "role" not in message:
            message = _of_sharegpt(message)
        role, where = message.get("role"), f"column {column!r}, message {position}"
        if calls := message.pop("tool_calls", None):
            message["tool_calls"] = _checked_calls(calls, where)
        content = message.setdefault("content", None)
        if isinstance(content, list):
            content = message["content"] = _checked_content(content, where, images)
        no_content = content is None and calls
        if not isinstance(role, str) or not (no_content or isinstance(content, str | list)):
            raise RequestError(
                "bad_messages",
                f"{where}: role and content must be strings, got {short_value(item)}",
            )
        if "function_call" in message:
            raise RequestError(
                "bad_messages",
                f"{where}: function_call is not supported: write it as one of tool_calls, which "
                "is a list of {type: function, function: {name, arguments}}",
            )
        if role not in roles:
            raise RequestError(
                "bad_messages", f"{where}: unknown role {short_value(role)}: use {', '.join(roles)}"
            )
        messages.append(message)
    return messages


def _checked_content(content: list[Any], where: str, images: bool) -> str | list[dict[str, Any]]:
    """Return the checked parts of a content. Unless `images`, return their joined text instead,
    which is what templates write for text parts."""
    parts = checked_parts(content, where)
    if images:
        return parts
    if any(part["type"] == "image" for part in parts):
        raise RequestError(
            "bad_messages", f"{where}: content has an image, but only text is read here"
        )
    return "".join(part["text"] for part in parts)


def _checked_calls(calls: Any, where: str) -> list[dict[str, Any]]:
    """Return the tool calls of a message, each {function: {name, arguments}} or {name, arguments}.
    The arguments are an object or its JSON text."""
    if not isinstance(calls, list):
        raise RequestError(
            "bad_messages", f"{where}: tool_calls must be a list, got {short_value(calls)}"
        )
    checked = []
    for number, item in enumerate(calls):
        call = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
        function = call.get("function", call)
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(
            function.get("arguments"), str | dict | None
        ):
            raise RequestError(
                "bad_messages",
                f"{where}: tool call {number} must be {{type: function, function: {{name, "
                f"arguments}}}} with an object or its text as arguments, got {short_value(item)}",
            )
        checked.append(call)
    return checked


def checked_parts(content: list[Any], where: str) -> list[dict[str, Any]]:
    """Return the parts of a content in one form: `{type: text, text}` and `{type: image, source}`.
    The source is None if the part names no image and takes one of the row.

    Image parts are accepted in OpenAI's form, `{type: image_url, image_url: {url}}`, and in
    HuggingFace's, `{type: image}` with or without `image`, `path`, `url` or `bytes`.

    Raises:
        RequestError: bad_messages: a part is neither text nor an image.
    """
    parts: list[dict[str, Any]] = []
    for item in content:
        part = {k: v for k, v in item.items() if v is not None} if isinstance(item, dict) else {}
        kind = part.get("type", next((name for name in _PART_KINDS if name in part), None))
        if kind in ("text", "input_text") and isinstance(part.get("text"), str):
            parts.append({"type": "text", "text": part["text"]})
        elif kind in ("image_url", "input_image", "image"):
            source = next((part[name] for name in _SOURCES if name in part), None)
            if isinstance(source, dict) and "url" in source:
                source = source["url"]
            parts.append({"type": "image", "source": source})
        else:
            raise RequestError(
                "bad_messages",
                f"{where}: content has a part {short_value(item)}: parts are text and images",
            )
    return parts


def short_value(value: Any) -> str:
    """Return the text of a value for an error message, at most 100 characters and an ellipsis."""
    text = repr(value)
    return text if len(text) <= 100 else f"{text[:100]}…"


def _of_sharegpt(message: dict[str, Any]) -> dict[str, Any]:
    """Convert a message with `from` and `value` into one with `role` and `content`."""
    role = message["from"]
    others = {key: item for key, item in message.items() if key not in ("from", "value")}
    if isinstance(role, str):
        role = _SHAREGPT_ROLES.get(role, role)
    return {"role": role, "content": message.get("value"), **others}
