"""Cells that hold JSON, as values of nested columns or as text."""

from __future__ import annotations

from typing import Any

from batchgen.engine.constraint.json_schema.json_text import parse_unique_json


def json_cell(value: Any) -> Any:
    """The JSON of a cell, of which a text is parsed.

    Raises:
        ValueError: the cell holds text that is no JSON, or names a key twice.
    """
    if not isinstance(value, str):
        return value
    try:
        return parse_unique_json(value)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(f"it is not JSON: {error}") from None
