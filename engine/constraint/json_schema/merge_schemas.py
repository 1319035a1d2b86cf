"""Merges JSON Schemas that must all hold (`allOf`) into one, and finds out whether two schemas can
hold at once (`oneOf`).

xgrammar supports neither keyword fully. So `lower_schema.py` uses this module to write one
equivalent schema, or refuses the schema with the reason.
"""

from collections.abc import Callable, Collection, Mapping
from itertools import combinations
from typing import Any

from batchgen.engine.constraint.json_schema.json_text import equality_key
from batchgen.engine.constraint.json_schema.keywords import refuse

Schema = Mapping[str, Any]
IsValid = Callable[[Schema, Any], bool]
"""Returns whether a value is valid, given the schema and the value."""
_OTHERS = ("additionalProperties", "unevaluatedProperties")
"""Keywords about the properties of an object that the same schema does not list."""


def split_unevaluated(schema: Schema) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split off `unevaluatedProperties` and `unevaluatedItems`, which are about what the rest
    leaves open."""
    last = {k: v for k, v in schema.items() if k.startswith("unevaluated")}
    return {k: v for k, v in schema.items() if k not in last}, last


def merge(parts: Collection[Schema], at: str, last: Schema | None = None) -> dict[str, Any]:
    """Write one schema that allows exactly what all of `parts` allow. Raises ConstraintError if one
    schema cannot express it.

    Args:
        parts: schemas without `$ref` and `allOf`.
        last: keywords about what no part mentions (see `split_unevaluated`).
    """
    merged: dict[str, Any] = {}
    for part in parts:
        _check_others(merged, part, at)
        _check_others(part, merged, at)
        for keyword, value in part.items():
            merged[keyword] = (
                _both(keyword, merged[keyword], value, at) if keyword in merged else value
            )
    for keyword, value in (last or {}).items():
        merged[keyword] = _both(keyword, merged.get(keyword, value), value, at)
    return merged


def _check_others(part: Schema, other: Schema, at: str) -> None:
    """Raise ConstraintError for two schemas of which one restricts further members and the other
    lists some."""
    # The keywords by which `part` restricts properties that it does not list, those of `other` that
    # it does not list, and whether `other` restricts its own further properties in another way.
    further = [keyword for keyword in _OTHERS if part.get(keyword, True) is not True]
    new = other.get("properties", {}).keys() - part.get("properties", {}).keys()
    unequal = not other.keys().isdisjoint(_OTHERS) and any(
        part.get(keyword) != other.get(keyword) for keyword in _OTHERS
    )
    if further and (new or unequal or "patternProperties" in other):
        raise refuse(
            "allOf",
            at,
            f"joins `{further[0]}` with properties of another schema: move them into one",
        )
    further = [keyword for keyword in ("items", "unevaluatedItems") if keyword in part]
    if further and "prefixItems" not in part and "prefixItems" in other:
        raise refuse("allOf", at, f"joins `{further[0]}` with `prefixItems` of another schema")
    if "unevaluatedItems" in part and "items" in other:
        raise refuse("allOf", at, "joins `unevaluatedItems` with `items` of another schema")


def _both(keyword: str, a: Any, b: Any, at: str) -> Any:
    """Return the value of a keyword that is equivalent to its values `a` and `b` together."""
    if a == b and type(a) is type(b):
        return a
    match keyword:
        case "type":
            types = _types(a) & _types(b)
            # An integer is a number, too, so `integer` and `number` have it in common.
            if "number" not in types and "number" in _types(a) | _types(b):
                types |= {"integer"} & (_types(a) | _types(b))
            if not types:
                raise refuse("type", at, f"is both {a!r} and {b!r}: no value matches")
            return sorted(types)
        case "required":
            return [*a, *(name for name in b if name not in a)]
        case "properties":
            joined = {name: {"allOf": [a[name], b[name]]} for name in a if name in b}
            return {**a, **b, **joined}
        case "items" | "propertyNames" if not isinstance(a, list) and not isinstance(b, list):
            return {"allOf": [a, b]}
        case "minimum" | "exclusiveMinimum" | "minLength" | "minItems" | "minProperties":
            return max(a, b)
        case "maximum" | "exclusiveMaximum" | "maxLength" | "maxItems" | "maxProperties":
            return min(a, b)
        case "enum":
            keys = set(map(equality_key, b))
            common = [x for x in a if equality_key(x) in keys]
            if common:
                return common
    raise refuse(
        keyword,
        at,
        "appears in two schemas that apply together, which cannot be enforced: keep one",
    )


def _types(value: Any) -> set[str]:
    return {value} if isinstance(value, str) else set(value)


def find_overlap(
    branches: Collection[Schema], is_valid: IsValid, flat: Callable[[Any], Schema]
) -> tuple[int, int] | None:
    """Return the indices of two branches that a value may match at once; None if all exclude each
    other.

    Args:
        branches: schemas without `$ref` and `allOf`.
        flat: rewrites a schema without `$ref` and `allOf`.
    """
    for (i, a), (j, b) in combinations(enumerate(branches), 2):
        if not _exclude(a, b, is_valid, flat):
            return i, j
    return None


def _exclude(a: Schema, b: Schema, is_valid: IsValid, flat: Callable[[Any], Schema]) -> bool:
    """Return whether it is certain that no value matches both schemas. The arguments are as for
    `find_overlap`."""
    for one, other in ((a, b), (b, a)):
        values = _listed(one)
        if values is not None:
            if (others := _listed(other)) is not None:
                keys = set(map(equality_key, others))
                values = [v for v in values if equality_key(v) in keys]
            return not any(is_valid(one, v) and is_valid(other, v) for v in values)
    if "type" not in a or "type" not in b:
        return False
    left, right = _types(a["type"]), _types(b["type"])
    common = left & right
    if "number" in left | right and "integer" in left | right:
        common = common | {"integer"}
    if common != {"object"}:
        return not common
    shared = set(a.get("required", ())) & set(b.get("required", ()))
    return any(
        _exclude(flat(a["properties"][name]), flat(b["properties"][name]), is_valid, flat)
        for name in shared & a.get("properties", {}).keys() & b.get("properties", {}).keys()
    )


def _listed(schema: Schema) -> list[Any] | None:
    return [schema["const"]] if "const" in schema else schema.get("enum")
