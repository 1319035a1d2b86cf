"""Stores the types (`datasets` features) of copied columns in the metadata of output columns.
`RowSource` writes them, and readers of a job's rows read them. So a column of JSON values, which
Arrow stores as text, is read as JSON again."""

from __future__ import annotations

import json
from typing import Any

import pyarrow as pa
from datasets import Features

_KEY = "feature"
"""The metadata key of the feature."""


def stored_field(name: str, feature: Any, type: pa.DataType) -> pa.Field:
    """Return the Arrow field of an output column, whose metadata contains the feature of the data
    set's column."""
    described = json.dumps(Features({name: feature}).to_dict())
    return pa.field(name, type, metadata={_KEY: described})


def stored_feature(field: pa.Field) -> Any:
    """Return the feature of the data set's column from which an output column was copied; without
    metadata, the feature of the Arrow type."""
    described = (field.metadata or {}).get(_KEY.encode())
    if described is None:
        return Features.from_arrow_schema(pa.schema([field]))[field.name]
    (feature,) = Features.from_dict(json.loads(described)).values()
    return feature
