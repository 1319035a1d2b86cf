"""Checks the tools that a row offers to the model, as JSON schemas of functions. `ChatPrompt` calls
`checked_tools`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.dataset_columns import json_cell
from batchgen.inputs.prompts.messages import short_value


def checked_tools(value: Any, column: str) -> list[dict[str, Any]] | None:
    """Return the tools of a cell; None if it has none.

    A cell holds a list of {type: function, function: {name, …}} or of bare functions {name, …}, or
    the JSON text of such a list.

    Raises:
        RequestError: bad_tools: the cell holds no such list.
    """
    try:
        tools = json_cell(value)
    except ValueError as error:
        raise RequestError("bad_tools", f"column {column!r}: {error}") from None
    if tools is None or tools == []:
        return None
    if not isinstance(tools, list):
        raise RequestError(
            "bad_tools", f"column {column!r} must hold a list of tools, got {short_value(tools)}"
        )
    for position, tool in enumerate(tools):
        if (why := _mistake(tool)) is not None:
            raise RequestError("bad_tools", f"column {column!r}, tool {position}: {why}")
    return tools


def _mistake(tool: Any) -> str | None:
    """Return what is wrong with a tool; None if it is valid."""
    form = "must be {type: function, function: {name, description, parameters}}"
    if not isinstance(tool, Mapping):
        return f"{form}, got {short_value(tool)}"
    if tool.get("type", "function") != "function":
        return f"type must be function, got {short_value(tool['type'])}"
    function = tool.get("function", tool)
    if not isinstance(function, Mapping):
        return f"{form}, got {short_value(tool)}"
    if not isinstance(name := function.get("name"), str) or not name:
        return f"the function needs a name, got {short_value(name)}"
    if not isinstance(parameters := function.get("parameters", {}), Mapping):
        return f"parameters must be a JSON Schema, got {short_value(parameters)}"
    return None
