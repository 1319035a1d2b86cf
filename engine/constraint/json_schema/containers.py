"""Rewrites JSON Schemas of arrays and objects, so that xgrammar enforces them. `lower_schema.py`
calls this for each part of a schema that may be an array or an object."""

import math
import re
from collections.abc import Callable, Mapping
from typing import Any

from batchgen.engine.constraint.json_schema.keywords import MOST, read_limits, refuse
from batchgen.engine.constraint.json_schema.scalars import string_node
from batchgen.engine.constraint.regex import regex_text as text

Lower = Callable[[Any, str], dict[str, Any]]
"""Rewrites a schema, given the schema and its JSON pointer."""
IsValid = Callable[[Any, Any], bool]
"""Returns whether a value is valid, given the schema and the value."""


def lower_array(schema: Mapping[str, Any], at: str, lower: Lower) -> dict[str, Any]:
    """Rewrite the keywords about arrays. Raises ConstraintError if a keyword cannot be enforced, or
    if no length is possible.

    Args:
        at: the JSON pointer of the schema.
        lower: rewrites the schemas of items.
    """
    # The schemas of the first items, and the schema of the items after them.
    prefix, rest = schema.get("prefixItems", []), schema.get("items")
    if isinstance(rest, list):  # until draft 2019-09
        prefix, rest = rest, schema.get("additionalItems")
    elif "additionalItems" in schema:
        raise refuse("additionalItems", at, "has no effect without a list of `items`: remove it")
    rest = schema.get("unevaluatedItems") if rest is None else rest
    low, limit = read_limits(schema, "minItems", "maxItems")
    high = math.inf if limit is None else limit
    if rest is None:  # after a prefix, further items are allowed only if `minItems` needs them
        rest = not prefix or low > len(prefix)
    if rest is False:
        high = min(high, len(prefix))
    if low > min(high, MOST):
        raise refuse("minItems", at, f"{low} is more than the {min(high, MOST)} that are allowed")
    prefix = prefix if high == math.inf else prefix[: int(high)]
    lowered: dict[str, Any] = {"type": "array"}
    if prefix:
        lowered["prefixItems"] = [lower(p, f"{at}/prefixItems/{i}") for i, p in enumerate(prefix)]
    if high <= len(prefix):
        lowered |= {"items": False} if prefix else {"items": {}, "maxItems": 0}
    else:
        lowered["items"] = lower(rest, f"{at}/items")
        lowered |= {} if high == math.inf else {"maxItems": int(high)}
    return lowered | ({"minItems": low} if low else {})


def lower_object(
    schema: Mapping[str, Any], at: str, lower: Lower, is_valid: IsValid
) -> dict[str, Any]:
    """Rewrite the keywords about objects. Raises ConstraintError if a keyword cannot be enforced,
    or if no object is possible.

    Args:
        is_valid: checks names against `propertyNames`.
    """
    properties, required = dict(schema.get("properties", {})), schema.get("required", [])
    patterns = schema.get("patternProperties", {})
    # The schema of properties that are not listed.
    extra = schema.get("additionalProperties", schema.get("unevaluatedProperties"))
    for name in required:
        if name not in properties:
            if patterns or extra is False:
                raise refuse("required", at, f"names {name!r}: add it to `properties`")
            properties[name] = True if extra is None else extra
    if extra is None:  # others are allowed only if none are listed
        extra = not properties and not patterns
    if "propertyNames" in schema and (extra is not False or patterns):
        if properties or patterns:
            raise refuse(
                "propertyNames",
                at,
                "is enforced only for objects without `properties` and `patternProperties`: use "
                "`additionalProperties: false`",
            )
        properties, patterns, extra = _of_names(schema["propertyNames"], extra, at, lower)
    elif "propertyNames" in schema:
        for name in properties:
            if not is_valid(schema["propertyNames"], name):
                raise refuse("propertyNames", at, f"forbids {name!r} of `properties`: remove one")
    _check_patterns(patterns, properties, extra, at)
    lowered: dict[str, Any] = {"type": "object"}
    if properties:
        parts = {name: lower(part, f"{at}/properties/{name}") for name, part in properties.items()}
        lowered |= {"properties": parts, "required": required}
    lowered |= _other_properties(list(properties), patterns, extra, at, lower)
    return lowered | _counts(schema, lowered, at)


def _of_names(
    rule: Any, extra: Any, at: str, lower: Lower
) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """Express the rule of `propertyNames` by three other keywords: return `properties`,
    `patternProperties` and `additionalProperties`. `extra` is the schema of all values, or True."""
    if rule is True:
        return {}, {}, extra
    if isinstance(rule, dict):
        lowered = lower({"type": "string"} | rule, f"{at}/propertyNames")
        if "enum" in lowered:
            return dict.fromkeys(lowered["enum"], extra), {}, False
        if rule.keys() <= {"type", "pattern"}:
            return ({}, {rule["pattern"]: extra}, False) if "pattern" in rule else ({}, {}, extra)
    raise refuse("propertyNames", at, "is enforced only as an `enum` or a `pattern`")


def _check_patterns(
    patterns: Mapping[str, Any], properties: Mapping[str, Any], extra: Any, at: str
) -> None:
    """Raise ConstraintError for patterns whose names may also match another schema, because
    xgrammar enforces only one."""
    for pattern in patterns:
        clash = [name for name in properties if re.search(pattern, name)]
        if len(patterns) > 1 or clash or extra is not False:
            what = "with several patterns" if len(patterns) > 1 else "with `additionalProperties`"
            what = f"with {clash[0]!r} of `properties` under its pattern" if clash else what
            raise refuse(
                "patternProperties",
                at,
                f"{what} cannot be enforced, since one name may fall under two schemas: keep one",
            )


def _other_properties(
    names: list[str], patterns: Mapping[str, Any], extra: Any, at: str, lower: Lower
) -> dict[str, Any]:
    """Rewrite the keywords about properties other than `names`, with at most one pattern."""
    for pattern, part in patterns.items():
        where = f"{at}/patternProperties/{pattern}"
        key = text.write(string_node({"pattern": pattern}, where), json=True)
        return {"patternProperties": {key: lower(part, where)}, "additionalProperties": False}
    if extra is False:
        return {"additionalProperties": False}
    part = lower(extra, f"{at}/additionalProperties")
    if not names:
        return {"additionalProperties": part}
    # Otherwise xgrammar would allow a name of `properties` again, spelled with escapes.
    key = text.write(text.other_than(names), json=True)
    return {"patternProperties": {key: part}, "additionalProperties": False}


def _counts(schema: Mapping[str, Any], lowered: Mapping[str, Any], at: str) -> dict[str, int]:
    """Rewrite minProperties and maxProperties. A free name may occur twice, and counts once."""
    low, limit = read_limits(schema, "minProperties", "maxProperties")
    high = math.inf if limit is None else limit
    needed = len(set(lowered.get("required", ())))
    free = lowered["additionalProperties"] is not False or "patternProperties" in lowered
    highest = math.inf if free else len(lowered.get("properties", ()))
    if free and low > max(1, needed):
        raise refuse(
            "minProperties",
            at,
            "cannot be enforced where names are free: list the names in `properties`, with "
            "`additionalProperties: false`",
        )
    if high < max(low, needed) or low > highest:
        raise refuse("minProperties/maxProperties", at, "leave no possible number of properties")
    bounds = {"minProperties": low} if low > needed else {}
    return bounds | ({"maxProperties": int(high)} if high < highest else {})
