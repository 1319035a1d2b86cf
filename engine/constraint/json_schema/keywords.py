"""The keywords of JSON Schema: which types each restricts, and what to write instead of those that
cannot be enforced."""

from collections.abc import Mapping
from difflib import get_close_matches

from batchgen.engine.interface.constraint_error import ConstraintError

ANNOTATIONS = frozenset(
    "$comment $schema $id title description default examples deprecated readOnly writeOnly".split()
)
"""Keywords that describe a value and do not restrict it."""
DEFINITIONS = frozenset({"$defs", "definitions"})
"""Keywords that only hold schemas for `$ref`."""
COMBINATIONS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type"})
"""Keywords that restrict values of any type: by other schemas, a list of values, or types."""

_ABOUT = {
    "object": "properties required additionalProperties unevaluatedProperties patternProperties "
    "propertyNames minProperties maxProperties",
    "array": "items prefixItems additionalItems unevaluatedItems minItems maxItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
TYPES_OF: dict[str, frozenset[str]] = {
    keyword: frozenset({name, "integer"} if name == "number" else {name})
    for name, keywords in _ABOUT.items()
    for keyword in keywords.split()
}
"""Maps a keyword to the types that it restricts. It allows all values of other types."""
KNOWN = ANNOTATIONS | DEFINITIONS | COMBINATIONS | TYPES_OF.keys() | {"discriminator"}

_CHECK_LATER = "remove it, or check it afterwards"
_BY_NAME = "refer to a schema in `$defs` by `$ref`"
_WITHOUT_SCHEMA = "it does not restrict the text by itself; remove it"
REFUSED = {
    "uniqueItems": _CHECK_LATER,
    "contains": _CHECK_LATER,
    "minContains": _CHECK_LATER,
    "maxContains": _CHECK_LATER,
    "not": "list what is allowed instead, with `enum` or `anyOf`",
    "if": "write the cases as branches of `anyOf`",
    "then": "write the cases as branches of `anyOf`",
    "else": "write the cases as branches of `anyOf`",
    "dependentRequired": "write the cases as branches of `anyOf`",
    "dependentSchemas": "write the cases as branches of `anyOf`",
    "dependencies": "write the cases as branches of `anyOf`",
    "$anchor": _BY_NAME,
    "$dynamicRef": _BY_NAME,
    "$dynamicAnchor": _BY_NAME,
    "$recursiveRef": _BY_NAME,
    "$recursiveAnchor": _BY_NAME,
    "$vocabulary": "remove it",
    "contentEncoding": _WITHOUT_SCHEMA,
    "contentMediaType": _WITHOUT_SCHEMA,
    "contentSchema": _WITHOUT_SCHEMA,
    "nullable": 'add "null" to `type` instead',
    "optional": "leave the name out of `required` instead",
    "divisibleBy": "use `multipleOf`",
    "id": "use `$id`",
}
"""Maps a keyword that a grammar cannot enforce to what the user can write instead."""

MOST = 1_000_000
"""The greatest limit of a count. Higher limits are lowered to it, because xgrammar counts with 32
bits."""


def refuse(keyword: str, at: str, reason: str) -> ConstraintError:
    """Return the error for a keyword. The reason continues the sentence "`keyword` at pointer"."""
    return ConstraintError(f"`{keyword}` at {at} {reason}")


def restricts(keyword: str, value: object) -> bool:
    """Return whether a keyword restricts values. Annotations and x-… extensions do not."""
    off = keyword == "uniqueItems" and value is False
    return keyword not in ANNOTATIONS and not keyword.startswith("x-") and not off


def read_limits(schema: Mapping[str, object], low: str, high: str) -> tuple[int, int | None]:
    """Return the lowest and highest count that two keywords such as `minItems` and `maxItems`
    allow. Without them these are 0 and None; the highest is at most `MOST`."""
    lower, upper = schema.get(low, 0), schema.get(high)
    assert isinstance(lower, int | float)
    if upper is None:
        return int(lower), None
    assert isinstance(upper, int | float)
    return int(lower), int(min(upper, MOST))


def check_keywords(schema: Mapping[str, object], at: str, root: bool) -> None:
    """Check that all keywords of a schema, not of its subschemas, can be enforced.

    A schema that lists its values (`enum`, `const`) may have any known keyword, because each value
    is checked in advance. `$id` is allowed only at the `root`. Raises ConstraintError, saying what
    to write instead.
    """
    listed = "enum" in schema or "const" in schema
    for keyword in schema:
        if keyword in REFUSED and restricts(keyword, schema[keyword]) and not listed:
            raise refuse(keyword, at, f"cannot be enforced while generating: {REFUSED[keyword]}")
        if keyword == "discriminator" and not _is_discriminator(schema):
            raise refuse(
                keyword,
                at,
                "must be {propertyName: NAME}, with or without a `mapping`, next to `oneOf` or "
                "`anyOf`: it names the required property that tells their branches apart",
            )
        if keyword == "$id" and not root:
            raise refuse(
                keyword,
                at,
                "is allowed only at the root, since it changes what references point to",
            )
        if keyword not in KNOWN and keyword not in REFUSED and not keyword.startswith("x-"):
            near = get_close_matches(keyword, KNOWN, 1)
            hint = f"did you mean `{near[0]}`? If not, remove it" if near else "remove it"
            raise refuse(keyword, at, f"is not a keyword of JSON Schema: {hint}, or begin it x-")


def _is_discriminator(schema: Mapping[str, object]) -> bool:
    """Return whether a schema's `discriminator` is that of OpenAPI, as Pydantic writes it."""
    value = schema["discriminator"]
    return (
        isinstance(value, Mapping)
        and value.keys() <= {"propertyName", "mapping"}
        and isinstance(value.get("propertyName"), str)
        and isinstance(value.get("mapping", {}), Mapping)
        and ("oneOf" in schema or "anyOf" in schema)
    )
