"""Finds the rows that a line of an exported file was made of."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import yaml

from batchgen.leases.own_files import refuse_links
from batchgen.pipelines.record.pipeline_record import PIPELINE_FILE
from batchgen.pipelines.record.step_folders import find_record
from batchgen.publish.finished_rows import FinishedRows, open_rows, set_facts
from batchgen.publish.row_values import rows_where
from batchgen.publish.trainers.export_files import JSON_NAMES
from batchgen.publish.trainers.token_rows import TOKEN_FORMATS, TokenRows
from batchgen.publish.trainers.trainer_export import TOLD
from batchgen.publish.trainers.trainer_rows import Asked, TrainerRows
from batchgen.shards.shard_files import shard_files
from batchgen.trace.traced import TracedLine
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

_ROW, _SAMPLE = "row_id", "sample_index"
_TEXTS = ("chosen", "rejected", "completion", "response", "text")
_READ_BY_LINE = f"{', '.join(JSON_NAMES)} or .parquet"


@dataclass(frozen=True)
class Made:
    """What a file was made of: a job or a set, and the options of the export, if they are known."""

    of: str | None
    asked: Asked | None
    plain: Mapping[str, Any] | None = None  # an export of columns as they are


@dataclass(frozen=True)
class Origin:
    """A row of a job or of a set; a set's rows have no sample."""

    folder: str
    row_id: str
    sample: int | None


def exported_line(
    path: Path, given: str, line: int, of: str | None
) -> tuple[TracedLine, list[Origin]]:
    """A line of an exported file, counted from 1, and the rows that it was made of.

    Args:
        of: the job or set that the file was made of, where it does not say that itself.

    Raises:
        ConfigError: there is no such line, or it cannot be told what it was made of.
    """
    content = _line(path, line, given)
    made = _made(path)
    folder = of or made.of
    if folder is None:
        raise ConfigError(
            f"{given} does not say what it was made of: name the job or the set with --of OUT"
        )
    rows = open_rows(folder)
    if made.asked is not None and made.asked.to != "openai":
        places = _places(rows, made.asked, line, given)
    else:
        found = _by_id(rows, content) or (
            [] if made.plain is None else _by_order(rows, made.plain, line)
        )
        if found:
            return TracedLine(given, line, content), found
        places = _by_texts(rows, content, given)
    return TracedLine(given, line, content), [_origin(rows, folder, place) for place in places]


def _line(path: Path, line: int, given: str) -> dict[str, Any]:
    """The content of a line of a file, or of a row of a folder's shards."""
    if line < 1:
        raise ConfigError(f"--line {line}: lines are counted from 1")
    found: Iterator[dict[str, Any]]
    if path.is_dir():
        refuse_links(path)
        found = islice(_rows_of(list(shard_files(path / "data").values())), line - 1, None)
    elif path.name.endswith(".parquet"):
        found = islice(_rows_of([path]), line - 1, None)
    elif path.name.endswith(JSON_NAMES):
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            text = next(islice(file, line - 1, None), None)
        try:
            content = None if text is None else json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{given}, line {line} is not JSON: {error}") from None
        found = iter([content] if isinstance(content, dict) else [])
    else:
        raise ConfigError(f"{given}: lines of files are read of {_READ_BY_LINE}")
    one = next(found, None)
    if one is None:
        raise ConfigError(f"{given} has no line {line} with an object")
    return one


