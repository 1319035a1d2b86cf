"""Recognises the formats of local files, and finds the line at which a file violates its format."""

from __future__ import annotations

import json
from codecs import BOM_UTF8
from pathlib import Path
from typing import Any

from batchgen.engine.constraint.json_schema.json_text import first_repeated
from batchgen.inputs.tables.encodings import open_bytes
from batchgen.util.errors import ConfigError
from batchgen.util.temporary import temporary_name

FORMATS = {
    ".jsonl": "json",
    ".json": "json",
    ".csv": "csv",
    ".tsv": "tsv",
    ".txt": "txt",
    ".parquet": "parquet",
    ".arrow": "arrow",
}
"""The format of a file, by the end of its name."""
SUPPORTED = ", ".join(FORMATS)
"""The ends of supported files' names, for messages."""
TEXT_FORMATS = ("json", "csv", "tsv", "txt")
"""The text formats, whose files may be compressed (.gz) and may have an encoding other than
UTF-8."""


MOST_COLUMNS = 10_000
"""The maximum number of columns of a data set."""


def table_format(file: Path) -> str | None:
    """Return the format of a file by its name; None if it is unknown."""
    name = file.name.removesuffix(".gz")
    kind = FORMATS.get(Path(name).suffix)
    return None if name != file.name and kind not in TEXT_FORMATS else kind


def root_cause(error: BaseException) -> BaseException:
    """Return the innermost of the errors that caused this one."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def reason(error: BaseException) -> str:
    """Return the type and the message of the innermost error, as one line."""
    error = root_cause(error)
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text[:500]}" if text else type(error).__name__


def json_list_as_lines(file: Path, folder: Path, number: int) -> Path | None:
    """Rewrite a file that is one JSON list as a file with one row per line. Returns None if the
    file is no list.

    datasets can read such a list, but keeps only ten decimals of its numbers.

    Args:
        folder: where the new file is written, unless it exists.
        number: part of the new file's name.

    Raises:
        ConfigError: the list cannot be read, is empty, or has an item that is no object.
    """
    with open_bytes(file) as data:
        if not data.read(1024).removeprefix(BOM_UTF8).lstrip().startswith(b"["):
            return None
        data.seek(0)
        try:
            rows = json.loads(data.read().decode("utf-8-sig"))
        except (ValueError, RecursionError) as error:
            raise ConfigError(f"dataset.path: {file} is not a JSON list: {error}") from None
    if not all(isinstance(row, dict) for row in rows):
        raise ConfigError(f"dataset.path: {file}: all rows must be JSON objects {{…}}")
    if not rows:
        raise ConfigError(f"dataset.path: {file} is empty")
    folder.mkdir(parents=True, exist_ok=True)
    lines = folder / f"list-{number:05}.jsonl"
    if not lines.exists():
        part = temporary_name(lines)
        with part.open("w", encoding="utf-8") as out:
            out.writelines(json.dumps(row) + "\n" for row in rows)  # ASCII, for lone surrogates
        part.replace(lines)
    return lines


def is_json_lines(file: Path) -> bool | None:
    """Return whether the first row of a JSON file is an object on one line; None if there is no
    row."""
    with open_bytes(file) as lines:
        first = next((line for line in lines if line.removeprefix(BOM_UTF8).strip()), None)
    if first is None:
        return None
    try:
        row = json.loads(first.decode("utf-8-sig"))
    except ValueError:
        return False
    except RecursionError:
        raise ConfigError(f"dataset.path: {file}: its first row is nested too deeply") from None
    if isinstance(row, dict):
        check_width(len(row), file)
    return isinstance(row, dict)


def check_width(columns: int, file: Path | str) -> None:
    """Raise ConfigError for too many columns, because much takes time quadratic in their number."""
    if columns > MOST_COLUMNS:
        raise ConfigError(
            f"dataset.path: {file} has {columns:,} columns, and at most {MOST_COLUMNS:,} can be "
            "read: drop those that no prompt needs, or put them into one as a list"
        )


def checked_row(text: str) -> Any:
    """Parse a line of JSON. Raises ValueError if it is no object, or if an object in it has a key
    twice."""
    row = json.loads(text, object_pairs_hook=unique_members)
    if not isinstance(row, dict):
        raise ValueError("a row must be a JSON object {…}")
    return row


def unique_members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Make a JSON object of its keys and values. Raises ValueError if a key occurs twice."""
    members = dict(pairs)
    if len(members) < len(pairs):
        twice = first_repeated(name for name, _ in pairs)
        raise ValueError(f"the key {twice!r:.100} appears twice in one object")
    return members


def first_bad_line(file: Path) -> str | None:
    """Return a message about the first invalid line of a file of JSON lines; None if all lines are
    JSON objects, or the file is one value over many lines."""
    number = 0
    try:
        with open_bytes(file) as lines:
            for number, line in enumerate(lines, 1):
                text = (
                    line.removeprefix(BOM_UTF8).decode().strip() if number == 1 else line.decode()
                )
                if number == 1 and (text.startswith("[") or text == "{"):
                    return None  # the file is one value over many lines
                if text.strip():
                    checked_row(text)
    except UnicodeDecodeError as error:
        return (
            f"{file}, line {number}: not UTF-8: {error.reason} at byte {error.start}: set "
            "dataset.encoding if the file has another encoding"
        )
    except json.JSONDecodeError as error:
        return f"{file}, line {number}: not JSON: {error.msg} at column {error.colno}"
    except ValueError as error:
        return f"{file}, line {number}: {error}"
    except RecursionError:
        return f"{file}, line {number}: nested too deeply"
    except (OSError, EOFError) as error:
        return f"{file}: {reason(error)}"
    return f"{file} is empty" if number == 0 else None
