"""Lines of code that read a job's rows with pandas, polars, duckdb and `load_dataset`.

The data set card and the end of a job show them to users.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from batchgen.storage.shards.row_order import KEYS
from batchgen.util.paths import is_url

GRADE_KEYS = ("row_id", *KEYS)
"""Columns that rows and grades have in common."""
CARD_HEADER = """\
---
configs:
- config_name: default
  data_files:
  - split: train
    path: data/*.parquet
tags:
- batchgen
- synthetic
dataset_info:
  description: Written by batchgen ({mark}).
---
"""
"""The beginning of a README.md, for the hub and `load_dataset`. `mark` identifies the card."""


def as_cards_say(folder: str) -> str:
    """The folder in the code on a card: `.`, because the card may be moved together with its
    folder, or the folder's URL in an object store."""
    return folder if is_url(folder) else "."


def inside(folder: str, name: str) -> str:
    """The path of an entry of a folder."""
    return name if folder == "." else f"{folder.rstrip('/')}/{name}"


def how_to_read(folder: str) -> dict[str, str]:
    """A line of code for each of the common readers. A folder `.` stands for the working
    directory."""
    data = inside(folder, "data")
    named, files = in_python(folder), data
    if is_url(folder):  # polars reads no URLs of folders
        files = f"{data}/*.parquet"
    if is_url(folder) or folder == ".":  # load_dataset reads neither by its name
        named = f'"parquet", data_files={in_python(f"{data}/*.parquet")}'
    return {
        "datasets": f'load_dataset({named}, split="train")',
        "pandas": f"pd.read_parquet({in_python(data)})",
        "polars": f"pl.read_parquet({in_python(files)})",
        "duckdb": f"SELECT * FROM {_in_duckdb(data)}",
    }


def rows_with_grades(grades: Sequence[str], rows: Collection[str], folder: str) -> str:
    """A query for duckdb that returns the rows of a job with their grades, every column once.

    Args:
        grades: the columns of the grades besides the keys. A column that the rows have as well gets
            a prefix; duckdb ignores the case of names.
        rows: the columns of the rows.
    """
    taken = {name.lower() for name in (*rows, *grades)}
    chosen = []
    for name in grades:
        column = f"grades.{_quoted(name)}"
        if name.lower() in {other.lower() for other in rows}:
            other = f"grades_{name}"
            while other.lower() in taken:
                other = f"grades_{other}"
            column += f" AS {_quoted(other)}"
        chosen.append(column)
    data, grade_files = (_in_duckdb(inside(folder, name)) for name in ("data", "grades"))
    return (
        f"SELECT {', '.join(['data.*', *chosen])} FROM {data} AS data JOIN {grade_files} AS grades "
        f"USING ({', '.join(GRADE_KEYS)})"
    )


def in_python(text: str) -> str:
    """A text as a literal of Python, whose escapes are those of JSON."""
    return json.dumps(text, ensure_ascii=False)


def _in_duckdb(folder: str) -> str:
    """All Parquet files of a folder, as a table in duckdb."""
    shards = "'{}/*.parquet'".format(folder.replace("'", "''"))
    if "=" in folder:  # duckdb would read `key=value` in a path as a column
        return f"read_parquet({shards}, hive_partitioning=false)"
    return shards


def _quoted(name: str) -> str:
    """The name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'
