"""Writes the README.md of a job's folder: a data set card for the hub and for `load_dataset`.

A running job gets `unfinished_card`, a complete one `dataset_card`; grading adds a section.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import pyarrow as pa

from batchgen.config.groups.dataset_config import dataset_name
from batchgen.config.groups.model_sampling import sampling_text
from batchgen.storage.folder.how_to_read import (
    CARD_HEADER,
    GRADE_KEYS,
    as_cards_say,
    how_to_read,
    in_python,
    inside,
    rows_with_grades,
)
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.storage.metrics.tally import OUTCOMES, Totals
from batchgen.util.text.text_table import answers_text

_MOST_SHOWN = 500  # characters of a constraint
_IN_TABLE = (b"meaning", b"scope", b"dtype", b"shape")
"""Keys of a field's metadata that the table of columns already shows."""
_GRADES = "## Grades"
_HOW_TO_READ = "## How to read it"
_MADE_FROM = """\
## How it was made

`config.yaml` is the configuration that the job ran with, key by key. `manifest.json` has the \
fingerprints of its model and data set and the versions of the packages.

Whoever made these files can make them again. Run this in the folder where the job was started, \
because paths in the configuration may be relative to it, and with the absolute path of this folder:

```
batchgen /path/of/this/folder/config.yaml output.dir=again
```

A configuration is as powerful as a program: it says which files and models are read and where the \
output goes, and it can name Python code to run. If you did not write `config.yaml` yourself, do \
not run it as it is: read it, and copy what you need into a configuration of your own.
"""
_UNFINISHED = """\
# Answers that batchgen is writing

This job is not complete. Finished rows appear in `data/` shard by shard. Until the first shard is
there, `load_dataset` finds no data files; later it returns the shards that existed when it first
looked. `batchgen show {folder}` shows all finished rows at any time, and the command that started
the job resumes it.

"""


def _header() -> str:
    """The YAML at the beginning of a card, with a random mark.

    `load_dataset` caches rows under the name of the folder and this header. With equal headers it
    would return the rows of another job in a folder of the same name, or the rows from before the
    job grew.
    """
    return CARD_HEADER.format(mark=secrets.token_hex(8))


def unfinished_card(folder: str) -> str:
    """The card of a job that is still running. Its header makes `load_dataset` read only the
    shards, and not the folder's JSON files."""
    return "\n".join([_header(), _UNFINISHED.format(folder=folder) + _reading(folder), ""])


def _reading(folder: str) -> str:
    """The section on how to read the rows."""
    card_path = as_cards_say(folder)
    lines = [f"- {name}: `{line}`" for name, line in how_to_read(card_path).items()]
    where = ["In this folder:", ""] if card_path == "." else []
    return "\n".join([_HOW_TO_READ, "", *where, *lines])


def dataset_card(
    job: JobSummary,
    fingerprints: Mapping[str, str],
    schema: pa.Schema,
    folder: str,
    funnel: Sequence[tuple[str, int]] = (),
) -> str:
    """The card of a complete job."""
    model, dataset, totals = job.group("model"), job.group("dataset"), job.totals
    is_named = dataset.get("path") or dataset.get("kind") == "count"
    source = dataset_name(dataset) if is_named else "the demo rows of batchgen"
    revision = f", revision `{model['revision']}`" if model.get("revision") else ""
    split = f", split `{dataset['split']}`" if dataset.get("split") else ""
    facts = [
        *_rows(totals, job.questions),
        f"Model: `{model['path']}`{revision}",
        f"Dataset: `{source}`{split}",
        *(f"`{choice}`: {rows:,}" for choice, rows in funnel),
        *_steps(job),
        *_constraint(job.group("constraint"), totals),
        *(() if job.cost is None else [f"Time of the device: {job.cost}"]),
        f"Sampling: {', '.join(_assignments(job.group('sampling')))}",
        *_recommended(job.sampling),
        *(f"Fingerprint of {what}: `{digest}`" for what, digest in fingerprints.items()),
    ]
    columns = [
        (f"`{field.name}`", f"`{field.type}`", _meta(field, "shape"), _meta(field, "meaning"))
        for field in schema
    ]
    return "\n".join(
        [
            _header(),
            f"# Answers of {job.model_name} to {source}",
            "",
            "Written by batchgen: one row per input row and sample, in the order of the input.",
            "",
            *(f"- {fact}" for fact in facts),
            "",
            "## Columns",
            "",
            *_table(("column", "type", "shape", "meaning"), columns),
            "",
            *_more(schema),
            _reading(folder),
            "",
            _MADE_FROM,
        ]
    )


