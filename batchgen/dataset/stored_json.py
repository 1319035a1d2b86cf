"""Values of JSON in Arrow: which nulls are the data's own, and back from the text in an output."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from datasets import Features
from datasets.features import Json, LargeList, List

_KEY = "feature"


def stored_field(name: str, feature: Any, type: pa.DataType) -> pa.Field:
    """The field of an output column that holds `feature` as `type`, for `read_back`."""
    described = json.dumps(Features({name: feature}).to_dict())
    return pa.field(name, type, metadata={_KEY: described})


def stored_feature(field: pa.Field) -> Any:
    """What the values of an output column were in the data set."""
    described = (field.metadata or {}).get(_KEY.encode())
    if described is None:
        return Features.from_arrow_schema(pa.schema([field]))[field.name]
    return Features.from_dict(json.loads(described))[field.name]


def read_back(value: Any, feature: Any) -> Any:
    """The value with its JSON parsed, which an output has as text at any depth."""
    return Features({"value": feature}).decode_example({"value": value})["value"]


def without_filled_nulls(value: Any, feature: Any) -> Any:
    """Without the entries that Arrow adds where the structs of rows differ in keys.

    JSON has no such entries: its nulls stay.
    """
    if isinstance(value, dict) and isinstance(feature, dict):
        return {
            key: without_filled_nulls(item, feature[key])
            for key, item in value.items()
            if item is not None or isinstance(feature[key], Json)
        }
    if isinstance(value, list) and isinstance(feature, (List, LargeList)):
        return [without_filled_nulls(item, feature.feature) for item in value]
    return value
