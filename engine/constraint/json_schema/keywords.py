"""The keywords of JSON Schema: what each is about, and why some cannot be enforced."""

from collections.abc import Mapping
from difflib import get_close_matches

from batchgen.engine.constraint.constraint import ConstraintError

# Say something about a value without restricting it.
ANNOTATIONS = frozenset(
    "$comment $schema $id title description default examples deprecated readOnly writeOnly".split()
)
DEFINITIONS = frozenset({"$defs", "definitions"})
COMBINATIONS = frozenset({"$ref", "allOf", "anyOf", "oneOf", "enum", "const", "type"})

_ABOUT = {
    "object": "properties required additionalProperties unevaluatedProperties patternProperties "
    "propertyNames minProperties maxProperties",
    "array": "items prefixItems additionalItems unevaluatedItems minItems maxItems",
    "string": "minLength maxLength pattern format",
    "number": "minimum maximum exclusiveMinimum exclusiveMaximum multipleOf",
}
# The types that a keyword is about; it allows every value of another type.
TYPES_OF: dict[str, frozenset[str]] = {
    keyword: frozenset({name, "integer"} if name == "number" else {name})
    for name, keywords in _ABOUT.items()
    for keyword in keywords.split()
}
KNOWN = ANNOTATIONS | DEFINITIONS | COMBINATIONS | TYPES_OF.keys()

_CHECK_LATER = "remove it, or check it afterwards"
_BY_NAME = "refer to a schema in `$defs` by `$ref`"
_WITHOUT_SCHEMA = "it does not restrict the text by itself; remove it"
# What a user may expect of a keyword that a grammar cannot enforce.
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
    "discriminator": "give each branch a required property with a `const` of its own",
    "optional": "leave the name out of `required` instead",
    "divisibleBy": "use `multipleOf`",
    "id": "use `$id`",
}


# No output is longer; xgrammar counts with 32 bits. A greater upper limit is lowered to this.
MOST = 1_000_000


def refuse(keyword: str, at: str, reason: str) -> ConstraintError:
    """The error for a keyword of the schema at a JSON pointer."""
    return ConstraintError(f"`{keyword}` at {at} {reason}")


def restricts(keyword: str, value: object) -> bool:
    """Whether a keyword of a checked schema says anything of a value."""
    off = keyword == "uniqueItems" and value is False
    return keyword not in ANNOTATIONS and not keyword.startswith("x-") and not off


def check_keywords(schema: Mapping[str, object], at: str, root: bool) -> None:
    """Every keyword is one that is understood here, or asks of listed values what it likes.

    Raises:
        ConstraintError: one is not; says what to write instead.
    """
    listed = "enum" in schema or "const" in schema
    for keyword in schema:
        if keyword in REFUSED and restricts(keyword, schema[keyword]) and not listed:
            raise refuse(keyword, at, f"cannot be enforced while generating: {REFUSED[keyword]}")
        if keyword == "$id" and not root:
            raise refuse(keyword, at, "may stand at the root only, since it moves references")
        if keyword not in KNOWN and keyword not in REFUSED and not keyword.startswith("x-"):
            [*near] = get_close_matches(keyword, KNOWN, 1)
            hint = f"did you mean `{near[0]}`? If not, remove it" if near else "remove it"
            raise refuse(keyword, at, f"is not a keyword of JSON Schema: {hint}, or begin it x-")
