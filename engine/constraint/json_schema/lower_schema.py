"""Rewrites JSON Schemas in the subset of JSON Schema that xgrammar enforces. `Constraint.make` and
`xgrammar_input.py` call `check_schema` and `lower`.

A keyword that cannot be enforced is refused by name. xgrammar reads only the first of the keywords
`$ref`, `const`, `enum`, `anyOf`, `oneOf`, `allOf` and `type` that a schema has. It also confuses
schemas that differ only in properties named like an annotation, such as `title`. So a schema is
written anew from the keywords that this module understands.

Everything that the rewritten schema allows is valid under the user's schema, according to
`jsonschema` with its format checker. Not everything valid is allowed:

- Properties come in the order of the schema. Properties that the schema does not name are allowed
  only if `additionalProperties` or `unevaluatedProperties` ask for them, or if it names none.
- A schema without `type` stands for the types that its keywords are about. After `prefixItems`,
  further items are allowed only if `items` or `minItems` ask for them.
- Numbers with bounds have at most 6 decimals and no exponent. Integers have no fraction.
- A pattern matches the whole string. Formats have their common forms. A string with a pattern or a
  length contains quotes, backslashes and line ends only where the pattern requires them.
"""

import json
from collections.abc import Iterable
from itertools import count
from typing import Any

from batchgen.engine.constraint.json_schema.containers import lower_array, lower_object
from batchgen.engine.constraint.json_schema.keywords import (
    ANNOTATIONS,
    DEFINITIONS,
    TYPES_OF,
    check_keywords,
    refuse,
    restricts,
)
from batchgen.engine.constraint.json_schema.merge_schemas import (
    find_overlap,
    merge,
    split_unevaluated,
)
from batchgen.engine.constraint.json_schema.scalars import check_values, lower_scalar
from batchgen.engine.constraint.json_schema.schema_references import find_endless, resolve
from batchgen.engine.constraint.json_schema.validator import make_validator
from batchgen.engine.interface.constraint_error import ConstraintError

ANY = "any"
"""The name, in the `$defs` of a rewritten schema, of the definition of any JSON value."""

_MOST_STEPS = 100_000
"""The most schemas that a schema may stand for. Each takes about 10 µs."""


def check_schema(schema: Any) -> None:
    """Check that a schema (parsed JSON) can be enforced. Raises ConstraintError, naming the
    keyword, its JSON pointer, and what to do."""
    lower(schema)


def lower(schema: Any, base: str = "#") -> dict[str, Any]:
    """Return the schema that xgrammar must get, with `strict_mode` on, instead of a user's.

    Its `$defs` has the definitions that it refers to. Raises ConstraintError as in `check_schema`.

    Args:
        schema: the user's schema, to which all its `$ref`s are relative.
        base: the JSON pointer of the schema, for messages.
    """
    from referencing.exceptions import Unresolvable

    try:
        return _Lowering(schema, base).run()
    except Unresolvable as error:  # next to keywords such as `enum`, jsonschema follows `$ref`
        raise ConstraintError(
            f"a `$ref` in the schema at {base} is not resolved ({error}): copy the schema into "
            "`$defs` and refer to it as `#/$defs/...`"
        ) from None
    except RecursionError:
        raise ConstraintError(f"the schema at {base} is nested too deeply") from None


