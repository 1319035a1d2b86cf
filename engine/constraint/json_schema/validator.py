"""Makes the validator of a JSON Schema with the library `jsonschema`, which checks whether a given
value is valid."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from batchgen.engine.interface.constraint_error import ConstraintError

if TYPE_CHECKING:
    from jsonschema.protocols import Validator


def make_validator(schema: Any) -> Validator:
    """Make the validator of a schema, including formats, for the draft of its `$schema` or 2020-12.

    The validator never fetches a schema: a `$ref` out of the document raises
    `referencing.exceptions.Unresolvable`. Raises ConstraintError if the schema is invalid, or of a
    draft other than 2020-12, 2019-09 and 7.
    """
    import jsonschema as js
    from jsonschema.exceptions import SchemaError
    from referencing import Registry

    drafts = (js.Draft202012Validator, js.Draft201909Validator, js.Draft7Validator)
    known = {draft.META_SCHEMA["$id"].rstrip("#"): draft for draft in drafts}
    name = schema.get("$schema", next(iter(known))) if isinstance(schema, Mapping) else ""
    draft = known.get(str(name).rstrip("#")) if name else drafts[0]
    if draft is None:
        raise ConstraintError(f"`$schema` is {name!r}: it must be one of {', '.join(known)}")
    try:
        draft.check_schema(schema)
    except SchemaError as error:
        # `type` may be a name or a list of names. The deeper error is more specific.
        deepest = max((*error.context, error), key=lambda part: len(part.absolute_path))
        at = "/".join(["#", *map(str, deepest.absolute_path)])
        tuples = error.absolute_path and error.absolute_path[-1] == "items"
        hint = "; for a list of schemas use `prefixItems`" if tuples else ""
        raise ConstraintError(f"not a valid JSON Schema at {at}: {deepest.message}{hint}") from None
    return draft(schema, registry=Registry(), format_checker=draft.FORMAT_CHECKER)
