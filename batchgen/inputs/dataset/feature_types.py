"""Classifies the types of columns (`datasets` features): plain values, images, or values that
contain bytes. `RowSource` uses this."""

from __future__ import annotations

from typing import Any

from datasets import ClassLabel, Image, Value
from datasets.features import Json, LargeList, List, Translation, TranslationVariableLanguages

PLAIN = (Value, ClassLabel, Json, Translation, TranslationVariableLanguages)
"""Features whose values are numbers, strings, lists and dicts, and not images or audio."""


def is_plain(feature: Any) -> bool:
    """Whether the values of a feature are numbers, strings, lists and dicts of these."""
    inner = _inner(feature)
    return isinstance(feature, PLAIN) if inner is None else all(map(is_plain, inner))


def is_image(feature: Any) -> bool:
    """Whether the values of a feature are images, or lists of images."""
    inner = _inner(feature)
    if isinstance(feature, Image):
        return True
    return bool(inner) and not isinstance(feature, dict) and all(map(is_image, inner or ()))


def holds_bytes(feature: Any) -> bool:
    """Whether the values of a feature contain bytes at any depth."""
    if isinstance(feature, Image):
        return True
    if isinstance(feature, Value):
        return "binary" in feature.dtype
    return any(map(holds_bytes, _inner(feature) or ()))


def _inner(feature: Any) -> list[Any] | None:
    """Return the features inside a struct or a list; None for any other feature."""
    if isinstance(feature, dict):
        return list(feature.values())
    if isinstance(feature, (List, LargeList)):
        return [feature.feature]
    return feature if isinstance(feature, list) else None
