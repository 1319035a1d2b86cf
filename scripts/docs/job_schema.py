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
"""A reference to another key, `${KEY}`."""
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
    step_properties = {
        FROM: {"description": "The steps whose answers are its rows."} | _one_or_more("string"),
        AFTER: {"const": COMPLETE},
        **{key: {"$ref": f"#/$defs/job/properties/{key}"} for key in job},
    }
    schema = {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "A job or pipeline of batchgen",
        "$defs": {
            "job": {"properties": job},
            "step": {
                "type": "object",
                "properties": step_properties,
                "additionalProperties": False,
            },
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
    """Return the schemas of the entries of a job file: groups, their keys by full name, and lists
    of steps. A group is the name of a choice (or null), or its keys."""
    properties: dict[str, Schema] = {EXPERIMENT: _one_or_more("string", enum=choices(EXPERIMENT))}
    for group in GROUPS:
        keys = _keys(group)
        entries = {CHOICE: {"enum": choices(group)}, "_target_": {"type": "string"}} | keys
        properties[group] = {
            "anyOf": [
                {"enum": [*choices(group), None]},
                {"type": "object", "properties": entries, "additionalProperties": False},
            ]
        }
        # The same keys written GROUP.KEY have the schemas of the second alternative above.
        pointer = f"#/$defs/job/properties/{group}/anyOf/1/properties"
        properties |= {f"{group}.{name}": {"$ref": f"{pointer}/{name}"} for name in keys}
    for name in STEP_LISTS:
        step = {"type": "object", "minProperties": 1, "examples": sorted(CLASSES[name])}
        properties[name] = {"type": ["array", "null"], "items": step}
    return properties


def _keys(group: str) -> dict[str, Schema]:
    """Return the schemas of the keys of all choices of a group, by key. The first comment that
    explains a key is its description."""
    schemas: dict[str, Schema] = {}
    for name in choices(group):
        for entry in read_choice(group, name).entries:
            if entry.name in _KINDS:
                continue
            value_type = declared_type(f"{group}.{entry.name}")
            schema = schemas.setdefault(entry.name, _schema_of_type(value_type))
            if entry.comment and "description" not in schema:
                schema["description"] = " ".join(" ".join(entry.comment).split())
    return schemas


def _schema_of_type(hint: Any) -> Schema:
    """Return the schema of the values that a declared type accepts. Each key also accepts a
    reference to another key, `${KEY}`, which is a string."""
    kinds, values = _alternatives(hint)
    if not kinds and not values:
        return {}
    schemas: list[Schema] = [{"type": sorted(kinds)}] if kinds else []
    schemas += [{"enum": sorted(values, key=str)}] if values else []
    return {"anyOf": schemas} if "string" in kinds else {"anyOf": [*schemas, dict(_REFERENCE)]}


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
        all_kinds = set[str]().union(*(kinds for kinds, _ in parts))
        return all_kinds, set().union(*(values for _, values in parts))
    if hint in _SCALARS:
        return {_SCALARS[hint]}, set()
    kind = origin or hint
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return {"object", "string"}, set()  # a string is the path of a file that has the mapping
    if isinstance(kind, type) and issubclass(kind, Collection):  # a single value is a list of one
        inner, values = _alternatives(get_args(hint)[0]) if get_args(hint) else (set[str](), set())
        return ({"array", *inner}, values) if inner or values else (set(), set())
    return set(), set()


def _one_or_more(kind: str, enum: Sequence[str] = ()) -> Schema:
    """Return the schema of a value, or a list of values, of the JSON type `kind` or from `enum`."""
    one: Schema = {"enum": list(enum)} if enum else {"type": kind}
    return {"anyOf": [one, {"type": "array", "items": one}]}
