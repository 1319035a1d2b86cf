"""JSON Schema, rewritten in the part of it that xgrammar enforces; all else is refused by name.

xgrammar reads a schema by its first known keyword and ignores the others there (`$ref`, `const`,
`enum`, `anyOf`, `oneOf`, `allOf`, `type`, in this order), knows nothing of many keywords, and takes
schemas that differ only in properties called `title` or the like for one. So the schema it gets is
not the user's: it is written anew from the keywords understood here. What it lets through is valid
under the user's schema, by `jsonschema` and its format checker. It may be less than all that is
valid:

* properties come in the order of the schema, and others only where `additionalProperties` or
  `unevaluatedProperties` ask for them or the schema names none;
* a schema without `type` means the types that its keywords are about; behind `prefixItems` come no
  other items unless `items` or `minItems` ask for them;
* numbers with bounds have at most 6 decimals and no exponent; integers no fraction;
* patterns match the whole string; formats are their common forms; a string with a pattern or a
  length has quotes, backslashes and line ends only where the pattern leaves no other choice.
"""

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote

from batchgen.engine.constraint.constraint import ConstraintError
from batchgen.engine.constraint.json_schema.containers import (
    find_endless,
    lower_array,
    lower_object,
)
from batchgen.engine.constraint.json_schema.keywords import (
    ANNOTATIONS,
    DEFINITIONS,
    TYPES_OF,
    check_keywords,
    refuse,
    restricts,
)
from batchgen.engine.constraint.json_schema.merge import find_overlap, merge, split_unevaluated
from batchgen.engine.constraint.json_schema.scalars import check_values, lower_scalar

if TYPE_CHECKING:
    from jsonschema.protocols import Validator

ANY = "any"  # the name of the definition for any JSON value


def check_schema(schema: Any) -> None:
    """Whether output can be held to a schema, parsed from JSON.

    Raises:
        ConstraintError: it is no JSON Schema, or has a keyword that cannot be enforced; names the
            keyword, its JSON pointer, and what to do.
    """
    lower(schema)


def make_validator(schema: Any) -> "Validator":
    """The validator of a schema by its `$schema` (2020-12 without one), formats included.

    Raises:
        ConstraintError: it is not a valid schema, or of another draft.
    """
    import jsonschema as js
    from jsonschema.exceptions import SchemaError

    drafts = (js.Draft202012Validator, js.Draft201909Validator, js.Draft7Validator)
    known = {draft.META_SCHEMA["$id"].rstrip("#"): draft for draft in drafts}
    name = schema.get("$schema", next(iter(known))) if isinstance(schema, Mapping) else ""
    draft = known.get(str(name).rstrip("#")) if name else drafts[0]
    if draft is None:
        raise ConstraintError(f"`$schema` is {name!r}: it must be one of {', '.join(known)}")
    try:
        draft.check_schema(schema)
    except SchemaError as error:
        # Of what `type` may be, a name or a list of names, the nearer one tells more.
        deepest = max((*error.context, error), key=lambda part: len(part.absolute_path))
        at = "/".join(["#", *map(str, deepest.absolute_path)])
        tuples = error.absolute_path and error.absolute_path[-1] == "items"
        hint = "; for a list of schemas use `prefixItems`" if tuples else ""
        raise ConstraintError(f"not a valid JSON Schema at {at}: {deepest.message}{hint}") from None
    return draft(schema, format_checker=draft.FORMAT_CHECKER)


def lower(schema: Any, base: str = "#") -> dict[str, Any]:
    """The schema as xgrammar must get it, with `strict_mode` and the definitions it refers to.

    Args:
        schema: parsed JSON; its `$ref` are relative to it.
        base: where it stands, for messages.

    Raises:
        ConstraintError: as `check_schema`.
    """
    try:
        return _Lowering(schema, base).run()
    except RecursionError:
        raise ConstraintError(f"the schema at {base} is nested too deeply") from None


