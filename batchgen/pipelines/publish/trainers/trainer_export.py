"""Writes the rows of a complete job or of a set in a trainer's format: `batchgen export --to`."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from batchgen.pipelines.publish.data_folder import is_there, request_digest, write_folder
from batchgen.pipelines.publish.finished_rows import SET_FORMAT, FinishedRows
from batchgen.pipelines.publish.set_card import job_lineage, set_card
from batchgen.pipelines.publish.trainers.export_files import (
    JSON_NAMES,
    binary_columns,
    tables,
    text_file,
    write_lines,
    write_parquet,
)
from batchgen.pipelines.publish.trainers.openai_lines import OpenAILines
from batchgen.pipelines.publish.trainers.token_rows import TOKEN_FORMATS, TokenRows
from batchgen.pipelines.publish.trainers.trainer_rows import ExportRequest, TrainerRows
from batchgen.util.errors import ConfigError

TOLD = b"batchgen.export"
"""The key in a Parquet file's metadata that says, as JSON, from what it was made."""


@dataclass(frozen=True)
class Exported:
    """The number of rows written, the numbers left out by reason, and whether anything was written:
    not if the folder had the rows already."""

    rows: int
    left_out: Mapping[str, int]
    is_new: bool = True


def export_for(
    rows: FinishedRows, request: ExportRequest, out: Path | None, *, at: Path | None = None
) -> Exported:
    """Write rows in the format that is asked for.

    Args:
        out: a new file, .parquet or .jsonl, compressed if it ends in .gz; a new folder, if its name
            has no suffix; None for JSON lines on standard output.
        at: another path to write to; the caller renames it later.

    Raises:
        ConfigError: an option does not fit, a row cannot be made, or `out` is there.
    """
    form, target = _form(request, out), at or out
    lines = lines_of(rows, request, out)
    if isinstance(lines, OpenAILines) or form == "jsonl":
        with text_file(out, at) as file:
            return Exported(write_lines(lines, file), lines.left_out)
    assert out is not None and target is not None
    if form == "parquet":
        facts = json.dumps({"asked": asdict(request), "of": rows.user_path, "digest": rows.digest})
        count = write_parquet(lines, lines.schema, target, {TOLD.decode(): facts})
        return Exported(count, lines.left_out)
    return _folder(rows, request, lines, out, target)


def lines_of(
    rows: FinishedRows, request: ExportRequest, out: Path | None
) -> OpenAILines | TrainerRows | TokenRows:
    """Make the object that yields the lines of a format. Raises ConfigError for everything that can
    be refused before the first row."""
    form = _form(request, out)
    if request.to == "openai":
        return OpenAILines(rows, request.where, request.reasoning)
    of_tokens = request.to in TOKEN_FORMATS
    trainer_rows = TokenRows(rows, request) if of_tokens else TrainerRows(rows, request)
    if form == "jsonl" and (names := binary_columns(trainer_rows.schema)):
        raise ConfigError(
            f"--to {request.to} has bytes in {', '.join(names)}: name a .parquet file in --out, or "
            "a folder, whose name has no suffix"
        )
    return trainer_rows


def _form(request: ExportRequest, out: Path | None) -> str:
    """The kind of file that a name says."""
    if out is None or out.name.endswith(JSON_NAMES):
        return "jsonl"
    if request.to == "openai":
        raise ConfigError(f"--out {out.name}: --to openai writes JSON lines: name it .jsonl")
    if out.suffix == ".parquet":
        return "parquet"
    if not out.suffix:
        return "folder"
    raise ConfigError(
        f"--out {out.name}: --to {request.to} writes .jsonl, .jsonl.gz or .parquet, or a folder, "
        "whose name has no suffix"
    )


def _folder(
    rows: FinishedRows,
    requested: ExportRequest,
    lines: TrainerRows | TokenRows,
    out: Path,
    path: Path,
) -> Exported:
    lineage = [job_lineage(rows)]
    request = request_digest(
        {"asked": asdict(requested), "jobs": [one["digest"] for one in lineage]}
    )
    if is_there(path, request):
        return Exported(0, {}, is_new=False)
    facts = {
        "format": SET_FORMAT,
        "kind": requested.to,
        "request": request,
        "asked": {key: value for key, value in asdict(requested).items() if value},
        "jobs": lineage,
    }

    def card(count: int) -> str:
        options = [f"--{key} {value}" for key, value in facts["asked"].items()]  # type: ignore[attr-defined]
        steps = [(f"left out: {why}", number) for why, number in lines.left_out.items()]
        return set_card(
            out,
            request,
            f"{count:,} rows, written by `batchgen export {' '.join(options)}`.",
            lineage,
            [*steps, ("rows", count)],
            lines.schema,
        )

    count = write_folder(path, lines.schema, tables(lines, lines.schema), facts, card)
    return Exported(count, lines.left_out)
