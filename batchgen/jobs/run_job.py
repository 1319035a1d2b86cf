"""Runs a job: every row of the data set gets into the output folder exactly once."""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import NamedTuple

from batchgen.compose.load_config import growing, identity, job_file_text, resolved
from batchgen.config.constraint_config import JsonConstraintConfig, JsonSchemaConstraintConfig
from batchgen.config.job_config import PARSED, JobConfig
from batchgen.constraint.row_constraints import RowConstraints
from batchgen.dataset.row_digest import rows_digest
from batchgen.dataset.row_source import Row
from batchgen.folder.changed_row import changed_row
from batchgen.folder.dataset_card import dataset_card, unfinished_card
from batchgen.folder.job_folder import JobFolder, refuse_shrinking
from batchgen.folder.job_metrics import Metrics, Tally, Totals
from batchgen.folder.job_summary import JobSummary, end_table
from batchgen.forecast.forecast import Forecast
from batchgen.grades.background_grading import grading_beside
from batchgen.jobs.fail_fast import AllRowsFailed
from batchgen.jobs.generation import Engine, Generation
from batchgen.jobs.graded_job import graded_card, save_scores, scores_of
from batchgen.jobs.job_parts import JobParts
from batchgen.jobs.progress import Progress, show_memory
from batchgen.leases.file_store import FolderGone
from batchgen.prompts.row_prompts import fit_prompt
from batchgen.report.write_report import REPORT, is_up_to_date, try_report
from batchgen.scoring.samples import Samples
from batchgen.shards.checked_file import DamagedFile
from batchgen.shards.output_schema import PROMPT_TOKEN_IDS, OutputSchema
from batchgen.shards.output_writer import OutputWriter
from batchgen.shards.parsed_column import ParsedColumn
from batchgen.shards.shard_files import read_columns, shard_files
from batchgen.storage.job_storage import Storage
from batchgen.storage.manifest import ROWS, Manifest
from batchgen.storage.open_storage import open_storage
from batchgen.util.errors import ConfigError, FolderLost, JobError
from batchgen.util.signals import JobStopped, StopSignals
from batchgen.workers.shard_queue import Todo
from batchgen.workers.worker import How, Worker, others_run

_OPENING_SECONDS = 60.0
"""How long a worker waits, at least, for the one that opens the folder."""


