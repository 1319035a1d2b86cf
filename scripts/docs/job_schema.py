"""Generates the JSON Schema of job and pipeline files, for editors: keys, their types, and the
comments of conf/ as descriptions. `reference.py` calls `schema_text`."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from batchgen.cli.conf_files import read_choice
from batchgen.config.compose.user_values import CHOICE
from batchgen.config.groups.class_names import CLASSES
from batchgen.config.groups.config_keys import (
    EXPERIMENT,
    GROUPS,
    STEP_LISTS,
    choices,
    declared_type,
)
from batchgen.pipelines.run.pipeline_values import AFTER, COMPLETE, FROM, KEYS, STEPS
from batchgen.storage.folder.pipeline_record import STEP_NAME

Schema = dict[str, Any]
_REFERENCE: Schema = {"type": "string", "pattern": r"\$\{"}
_SCALARS: Mapping[Any, str] = {
    bool: "boolean", int: "integer", float: "number", str: "string", NoneType: "null"
}  # fmt: skip
_KINDS = ("_target_", "kind")
"""Keys that choose a class, which the choice of a group has already chosen."""


def schema_text() -> str:
    """Return the text of docs/reference/job.schema.json."""
    job = _job_properties()
    steps = {
        "type": "object",
        "minProperties": 1,
        "additionalProperties": False,
        "patternProperties": {f"^{STEP_NAME.pattern}$": {"$ref": "#/$defs/step"}},
    }
    of_step = {
        FROM: {"description": "The steps whose answers are its rows."} | _one_or_more("string"),
        AFTER: {"const": COMPLETE},
        **{key: {"$ref": f"#/$defs/job/properties/{key}"} for key in job},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job or pipeline of batchgen",
        "$defs": {
            "job": {"properties": job},
            "step": {"type": "object", "properties": of_step, "additionalProperties": False},
        },
        "type": "object",
        "properties": {
            STEPS: {"description": "The steps of a pipeline, by name."} | steps,
            **{key: {} for key in KEYS},
            **{key: {"$ref": f"#/$defs/job/properties/{key}"} for key in job},
        },
        "additionalProperties": False,
    }
    return json.dumps(schema, indent=1, ensure_ascii=False) + "\n"


def _job_properties() -> dict[str, Schema]:
    """What a job file may hold: groups, their keys by full name, and lists of steps."""
    found: dict[str, Schema] = {EXPERIMENT: _one_or_more("string", enum=choices(EXPERIMENT))}
    for group in GROUPS:
        keys = _keys(group)
        inside = {CHOICE: {"enum": choices(group)}, "_target_": {"type": "string"}} | keys
        found[group] = {
            "anyOf": [
                {"enum": [*choices(group), None]},
                {"type": "object", "properties": inside, "additionalProperties": False},
            ]
        }
        at = f"#/$defs/job/properties/{group}/anyOf/1/properties"
        found |= {f"{group}.{name}": {"$ref": f"{at}/{name}"} for name in keys}
    for name in STEP_LISTS:
        step = {"type": "object", "minProperties": 1, "examples": sorted(CLASSES[name])}
        found[name] = {"type": ["array", "null"], "items": step}
    return found


def _keys(group: str) -> dict[str, Schema]:
    """Return the keys of all choices of a group, each with the first comment that explains it."""
    found: dict[str, Schema] = {}
    for name in choices(group):
        for entry in read_choice(group, name).entries:
            if entry.name in _KINDS:
                continue
            schema = found.setdefault(entry.name, _of_type(declared_type(f"{group}.{entry.name}")))
            if entry.comment and "description" not in schema:
                schema["description"] = " ".join(" ".join(entry.comment).split())
    return found


def _of_type(hint: Any) -> Schema:
    """Return the schema of the values that a declared type accepts, or of a reference to another
    key."""
    kinds, values = _alternatives(hint)
    if not kinds and not values:
        return {}
    found: list[Schema] = [{"type": sorted(kinds)}] if kinds else []
    found += [{"enum": sorted(values, key=str)}] if values else []
    return {"anyOf": found} if "string" in kinds else {"anyOf": [*found, dict(_REFERENCE)]}


def _alternatives(hint: Any) -> tuple[set[str], set[Any]]:
    """Return the JSON types and constants that a declared type accepts; empty if it accepts
    anything."""
    origin = get_origin(hint)
    if origin is Annotated:
        return _alternatives(get_args(hint)[0])
    if origin is Literal:
        return set(), set(get_args(hint))
    if origin in (Union, UnionType):
        parts = [_alternatives(part) for part in get_args(hint)]
        if any(not kinds and not values for kinds, values in parts):
            return set(), set()
        return set().union(*(k for k, _ in parts)), set().union(*(v for _, v in parts))
    if hint in _SCALARS:
        return {_SCALARS[hint]}, set()
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {"object", "string"}, set()  # the path of a file that holds it
    if isinstance(kind, type) and issubclass(kind, Collection):  # one value is a list of one
        inner, values = _alternatives(get_args(hint)[0]) if get_args(hint) else (set[str](), set())
        return ({"array", *inner}, values) if inner or values else (set(), set())
    return set(), set()


def _one_or_more(kind: str, enum: Sequence[str] = ()) -> Schema:
    one: Schema = {"enum": list(enum)} if enum else {"type": kind}
    return {"anyOf": [one, {"type": "array", "items": one}]}
