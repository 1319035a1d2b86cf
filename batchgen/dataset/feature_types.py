"""What the columns of a data set hold, and which Arrow type keeps it."""

from __future__ import annotations

from typing import Any

import pyarrow as pa
from datasets import ClassLabel, Image, Value
from datasets.features import Json, LargeList, List, Translation, TranslationVariableLanguages

PLAIN = (Value, ClassLabel, Json, Translation, TranslationVariableLanguages)
"""Features whose values are numbers, strings, lists and dicts; images and audio are none."""


def is_plain(feature: Any) -> bool:
    """Whether the values of a feature are numbers, strings, lists and dicts of Python."""
    return (
        isinstance(feature, PLAIN)
        if (inner := _inner(feature)) is None
        else all(map(is_plain, inner))
    )


def is_image(feature: Any) -> bool:
    """Whether the values of a feature are images of datasets, or lists of them."""
    inner = _inner(feature)
    if isinstance(feature, Image):
        return True
    return bool(inner) and not isinstance(feature, dict) and all(map(is_image, inner or ()))


def holds_bytes(feature: Any) -> bool:
    """Whether the values of a feature have bytes in them, at any depth."""
    if isinstance(feature, Image):
        return True
    if isinstance(feature, Value):
        return "binary" in feature.dtype
    return any(map(holds_bytes, _inner(feature) or ()))


def has_json(feature: Any) -> bool:
    return isinstance(feature, Json) or any(map(has_json, _inner(feature) or ()))


def _inner(feature: Any) -> list[Any] | None:
    """The features of which a struct or a list consists; None of any other feature."""
    if isinstance(feature, dict):
        return list(feature.values())
    if isinstance(feature, (List, LargeList)):
        return [feature.feature]
    return feature if isinstance(feature, list) else None


def storage_type(kind: pa.DataType) -> pa.DataType:
    """The Arrow type in which plain strings take the place of JSON, at every depth."""
    if isinstance(kind, pa.BaseExtensionType):
        return kind.storage_type
    if pa.types.is_struct(kind):
        return pa.struct([pa.field(f.name, storage_type(f.type)) for f in kind])
    if pa.types.is_list(kind):
        return pa.list_(storage_type(kind.value_type))
    if pa.types.is_large_list(kind):
        return pa.large_list(storage_type(kind.value_type))
    if pa.types.is_fixed_size_list(kind):
        return pa.list_(storage_type(kind.value_type), kind.list_size)
    return kind
