"""Opens a job so that it can run."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.resolve.opened_job import OpenedJob, open_job

if TYPE_CHECKING:
    from batchgen.inputs.model.job_engine import Engine
    from batchgen.jobs.forecast.forecast import Forecast


def resolve_job(config: JobConfig) -> OpenedJob:
    """Open and check all that a job runs on, except the weights: those load when rows need them."""
    return runnable(open_job(config, wait=True))


def runnable(job: OpenedJob) -> OpenedJob:
    """The job with digests of its models, whose files are read, and with a forecast of itself."""
    return replace(job.with_fingerprints(), predict=partial(_predict, job))


def _predict(job: OpenedJob, engine: Engine, answers: int, start_s: float) -> Forecast | None:
    from batchgen.jobs.forecast.at_start import predict

    return predict(job.config, job, engine.memory, answers, start_s)