@dataclass(frozen=True)
class JobResult:
    """How a job ended without an error.

    Attributes:
        error_rows: how many rows of a complete job have an error instead of an answer.
        stopped_by: the number of the signal that stopped the job, None if it is complete.
        message: what the user is told.
    """

    error_rows: int
    stopped_by: int | None
    message: str

    @property
    def exit_code(self) -> int:
        """As `batchgen.__main__` describes them."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        return 3 if self.error_rows else 0


def run_job(config: JobConfig, parts: JobParts) -> JobResult:
    """Run a job to its end, or go on with one that was stopped or killed.

    Everything that can be refused is refused before the weights load. A first SIGINT or SIGTERM
    stops the job cleanly, a second one at once.

    Raises:
        ConfigError: the user made a mistake. No row was computed, unless the mistake is in a later
            row of the data set.
        JobError: the output cannot be written or is damaged. Finished rows are safe.
        Exception: whatever the engine or the data set raises. Finished rows are safe.
    """
    with StopSignals() as signals, closing(parts):
        try:
            return _run(config, parts, signals)
        except JobStopped as stopped:
            assert signals.received is not None
            message = f"{stopped or 'Stopped before the first row.'} {_resume(config.output.dir)}"
            return JobResult(0, signals.received, message)
        except FolderGone:  # others have completed the job while this worker began to join them
            with closing(open_storage(config.output.dir, config.workers)) as storage:
                ended = _completed_elsewhere(storage, parts, rows=0)
            if ended is None:
                raise JobError(
                    f"the workers of the job in {config.output.dir} have left it while this one "
                    "began to join them: run the same command again"
                ) from None
            return ended


def _run(config: JobConfig, parts: JobParts, signals: StopSignals) -> JobResult:
    output, source, samples = config.output, parts.source, config.sampling.n
    prompt, constraints, schema = check_rows(config, parts)
    with (
        _folder(config, parts, schema) as folder,
        _worker(config, folder) as worker,
        _writer(config, parts, folder, schema, worker) as writer,
    ):
        if folder.is_alone:
            retried = [f"output.retry_errors: {writer.retried:,} rows"] if writer.retried else []
            folder.record(*retried, rows=writer.resumed)
            folder.storage.write(folder.path / "config.yaml", job_file_text(config))
            worker.tell_older(writer.older)
        metrics = _metrics(config, parts, folder, writer, worker)
        todo = Todo(source, writer, worker, output.rows_per_shard)
        is_done = todo.is_empty()
        if is_done and metrics.was_complete:
            signals.deferred = True
            return _already_complete(config, parts, folder, signals)
        total = None if source.num_rows is None else source.num_rows * samples
        metrics.attempt.rows_total = total
        if folder.is_alone and not is_done:
            card = unfinished_card(folder.storage.shown)
            folder.storage.write(folder.path / "README.md", card)
            folder.storage.delete(folder.path / REPORT)  # it would tell of fewer rows
        graded = Samples(folder.path, config.score)
        needed = folder.is_alone and not is_done and folder.storage.in_place
        beside = grading_beside(folder.path, config, needed=needed)
        with _recorded(metrics, folder.storage.shown), beside as grading:
            folder.share()
            if not is_done:
                engine = parts.build_engine()
                signals.deferred = True
                # A GPU rounds sums differently in batches of another size, and so do other numbers
                # of ranks, which workers may have.
                on_one_cpu = engine.memory.total is None and config.engine.tensor_parallel == 1
                writer.set_exact(on_one_cpu and engine.batch_dependence is None)
                metrics.attempt.memory = asdict(engine.memory)
                metrics.attempt.batch_dependence = engine.batch_dependence
                show_memory(engine.memory)
                if engine.batch_dependence is not None:
                    found = replace(folder.manifest, batch_dependence=engine.batch_dependence)
                    folder.update(found)
                expected = _predict(parts, engine, metrics)
                generation = Generation(
                    config, source, prompt, constraints, engine, writer, metrics
                )
                shown = Progress(
                    total,
                    writer.resumed,
                    config.progress.show,
                    parts.decode,
                    resumed_errors=metrics.tally.totals.error_rows,
                    longest=config.sampling.max_new_tokens,
                    expected=expected,
                )
                metrics.begin()
                with closing(engine), shown as progress:
                    if not generation.run(todo, signals, progress):
                        return _stopped(writer, metrics, signals, folder.storage.shown)
            signals.deferred = True
            writer.flush()
            worker.beat()  # whoever completes the job says what this worker has computed
            _refuse_quarantined(todo, worker)
            ended = _ended_without(worker, folder, parts, metrics, signals, writer)
            if ended is not None:
                return ended
            writer.finish(todo.num_rows)
            with folder.storage.whole(needed=bool(config.post) or output.report):
                metrics.score = scores_of(graded, config, signals, grading)
                return _complete(config, parts, folder, schema, metrics)


def _predict(parts: JobParts, engine: Engine, metrics: Metrics) -> Forecast | None:
    """What this attempt will take, which metrics.json keeps beside what it took."""
    attempt = metrics.attempt
    if attempt.rows_total is None:
        return None
    expected = parts.predict(engine, attempt.rows_total - attempt.rows_resumed, metrics.age)
    if expected is not None:
        metrics.predicted = expected.summary()
    return expected


@contextmanager
def _worker(config: JobConfig, folder: JobFolder) -> Iterator[Worker]:
    """This process among the workers of the folder, who are told how it ends."""
    joins, storage = not folder.is_alone, folder.storage
    worker = Worker(folder.path, config.workers, folder.least_worker, storage, joins=joins)
    how: How | None = "failed"
    try:
        folder.confirm()
        yield worker
        how = "complete"
    except JobStopped:
        how = "stopped"
        raise
    except FolderLost:
        how = None
        raise
    except (JobError, OSError) as error:
        # A disk that is full or away would end every worker, whatever the shard.
        how = "failed" if isinstance(error, DamagedFile) else "stopped"
        raise
    finally:
        worker.end(how)


def _writer(
    config: JobConfig, parts: JobParts, folder: JobFolder, schema: OutputSchema, worker: Worker
) -> OutputWriter:
    """What writes this worker's rows.

    Raises:
        FolderGone: the others have completed the job since this worker began to join them.
    """
    source = parts.source
    try:
        return OutputWriter(
            folder.data,
            folder.journal,
            schema,
            config.output.rows_per_shard,
            config.sampling.n,
            num_rows=source.num_rows,
            retry_errors=config.output.retry_errors,
            worker=worker.number,
            older=None if folder.is_alone else worker.older(),
            publish=worker.publish,
            storage=folder.storage,
        )
    except FileNotFoundError as error:
        if folder.is_alone:
            raise
        raise FolderGone(str(error.filename)) from None
    except FolderGone:
        # In a store, which has no folders that could be gone, this worker has left its heartbeat.
        if _completed_elsewhere(folder.storage, parts, rows=0) is not None:
            folder.remove_journal()
        raise


def _refuse_quarantined(todo: Todo, worker: Worker) -> None:
    """End a job in which all is done but shards that have ended workers again and again.

    Raises:
        JobError: there are such shards.
    """
    lines = []
    ended = worker.quarantined()
    for shard, rows in todo.quarantined_rows().items():
        some = ", ".join(rows[:20]) + (f" … ({len(rows):,} in all)" if len(rows) > 20 else "")
        who = ", ".join(map(str, ended.get(shard, ())))
        lines.append(f"shard {shard} has ended the workers {who}; rows not computed: {some}")
    if lines:
        raise JobError(
            "all other rows are computed, but some are in quarantine:\n  "
            + "\n  ".join(lines)
            + "\nlook at these rows, and at what the workers printed when they ended; the same "
            "command tries them again"
        )


def _ended_without(
    worker: Worker,
    folder: JobFolder,
    parts: JobParts,
    metrics: Metrics,
    signals: StopSignals,
    writer: OutputWriter,
) -> JobResult | None:
    """Wait until this worker is the one that completes the job, which is None, or until another
    has completed it or a signal came, which is how the job ended for this worker."""
    while True:
        is_mine = worker.claim_finish()
        # After the claim: it is granted, too, where the leases of a complete job are gone for long.
        elsewhere = _completed_elsewhere(folder.storage, parts, metrics.attempt.rows)
        if elsewhere is not None:
            folder.remove_journal()  # who completed the job may have been killed before that
            return elsewhere
        if is_mine:
            return None
        if signals.received is not None:
            return _stopped(writer, metrics, signals, folder.storage.shown)
        time.sleep(min(1.0, worker.look_seconds))


def _completed_elsewhere(storage: Storage, parts: JobParts, rows: int) -> JobResult | None:
    """How the job ended if another worker has completed it; None if none has yet.

    Args:
        rows: how many this worker has computed.
    """
    content = storage.read(storage.path / "metrics.json")
    if content is None:  # no worker has had the time to write it
        return None
    figures = json.loads(content)
    if figures["status"] != "complete":
        return None
    totals = Totals.of(figures)
    head = f"The job is complete; this worker has computed {rows:,} rows of it.\n"
    job = JobSummary(totals, score=figures.get("score"))
    table = end_table(job, storage.shown, parts.strategy)
    return JobResult(totals.error_rows, None, head + table)


def _folder(config: JobConfig, parts: JobParts, schema: OutputSchema) -> JobFolder:
    """The job's folder, locked, once it is sure that it is this job's, or can become it."""
    storage = open_storage(config.output.dir, config.workers)
    folder = JobFolder(
        storage.path,
        job_manifest(config, parts, schema),
        lambda stop: rows_digest(parts.source, stop),
        changed_row=partial(changed_row, storage, parts.source),
        overwrite=config.output.overwrite,
        wait=max(_OPENING_SECONDS, config.workers.stale_after),
        is_alone=lambda path: not others_run(path, config.workers),
        storage=storage,
    )
    try:
        if folder.is_alone:
            refuse_shrinking(storage, most_rows(config, parts.source.num_rows))
    except BaseException:
        folder.close()
        raise
    return folder


def job_manifest(config: JobConfig, parts: JobParts, schema: OutputSchema) -> Manifest:
    """The manifest of a job as it is asked for, without digests of its rows."""
    source, given = parts.source, parts.fingerprints
    return Manifest.build(
        identity(config, [name for name in given if name.endswith("_model")]),
        {"dataset": source.fingerprint, **given},
        {field.name: str(field.type) for field in schema.arrow},
        {**growing(config), ROWS: source.num_rows},
    )


def _metrics(
    config: JobConfig,
    parts: JobParts,
    folder: JobFolder,
    writer: OutputWriter,
    worker: Worker,
) -> Metrics:
    """The metrics of this attempt, which begin with what earlier ones have done.

    Who joins others counts its own rows only: the first of them has counted those from before.
    """
    tally = _tally(config, parts)
    for table in writer.done_rows(tally.columns) if writer.resumed and folder.is_alone else ():
        tally.add_table(table)
    path = folder.path / "metrics.json"
    return Metrics(path, writer.resumed, tally, worker, folder.storage)


class CheckedRows(NamedTuple):
    """What a job makes of each row.

    Attributes:
        prompt: token ids, as of `fitted_prompt`.
        constraints: what the answers are held to.
        schema: the columns of the output files.
    """

    prompt: Callable[[Row], list[int]]
    constraints: RowConstraints
    schema: OutputSchema


def check_rows(config: JobConfig, parts: JobParts) -> CheckedRows:
    """Make what is needed for each row; this refuses what can be refused without the folder.

    Raises:
        ConfigError: prompts have no room, the rows lack the column of their constraints, or columns
            have the same name.
    """
    return CheckedRows(
        fitted_prompt(config, parts),
        RowConstraints(config.constraint, parts.source.features),
        output_schema(config, parts),
    )


def most_rows(config: JobConfig, num_rows: int | None) -> int | None:
    """How many rows the job has at most; None if that is not known.

    Args:
        num_rows: of the data set; None for a stream.
    """
    return config.dataset.limit if num_rows is None else num_rows


def output_schema(config: JobConfig, parts: JobParts) -> OutputSchema:
    """The columns of the job's output files."""
    columns, constraint = config.output.columns, config.constraint
    parsed = None
    if PARSED in columns:
        assert isinstance(constraint, (JsonConstraintConfig, JsonSchemaConstraintConfig))
        parsed = ParsedColumn.build(config.params.constraint, constraint.start_after or "")
    return OutputSchema.build(
        parts.source.schema,
        parts.columns,
        parts.counts,
        prompt_token_ids=PROMPT_TOKEN_IDS in columns,
        constrained=constraint.kind != "none",
        parsed=parsed,
        text_column=config.output.text_column,
    )


