"""Converts a JSON Schema into the Arrow type that holds all values it allows, if there is one.

It gives the column `parsed` its type (`parsed_column.py`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pyarrow as pa

from batchgen.engine.constraint.json_schema.keywords import ANNOTATIONS, DEFINITIONS

_SCALARS = {"integer": pa.int64(), "number": pa.float64(), "string": pa.string()}
_SCALARS["boolean"] = pa.bool_()
_ANNOTATIONS = ANNOTATIONS | DEFINITIONS | {"format"}
"""Keywords that do not affect the type of a value."""
# Keywords that only restrict the values of their type.
_OF_OBJECTS = {"properties", "required", "additionalProperties", "minProperties", "maxProperties"}
_OF_ARRAYS = {"items", "minItems", "maxItems"}
_OF_STRINGS = {"minLength", "maxLength", "pattern"}
_OF_NUMBERS = {"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}
_BOUNDS = _OF_NUMBERS - {"multipleOf"}


_MOST_FIELDS = 2000  # a small schema can describe any number of fields through its $refs
_MOST_LEVELS = 100


class Inexact(Exception):
    """A schema has no exact Arrow type. The message can follow the word "because"."""


def arrow_type(schema: Any) -> pa.DataType:
    """The Arrow type of a schema's values.

    Objects become structs, arrays lists, integers int64 and numbers float64. A field is null where
    an optional property is absent or a value is null.

    An object has only the properties in `properties`, whatever the schema says, because a
    constrained row writes no others. An integer without bounds becomes int64, and `ParsedColumn`
    writes null for a value that is too large.

    Raises:
        Inexact: no one type holds all values: the schema is recursive, allows values of several
            types, or has integers that are bounded beyond 64 bits.
    """
    return _Typing(schema).type(schema, "", ())


class _Typing:
    """Walks through one schema. In all methods `at` is the JSON pointer of the part that is
    visited, for messages."""

    def __init__(self, root: Any) -> None:
        self._root = root
        self._fields = 0

    def type(self, schema: Any, at: str, refs: tuple[str, ...]) -> pa.DataType:
        """The type of the part of the schema at the JSON pointer `at`. `refs` are the references
        that lead there, to notice recursion."""
        if not isinstance(schema, Mapping):
            raise _inexact("may be of any type", at)
        self._fields += 1
        if self._fields > _MOST_FIELDS or at.count("/") > _MOST_LEVELS:
            raise Inexact("it describes too many fields or levels")
        constraints = {key: value for key, value in schema.items() if key not in _ANNOTATIONS}
        for key, handler in (("$ref", self._ref), ("anyOf", self._any), ("oneOf", self._any)):
            if key in constraints:
                if len(constraints) > 1:
                    raise _inexact(f"has other keywords next to {key}", at)
                return handler(constraints[key], f"{at}/{key}", refs)
        if "enum" in constraints or "const" in constraints:
            return _of_values(constraints.get("enum", [constraints.get("const")]), at)
        return self._of_type(constraints, at, refs)

    def _of_type(self, keywords: Mapping[str, Any], at: str, refs: tuple[str, ...]) -> pa.DataType:
        """The type of a part with the keyword `type`."""
        names = keywords.get("type", ())
        names = {names} if isinstance(names, str) else {*names}
        names -= {"null"}
        if names == {"integer", "number"}:
            names = {"number"}
        if len(names) != 1:
            raise _inexact("may be of several types" if names else "names no type", at)
        (name,) = names
        if name == "object":
            return self._object(keywords, at, refs)
        if name == "array":
            _only(keywords, _OF_ARRAYS, at)
            return pa.list_(self.type(keywords.get("items"), f"{at}/items", refs))
        _only(keywords, _OF_STRINGS | _OF_NUMBERS, at)
        if name == "integer" and any(abs(keywords.get(key, 0)) > 2**63 - 1 for key in _BOUNDS):
            raise _inexact("may be an integer of more than 64 bits", at)
        return _SCALARS[name]

    def _object(self, keywords: Mapping[str, Any], at: str, refs: tuple[str, ...]) -> pa.DataType:
        _only(keywords, _OF_OBJECTS, at)
        if keywords.get("additionalProperties", False) is not False:
            raise _inexact("may have additional properties", at)
        properties = keywords.get("properties", {})
        if not properties or "" in properties:  # Parquet has no such structs
            raise _inexact("has no named properties", at)
        return pa.struct(
            [
                pa.field(name, self.type(inner, f"{at}/properties/{_escaped(name)}", refs))
                for name, inner in properties.items()
            ]
        )

    def _ref(self, ref: str, at: str, refs: tuple[str, ...]) -> pa.DataType:
        """The type of the part that a reference points to."""
        if ref in refs:
            raise _inexact("is recursive", at)
        target = self._root
        if ref != "#" and not ref.startswith("#/"):
            raise _inexact(f"refers to {ref}", at)
        for part in ref.split("/")[1:]:
            key = part.replace("~1", "/").replace("~0", "~")
            if isinstance(target, Mapping) and key in target:
                target = target[key]
            else:
                raise _inexact(f"refers to {ref}", at)
        return self.type(target, at, (*refs, ref))

    def _any(self, choices: list[Any], at: str, refs: tuple[str, ...]) -> pa.DataType:
        """The common type of several choices; null does not count."""
        types = [
            self.type(choice, f"{at}/{i}", refs)
            for i, choice in enumerate(choices)
            if choice != {"type": "null"}
        ]
        if not types or any(type != types[0] for type in types):
            raise _inexact("may be of several types", at)
        return types[0]


def _of_values(values: list[Any], at: str) -> pa.DataType:
    """The common type of the values of `enum` or `const`."""
    kinds = {type(value) for value in values} - {type(None)}
    if kinds == {str}:
        return pa.string()
    if kinds == {bool}:
        return pa.bool_()
    if kinds == {int} and all(v is None or -(2**63) <= v < 2**63 for v in values):
        return pa.int64()
    if kinds in ({float}, {int, float}):
        return pa.float64()
    raise _inexact("may be of several types", at)


def _only(keywords: Mapping[str, Any], allowed: set[str], at: str) -> None:
    """Raise Inexact if there is a keyword that is not allowed."""
    if odd := [key for key in keywords if key not in allowed and key != "type"]:
        raise _inexact(f"has {odd[0]}", at)


def _inexact(what: str, at: str) -> Inexact:
    return Inexact(f"{at or 'the schema'} {what}")


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")
