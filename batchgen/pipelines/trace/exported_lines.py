"""Finds the rows from which a line of an exported file was made, for `batchgen trace FILE --line
N`.

Every export records how it was made: in the metadata of a Parquet file, in selection.json of a
folder, or in exports.json of a pipeline. `exported_line` makes the lines again from this record and
compares them with the line in question. A line that was edited after the export equals none of
them, so its origin is unknown.
"""

from __future__ import annotations

import gzip
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from batchgen.pipelines.publish.finished_rows import FinishedRows, open_rows, set_facts, whole_set
from batchgen.pipelines.publish.row_values import rows_where
from batchgen.pipelines.publish.trainers.export_files import JSON_NAMES
from batchgen.pipelines.publish.trainers.openai_lines import OpenAILines
from batchgen.pipelines.publish.trainers.token_rows import TOKEN_FORMATS, TokenRows
from batchgen.pipelines.publish.trainers.trainer_export import EXPORT_KEY
from batchgen.pipelines.publish.trainers.trainer_rows import ExportRequest, TrainerRows
from batchgen.pipelines.trace.traced import TracedLine
from batchgen.storage.folder.export_record import EXPORTS, ExportRecord
from batchgen.storage.folder.step_folders import find_record
from batchgen.storage.shards.checked_file import CheckedFile, read_schema
from batchgen.storage.shards.shard_files import shard_files
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url
from batchgen.util.text.row_json import json_text

_ROW, _SAMPLE, _ID = "row_id", "sample_index", "id"
_READ_BY_LINE = f"{', '.join(JSON_NAMES)} or .parquet"


@dataclass(frozen=True)
class ExportRecipe:
    """How a file was made.

    Attributes:
        of: the job or set whose rows were exported.
        to: the trainer's format; None for unchanged columns.
        options: the options of the export.
    """

    of: str
    to: str | None
    options: Mapping[str, Any] = field(default_factory=dict)

    @property
    def request(self) -> ExportRequest:
        """The request for a trainer's format."""
        names = {field.name for field in fields(ExportRequest)} - {"to"}
        assert self.to is not None
        return ExportRequest(to=self.to, **{k: v for k, v in self.options.items() if k in names})


@dataclass(frozen=True)
class Origin:
    """A row of a job or of a set.

    Attributes:
        folder: the job or set.
        row_id: the id of the row, with its adapter (see `FinishedRows.full_id`).
        sample: the number of the sample; None for a set, whose rows are single samples.
    """

    folder: str
    row_id: str
    sample: int | None


_FindOrigins = Callable[[], list[Origin]]
Line = tuple[Mapping[str, Any], _FindOrigins]
"""A line that was made again, and a function that returns the rows from which it was made."""


def exported_line(
    path: Path, user_path: str, line: int, of: str | None
) -> tuple[TracedLine, list[Origin]]:
    """Find a line of an exported file, and the rows from which it was made.

    Args:
        path: the file or folder.
        user_path: the same as the user typed it, for messages.
        line: the number of the line, from 1.
        of: the job or set from which the file was made. Needed if the file does not record it, or
            if the job has moved.

    Raises:
        ConfigError: there is no such line, or its origin is unknown.
        JobError: a file is damaged.
    """
    content = _line(path, line, user_path)
    recipe = _recipe(path)
    folder = of or (None if recipe is None else recipe.of)
    if folder is None:
        raise ConfigError(
            f"{user_path} does not say what it was made from: name the job or the set with --of OUT"
        )
    rows, text = open_rows(folder), json_text(content)
    if recipe is None:
        return TracedLine(user_path, line, content), _of_columns(rows, content, user_path, line)
    # The line with the same number is the right one. If the order has changed, the only equal line
    # is; two of them are kept, to see that there are several.
    exact, others = list[_FindOrigins](), list[_FindOrigins]()
    for number, (made_again, find_origins) in enumerate(_lines(rows, recipe, path), start=1):
        if json_text(dict(made_again)) == text:
            if number == line:
                exact = [find_origins]
                break
            others = [*others[:1], find_origins]
    matches = exact or others
    if not matches:
        raise ConfigError(
            f"{user_path}, line {line}: no row of {rows.user_path} gives this line: the file or "
            "the rows have changed since it was written"
        )
    if len(matches) > 1:
        raise ConfigError(
            f"{user_path}, line {line}: several rows of {rows.user_path} give this line, and the "
            "order of the file has changed since it was written, so the right one is unknown"
        )
    (find_origins,) = matches
    return TracedLine(user_path, line, content), find_origins()


def _line(path: Path, line: int, user_path: str) -> dict[str, Any]:
    """Return the content of a line of a file, or of a row in a folder's shards."""
    if line < 1:
        raise ConfigError(f"--line {line}: lines are counted from 1")
    before = min(line - 1, sys.maxsize)  # `islice` takes no larger number
    lines: Iterator[dict[str, Any]]
    if path.is_dir():
        whole_set(path, user_path)
        lines = islice(_rows_of(list(shard_files(path / "data").values())), before, None)
    elif path.name.endswith(".parquet"):
        lines = islice(_rows_of([path]), before, None)
    elif path.name.endswith(JSON_NAMES):
        opener: Any = gzip.open if path.suffix == ".gz" else open
        with opener(path, "rt", encoding="utf-8") as file:
            text = next(islice(file, before, None), None)
        try:
            content = None if text is None else json.loads(text)
        except ValueError as error:
            raise ConfigError(f"{user_path}, line {line} is not JSON: {error}") from None
        lines = iter([content] if isinstance(content, dict) else [])
    else:
        raise ConfigError(f"{user_path}: lines are read from {_READ_BY_LINE}")
    line_content = next(lines, None)
    if line_content is None:
        raise ConfigError(f"{user_path} has no line {line} with an object")
    return line_content