def fitted_prompt(config: JobConfig, parts: JobParts) -> Callable[[Row], list[int]]:
    """A function from a row to its prompt, cut or refused so that the longest answer has room.

    Otherwise an answer could end at the model's limit, and nobody would see why.

    Raises:
        ConfigError: the longest answer leaves no room for any prompt.
    """
    room = parts.max_model_len - config.sampling.max_new_tokens
    if room < 1:
        raise ConfigError(
            f"sampling.max_new_tokens={config.sampling.max_new_tokens} leaves no room for a "
            f"prompt: both together have at most {parts.max_model_len} tokens; lower it, or "
            "raise engine.max_model_len if the model allows it"
        )

    def token_ids(row: Row) -> list[int]:
        if row.failure is not None:
            raise row.failure
        ids = parts.prompt.token_ids(row)
        return fit_prompt(ids, room, config.prompt.too_long, parts.bos_id)

    return token_ids


@contextmanager
def _recorded(metrics: Metrics, shown: str) -> Iterator[None]:
    """Save in metrics.json how the job ended, and tell with an error what is safe."""
    metrics.save("running")
    try:
        yield
    except JobStopped:
        metrics.save("stopped")
        raise
    except Exception as error:
        if isinstance(error, FolderLost):
            raise
        # The same command would only repeat a mistake that shows when the engine is built.
        if metrics.attempt.rows or not isinstance(error, (ConfigError, AllRowsFailed)):
            error.add_note(f"Finished rows are safe. {_resume(shown)}")
        # On a full disk this fails too. The first error must stay the one that the user sees.
        with contextlib.suppress(JobError):
            metrics.save("failed")
        raise