def _rows_of(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        for batch in pq.ParquetFile(file).iter_batches(256):
            yield from batch.to_pylist()


def _made(path: Path) -> Made:
    """What a file or folder says of how it was made, or what the pipeline says that wrote it."""
    if path.is_dir():
        facts = set_facts(path)
        of = [one["path"] for one in facts["jobs"]]
        return Made(
            of[0] if len(of) == 1 else None, _asked({"to": facts["kind"], **facts["asked"]})
        )
    if path.name.endswith(".parquet"):
        told = (pq.read_schema(path).metadata or {}).get(TOLD)
        if told is not None:
            values = json.loads(told)
            return Made(values["of"], _asked(values["asked"]))
    return _of_pipeline(path)


def _of_pipeline(path: Path) -> Made:
    """What the pipeline says in whose folder a file is."""
    out = path.resolve().parent.parent
    file = out / PIPELINE_FILE
    record = find_record(str(out)) if file.is_file() else None
    if record is None:
        return Made(None, None)
    exports = yaml.safe_load(file.read_text(encoding="utf-8")).get("export") or []
    for one in exports:
        if (
            isinstance(one, dict)
            and one.get("out") == path.name
            and one.get("from") in record.current
        ):
            options = {key: value for key, value in one.items() if key not in ("from", "out", "to")}
            of = str(out / record.current[one["from"]])
            if one.get("to") is None:
                return Made(of, None, options)
            return Made(of, _asked({"to": one["to"], **options}))
    return Made(None, None)


def _asked(values: Mapping[str, Any]) -> Asked:
    known = {field.name for field in fields(Asked)}
    return Asked(**{key: value for key, value in values.items() if key in known})


def _places(rows: FinishedRows, asked: Asked, line: int, given: str) -> list[tuple[int, int]]:
    """The places of the rows that a line was made of, found by making the lines again."""
    made = TokenRows(rows, asked) if asked.to in TOKEN_FORMATS else TrainerRows(rows, asked)
    for _ in islice(made, line - 1, line):
        return made.made_of
    raise ConfigError(f"{given}: {rows.given} gives fewer lines now: it has changed since")


def _by_id(rows: FinishedRows, content: Mapping[str, Any]) -> list[Origin]:
    """The row that a line names."""
    if rows.is_set:
        found = content.get("id")
        return [Origin(rows.given, found, None)] if isinstance(found, str) else []
    row_id, sample = content.get(_ROW, content.get("custom_id")), content.get(_SAMPLE)
    if not isinstance(row_id, str):
        return []
    return [Origin(rows.given, row_id, sample if isinstance(sample, int) else None)]


def _by_order(rows: FinishedRows, options: Mapping[str, Any], line: int) -> list[Origin]:
    """The row of a line of columns as they are, which stand in the order of the rows."""
    names = ["id"] if rows.is_set else [_ROW, _SAMPLE]
    for row in islice(rows_where(rows, options.get("where"), names), line - 1, line):
        if rows.is_set:
            return [Origin(rows.given, row["id"], None)]
        return [Origin(rows.given, row[_ROW], row[_SAMPLE])]
    return []


def _by_texts(rows: FinishedRows, content: Mapping[str, Any], given: str) -> list[tuple[int, int]]:
    """The places of rows that have the answers of a line in one of their texts, those that have
    most of its other texts."""
    answers, others = _answers(content), set(_texts_in(content))
    best: dict[str, tuple[int, list[tuple[int, int]]]] = {}
    for row in rows.rows(rows.columns.named(rows.columns.names)):
        texts = {value for value in row.variables.values() if isinstance(value, str)}
        for answer in answers & texts:
            score = len(others & texts)
            known = best.setdefault(answer, (score, []))
            if score > known[0]:
                best[answer] = known = score, []
            if score == known[0]:
                known[1].append((row.shard, row.place))
    if not best:
        raise ConfigError(f"{given}: no row of {rows.given} has the answer of this line")
    return sorted({place for _, places in best.values() for place in places})


def _answers(content: Mapping[str, Any]) -> set[str]:
    """The texts of a line that a model has written."""
    found = {content[name] for name in _TEXTS if isinstance(content.get(name), str)}
    for name in ("messages", *_TEXTS):
        value = content.get(name)
        messages = value if isinstance(value, list) else []
        said = [m for m in messages if isinstance(m, dict) and m.get("role") == "assistant"]
        found |= {m["content"] for m in said[-1:] if isinstance(m.get("content"), str)}
    return found


def _texts_in(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping | list):
        for item in value.values() if isinstance(value, Mapping) else value:
            yield from _texts_in(item)


def _origin(rows: FinishedRows, folder: str, place: tuple[int, int]) -> Origin:
    shard, at = place
    names = ["id"] if rows.is_set else [_ROW, _SAMPLE]
    for table, _ in rows.tables(shard, names, places=np.array([at])):
        (row,) = table.select(names).to_pylist()
        if rows.is_set:
            return Origin(folder, row["id"], None)
        return Origin(folder, row[_ROW], row[_SAMPLE])
    raise AssertionError("a row that was read just now is there")


def is_exported(path: Path, given: str) -> bool:
    """Whether a path is a file, or the folder of an export for a trainer."""
    if is_url(given):
        return False
    if path.is_file():
        return True
    return (path / "selection.json").is_file() and set_facts(path)["kind"] != "rows"
