"""Writes the card (README.md) of a set: a folder of chosen rows, which `batchgen select` and its
like make of finished jobs. The card says what the rows are, and which jobs they came from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.pipelines.publish.finished_rows import FinishedRows
from batchgen.storage.folder.how_to_read import CARD_HEADER, how_to_read

_GROUPS = ("model", "dataset", "rows", "prompt", "strategy", "sampling", "constraint", "post")
"""The groups of each job's configuration that a set keeps."""
_NOT_KEPT = ("row_digests", "history")
"""Parts of a manifest that grow with the rows, or that are for people."""


def job_lineage(job: FinishedRows) -> dict[str, Any]:
    """The facts that a set keeps of a job, or of another set, from which its rows came."""
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
    """The README.md of a folder: what it is about, where its rows came from, how many were left
    after which step, and its columns. The text depends on these alone; `mark` is a digest of them.
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
    """A line for each job: its model, its data set and how it sampled, and its digest."""
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
    """The table of columns for a card."""
    lines = ["| column | type | meaning |", "|---|---|---|"]
    for field in schema:
        meaning = (field.metadata or {}).get(b"meaning", b"").decode()
        lines.append(f"| `{field.name}` | `{field.type}` | {meaning} |")
    return lines
