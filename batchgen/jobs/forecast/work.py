"""Turns an opened job into the `Work` that `forecast` estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.jobs.forecast.calibration import Calibration
from batchgen.jobs.forecast.deterministic_price import BLOCKS, DECODE, SCORED
from batchgen.jobs.forecast.devices import Device, measured_cpu, this_gpu
from batchgen.jobs.forecast.engine_estimate import EngineEstimate
from batchgen.jobs.forecast.forecast import Work
from batchgen.jobs.forecast.run_time import Capacity
from batchgen.jobs.forecast.samples_per_row import SamplesPerRow
from batchgen.jobs.forecast.scan import Scan
from batchgen.kernels.rules import BY_ROW

if TYPE_CHECKING:
    from batchgen.jobs.resolve.opened_job import OpenedJob

_MEASURE_S = 0.2
"""Seconds for which each of a CPU's rates is measured."""
_COMPARED = 50
"""The number of prompts that are compared to find their common prefix."""


def here(config: JobConfig, dtype: torch.dtype) -> Device | None:
    """The device on which a job would run on this machine; None for a GPU that is not in the
    table."""
    name = config.engine.device
    if name == "cuda" or (name == "auto" and torch.cuda.is_available()):
        return this_gpu()
    return measured_cpu(dtype, _MEASURE_S)


def job_work(
    config: JobConfig,
    opened: OpenedJob,
    room: EngineEstimate,
    memory: MemoryPlan,
    scan: Scan,
    rows: int,
    *,
    samples: SamplesPerRow,
    seen: Calibration | None = None,
    compiled: bool = True,
) -> Work:
    """Describe the work of a job with `rows` rows to compute and `samples` answers of each; other
    arguments are those of `Work`."""
    settings, sampling = room.settings, config.sampling
    block = settings.block_size
    prompts = [read.ids for read in scan.sample[:_COMPARED]]
    prefix = common_prefix(prompts) // block * block if settings.prefix_caching else 0
    capacity = Capacity(
        rows=min(settings.max_num_seqs, memory.window_rows or settings.max_num_seqs),
        tokens=memory.kv_tokens,
        batched_tokens=settings.max_batched_tokens,
        prefix=prefix if len(prompts) > 1 else 0,
        samples=samples.whole if settings.prefix_caching else 1,
        block=block,
    )
    notes, price = list[str](), None
    if len(room.uses) > 1:
        notes.append("the cost of models other than the target is not counted")
    if settings.rules is BY_ROW:
        price = SCORED if opened.answer is not None else DECODE
        price = BLOCKS if opened.model.config.diffusion is not None else price
        notes.append(price.text)
    return Work(
        prompts=scan.lengths,
        rows=rows,
        samples=samples.whole,
        spread=samples.spread,
        longest=scan.longest_answer or sampling.max_new_tokens,
        exact=sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids),
        width=room.width,
        min_width=opened.strategy.least_tokens,
        capacity=capacity,
        weight_bytes=room.weight_bytes,
        seen=seen,
        compiled=compiled,
        price=1.0 if price is None else price.times,
        notes=tuple(notes),
    )


def same_speed(config: JobConfig) -> dict[str, Any]:
    """The groups of a job that decide its speed, as its config.yaml has them."""
    values = resolved(config)
    return {group: values[group] for group in ("model", "strategy", "engine", "constraint")}


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """The number of tokens with which all prompts begin."""
    if not prompts:
        return 0
    first, *others = prompts
    shared = len(first)
    for other in others:
        shared = min(shared, len(other))
        different = np.flatnonzero(np.array(first[:shared]) != np.array(other[:shared]))
        shared = int(different[0]) if len(different) else shared
    return shared
