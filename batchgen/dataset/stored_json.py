"""JSON in Arrow columns: reading it back, and telling its own nulls from those of Arrow."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from datasets import Features
from datasets.features import Json, LargeList, List

_KEY = "feature"


def stored_field(name: str, feature: Any, type: pa.DataType) -> pa.Field:
    """The Arrow field of an output column; its metadata keeps the feature of the data set's
    column."""
    described = json.dumps(Features({name: feature}).to_dict())
    return pa.field(name, type, metadata={_KEY: described})


def stored_feature(field: pa.Field) -> Any:
    """The feature that the data set's column had from which an output column was copied."""
    described = (field.metadata or {}).get(_KEY.encode())
    if described is None:
        return Features.from_arrow_schema(pa.schema([field]))[field.name]
    (feature,) = Features.from_dict(json.loads(described)).values()
    return feature


def read_back(value: Any, feature: Any) -> Any:
    """A value of an output column with its JSON parsed: outputs hold JSON as text."""
    return Features({"value": feature}).decode_example({"value": value})["value"]


def without_filled_nulls(value: Any, feature: Any) -> Any:
    """The value without the null entries that Arrow adds where the structs of rows have different
    keys. Nulls inside JSON values are the data's own and stay."""
    if isinstance(value, dict) and isinstance(feature, dict):
        return {
            key: without_filled_nulls(item, feature[key])
            for key, item in value.items()
            if item is not None or isinstance(feature[key], Json)
        }
    if isinstance(value, list) and isinstance(feature, (List, LargeList)):
        return [without_filled_nulls(item, feature.feature) for item in value]
    return value
