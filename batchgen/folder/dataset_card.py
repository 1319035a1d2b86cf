"""The README.md of an output folder: a data set card, which the hub and `load_dataset` read."""

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchgen.folder.job_metrics import OUTCOMES, Totals
from batchgen.shards.row_order import KEYS
from batchgen.util.paths import is_url

_MOST_SHOWN = 500
_GRADE_KEYS = ("row_id", *KEYS)
"""Columns that rows and grades have in common."""
_IN_TABLE = (b"meaning", b"scope", b"dtype", b"shape")
"""Keys of a field's metadata that the table of columns shows, or that its type says."""
_HEADER = """\
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


_MADE_FROM = """\
## How it was made

`config.yaml` is the configuration that the job ran with, key by key. `manifest.json` has the \
fingerprints of its model and data set and the versions of the packages.

Whoever made these files can make them again. This is run where the job was started, because paths \
in the configuration may be relative to that place, and with the absolute path of this folder:

```
batchgen /path/of/this/folder/config.yaml output.dir=again
```

A configuration is as powerful as a program: it says which files and models are read and where the \
output goes, and it can name Python code to run. If you did not write `config.yaml` yourself, do \
not run it as it is: read it, and put what you need of it into a configuration of your own.
"""


_UNFINISHED = """\
# Answers that batchgen is writing

This job is not complete. The rows that are finished come into `data/` shard by shard; until the
first shard is there, `load_dataset` says that it finds no data files, and later it gives the shards
that were there when it first looked. `batchgen show {folder}` shows all finished rows at any time,
and the command that started the job goes on with it.

"""


def how_to_read(folder: str) -> dict[str, str]:
    """For each of the common readers the line that reads the rows of a job's folder."""
    data = f"{folder.rstrip('/')}/data"
    named, files = f'"{folder}"', data
    if is_url(folder):  # load_dataset and polars take URLs of files only
        files = f"{data}/*.parquet"
        named = f'"parquet", data_files="{files}"'
    return {
        "datasets": f'load_dataset({named}, split="train")',
        "pandas": f'pd.read_parquet("{data}")',
        "polars": f'pl.read_parquet("{files}")',
        "duckdb": f"SELECT * FROM {_in_duckdb(data)}",
    }


def _in_duckdb(folder: str) -> str:
    """All Parquet files of a folder, as a table in duckdb."""
    shards = "'{}/*.parquet'".format(folder.replace("'", "''"))
    if "=" in folder:  # duckdb takes such folders for columns
        return f"read_parquet({shards}, hive_partitioning=false)"
    return shards


def _header() -> str:
    """The YAML at the beginning of a card, with a mark that no other has.

    `load_dataset` keeps the rows that it has read, and finds them again by the name of the folder
    and by this header, without a look at the files. With equal headers it would give the rows of
    another job whose folder has the same name, or those that were there before the job grew.
    """
    return _HEADER.format(mark=secrets.token_hex(8))


def unfinished_card(folder: str) -> str:
    """The card of a job that is not complete.

    With it `load_dataset` looks for shards alone; else it would take the JSON files for data.
    """
    text = _UNFINISHED.format(folder=folder)
    return "\n".join([_header(), text + "\n".join(_reading(folder)), ""])


def _reading(folder: str) -> list[str]:
    lines = [f"- {name}: `{line}`" for name, line in how_to_read(folder).items()]
    return [_HOW_TO_READ, "", *lines]


def dataset_card(
    config: Mapping[str, Mapping[str, Any]],
    fingerprints: Mapping[str, str],
    schema: pa.Schema,
    totals: Totals,
    folder: str,
) -> str:
    """The text of the card of a complete job.

    Args:
        folder: the path of the job's folder.
        config: the resolved configuration, by group.
        fingerprints: of the data set, the model and what else decides the answers, by name.
        schema: of the shards.
    """
    model, dataset = config["model"], config["dataset"]
    source = dataset.get("path") or "the demo rows of batchgen"
    columns = [
        f"| `{field.name}` | `{field.type}` | {_meta(field, 'shape')} | {_meta(field, 'meaning')} |"
        for field in schema
    ]
    facts = [
        *_rows(totals),
        f"Model: `{model['path']}`"
        + (f", revision `{model['revision']}`" if model.get("revision") else ""),
        f"Dataset: `{source}`" + (f", split `{dataset['split']}`" if dataset.get("split") else ""),
        *_constraint(config["constraint"], totals),
        f"Sampling: {', '.join(_assignments(config['sampling']))}",
        *(f"Fingerprint of {what}: `{digest}`" for what, digest in fingerprints.items()),
    ]
    return "\n".join(
        [
            _header(),
            f"# Answers of {model.get('name') or model['path']} to {source}",
            "",
            "Written by batchgen: one row per input row and sample, in the order of the input.",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            "## Columns",
            "",
            "| column | type | shape | meaning |",
            "|---|---|---|---|",
            *columns,
            "",
            *_more(schema),
            *_reading(folder),
            "",
            _MADE_FROM,
        ]
    )


