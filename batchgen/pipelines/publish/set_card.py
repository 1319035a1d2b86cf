"""Writes the card (README.md) of a set, a folder that `batchgen select` or `export` wrote from
finished jobs. The card says what the rows are, and from which jobs they came."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.pipelines.publish.finished_rows import FinishedRows
from batchgen.storage.folder.how_to_read import CARD_HEADER, how_to_read

_GROUPS = ("model", "dataset", "rows", "prompt", "strategy", "sampling", "constraint", "post")
"""The groups of a job's configuration that the set records."""
_NOT_KEPT = ("row_digests", "history")
"""Parts of a manifest that the set does not record: they grow with the rows, or are only for
people."""


def job_lineage(job: FinishedRows) -> dict[str, Any]:
    """Return the facts that a set records about a job, or about another set, from which its rows
    came."""
    lineage: dict[str, Any] = {"path": job.user_path, "digest": job.digest}
    if job.facts is not None:
        return {**lineage, "set": dict(job.facts)}
    manifest = {key: value for key, value in job.manifest.items() if key not in _NOT_KEPT}
    config = {key: job.config[key] for key in _GROUPS if job.config.get(key)}
    return {**lineage, "config": config, "manifest": manifest}


def set_card(
    folder: Path,
    mark: str,
    about: str,
    lineage: Sequence[Mapping[str, Any]],
    steps: Sequence[tuple[str, int]],
    schema: pa.Schema,
) -> str:
    """Return the text of README.md. It depends only on the arguments.

    Args:
        folder: the folder of the set.
        mark: the digest of the request, for the header.
        about: a sentence on the rows.
        lineage: from `job_lineage`, of each job.
        steps: (step, rows that remained after it), in order.
        schema: the columns of the set.
    """
    reading = [f"- {reader}: `{line}`" for reader, line in how_to_read(".").items()]
    parts = [
        CARD_HEADER.format(mark=mark),
        *(f"# {folder.name}", "", about, "", "## Lineage", ""),
        *lineage_lines(lineage),
        *("", "## How the rows were chosen", "", "| step | rows |", "|---|---|"),
        *(f"| `{step}` | {rows:,} |" for step, rows in steps),
        *("", "## Columns", ""),
        *column_lines(schema),
        *("", "## How to read it", "", "In this folder:", ""),
        *reading,
    ]
    return "\n".join(parts)


def lineage_lines(lineage: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return a line of Markdown for each job: its model, data set, sampling and digest."""
    lines = []
    for one in lineage:
        if "set" in one:
            lines += lineage_lines(one["set"]["jobs"])
            continue
        config = one["config"]
        model, dataset, sampled = (_group(config, n) for n in ("model", "dataset", "sampling"))
        sampling = ", ".join(f"{key}={value}" for key, value in sampled.items())
        revision = f" at `{model['revision']}`" if model.get("revision") else ""
        lines.append(
            f"- `{one['path']}`: model `{model.get('path')}`{revision}, data set "
            f"`{dataset.get('path') or dataset.get('kind')}`, sampling `{sampling}`, digest "
            f"`{one['digest']}`"
        )
    return lines


def _group(config: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    values = config.get(name)
    return values if isinstance(values, dict) else {}


def column_lines(schema: pa.Schema) -> Sequence[str]:
    """Return a Markdown table of columns."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for field in schema:
        meaning = (field.metadata or {}).get(b"meaning", b"").decode()
        lines.append(f"| `{field.name}` | `{field.type}` | {meaning} |")
    return lines