def _stopped(writer: OutputWriter, metrics: Metrics, signals: StopSignals, shown: str) -> JobResult:
    writer.flush()
    metrics.save("stopped")
    done = metrics.attempt.rows + metrics.attempt.rows_resumed
    return JobResult(0, signals.received, f"Stopped with {done:,} rows done. {_resume(shown)}")


def _complete(
    config: JobConfig,
    parts: JobParts,
    folder: JobFolder,
    schema: OutputSchema,
    metrics: Metrics,
) -> JobResult:
    storage = folder.storage
    elsewhere = _completed_elsewhere(storage, parts, metrics.attempt.rows)
    if elsewhere is not None:  # this worker was paused, and another has done the same
        return elsewhere
    shown = storage.shown
    metrics.tally = _count_shards(config, parts, folder)
    totals, fingerprints = metrics.tally.totals, folder.manifest.fingerprints
    about = JobSummary(totals, config=resolved(config))
    card = dataset_card(about, fingerprints, schema.arrow, shown)
    storage.write(folder.path / "README.md", graded_card(card, folder.path, shown))
    metrics.save("complete")
    folder.remove_journal()
    metrics.keep()
    report = _report(parts, folder) if config.output.report else None
    job = JobSummary(totals, attempts=[asdict(metrics.attempt)], score=metrics.score)
    message = end_table(job, shown, parts.strategy, report)
    return JobResult(totals.error_rows, None, message)


