"""The prediction that a job makes of itself when its engine is there."""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.jobs.forecast.engine_estimate import estimate_engine
from batchgen.jobs.forecast.forecast import Forecast, forecast
from batchgen.jobs.forecast.planned_work import here, job_work, step_cost
from batchgen.jobs.forecast.prompt_reading import job_reading
from batchgen.jobs.forecast.samples_per_row import samples_per_row
from batchgen.jobs.forecast.scan import sample_indices
from batchgen.util.errors import ConfigError, JobError

if TYPE_CHECKING:
    from batchgen.jobs.resolve.opened_job import OpenedJob

_ROWS = 48
_MEASURE_S = 0.04


def predict(
    config: JobConfig, opened: OpenedJob, memory: MemoryPlan, answers: int, start_s: float
) -> Forecast | None:
    """What an attempt of a job will take, from a few rows and in a fraction of a second.

    `memory` is the engine's plan, and the start has taken `start_s` seconds. None if the GPU is not
    known, or none of the rows that are looked at has a prompt or can be read.
    """
    device = here(config, opened.dtype, _MEASURE_S)
    if device is None:
        return None
    source = opened.source
    assert source.num_rows is not None
    reading = job_reading(config, opened)
    prompts: list[list[int]] = []
    most: list[int] = []
    try:
        for row in source.rows_at(sample_indices(source.num_rows, _ROWS)):
            # A row without a prompt will say so itself.
            with suppress(RequestError):
                params = reading.sampling(row)
                prompts.append(reading.token_ids(row))
                most.append(params.max_new_tokens)
    except (ConfigError, JobError):  # The job tells of it when it comes to that row.
        return None
    if not prompts:
        return None
    room = estimate_engine(opened, config, memory.total, native_fp8=device.fp8)
    lengths = np.minimum(np.array([len(ids) for ids in prompts], np.int64), reading.room)
    samples = samples_per_row(config.sampling)
    rows = -(-answers // samples.whole)
    work = job_work(
        config,
        opened,
        room,
        memory,
        prompts,
        lengths,
        rows,
        samples=samples,
        longest=-(-sum(most) // len(most)),
        start_s=start_s,
    )
    return forecast(step_cost(room, opened, device), work)
