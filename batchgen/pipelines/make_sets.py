"""Writes the exports of a pipeline and pushes what it asks for."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from batchgen.pipelines.open_pipeline import OpenPipeline
from batchgen.pipelines.record.export_record import (
    EXPORTS,
    ExportRecord,
    MadeExport,
    content_digest,
)
from batchgen.pipelines.written_sets import Export, settings
from batchgen.publish.data_folder import request_digest
from batchgen.publish.finished_rows import FinishedRows, open_rows
from batchgen.publish.trainers.text_export import export_text
from batchgen.publish.trainers.trainer_export import Exported, export_for
from batchgen.storage.whole_file import publish
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.temporary import delete_temporaries


def make_exports(opened: OpenPipeline) -> list[str]:
    """Write the exports that are not there as they would be made now; returns a line for each.

    Raises:
        ConfigError: a file is there that the pipeline has not written.
        JobError: rows are damaged, or an export cannot be written.
    """
    folder = Path(opened.pipeline.out) / EXPORTS
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot write {folder}: {error.strerror or error}") from None
    delete_temporaries(folder)
    record = ExportRecord.read(folder)
    return [_made(one, opened.folder(one.step), record) for one in opened.pipeline.exports]


def refuse_foreign_exports(opened: OpenPipeline) -> None:
    """Raise ConfigError for a file in the place of an export that the pipeline has not written."""
    record = ExportRecord.read(Path(opened.pipeline.out) / EXPORTS)
    for one in opened.pipeline.exports:
        _own_digest(record, one.out)


def _own_digest(record: ExportRecord, name: str) -> str | None:
    """The digest of an export as it is; None if it is not there, or has lost all that it held."""
    path, known = record.folder / name, record.made.get(name)
    if path.is_symlink():
        raise ConfigError(f"export: {path} is a link, and what a pipeline writes is not: remove it")
    if path.is_file() and not path.stat().st_size:
        return None
    there = content_digest(path)
    if there is not None and (known is None or not known.is_own(there)):
        raise ConfigError(
            f"export: {path} is there already, and is not what this pipeline has written: move it "
            "away, or give the export another `out`"
        )
    return there


def _made(one: Export, source: str, record: ExportRecord) -> str:
    """Write an export unless it is there; returns what is said of it."""
    rows = open_rows(source)
    request = request_digest({**settings(one), "rows": rows.digest})
    path, known = record.folder / one.out, record.made.get(one.out)
    there = _own_digest(record, one.out)
    if known is not None and known.request == request and known.digests[:1] == (there,):
        return f"{path}: has these rows already"
    # One name: what a kill has left of a folder is deleted when it is written again.
    new = path.with_name(f".{path.name}.new.tmp")
    try:
        done = _write(one, rows, path, new)
        made = content_digest(new)
        assert made is not None
        digests = (made,) if there is None else (made, there)
        of = source.rpartition("/")[2]
        record.write(one.out, MadeExport(request, digests, of, settings(one)))
        if path.is_dir():
            shutil.rmtree(path)
        publish(new, path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    why = "".join(f"; {count:,} left out {reason}" for reason, count in done.left_out.items())
    return f"{path}: {done.rows:,} rows{why}"


def _write(one: Export, rows: FinishedRows, path: Path, new: Path) -> Exported:
    """Write an export under another name."""
    if one.to is not None:
        return export_for(rows, one.asked(), path, at=new)
    options: dict[str, Any] = {key: one.options.get(key) for key in ("columns", "where")}
    return Exported(export_text(rows.given, path, at=new, **options), {})


def push_all(opened: OpenPipeline, say: Callable[[str], None]) -> list[str]:
    """Push what the pipeline asks for; returns a line for each."""
    lines = []
    for one in opened.pipeline.pushes:
        from batchgen.publish.hub.push_folder import FolderPush
        from batchgen.publish.hub.pushed_files import PushedFolder

        is_step = one.source in opened.pipeline.steps
        place = Path(opened.pipeline.out) / EXPORTS / one.source
        folder = PushedFolder(opened.folder(one.source) if is_step else str(place))
        push = FolderPush(folder, one.repo, private=one.private, say=say)
        push.push(complete=True)
        done = f"{push.pushed:,} files pushed" if push.pushed else "all files are there already"
        lines.append(f"push {one.source}: {done}: {push.url}")
    return lines
