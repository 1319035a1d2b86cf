"""The end of a job: completed by this worker, by another worker, or complete before it was started.

Each function returns the `JobResult`, whose message the command prints.
"""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.job_config import JobConfig
from batchgen.evals.scores.samples import Samples
from batchgen.jobs.generation.turns import Turns
from batchgen.jobs.resolve.resolved_job import ResolvedJob
from batchgen.jobs.run.graded_job import grade_and_score, graded_card, save_scores
from batchgen.pages.report.write_report import REPORT, is_up_to_date, try_report
from batchgen.storage.costs.chain_costs import all_steps
from batchgen.storage.folder.dataset_card import dataset_card
from batchgen.storage.folder.job_folder import JobFolder
from batchgen.storage.folder.job_summary import JobSummary, end_table
from batchgen.storage.folder.row_funnel import IndexFacts, num_questions
from batchgen.storage.leases.job_files import ROW_INDEX
from batchgen.storage.metrics.job_metrics import Metrics
from batchgen.storage.metrics.tally import Tally, Totals
from batchgen.storage.shards.output_fields import CHANNEL
from batchgen.storage.shards.output_schema import OutputSchema
from batchgen.storage.shards.shard_files import read_columns, shard_files
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.metrics_file import read_metrics
from batchgen.util.signals import StopSignals


@dataclass(frozen=True)
class JobResult:
    """How a job ended without an error.

    Attributes:
        error_rows: the number of rows that have an error instead of an answer.
        stopped_by: the signal that stopped the job; None if no signal did.
        message: the text for the user.
        is_spent: whether the job stopped because its budget is spent.
    """

    error_rows: int
    stopped_by: int | None
    message: str
    is_spent: bool = False

    @property
    def exit_code(self) -> int:
        """The exit code of the command, see `batchgen.__main__`."""
        if self.stopped_by is not None:
            return 128 + self.stopped_by
        if self.is_spent:
            return 4
        return 3 if self.error_rows else 0


def completed_elsewhere(storage: Storage, parts: ResolvedJob, rows: int) -> JobResult | None:
    """The result of a job that another worker has completed; None if none has. This worker has
    computed `rows` rows."""
    metrics = read_metrics(storage)
    if metrics is None or metrics["status"] != "complete":  # None: no worker has written it yet
        return None
    totals = Totals.of(metrics)
    head = f"The job is complete; this worker has computed {rows:,} of its answers.\n"
    steps = all_steps(metrics, _name(storage))
    copied = metrics.get("rows_copied", 0)
    job = JobSummary(
        totals,
        score=metrics.get("score"),
        adapter_scores=metrics.get("adapter_scores", {}),
        rows_copied=copied,
        costs=steps,
    )
    table = end_table(job, storage.display_name, parts.strategy)
    return JobResult(totals.error_rows, None, head + table)


def complete(
    config: JobConfig,
    parts: ResolvedJob,
    folder: JobFolder,
    schema: OutputSchema,
    metrics: Metrics,
) -> JobResult:
    """Complete a job whose rows are all written, graded and scored: write README.md, metrics.json
    and the report, and delete the journal."""
    storage = folder.storage
    elsewhere = completed_elsewhere(storage, parts, metrics.attempt.rows)
    if elsewhere is not None:  # this worker was paused, and another completed the job
        return elsewhere

    display_name = storage.display_name
    metrics.tally = _count_shards(config, parts, folder)
    metrics.look()
    totals, fingerprints = metrics.tally.totals, folder.manifest.fingerprints
    facts = IndexFacts.parse(storage.read(folder.path / ROW_INDEX))
    sampling = metrics.sampling
    questions = num_questions(folder.manifest, facts)
    about = JobSummary(
        totals,
        config=resolved(config),
        row_facts=facts,
        costs=metrics.costs(_name(storage)),
        sampling=sampling,
        questions=questions,
    )
    funnel = [(left.choice, left.rows) for left in parts.source.data.funnel]
    card = dataset_card(about, fingerprints, schema.arrow, display_name, funnel)
    storage.write(folder.path / "README.md", graded_card(card, folder.path, display_name))
    metrics.save("complete")
    folder.remove_journal()
    metrics.keep()
    report = _report(parts, folder) if config.output.report else None
    job = JobSummary(
        totals,
        attempts=metrics.session(),
        score=metrics.score,
        adapter_scores=metrics.adapter_scores,
        config=resolved(config),
        row_facts=facts,
        rows_copied=metrics.rows_copied,
        costs=metrics.costs(_name(storage)),
        sampling=sampling,
        questions=questions,
    )
    message = end_table(job, display_name, parts.strategy, report)
    return JobResult(totals.error_rows, None, message)


def _name(storage: Storage) -> str:
    """The job's short name: the last part of its folder's path."""
    return storage.display_name.rstrip("/").rpartition("/")[2]


def already_complete(
    config: JobConfig, parts: ResolvedJob, folder: JobFolder, signals: StopSignals
) -> Turns[JobResult]:
    """Grade and score a job that was complete before it was started, and make its report if it is
    missing or old. No row is computed."""
    storage = folder.storage
    folder.remove_journal()
    wants_report = config.output.report and not is_up_to_date(storage)
    with storage.local_copy(needed=config.is_scored or wants_report):
        samples = Samples(folder.path, config.score, by=config.model.grid_column)
        scores = yield from grade_and_score(samples, config, signals)
        if config.is_scored:
            save_scores(folder.path, scores, storage.display_name)
        totals = _count_shards(config, parts, folder).totals
        wants_report = config.output.report and not is_up_to_date(storage)  # scores may be new
        report = _report(parts, folder) if wants_report else None
    message = "This job is complete already; nothing was computed.\n"
    display_name = storage.display_name
    facts = IndexFacts.parse(storage.read(folder.path / ROW_INDEX))
    metrics = read_metrics(storage) or {}
    steps = all_steps(metrics, _name(storage))
    questions = num_questions(folder.manifest, facts)
    job = JobSummary(
        totals,
        score=scores.score,
        adapter_scores=scores.adapters,
        row_facts=facts,
        costs=steps,
        questions=questions,
    )
    table = end_table(job, display_name, parts.strategy, report)
    return JobResult(totals.error_rows, None, message + table)


def _report(parts: ResolvedJob, folder: JobFolder) -> str | None:
    """Make the job's report; returns its name for people, or None if it could not be made."""
    display_name = folder.storage.display_name
    path = try_report(folder.path, parts.decode_all, display_name)
    return None if path is None else f"{display_name}/{REPORT}"


def _count_shards(config: JobConfig, parts: ResolvedJob, folder: JobFolder) -> Tally:
    """Count all rows of a complete job, by reading its shards."""
    tally, storage = new_tally(config, parts), folder.storage
    for path in shard_files(folder.data, storage.names(folder.data)).values():
        tally.add_table(read_columns(storage.parquet(path), tally.columns))
    return tally


def new_tally(config: JobConfig, parts: ResolvedJob) -> Tally:
    """An empty tally of the counts that this job's rows have."""
    names = [count.name for count in parts.counts]
    until = config.sampling.until is not None
    channels = any(column.name == CHANNEL for column in parts.beside)
    return Tally(names, constrained=config.constrained, until=until, channels=channels)