class _Lowering:
    """One schema on its way; `at` is always the JSON pointer of the part at hand.

    `open_refs` are the references followed since the instance at hand began: to meet one again
    would be a value that consists of itself.
    """

    def __init__(self, root: Any, base: str) -> None:
        self.root, self.base = root, base
        self.validator = make_validator(root)
        self.definitions: dict[str, Any] = {}
        self.names: dict[str, str] = {}
        self.marks = 0

    def run(self) -> dict[str, Any]:
        self.names["#"] = "#"
        lowered = self.schema(self.root, self.base, ("#",))
        self.refuse_endless(lowered)
        return lowered | {"$defs": self.definitions} if self.definitions else lowered

    def schema(self, schema: Any, at: str, open_refs: tuple[str, ...] = ()) -> dict[str, Any]:
        if isinstance(schema, bool):
            if not schema:
                raise refuse("false", at, "allows no value: remove it, or the property it is for")
            return self.any()
        check_keywords(schema, at, root=schema is self.root)
        schema = {k: v for k, v in schema.items() if restricts(k, v)}
        if "enum" in schema or "const" in schema:
            return self.enum(schema, at)
        schema = {k: v for k, v in schema.items() if k not in DEFINITIONS}
        if "$ref" in schema or "allOf" in schema:
            return self.all_of(schema, at, open_refs)
        for keyword in ("anyOf", "oneOf"):
            if keyword in schema:
                return self.any_of(schema, keyword, at, open_refs)
        return self.typed(schema, at)

    # References and combinations.

    def resolve(self, ref: str, at: str) -> tuple[str, Any]:
        """The canonical pointer of a reference into this document, and what it points to."""
        if ref != "#" and not ref.startswith("#/"):
            raise refuse(
                "$ref",
                at,
                f"to {ref!r} is not resolved: copy the schema into `$defs` and refer "
                "to it as `#/$defs/...`",
            )
        target = self.root
        parts = [p.replace("~1", "/").replace("~0", "~") for p in unquote(ref).split("/")[1:]]
        for part in parts:
            index = int(part) if isinstance(target, list) and part.isdecimal() else part
            try:
                target = target[index]
            except (KeyError, IndexError, TypeError):
                raise refuse("$ref", at, f"to {ref!r} points to nothing: correct it") from None
        if not isinstance(target, dict | bool):
            raise refuse("$ref", at, f"to {ref!r} does not point to a schema: correct it")
        return "/".join(["#", *(p.replace("~", "~0").replace("/", "~1") for p in parts)]), target

    def reference(self, ref: str, at: str, open_refs: tuple[str, ...]) -> dict[str, Any]:
        pointer, target = self.resolve(ref, at)
        if pointer in open_refs:
            raise refuse("$ref", at, f"to {ref!r} leads back to itself: no value can match")
        if pointer not in self.names:
            name = self.names[pointer] = f"d{len(self.names)}"
            self.definitions[name] = {}  # keeps its place while its own references are followed
            self.definitions[name] = self.schema(target, pointer, (*open_refs, pointer))
        name = self.names[pointer]
        return {"$ref": "#" if name == "#" else f"#/$defs/{name}"}

    def expand(self, schema: Any, at: str, open_refs: tuple[str, ...]) -> list[dict[str, Any]]:
        """The schemas that hold together where `schema` holds, free of `$ref` and `allOf`."""
        if isinstance(schema, bool):
            if not schema:
                raise refuse("false", at, "allows no value: remove it")
            return []
        check_keywords(schema, at, root=schema is self.root)
        skip = {"$ref", "allOf", *DEFINITIONS}
        own = {k: v for k, v in schema.items() if k not in skip and restricts(k, v)}
        parts = [own] if own else []
        if "$ref" in schema:
            pointer, target = self.resolve(schema["$ref"], at)
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
        branches = schema[keyword]
        rest, last = split_unevaluated({k: v for k, v in schema.items() if k != keyword})
        if rest or last:  # holds in every branch
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
        return merge(self.expand(schema, at, ()), at)

    def is_valid(self, schema: Any, value: Any) -> bool:
        return self.validator.evolve(schema=schema).is_valid(value)

    # Values.

    def mark(self, lowered: dict[str, Any], names: Iterable[str]) -> dict[str, Any]:
        """Sets a schema apart whose difference from another xgrammar would not see.

        It takes two schemas for one if they are equal without the names of annotations, at any
        depth, with names written as they are.
        """
        if any(name in ANNOTATIONS or '"' in name for name in names):
            self.marks += 1
            return lowered | {"x-mark": self.marks}
        return lowered

    def any(self) -> dict[str, Any]:
        """Any value: xgrammar's own rule for it is not compact."""
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
        """The values that are valid by every other keyword, too: these need no grammar."""
        values = schema["enum"] if "enum" in schema else [schema["const"]]
        valid = [value for value in values if self.is_valid(schema, value)]
        keyword = "enum" if "enum" in schema else "const"
        if not valid:
            raise refuse(keyword, at, "has no value that the other keywords allow")
        return self.mark({"enum": valid}, check_values(valid, keyword, at))

    def typed(self, schema: dict[str, Any], at: str) -> dict[str, Any]:
        types = schema.get("type")
        if types is None:
            if not schema:
                return self.any()
            found = {name for keyword in schema for name in TYPES_OF[keyword]}
            types = sorted(found - {"integer"})
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
        """Every definition must have a value of finite size, or its output would never end."""
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