def _rows_of(files: Sequence[Path]) -> Iterator[dict[str, Any]]:
    for file in files:
        with CheckedFile(file) as rows:
            for batch in rows.batches(256):
                yield from batch.to_pylist()


def _recipe(path: Path) -> ExportRecipe | None:
    """Return how a file or folder was made, according to its record; None without a record."""
    if path.is_dir():
        facts = set_facts(path)
        of = [one["path"] for one in facts["jobs"]]
        return ExportRecipe(of[0], facts["kind"], facts["asked"]) if len(of) == 1 else None
    if path.name.endswith(".parquet"):
        stored = (read_schema(path).metadata or {}).get(EXPORT_KEY)
        if stored is not None:
            values = json.loads(stored)
            return ExportRecipe(values["of"], values["asked"]["to"], values["asked"])
    out = path.resolve().parent.parent
    if path.resolve().parent.name != EXPORTS or find_record(str(out)) is None:
        return None
    known = ExportRecord.read(path.resolve().parent).exports.get(path.name)
    if known is None or not known.of:
        return None
    settings = known.settings
    return ExportRecipe(str(out / known.of), settings["to"], settings["options"])


def _lines(rows: FinishedRows, recipe: ExportRecipe, path: Path) -> Iterator[Line]:
    """Make the lines of an export again."""
    where = recipe.options.get("where")
    if recipe.to is None:
        names = recipe.options.get("columns") or rows.schema.names
        for row in rows_where(rows, where, list(dict.fromkeys([*names, *_keys(rows)]))):
            yield {name: row[name] for name in names}, _origins(rows, row)
        return
    if recipe.to == "openai":
        for line in OpenAILines(rows, where, recipe.options.get("reasoning")):
            yield line, _origins(rows, {_ROW: line["custom_id"], _SAMPLE: None})
        return
    request = recipe.request
    lines = TokenRows(rows, request) if request.to in TOKEN_FORMATS else TrainerRows(rows, request)
    is_json = path.name.endswith(JSON_NAMES)
    for exported in lines:
        # A Parquet file returns values with the types of its schema.
        table = None if is_json else pa.Table.from_pylist([exported], schema=lines.schema)
        addresses = list(lines.made_of)
        yield exported if table is None else table.to_pylist()[0], partial(_at, rows, addresses)


def _of_columns(
    rows: FinishedRows, content: Mapping[str, Any], user_path: str, line: int
) -> list[Origin]:
    """Find the row whose columns equal a line. The line must contain the row's id.

    Raises:
        ConfigError: the line has no id or other columns, or not exactly one row equals it.
    """
    key = _ID if rows.is_set else _ROW
    if key not in content or not set(content) <= {*rows.columns.names}:
        raise ConfigError(
            f"{user_path} does not say how it was made, and its lines are not rows of "
            f"{rows.user_path} with their {key}: export a .parquet file or a folder, or export "
            "in a pipeline, which all record it"
        )
    text = json_text(content)
    origins = [
        row
        for row in rows_where(rows, None, list(dict.fromkeys([*content, *_keys(rows)])))
        if row[key] == content[key] and json_text({name: row[name] for name in content}) == text
    ]
    if len(origins) != 1:
        what = "no row" if not origins else f"{len(origins)} samples"
        raise ConfigError(
            f"{user_path}, line {line}: {what} of {rows.user_path} with the {key} "
            f"{content[key]!r} {'have' if origins else 'has'} the values of the line, so the "
            "right one is unknown"
        )
    return _origins(rows, origins[0])()


def _origins(rows: FinishedRows, row: Mapping[str, Any]) -> Callable[[], list[Origin]]:
    """Return a function that returns the origin of a row, given the row's columns."""
    if rows.is_set:
        return lambda: [Origin(rows.user_path, rows.full_id(row), None)]
    return lambda: [Origin(rows.user_path, rows.full_id(row), row[_SAMPLE])]


def _keys(rows: FinishedRows) -> list[str]:
    """The columns that identify a row."""
    return [*([_ID] if rows.is_set else [_ROW, _SAMPLE]), *filter(None, [rows.grid_column])]


def _at(rows: FinishedRows, addresses: Sequence[tuple[int, int]]) -> list[Origin]:
    """Return the rows at these (shard, position) addresses."""
    origins = []
    names = _keys(rows)
    for shard, index in addresses:
        for table, _ in rows.tables(shard, names, indices=np.array([index])):
            origins += _origins(rows, table.select(names).to_pylist()[0])()
    return origins


def is_exported(path: Path, user_path: str) -> bool:
    """Whether a path is a file, or a folder that was exported for a trainer."""
    if is_url(user_path):
        return False
    if path.is_file():
        return True
    return (path / "selection.json").is_file() and set_facts(path)["kind"] != "rows"
