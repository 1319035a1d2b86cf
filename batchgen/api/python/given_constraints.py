"""Converts the ways in which a user can write a constraint in Python to a `Constraint`.
`SamplingParams` uses `as_constraint`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol, get_args, runtime_checkable

from batchgen.engine.constraint.constraint import Constraint, Kind

KINDS: tuple[str, ...] = get_args(Kind)
_OPTIONS = ("max_whitespace", "start_after")
_EXAMPLES = (
    '{"json_schema": schema}, {"regex": pattern}, {"choice": texts}, {"grammar": ebnf}, '
    '{"structural_tag": tag} or {"json": True}'
)


@runtime_checkable
class SchemaModel(Protocol):
    """A class with a JSON Schema, such as a pydantic model."""

    def model_json_schema(self) -> dict[str, Any]:
        """Return the JSON Schema."""
        ...


ConstraintLike = Constraint | Mapping[str, Any] | SchemaModel
"""A constraint, a mapping from a kind to its value, or a pydantic model class."""


def as_constraint(constraint: ConstraintLike | None) -> Constraint | None:
    """Convert a user's constraint; None stays None.

    Args:
        constraint: a `Constraint`; a class with `model_json_schema`, such as a pydantic model; or a
            mapping of the constraint's kind to its value, such as `{"regex": "[0-9]+"}`. The value
            of `json_schema` may also be such a class, and the value of `json` is True. The mapping
            may also have the keys `max_whitespace` and `start_after` (see `Constraint`).

    Raises:
        ValueError: it is none of these, or cannot be enforced.
    """
    if constraint is None or isinstance(constraint, Constraint):
        return constraint
    if isinstance(constraint, SchemaModel):
        return Constraint.make("json_schema", constraint.model_json_schema())
    if not isinstance(constraint, Mapping):
        raise ValueError(
            f"constraint must be {_EXAMPLES}, or a pydantic model, got {constraint!r:.100}"
        )
    kinds = [key for key in constraint if key in KINDS]
    unknown = [key for key in constraint if key not in (*KINDS, *_OPTIONS)]
    if len(kinds) != 1 or unknown:
        raise ValueError(f"constraint must be one of {_EXAMPLES}: {_mistake(constraint, kinds)}")
    (kind,) = kinds
    value = constraint[kind]
    if kind == "json":
        if value is not True:
            raise ValueError(
                "constraint {'json': True} asks for any JSON object; for a schema write "
                f"{{'json_schema': schema}}, got {value!r:.100}"
            )
        value = None
    elif isinstance(value, SchemaModel):
        value = value.model_json_schema()
    elif kind == "choice" and isinstance(value, Sequence) and not isinstance(value, str):
        value = list(value)
    options = {key: constraint[key] for key in _OPTIONS if constraint.get(key) is not None}
    return Constraint.make(kind, value, **options)


def _mistake(values: Mapping[str, Any], kinds: list[str]) -> str:
    """Return what is wrong with the keys of a mapping, as the end of an error message."""
    if len(kinds) > 1:
        return f"got {' and '.join(map(repr, kinds))} together"
    if not kinds and {"type", "properties", "$ref", "$defs", "anyOf", "enum"} & values.keys():
        return "a JSON Schema is written as {'json_schema': schema}"
    return f"got the keys {', '.join(map(repr, values)) or '(none)'}"
