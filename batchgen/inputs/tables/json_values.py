"""Finds the Arrow type that holds the JSON values of a column, and converts values to it. Values of
mixed types become JSON text.

`SeenValues` collects the types of values; `json_encoder` converts values for storage. The values
1 and 2 are an int64 column; 1 and "a" are a JSON column, stored as the texts `1` and `"a"`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection
from itertools import chain
from typing import Any

import pyarrow as pa
from datasets import Value
from datasets.features import Json, LargeList, List

_MOST_EXACT = 2**53
"""All integers up to this one are exactly representable as 64-bit floats."""
_DEEPEST = 40
"""Lists and objects inside this many others are stored as JSON text, because Parquet files with
about 50 lists in each other cannot be read."""
_SCALARS = {str: "string", bool: "bool", float: "float64", int: "int64"}
"""The Arrow types of Python's."""


class SeenValues:
    """Collects the types of the values at one place of many rows, and the types inside them.

    Attributes:
        fields: the values of each key, if the values are objects.
    """

    def __init__(self, depth: int = 0) -> None:
        """Start without values.

        Args:
            depth: the number of lists and objects around the place.
        """
        self._depth = depth
        self._types: set[type] = set()
        self._keys: set[frozenset[str]] = set()
        self.fields: dict[str, SeenValues] = {}
        self._items: SeenValues | None = None  # the items of all lists
        self._minimum = self._maximum = 0  # of all integers
        self._has_whole_float = False  # a float such as 1.0, which would be stored like the integer

    def add(self, values: Collection[Any]) -> None:
        """Add the values of more rows."""
        types = set(map(type, values))
        self._types |= types
        for kind in types:
            same_type: Collection[Any] = (
                values if len(types) == 1 else [v for v in values if type(v) is kind]
            )
            if kind in (dict, list) and self._depth == _DEEPEST:
                continue
            if kind is dict:
                # The distinct sets of keys; tuples first, because most objects have equal ones.
                self._keys |= set(map(frozenset, set(map(tuple, same_type))))
                if self._is_struct:
                    self.add_fields(same_type)
            elif kind is list:
                self._items = self._items or SeenValues(self._depth + 1)
                self._items.add(list(chain.from_iterable(same_type)))
            elif kind is int:
                self._minimum = min(self._minimum, min(same_type))
                self._maximum = max(self._maximum, max(same_type))
            elif kind is float:
                self._has_whole_float |= any(map(float.is_integer, same_type))

    def add_fields(self, objects: Collection[dict[str, Any]]) -> None:
        """Add the members of more objects, which may have different keys."""
        for name in dict.fromkeys(chain.from_iterable(dict.fromkeys(map(tuple, objects)))):
            values = [item[name] for item in objects if name in item]
            self.fields.setdefault(name, SeenValues(self._depth + 1)).add(values)

    @property
    def _is_struct(self) -> bool:
        """Whether all objects have the same keys, so that Arrow adds no nulls to any of them."""
        return len(self._keys) == 1 and frozenset() not in self._keys

    def feature(self) -> Any:
        """Return the feature (a type of datasets) of the values. It is JSON if no single type holds
        all of them unchanged."""
        types = self._types - {type(None)}
        if not types:
            return Value("null")
        if types & {dict, list} and self._depth == _DEEPEST:
            return Json()
        if types == {dict} and self._is_struct:
            return {name: field.feature() for name, field in self.fields.items()}
        if types == {list}:
            assert self._items is not None
            return List(self._items.feature())
        (kind, *others) = types
        if others or kind not in _SCALARS or (kind is int and not self._fits(-(2**63), 2**63 - 1)):
            return Json()
        return Value(_SCALARS[kind])

    def stored(self) -> pa.DataType:
        """Return the Arrow type that stores the values. JSON is stored as text; but a mixture of
        integers and fractions that floats represent exactly is stored as numbers."""
        feature = self.feature()
        if isinstance(feature, dict):
            return pa.struct([pa.field(n, field.stored()) for n, field in self.fields.items()])
        if isinstance(feature, List):
            assert self._items is not None
            return pa.list_(self._items.stored())
        if isinstance(feature, Json):
            numbers = self._types - {type(None)} == {int, float}
            exact = numbers and not self._has_whole_float and self._fits(-_MOST_EXACT, _MOST_EXACT)
            return pa.float64() if exact else pa.string()
        return feature.pa_type

    def _fits(self, low: int, high: int) -> bool:
        """Return whether all integers are from `low` to `high`."""
        return low <= self._minimum and self._maximum <= high


def has_json(feature: Any) -> bool:
    """Return whether a feature contains JSON, at any depth."""
    if isinstance(feature, (dict, list)):
        return any(map(has_json, feature.values() if isinstance(feature, dict) else feature))
    if isinstance(feature, (List, LargeList)):
        return has_json(feature.feature)
    return isinstance(feature, Json)


def storage_type(kind: pa.DataType) -> pa.DataType:
    """Return the Arrow type that stores the values of another Arrow type, at every depth: text for
    UUIDs, and basic types for the views, dictionaries and run-end encodings of newer writers."""
    types = pa.types
    if isinstance(kind, pa.BaseExtensionType):
        return pa.string() if kind.extension_name == "arrow.uuid" else kind.storage_type
    if types.is_string_view(kind):
        return pa.string()
    if types.is_binary_view(kind):
        return pa.binary()
    if types.is_run_end_encoded(kind) or types.is_dictionary(kind):
        return storage_type(kind.value_type)
    if types.is_struct(kind):
        return pa.struct([pa.field(f.name, storage_type(f.type)) for f in kind])
    if types.is_list(kind) or types.is_list_view(kind):
        return pa.list_(storage_type(kind.value_type))
    if types.is_large_list(kind) or types.is_large_list_view(kind):
        return pa.large_list(storage_type(kind.value_type))
    if types.is_fixed_size_list(kind):
        return pa.list_(storage_type(kind.value_type), kind.list_size)
    return kind


def mixed_json(value: Any) -> str:
    """Return a value as the JSON text that a column of mixed types stores."""
    return json.dumps(value, separators=(",", ":"), default=str).replace("/", "\\/")


def json_encoder(feature: Any, stored: pa.DataType) -> Callable[[Any], Any] | None:
    """Return a function that converts a column's values for storage, with JSON text for values of
    mixed types. None if Arrow stores all values unchanged."""
    if isinstance(feature, Json):
        return None if pa.types.is_floating(stored) else _text_or_null
    if isinstance(feature, dict):
        by_field = {
            name: json_encoder(inner, stored.field(name).type) for name, inner in feature.items()
        }
        encoders = {name: encode for name, encode in by_field.items() if encode is not None}
        if not encoders:
            return None
        return lambda value: None if value is None else value | _encoded(value, encoders)
    if isinstance(feature, (List, LargeList)):
        encode = json_encoder(feature.feature, stored.value_type)
        if encode is None:
            return None
        return lambda value: None if value is None else list(map(encode, value))
    return None


def _encoded(value: dict[str, Any], encoders: dict[str, Callable[[Any], Any]]) -> dict[str, Any]:
    return {name: encode(value.get(name)) for name, encode in encoders.items()}


def _text_or_null(value: Any) -> str | None:
    return None if value is None else mixed_json(value)
