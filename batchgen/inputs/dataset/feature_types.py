"""Classifies the types of columns (`datasets` features): plain values, images, or values with
bytes."""

from __future__ import annotations

from typing import Any

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


def _inner(feature: Any) -> list[Any] | None:
    """The features of which a struct or a list consists; None of any other feature."""
    if isinstance(feature, dict):
        return list(feature.values())
    if isinstance(feature, (List, LargeList)):
        return [feature.feature]
    return feature if isinstance(feature, list) else None