def _recommended(sampling: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """The sampling options that the model recommends, compared with those of the job."""
    if all(values["model"] is None for values in sampling.values()):
        return []
    return [f"Compared with what the model recommends: {sampling_text(sampling)}"]


def grades_section(schema: pa.Schema, rows: Collection[str], folder: str) -> str:
    """The section on the files in `grades`.

    Args:
        schema: the columns of the grades.
        rows: the names of the columns in `data`.
        folder: what people call the job's folder.
    """
    fields = [field for field in schema if field.name not in GRADE_KEYS]
    card_path, keys = as_cards_say(folder), ", ".join(f'"{key}"' for key in GRADE_KEYS)
    rows_at, grades_at = (in_python(inside(card_path, name)) for name in ("data", "grades"))
    columns = [(f"`{f.name}`", f"`{f.type}`", _meta(f, "meaning")) for f in fields]
    return "\n".join(
        [
            _GRADES,
            "",
            "`grades/` has a row for each row of `data/`, in the same order and in files of the "
            "same names; the metadata of each file (`batchgen.steps`) say which steps made it. "
            "Rows and grades belong together by `row_id` and `sample_index`. By pandas and duckdb:",
            "",
            "```python",
            f"rows, grades = pd.read_parquet({rows_at}), pd.read_parquet({grades_at})",
            f'both = rows.merge(grades, on=[{keys}], suffixes=("", "_of_grades"))',
            "```",
            "",
            "```sql",
            rows_with_grades([field.name for field in fields], rows, card_path),
            "```",
            "",
            *_table(("column", "type", "meaning"), columns),
            "",
            "",
        ]
    )


def with_grade_section(card: str, section: str) -> str:
    """Replace the section on grades of a card by this one, or add it."""
    before, _, after = card.partition(_HOW_TO_READ)
    return before.partition(_GRADES)[0] + section + _HOW_TO_READ + after


def _table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table in Markdown."""
    line = "|" + "---|" * len(header)
    return [f"| {' | '.join(header)} |", line, *(f"| {' | '.join(row)} |" for row in rows)]


def _rows(totals: Totals, questions: int | None) -> list[str]:
    """The number of answers and tokens, and how the answers ended."""
    reasons = ", ".join(f"{n:,} {reason}" for reason, n in totals.finish_reasons.items())
    facts = [
        f"{answers_text(questions, totals.rows)}: {reasons or 'none'}.",
        f"{totals.prompt_tokens:,} prompt tokens, {totals.generated_tokens:,} generated tokens.",
    ]
    if totals.errors:
        kinds = ", ".join(f"{n:,} {kind}" for kind, n in totals.errors.items())
        facts.append(f"{totals.error_rows:,} answers have an `error` and no text: {kinds}.")
    return facts


def _steps(job: JobSummary) -> list[str]:
    """The number of rows that each of the job's row steps left."""
    facts = job.row_facts
    if facts is None:
        return []
    return [
        f"Steps of rows: {facts.funnel}. `rows/` says where each row comes from, and which rows "
        "were taken out at which step and why."
    ]


def _assignments(values: Mapping[str, Any]) -> list[str]:
    return [f"`{key}={json.dumps(value, ensure_ascii=False)}`" for key, value in values.items()]


def _constraint(constraint: Mapping[str, Any], totals: Totals) -> list[str]:
    """The constraint of the rows, and how many answers satisfied it."""
    if not totals.constraint:
        return []
    options = {key: value for key, value in constraint.items() if value and key != "kind"}
    text = json.dumps(options, ensure_ascii=False)
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
    """The metadata of columns that the table does not show."""
    lines = []
    for field in schema:
        metadata = (field.metadata or {}).items()
        more = [(key.decode(), value.decode()) for key, value in metadata if key not in _IN_TABLE]
        if _meta(field, "scope") and more:
            lines += [f"`{field.name}`:", "", *(f"- {key}: {value}" for key, value in more), ""]
    return lines


def _meta(field: pa.Field, key: str) -> str:
    """A value of a field's metadata; empty if it is missing."""
    value: bytes = (field.metadata or {}).get(key.encode(), b"")
    return value.decode()
