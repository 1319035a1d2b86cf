"""Writes the rows of a complete job or of a set in a trainer's format, for `batchgen export
--to`."""

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

EXPORT_KEY = b"batchgen.export"
"""The metadata key of a Parquet file under which JSON says from which rows the file was made."""


@dataclass(frozen=True)
class Exported:
    """The result of an export.

    Attributes:
        rows: the number of rows written.
        left_out: the number of rows left out, by reason.
        is_new: False if the folder already had the rows, so that nothing was written.
    """

    rows: int
    left_out: Mapping[str, int]
    is_new: bool = True


def export_for(
    rows: FinishedRows, request: ExportRequest, out: Path | None, *, at: Path | None = None
) -> Exported:
    """Write rows in the requested format.

    Args:
        out: a new file ending in .parquet or .jsonl (.gz compresses); a new folder, if the name has
            no suffix; None for JSON lines on standard output.
        at: the path to write to instead; the caller renames it to `out` later.

    Raises:
        ConfigError: an option does not fit, a row cannot be made, or `out` exists.
    """
    form, target = _form(request, out), at or out
    lines = lines_of(rows, request, out)
    if isinstance(lines, OpenAILines) or form == "jsonl":
        with text_file(out, at) as file:
            return Exported(write_lines(lines, file), lines.left_out)
    assert out is not None and target is not None
    if form == "parquet":
        facts = json.dumps({"asked": asdict(request), "of": rows.user_path, "digest": rows.digest})
        count = write_parquet(lines, lines.schema, target, {EXPORT_KEY.decode(): facts})
        return Exported(count, lines.left_out)
    return _folder(rows, request, lines, out, target)


def lines_of(
    rows: FinishedRows, request: ExportRequest, out: Path | None
) -> OpenAILines | TrainerRows | TokenRows:
    """Return the iterable of the rows of a format. Raises ConfigError for every mistake that can be
    detected before the first row."""
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
    """Return the kind of output that the name of `out` implies: jsonl, parquet or folder."""
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
    """Write the rows to a folder with a card, unless the folder has them already."""
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
