"""Computes the unfinished rows of a job: loads the weights and runs `Generation` to the last row.
`run_job.py` calls `compute_rows`."""

from __future__ import annotations

from contextlib import closing, nullcontext
from dataclasses import asdict, replace

from batchgen.inputs.model.job_engine import Engine
from batchgen.jobs.generation.begun_answers import BegunAnswers
from batchgen.jobs.generation.generation import Generation
from batchgen.jobs.generation.progress import Progress
from batchgen.jobs.generation.running_score import running_score
from batchgen.jobs.generation.sample_waves import EverySample, SampleWaves
from batchgen.jobs.generation.turns import Turns
from batchgen.jobs.generation.valid_samples import Judge
from batchgen.jobs.reuse.row_key import RowKeys
from batchgen.jobs.reuse.row_reuse import row_reuse
from batchgen.jobs.run.job_attempt import JobAttempt
from batchgen.jobs.run.job_end import JobResult
from batchgen.storage.costs.cost_recorder import CostRecorder

_GPU_SHARE, _CPU_SHARE = 1.0, 0.2
"""The time of a decode step of one row, as a share of the time of a step of a full batch: the same
on a GPU, and a fifth on a CPU."""


def compute_rows(attempt: JobAttempt) -> Turns[JobResult | None]:
    """Load the weights and compute rows until none is left; then return None. Return the job's
    result if a signal came or the budget was spent."""
    yield 0.0  # all jobs that share the engine are opened before any weights load
    if attempt.spending.is_spent:
        return attempt.stopped()
    config, parts, metrics, writer = attempt.config, attempt.parts, attempt.metrics, attempt.writer
    storage, schema = attempt.folder.storage, attempt.rows.schema
    engine = parts.build_engine()
    attempt.signals.deferred = True
    _note_engine(attempt, engine)
    reuse = row_reuse(config, parts.fingerprints, parts.max_model_len, schema, storage)
    waves = _waves(attempt)
    generation = Generation(
        config,
        parts.source,
        attempt.rows.request,
        parts.split,
        engine,
        writer,
        metrics,
        waves,
        attempt.spending,
        CostRecorder(storage, config.output.rows_per_shard, attempt.worker.number),
        BegunAnswers(
            engine,
            writer,
            RowKeys(config, parts.fingerprints, parts.max_model_len),
            config.output.begun_every,
        ),
        reuse,
        parts.name,
    )
    metrics.begin()

    def save_thumbnails() -> None:
        if parts.images is not None:
            parts.images.thumbnails.save(storage, attempt.worker.number)

    def watch() -> None:
        parts.watch()
        save_thumbnails()

    closed = nullcontext() if reuse is None else closing(reuse)
    with closing(engine), closing(waves), closed, _progress(attempt, engine) as progress:
        is_done = yield from generation.turns(attempt.todo, attempt.signals, progress, watch)
    save_thumbnails()
    return None if is_done else attempt.stopped()


def _progress(attempt: JobAttempt, engine: Engine) -> Progress:
    """Make the display of the job. Trackers get the same score so far."""
    config, parts, metrics = attempt.config, attempt.parts, attempt.metrics
    score = running_score(config, attempt.rows.schema, attempt.folder.path)
    if score is not None:
        metrics.score_so_far = score.mean
    # Options of rows may allow longer answers than the job's options do.
    has_row_options = config.sampling.column is not None
    return Progress(
        metrics.attempt.rows_total,
        attempt.writer.resumed,
        config.progress.show,
        parts.decode,
        resumed_errors=metrics.tally.totals.error_rows,
        longest=parts.max_model_len if has_row_options else config.sampling.max_new_tokens,
        batch_share=_GPU_SHARE if engine.memory.total is not None else _CPU_SHARE,
        title=parts.name,
        score=score,
    )


def _waves(attempt: JobAttempt) -> EverySample:
    """Make the object that decides when the samples of a row begin."""
    if attempt.rows.where is None:
        return EverySample()
    return SampleWaves(Judge(attempt.rows.where, attempt.config.score), attempt.writer)


def _note_engine(attempt: JobAttempt, engine: Engine) -> None:
    """Record the properties of the engine that the answers depend on, in writer, metrics and
    manifest."""
    # A GPU may round sums differently if the batch has another size, and so does another number of
    # ranks, in which workers on CPUs may differ.
    options, on_gpu = attempt.config.engine, engine.memory.total is not None
    keeps_bits = options.deterministic if on_gpu else options.tensor_parallel == 1
    exact = keeps_bits and engine.batch_dependence is None
    attempt.writer.set_exact(exact, attempt.parts.by_schedule)
    attempt.metrics.attempt.memory = asdict(engine.memory)
    attempt.metrics.attempt.contract = attempt.parts.contract()
    attempt.metrics.attempt.batch_dependence = engine.batch_dependence
    if engine.batch_dependence is not None:
        folder = attempt.folder
        folder.update(replace(folder.manifest, batch_dependence=engine.batch_dependence))