def _already_complete(
    config: JobConfig, parts: JobParts, folder: JobFolder, signals: StopSignals
) -> JobResult:
    storage = folder.storage
    folder.remove_journal()
    wants_report = config.output.report and not is_up_to_date(storage)
    with storage.whole(needed=bool(config.post) or wants_report):
        score = scores_of(Samples(folder.path, config.score), config, signals)
        if config.post:
            save_scores(folder.path, score, storage.shown)
        totals = _count_shards(config, parts, folder).totals
        wants_report = config.output.report and not is_up_to_date(storage)  # scores may be new
        report = _report(parts, folder) if wants_report else None
    message = "This job is complete already; nothing was computed.\n"
    shown = storage.shown
    table = end_table(JobSummary(totals, score=score), shown, parts.strategy, report)
    return JobResult(totals.error_rows, None, message + table)


def _report(parts: JobParts, folder: JobFolder) -> str | None:
    """Make the job's report; returns what people call it, None if it could not be made."""
    shown = folder.storage.shown
    made = try_report(folder.path, parts.decode_all, shown)
    return None if made is None else f"{shown}/{REPORT}"


def _count_shards(config: JobConfig, parts: JobParts, folder: JobFolder) -> Tally:
    """The counts over all rows of a complete job, as its shards have them."""
    tally, storage = _tally(config, parts), folder.storage
    for path in shard_files(folder.data, storage.names(folder.data)).values():
        tally.add_table(read_columns(storage.parquet(path), tally.columns))
    return tally


def _tally(config: JobConfig, parts: JobParts) -> Tally:
    names = [count.name for count in parts.counts]
    return Tally(names, constrained=config.constraint.kind != "none")


def _resume(shown: str) -> str:
    return f"The output so far is in {shown}; run the same command to go on from there."
