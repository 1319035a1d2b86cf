"""Reads JSON lines as Arrow tables in which text that looks like a date stays text."""

from __future__ import annotations

import dataclasses
import glob
import io
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.json
from datasets import Features, Value
from datasets.features import Json, LargeList, List
from datasets.packaged_modules.json.json import JsonConfig
from datasets.table import table_cast

from batchgen.tables.encodings import open_bytes

_CHUNK = 10 << 20
"""Bytes that become a table."""


def json_features(files: Sequence[Path], cache: Path) -> Features | None:
    """What the columns of files of JSON lines hold, as datasets infers it from their first rows,
    but with text where datasets takes text for a date; None if it cannot tell."""
    known = {field.name for field in dataclasses.fields(JsonConfig)}
    # Newer versions of datasets make other rows of what looks like the log of a coding agent.
    options = {"parse_agent_traces": False} if "parse_agent_traces" in known else {}
    builder = datasets.load_dataset_builder(
        "json",
        data_files=[glob.escape(str(file.absolute())) for file in files],
        cache_dir=str(cache),
        **options,
    )
    features = next(iter(builder.as_streaming_dataset().values())).features
    return None if features is None else Features(_without_dates(dict(features)))


def _without_dates(feature: Any) -> Any:
    """The feature with strings in place of dates: JSON itself has none."""
    if isinstance(feature, dict):
        return {name: _without_dates(inner) for name, inner in feature.items()}
    if isinstance(feature, (List, LargeList)):
        return type(feature)(_without_dates(feature.feature))
    if isinstance(feature, Value) and pa.types.is_temporal(feature.pa_type):
        return Value("string")
    return feature


def json_tables(file: Path, features: Features) -> Iterator[pa.Table]:
    """The rows of a file of JSON lines with these features; a row that does not fit raises
    ValueError, as pyarrow's errors are."""
    mixed = Features({name: kind for name, kind in features.items() if _has_json(kind)})
    plain = {name: _json_as_text(kind) for name, kind in features.items()}
    schema = Features(plain).arrow_schema
    with open_bytes(file) as data:
        while chunk := data.read(_CHUNK):
            chunk += data.readline()
            if mixed:
                chunk = _with_json_as_text(chunk, mixed)
            yield table_cast(_table(chunk, plain, schema), features.arrow_schema)


def _table(chunk: bytes, features: dict[str, Any], schema: pa.Schema) -> pa.Table:
    try:
        return pyarrow.json.read_json(
            io.BytesIO(chunk),
            # One block: a row must not lie in two of them.
            read_options=pyarrow.json.ReadOptions(use_threads=False, block_size=len(chunk) + 1),
            parse_options=pyarrow.json.ParseOptions(explicit_schema=schema),
        )
    except pa.ArrowInvalid:  # numbers where the first rows have text become text, as in datasets
        rows = [_fitted(row, features) for row in _rows(chunk)]
    try:
        return pa.Table.from_pylist(rows, schema=schema)
    except OverflowError as error:
        raise ValueError(str(error)) from None


def _fitted(value: Any, feature: Any) -> Any:
    """The value with texts in place of what is no text, where the feature is a string."""
    if value is None:
        return None
    if isinstance(feature, dict) and isinstance(value, dict):
        for name in value:
            if name not in feature:
                raise ValueError(f"the first rows have no {name!r}, and a later one has")
        return {name: _fitted(item, feature[name]) for name, item in value.items()}
    if isinstance(feature, (List, LargeList)) and isinstance(value, list):
        return [_fitted(item, feature.feature) for item in value]
    if feature == Value("string") and isinstance(value, (bool, int, float)):
        return json.dumps(value)
    return value


def _rows(chunk: bytes) -> Iterator[Any]:
    lines = chunk.decode("utf-8-sig").split("\n")
    return (json.loads(line) for line in lines if line.strip())


def _with_json_as_text(chunk: bytes, mixed: Features) -> bytes:
    """The lines with JSON text in place of the values of several types."""
    out = io.StringIO()
    for row in _rows(chunk):
        found = Features({name: mixed[name] for name in mixed if row.get(name) is not None})
        row |= found.encode_example({name: row[name] for name in found})
        out.write(json.dumps(row, ensure_ascii=False) + "\n")
    return out.getvalue().encode("utf-8", "surrogatepass")


def _has_json(feature: Any) -> bool:
    return bool(_json_as_text(feature) != feature)


def _json_as_text(feature: Any) -> Any:
    """The feature with strings in place of JSON of several types."""
    if isinstance(feature, dict):
        return {name: _json_as_text(inner) for name, inner in feature.items()}
    if isinstance(feature, (List, LargeList)):
        return type(feature)(_json_as_text(feature.feature))
    return Value("string") if isinstance(feature, Json) else feature