class _Lowering:
    """The rewriting of one document, part by part.

    In its methods, `at` is a part's JSON pointer. `open_refs` are the pointers of references that
    led to the part without entering a property or an item; meeting one of them again would mean a
    value that consists only of itself.

    Attributes:
        definitions: the rewritten schemas that references lead to, by name.
        names: the names of definitions, by the pointers of their schemas.
        branches: the pointers of branches with a tag, by their content.
        marks: the number of schemas that `mark` has made distinct.
        steps: the number of schemas looked at.
    """

    def __init__(self, root: Any, base: str) -> None:
        self.root, self.base = dict(root) if isinstance(root, dict) else root, base
        self.validator = make_validator(root)
        self.definitions: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.branches: dict[str, str] = {}
        self.marks = self.steps = 0

    def run(self) -> dict[str, Any]:
        self.names["#"] = "#"  # references to the whole document stay as they are
        lowered = self.schema(self.root, self.base, ("#",))
        self.refuse_endless(lowered)
        return lowered | {"$defs": self.definitions} if self.definitions else lowered

    def schema(self, schema: Any, at: str, open_refs: tuple[str, ...] = ()) -> dict[str, Any]:
        self.step()
        if isinstance(schema, bool):
            if not schema:
                raise refuse("false", at, "allows no value: remove it, or the property it is for")
            return self.any()
        check_keywords(schema, at, root=schema is self.root)
        schema = {k: v for k, v in self.tagged(schema).items() if restricts(k, v)}
        if "enum" in schema or "const" in schema:
            return self.enum(schema, at)
        schema = {k: v for k, v in schema.items() if k not in DEFINITIONS}
        if "$ref" in schema or "allOf" in schema:
            return self.all_of(schema, at, open_refs)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self.any_of(schema, keyword, at, open_refs)
        return self.typed(schema, at)

    def step(self) -> None:
        """Count a schema. References that lead to the same schemas again and again make many."""
        self.steps += 1
        if self.steps > _MOST_STEPS:
            raise ConstraintError(
                f"the schema at {self.base} stands for more than {_MOST_STEPS:,} schemas, because "
                "`$ref` and `allOf` repeat what they join: write it out once"
            )

    # References and combinations.

    def tagged(self, schema: Any) -> Any:
        """Return the schema with its `discriminator`, if it has one, as a required property of each
        branch. The property's values are the names by which `mapping` leads to the branch."""
        if (discriminator := schema.get("discriminator")) is None:
            return schema
        name, mapping = discriminator["propertyName"], discriminator.get("mapping", {})
        keyword = "oneOf" if "oneOf" in schema else "anyOf"
        branches = []
        for branch in schema[keyword]:
            targets = (branch, isinstance(branch, dict) and branch.get("$ref"))
            tags = [tag for tag, target in mapping.items() if target in targets]
            tag = {"type": "object", "required": [name]}
            values = {"properties": {name: {"enum": tags}}} if tags else {}
            branches.append({"$ref": self.branch({"allOf": [branch, tag | values]})})
        rest = {k: v for k, v in schema.items() if k != "discriminator"}
        return rest | {keyword: branches}

    def branch(self, schema: dict[str, Any]) -> str:
        """Make a definition of a schema, so that the schema may lead to itself, and return its
        pointer."""
        text = json.dumps(schema)
        if text not in self.branches:
            definitions = self.root.get("$defs", {})
            name = next(n for n in map("branch-{}".format, count(1)) if n not in definitions)
            self.root["$defs"] = {**definitions, name: schema}
            self.branches[text] = f"#/$defs/{name}"
        return self.branches[text]

    def reference(self, ref: str, at: str, open_refs: tuple[str, ...]) -> dict[str, Any]:
        """Rewrite a schema that is only a reference."""
        pointer, target = resolve(self.root, ref, at)
        if pointer in open_refs:
            raise refuse("$ref", at, f"to {ref!r} leads back to itself: no value can match")
        if pointer not in self.names:
            name = self.names[pointer] = f"d{len(self.names)}"
            self.definitions[name] = {}  # keeps its place while its own references are followed
            self.definitions[name] = self.schema(target, pointer, (*open_refs, pointer))
        name = self.names[pointer]
        return {"$ref": "#" if name == "#" else f"#/$defs/{name}"}

    def expand(self, schema: Any, at: str, open_refs: tuple[str, ...]) -> list[dict[str, Any]]:
        """Return schemas without `$ref` and `allOf` that together are equivalent to `schema`."""
        self.step()
        if isinstance(schema, bool):
            if not schema:
                raise refuse("false", at, "allows no value: remove it")
            return []
        check_keywords(schema, at, root=schema is self.root)
        schema, skip = self.tagged(schema), {"$ref", "allOf", *DEFINITIONS}
        siblings = {k: v for k, v in schema.items() if k not in skip and restricts(k, v)}
        parts = [siblings] if siblings else []
        if "$ref" in schema:
            pointer, target = resolve(self.root, schema["$ref"], at)
            if pointer in open_refs:
                raise refuse("$ref", at, f"to {schema['$ref']!r} leads back to itself")
            parts += self.expand(target, pointer, (*open_refs, pointer))
        for i, part in enumerate(schema.get("allOf", ())):
            parts += self.expand(part, f"{at}/allOf/{i}", open_refs)
        return parts

    def all_of(self, schema: Any, at: str, open_refs: tuple[str, ...]) -> dict[str, Any]:
        if schema.keys() == {"$ref"}:
            return self.reference(schema["$ref"], at, open_refs)
        if schema.keys() == {"allOf"} and len(schema["allOf"]) == 1:
            return self.schema(schema["allOf"][0], f"{at}/allOf/0", open_refs)
        rest, last = split_unevaluated(schema)
        return self.schema(merge(self.expand(rest, at, open_refs), at, last), at, open_refs)

    def any_of(
        self, schema: Any, keyword: str, at: str, open_refs: tuple[str, ...]
    ) -> dict[str, Any]:
        """Rewrite a schema with branches under the keyword `anyOf` or `oneOf`."""
        branches = schema[keyword]
        rest, last = split_unevaluated({k: v for k, v in schema.items() if k != keyword})
        if rest or last:  # keywords next to the branches apply to each branch
            branches = [
                merge([rest, *self.expand(branch, f"{at}/{keyword}/{i}", open_refs)], at, last)
                for i, branch in enumerate(branches)
            ]
        if keyword == "oneOf":
            flat = [self.flat(branch, at) for branch in branches]
            overlap = find_overlap(flat, self.is_valid, lambda part: self.flat(part, at))
            if overlap:
                raise refuse(
                    "oneOf",
                    at,
                    "cannot be enforced, since the branches {} and {} may both match:"
                    " use `anyOf`, or give each branch a required property with a `const` of its"
                    " own".format(*overlap),
                )
        lowered = [
            self.schema(branch, f"{at}/{keyword}/{i}", open_refs)
            for i, branch in enumerate(branches)
        ]
        return lowered[0] if len(lowered) == 1 else {"anyOf": lowered}

    def flat(self, schema: Any, at: str) -> dict[str, Any]:
        """Return one schema without `$ref` and `allOf` that is equivalent to `schema`."""
        return merge(self.expand(schema, at, ()), at)

    def is_valid(self, schema: Any, value: Any) -> bool:
        return self.validator.evolve(schema=schema).is_valid(value)

    # Values.

    def mark(self, lowered: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Make a rewritten schema distinct from others with which xgrammar might confuse it.

        When it compares schemas, xgrammar ignores members named like an annotation, at any depth,
        and writes names without escapes. `names` are the names of members in the schema.
        """
        if any(name in ANNOTATIONS or '"' in name for name in names):
            self.marks += 1
            return lowered | {"x-mark": self.marks}
        return lowered

    def any(self) -> dict[str, Any]:
        """Return a schema of any value. xgrammar has a rule for that, but it allows whitespace."""
        ref = {"$ref": f"#/$defs/{ANY}"}
        self.definitions[ANY] = {
            "anyOf": [
                {"type": "object", "additionalProperties": ref},
                {"type": "array", "items": ref},
                *({"type": name} for name in ("string", "number", "boolean", "null")),
            ]
        }
        return ref

    def enum(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Rewrite `enum` or `const` as the listed values that all other keywords allow."""
        keyword = "enum" if "enum" in schema else "const"
        values = schema["enum"] if keyword == "enum" else [schema["const"]]
        others = {k: v for k, v in schema.items() if k != keyword}
        valid = [value for value in values if not others or self.is_valid(others, value)]
        if not valid:
            raise refuse(keyword, at, "has no value that the other keywords allow")
        return self.mark({"enum": valid}, check_values(valid, keyword, at))

    def typed(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        """Rewrite a schema of keywords about types, as one branch for each allowed type."""
        types = schema.get("type")
        if types is None:
            if not schema:
                return self.any()
            type_names = {name for keyword in schema for name in TYPES_OF[keyword]}
            types = sorted(type_names - {"integer"})
        elif isinstance(types, str):
            types = [types]
        kinds: list[dict[str, Any]] = []
        for name in types:
            if name == "integer" and "number" in types:
                continue
            about = {k: v for k, v in schema.items() if name in TYPES_OF.get(k, ())}
            match name:
                case "object":
                    lowered = lower_object(about, at, self.schema, self.is_valid)
                    names = [*lowered.get("properties", ()), *lowered.get("patternProperties", ())]
                    kinds.append(self.mark(lowered, names))
                case "array":
                    kinds.append(lower_array(about, at, self.schema))
                case _:
                    kinds.append(lower_scalar(name, about, at))
        return kinds[0] if len(kinds) == 1 else {"anyOf": kinds}

    def refuse_endless(self, root: dict[str, Any]) -> None:
        """Raise ConstraintError for a definition that has no value of finite size: its output would
        never end."""
        endless = find_endless(
            {"#": root} | {f"#/$defs/{k}": v for k, v in self.definitions.items()}
        )
        if endless:
            pointers = {f"#/$defs/{name}": pointer for pointer, name in self.names.items()}
            raise refuse(
                "$ref",
                pointers.get(min(endless), self.base),
                "makes every value contain another of its kind without end: make a property on "
                "the way optional, or let an array be empty",
            )
