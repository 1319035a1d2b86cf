"""Follows references (`$ref`) within one JSON Schema document. `lower_schema.py` uses it."""

from collections.abc import Mapping
from typing import Any
from urllib.parse import unquote

from batchgen.engine.constraint.json_schema.keywords import refuse


def resolve(root: Any, ref: str, at: str) -> tuple[str, Any]:
    """Return the canonical JSON pointer and the schema that a reference leads to. Raises
    ConstraintError if it leads out of the document `root`, or not to a schema.

    Args:
        at: the JSON pointer of the schema that contains the reference.
    """
    if ref != "#" and not ref.startswith("#/"):
        raise refuse(
            "$ref",
            at,
            f"to {ref!r} is not resolved: copy the schema into `$defs` and refer to it as "
            "`#/$defs/...`",
        )
    target = root
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


def find_endless(schemas: Mapping[str, Any]) -> set[str]:
    """Return the references (`$ref`) of rewritten schemas that have no finite value."""
    finite: set[str] = set()
    while finished := {k for k, v in schemas.items() if k not in finite and _ends(v, finite)}:
        finite |= finished
    return schemas.keys() - finite


def _ends(lowered: Any, finite: set[str]) -> bool:
    """Return whether a rewritten schema has a finite value, assuming that the references `finite`
    do."""
    if "$ref" in lowered:
        return lowered["$ref"] in finite
    if "anyOf" in lowered:
        return any(_ends(branch, finite) for branch in lowered["anyOf"])
    low, prefix = lowered.get("minItems", 0), lowered.get("prefixItems", [])
    needed = [lowered["properties"][name] for name in lowered.get("required", ())]
    needed += prefix[:low] + ([lowered["items"]] if low > len(prefix) else [])
    return all(_ends(part, finite) for part in needed)