_GRADES = "## Grades"
_HOW_TO_READ = "## How to read it"


def grades_section(schema: pa.Schema, rows: Collection[str], folder: str) -> str:
    """What a card says of the files in `grades`.

    Args:
        schema: of these files.
        rows: the names of the columns of `data`.
        folder: the path of the job's folder.
    """
    made = [field for field in schema if field.name not in _GRADE_KEYS]
    columns = [f"| `{f.name}` | `{f.type}` | {_meta(f, 'meaning')} |" for f in made]
    return "\n".join(
        [
            _GRADES,
            "",
            "`grades/` has a row for each row of `data/`, in the same order and in files of the "
            "same names; the metadata of each file (`batchgen.steps`) say which steps made it. "
            "Rows and grades belong together by `row_id` and `sample_index`. In duckdb:",
            "",
            "```sql",
            rows_with_grades([field.name for field in made], rows, folder),
            "```",
            "",
            "| column | type | meaning |",
            "|---|---|---|",
            *columns,
            "",
            "",
        ]
    )


def rows_with_grades(grades: Sequence[str], rows: Collection[str], folder: str) -> str:
    """A query for duckdb that gives the rows of a job with their grades, every column once.

    Args:
        grades: the columns of the grades besides the keys. One whose name a column of the rows has,
            too, gets a prefix; duckdb takes small and capital letters for the same.
        rows: the columns of the rows.
        folder: the path of the job's folder.
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
    data, made = (_in_duckdb(f"{folder.rstrip('/')}/{name}") for name in ("data", "grades"))
    return (
        f"SELECT {', '.join(['data.*', *chosen])} FROM {data} AS data JOIN {made} AS grades "
        f"USING ({', '.join(_GRADE_KEYS)})"
    )


def _quoted(name: str) -> str:
    """The name of a column in SQL."""
    return '"' + name.replace('"', '""') + '"'


def with_grades(card: str, section: str) -> str:
    """A card with this section about grades, in the place of one that it may have."""
    before, _, after = card.partition(_HOW_TO_READ)
    return before.partition(_GRADES)[0] + section + _HOW_TO_READ + after


def _rows(totals: Totals) -> list[str]:
    """How many rows and tokens there are, and how the rows ended."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in totals.finish_reasons.items())
    facts = [
        f"{totals.rows:,} rows: {reasons or 'none'}.",
        f"{totals.prompt_tokens:,} prompt tokens, {totals.generated_tokens:,} generated tokens.",
    ]
    if totals.errors:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in totals.errors.items())
        facts.append(f"{totals.error_rows:,} rows have an `error` and no text: {kinds}.")
    return facts


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"`{key}={json.dumps(value, ensure_ascii=False)}`" for key, value in values.items()]


def _constraint(constraint: Mapping[str, Any], totals: Totals) -> list[str]:
    """Which constraint the rows had, and how many kept it; nothing for a job without one."""
    if not totals.constraint:
        return []
    given = {key: value for key, value in constraint.items() if value and key != "kind"}
    text = json.dumps(given, ensure_ascii=False)
    what = f"`{text}`" if len(text) <= _MOST_SHOWN and "`" not in text else "see `config.yaml`"
    counts = ", ".join(
        f"{totals.constraint[name]:,} {name} ({meaning})"
        for name, meaning in OUTCOMES.items()
        if totals.constraint[name]
    )
    return [
        f"Constraint: {constraint['kind']}, {what}",
        f"Rows by constraint: {counts or 'none'}. `batchgen validate FOLDER` checks them again.",
    ]


def _more(schema: pa.Schema) -> list[str]:
    """What columns say of themselves besides what stands in the table."""
    lines = []
    for field in schema:
        given = (field.metadata or {}).items()
        more = [(key.decode(), value.decode()) for key, value in given if key not in _IN_TABLE]
        if _meta(field, "scope") and more:
            lines += [f"`{field.name}`:", "", *(f"- {key}: {value}" for key, value in more), ""]
    return lines


def _meta(field: pa.Field, key: str) -> str:
    value: bytes = (field.metadata or {}).get(key.encode(), b"")
    return value.decode()
