"""Writes the exports of a pipeline and pushes its results to the hub, after the steps are complete.

`refuse_wrong_exports` runs before the first step, so that a wrong export fails before hours of
computing.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from dataclasses import replace
from io import StringIO
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.prompt_config import TextPromptConfig
from batchgen.evals.grades.finished_shards import GradedShards
from batchgen.evals.grades.visible_columns import VisibleColumns
from batchgen.inputs.upstream.followed_job import FollowedJob, Promise
from batchgen.jobs.resolve.open_job import open_job
from batchgen.jobs.run.checked_rows import job_manifest, output_schema
from batchgen.pipelines.publish.data_folder import request_digest
from batchgen.pipelines.publish.finished_rows import FinishedRows, open_rows
from batchgen.pipelines.publish.trainers.text_export import (
    export_columns,
    export_format,
    export_text,
)
from batchgen.pipelines.publish.trainers.trainer_export import Exported, export_for, lines_of
from batchgen.pipelines.run.open_pipeline import OpenPipeline
from batchgen.pipelines.run.written_sets import Export, export_settings
from batchgen.storage.folder.export_record import (
    EXPORTS,
    ExportEntry,
    ExportRecord,
    content_digest,
)
from batchgen.storage.stores.whole_file import publish_file
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.temporary import delete_temporaries


def make_exports(opened: OpenPipeline) -> list[str]:
    """Write the exports that are missing or out of date. Returns a line of text for each.

    Raises:
        ConfigError: an export would replace a file that the pipeline has not written.
        JobError: rows are damaged, or an export cannot be written.
    """
    folder = Path(opened.pipeline.out) / EXPORTS
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise JobError(f"cannot write {folder}: {error.strerror or error}") from None
    delete_temporaries(folder)
    record = ExportRecord.read(folder)
    return [_make_export(one, opened.folder(one.step), record) for one in opened.pipeline.exports]


def _make_export(one: Export, source: str, record: ExportRecord) -> str:
    """Write an export unless it is up to date. Returns a line of text about it.

    Args:
        one: the export.
        source: the folder of its step.
    """
    rows = open_rows(source)
    request = request_digest({**export_settings(one), "rows": rows.digest})
    path, previous = record.folder / one.out, record.exports.get(one.out)
    # The names end in .tmp, so that the leftovers of a killed process are deleted by the next one.
    new, old = (path.with_name(f".{path.name}.{kind}.tmp") for kind in ("new", "old"))
    if old.is_dir():
        shutil.rmtree(old)
    current = record.current_digest(one.out)
    # The first of the recorded digests is that of the export itself.
    if previous is not None and previous.request == request and previous.digests[:1] == (current,):
        return f"{path}: already has these rows"
    try:
        exported = _write(one, rows, path, new)
        digest = content_digest(new)
        assert digest is not None
        # Until the new file has its name, the old one is the pipeline's as well.
        digests = (digest,) if current is None else (digest, current)
        of = source.rpartition("/")[2]
        record.write(one.out, ExportEntry(request, digests, of, export_settings(one)))
        if path.is_dir():
            path.rename(old)
        publish_file(new, path)
        if old.is_dir():
            shutil.rmtree(old)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    why = "".join(f"; {count:,} left out {reason}" for reason, count in exported.left_out.items())
    return f"{path}: {exported.rows:,} rows{why}"


def _write(one: Export, rows: FinishedRows, path: Path, new: Path) -> Exported:
    """Write an export to the path `new`. Its format follows from the name of `path`."""
    if one.to is not None:
        return export_for(rows, one.request(), path, at=new)
    options: dict[str, Any] = {key: one.options.get(key) for key in ("columns", "where")}
    return Exported(export_text(rows.user_path, path, at=new, **options), {})


def push_all(opened: OpenPipeline, say: Callable[[str], None]) -> list[str]:
    """Make the pushes of the pipeline. Returns a line of text for each."""
    lines = []
    for one in opened.pipeline.pushes:
        from batchgen.pipelines.publish.push_folder import FolderPush
        from batchgen.pipelines.publish.pushed_files import PushedFolder

        is_step = one.source in opened.pipeline.steps
        set_folder = Path(opened.pipeline.out) / EXPORTS / one.source
        folder = PushedFolder(opened.folder(one.source) if is_step else str(set_folder))
        push = FolderPush(folder, one.repo, private=one.private, say=say)
        push.push(complete=True)
        done = (
            f"{push.pushed:,} files pushed" if push.pushed else ("all files are on the hub already")
        )
        lines.append(f"push {one.source}: {done}: {push.url}")
    return lines


class PromisedRows(FinishedRows):
    """The columns of the rows of a step that has not run yet; it has no rows.

    Args:
        user_path: the name of the step, for messages.
        job: the columns that the step will write.
        config: the step's configuration by group.
        more: names of columns that the step takes from tables of other steps.
    """

    def __init__(
        self, user_path: str, job: FollowedJob, config: Mapping[str, Any], more: Sequence[str]
    ) -> None:
        GradedShards.__init__(self, job.storage, user_path)
        self.config, self.text_column, self.facts = config, job.text_column, None
        self.manifest, self.metrics, self.shards = {}, {}, []
        new = [pa.field(name, pa.string()) for name in more if name not in job.schema.names]
        self.schema, self.grade_schema = pa.schema([*job.schema, *new]), job.grade_schema
        self.columns = VisibleColumns(self.schema.names, self.grade_schema.names)


def refuse_wrong_exports(opened: OpenPipeline) -> None:
    """Check the exports before the steps run.

    Raises:
        ConfigError: an export's options do not fit the rows that its step will have, or it would
            replace a file that the pipeline has not written.
    """
    exports = opened.pipeline.exports
    if not exports:
        return
    record = ExportRecord.read(Path(opened.pipeline.out) / EXPORTS)
    for one in exports:
        record.current_digest(one.out)
    promised = _promised_rows(opened)
    for one in exports:
        if (rows := promised.get(one.step)) is None:
            continue
        try:
            if one.to is None:
                columns, where = (one.options.get(key) for key in ("columns", "where"))
                export_columns(rows, export_format(Path(one.out)), columns, where)
            else:
                lines_of(rows, one.request(), Path(one.out))
        except ConfigError as error:
            raise ConfigError(f"export {one.out}: {str(error).replace('--', '')}") from None


def _promised_rows(opened: OpenPipeline) -> dict[str, PromisedRows]:
    """Return the columns of the steps that exports need, by step. A step that cannot be opened yet
    is left out, as are its readers; its errors are reported when it runs."""
    promised: dict[str, PromisedRows] = {}
    promises: dict[str, Promise] = {}
    steps, needed = opened.pipeline.steps, {one.step for one in opened.pipeline.exports}
    for name in [*steps][::-1]:  # readers first: a needed step needs the steps that it reads
        needed |= {*steps[name].reads} if name in needed else set()
    for name in steps:
        if name not in needed:
            continue
        try:
            with redirect_stderr(StringIO()):  # warnings are shown when the step runs
                promised[name] = _of_step(opened, name, promises)
        except (ConfigError, JobError):
            continue
    return promised


def _of_step(opened: OpenPipeline, name: str, promises: dict[str, Promise]) -> PromisedRows:
    """Return the columns of a step. Its promise is added to `promises` under its folder, for its
    readers."""
    step, config = opened.pipeline.steps[name], opened.config(name)
    data, more = config.dataset, list[str]()
    if data.path == "-":
        raise ConfigError("dataset.path=-: standard input can be read once")
    if step.parents:  # all parents have the same columns, so the first one stands for all
        data = replace(data, path=opened.folder(step.parents[0]), follow=True)
        if data.paths[0] not in promises:
            raise ConfigError(f"{step.parents[0]} is not known yet")
    job = replace(config, dataset=data)
    if step.tables:  # the rows of tables do not exist yet, nor do columns that prompts take of them
        for index in step.tables:
            columns = config.rows[index].options.get("columns") or ()
            more += columns.values() if isinstance(columns, Mapping) else columns
        kept = [one for index, one in enumerate(config.rows) if index not in step.tables]
        job = replace(job, rows=tuple(kept), prompt=TextPromptConfig(text="-", constant=True))
    with_prints = open_job(job, promises).with_fingerprints()
    schema = output_schema(job, with_prints)
    folder = opened.folder(name)
    promise = Promise.of(job, job_manifest(job, with_prints, schema), schema.arrow)
    promises[folder] = promise
    followed = FollowedJob(Path(folder), name, promise)
    return PromisedRows(f"step {name}", followed, resolved(config), more)
