"""Writes the exports of a pipeline and pushes what it asks for."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from batchgen.leases.folder_lock import FolderLock
from batchgen.pipelines.open_pipeline import OpenPipeline
from batchgen.pipelines.written_sets import EXPORTS, MADE, Export, settings
from batchgen.publish.data_folder import request_digest
from batchgen.publish.finished_rows import open_rows
from batchgen.publish.trainers.text_export import export_text
from batchgen.publish.trainers.trainer_export import export_for
from batchgen.storage.whole_file import write_atomic
from batchgen.util.errors import ConfigError, JobError

_WAIT = 3600.0
"""Seconds that a worker waits for another one that writes the exports."""


def make_exports(opened: OpenPipeline) -> list[str]:
    """Write the exports that are not there as they would be made now; returns a line for each."""
    exports = opened.pipeline.exports
    if not exports:
        return []
    folder = Path(opened.pipeline.out) / EXPORTS
    with _alone(folder):
        made = _made(folder)
        lines = []
        for one in exports:
            source = opened.folder(one.step)
            digest = request_digest({**settings(one), "rows": open_rows(source).digest})
            if made.get(one.out) == digest and (folder / one.out).exists():
                lines.append(f"{folder / one.out}: has these rows already")
                continue
            _remove(folder / one.out, is_ours=one.out in made)
            lines.append(_export(one, source, folder / one.out))
            made[one.out] = digest
            write_atomic(folder / MADE, json.dumps(made, indent=2) + "\n")
        return lines


@contextmanager
def _alone(folder: Path) -> Iterator[None]:
    """No other process writes exports meanwhile."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FolderLock(folder / ".lock", wait=_WAIT)
    except OSError as error:
        raise JobError(f"cannot write {folder}: {error.strerror or error}") from None
    with lock:
        yield


def _made(folder: Path) -> dict[str, str]:
    """What each export was made of, by its name."""
    try:
        found = json.loads((folder / MADE).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError):
        raise JobError(f"{folder / MADE} is damaged: remove it and what lies beside it") from None
    return found if isinstance(found, dict) else {}


def _remove(path: Path, *, is_ours: bool) -> None:
    """Remove an export that was made of other rows."""
    if path.is_symlink() or (path.exists() and not is_ours):
        raise ConfigError(
            f"export: {path} is there already, and is not of this pipeline: remove it"
        )
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def _export(one: Export, source: str, path: Path) -> str:
    """Write an export; returns what is said of it."""
    # A file that a kill has left half-written never has the name that readers know.
    new = path if not path.suffix else path.with_name(f".new-{path.name}")
    new.unlink(missing_ok=True)
    left_out: Mapping[str, int] = {}
    if one.to is None:
        options: dict[str, Any] = {key: one.options.get(key) for key in ("columns", "where")}
        rows = export_text(source, new, **options)
    else:
        done = export_for(open_rows(source), one.asked(), new)
        rows, left_out = done.rows, done.left_out
    new.replace(path)
    why = "".join(f"; {count:,} left out {reason}" for reason, count in left_out.items())
    return f"{path}: {rows:,} rows{why}"


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
