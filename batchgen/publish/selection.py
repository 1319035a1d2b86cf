"""A new set of rows out of complete jobs: `batchgen select`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.folder.how_to_read import how_to_read
from batchgen.publish.chosen_rows import Choice, Funnel, choose
from batchgen.publish.data_folder import column_lines, is_there, request_digest, write_folder
from batchgen.publish.finished_rows import SET_FORMAT, FinishedRows
from batchgen.publish.set_rows import set_columns, set_schema, set_tables
from batchgen.util.errors import ConfigError

_GROUPS = ("model", "dataset", "rows", "prompt", "strategy", "sampling", "constraint", "post")
"""What a set keeps of the configuration of each job."""
_NOT_KEPT = ("row_digests", "history")
"""Parts of a manifest that grow with the rows, or that are for people."""
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


@dataclass(frozen=True)
class Selected:
    """What `select` did: the rows of the set, and how many there were after each step; `made` is
    false if the set was there."""

    rows: int
    funnel: Sequence[tuple[str, int]]
    made: bool


def select(
    jobs: Sequence[FinishedRows],
    choice: Choice,
    out: Path,
    *,
    columns: Sequence[str] | None = None,
    text_as: str = "response",
) -> Selected:
    """Write a folder with the rows that a choice takes of some jobs.

    A folder that has them is left as it is. Killed at any time, it leaves no folder.

    Raises:
        ConfigError: an option does not fit the jobs, `out` holds something else, or no row is left.
        JobError: a job is damaged, or the folder cannot be written.
    """
    prefixes = _prefixes(jobs)
    taken = [
        set_columns(
            job,
            named=columns,
            text_as=text_as,
            one_of_a_row=choice.best is not None,
            prefix=prefix,
        )
        for job, prefix in zip(jobs, prefixes, strict=True)
    ]
    schema = set_schema(jobs, taken)
    lineage = [job_lineage(job) for job in jobs]
    asked = {**asdict(choice), "columns": columns, "text_as": text_as}
    request = request_digest({"asked": asked, "jobs": [one["digest"] for one in lineage]})
    if is_there(out, request):
        return Selected(0, (), made=False)
    places, funnel = choose(jobs, choice)
    if not len(places):
        raise ConfigError("\n".join(["no row is left:", *funnel.lines()]))
    facts = {
        "format": SET_FORMAT,
        "kind": "rows",
        "request": request,
        "asked": asked,
        "text_column": text_as,
        "funnel": funnel.steps,
        "jobs": lineage,
    }

    def card(rows: int) -> str:
        return set_card(out.name, request, lineage, funnel, rows, schema, str(out))

    rows = write_folder(out, schema, set_tables(jobs, taken, places, schema), facts, card)
    return Selected(rows, funnel.steps, made=True)


def job_lineage(job: FinishedRows) -> dict[str, Any]:
    """What a folder remembers of a job, or of a set, that its rows came from."""
    found: dict[str, Any] = {"path": job.given, "digest": job.digest}
    if job.facts is not None:
        return {**found, "set": dict(job.facts)}
    manifest = {key: value for key, value in job.manifest.items() if key not in _NOT_KEPT}
    config = {key: job.config[key] for key in _GROUPS if job.config.get(key)}
    return {**found, "config": config, "manifest": manifest}


def _prefixes(jobs: Sequence[FinishedRows]) -> list[str]:
    """What the ids of each job's rows begin with: nothing for one job, else its folder's name."""
    if len(jobs) == 1:
        return [""]
    names = [job.given.rstrip("/").rpartition("/")[2] for job in jobs]
    if len(set(names)) < len(names):
        raise ConfigError(
            f"two of these jobs have one name ({', '.join(sorted(names))}), and ids begin with it: "
            "move one of them"
        )
    return [f"{name}/" for name in names]


def set_card(
    name: str,
    mark: str,
    lineage: Sequence[Mapping[str, Any]],
    funnel: Funnel,
    rows: int,
    schema: pa.Schema,
    folder: str,
) -> str:
    """The README.md of a set. Its text depends on the rows alone, and on where they came from."""
    reading = [f"- {reader}: `{line}`" for reader, line in how_to_read(folder).items()]
    parts = [
        _HEADER.format(mark=mark),
        f"# {name}",
        "",
        f"{rows:,} rows, chosen by `batchgen select`. `selection.json` has the manifests of the "
        "jobs that they came from.",
        "",
        "## Lineage",
        "",
        *lineage_lines(lineage),
        "",
        "## How the rows were chosen",
        "",
        "| step | rows left |",
        "|---|---|",
        *(f"| `{step}` | {left:,} |" for step, left in funnel.steps),
        "",
        "## Columns",
        "",
        *column_lines(schema),
        "",
        "## How to read it",
        "",
        *reading,
    ]
    return "\n".join(parts)


def lineage_lines(lineage: Sequence[Mapping[str, Any]]) -> list[str]:
    """A line for each job: its model, its data set and how it sampled, and its digest."""
    lines = []
    for one in lineage:
        if "set" in one:
            lines += lineage_lines(one["set"]["jobs"])
            continue
        config = one["config"]
        model, dataset = config.get("model") or {}, config.get("dataset") or {}
        sampling = ", ".join(f"{k}={v}" for k, v in (config.get("sampling") or {}).items())
        revision = f" at `{model['revision']}`" if model.get("revision") else ""
        lines.append(
            f"- `{one['path']}`: model `{model.get('path')}`{revision}, data set "
            f"`{dataset.get('path') or dataset.get('kind')}`, sampling `{sampling}`, digest "
            f"`{one['digest']}`"
        )
    return lines
