"""From an opened job to the work that `forecast` estimates."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.jobs.forecast.calibration import Calibration, Ints
from batchgen.jobs.forecast.devices import Device, measured_cpu, this_gpu
from batchgen.jobs.forecast.engine_estimate import EngineEstimate
from batchgen.jobs.forecast.forecast import Work
from batchgen.jobs.forecast.run_time import Places
from batchgen.jobs.forecast.samples_per_row import SamplesPerRow
from batchgen.jobs.forecast.step_cost import StepCost

if TYPE_CHECKING:
    from batchgen.jobs.resolve.opened_job import OpenedJob


def job_device(config: JobConfig) -> str:
    """The kind of device that a job runs on here: `cuda` or `cpu`."""
    name = config.engine.device
    if name == "auto":
        return "cuda" if torch.cuda.is_available() else "cpu"
    return name


def here(config: JobConfig, dtype: torch.dtype, seconds: float) -> Device | None:
    """The device that a job runs on here; None if it is a GPU that is not known. Each rate of a CPU
    is measured for `seconds`."""
    if job_device(config) == "cuda":
        return this_gpu()
    return measured_cpu(dtype, seconds)


def job_work(
    config: JobConfig,
    opened: OpenedJob,
    room: EngineEstimate,
    memory: MemoryPlan,
    prompts: Sequence[Sequence[int]],
    lengths: Ints,
    rows: int,
    *,
    samples: SamplesPerRow,
    longest: int | None = None,
    seen: Calibration | None = None,
    start_s: float | None = None,
    compiled: bool = True,
    notes: tuple[str, ...] = (),
) -> Work:
    """What a job has to do, with `rows` to compute, `samples` of each, and some whole prompts,
    which tell what all begin with. `lengths` are the tokens of all prompts or of some, `longest`
    the mean of the most tokens of an answer, where rows have their own; the rest is as in `Work`.
    """
    settings, sampling = room.settings, config.sampling
    block = settings.block_size
    prefix = common_prefix(prompts) // block * block if settings.prefix_caching else 0
    places = Places(
        rows=min(settings.max_num_seqs, memory.window_rows or settings.max_num_seqs),
        tokens=memory.kv_tokens,
        batched_tokens=settings.max_batched_tokens,
        prefix=prefix if len(prompts) > 1 else 0,
        samples=samples.whole if settings.prefix_caching else 1,
        block=block,
    )
    return Work(
        prompts=lengths,
        rows=rows,
        samples=samples.whole,
        spread=samples.spread,
        longest=longest or sampling.max_new_tokens,
        exact=sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids),
        width=room.width,
        least=opened.strategy.least_tokens,
        places=places,
        weight_bytes=room.weight_bytes,
        seen=seen,
        start_s=start_s,
        compiled=compiled,
        notes=notes + _notes(room),
    )


def step_cost(room: EngineEstimate, opened: OpenedJob, device: Device) -> StepCost:
    """The time of the target's forwards on a device for each rank; on a CPU the ranks share one."""
    if not device.is_gpu:
        device = device.shared(room.sizes.ranks)
    return StepCost(room.sizes, device, opened.model.config.vocab_size)


def same_speed(config: JobConfig) -> dict[str, Any]:
    """The groups of a job that decide its speed, as its config.yaml has them."""
    values = resolved(config)
    return {group: values[group] for group in ("model", "strategy", "engine", "constraint")}


def common_prefix(prompts: Sequence[Sequence[int]]) -> int:
    """How many tokens all prompts begin with."""
    if not prompts:
        return 0
    first, *others = prompts
    shared = len(first)
    for other in others:
        shared = min(shared, len(other))
        different = np.flatnonzero(np.array(first[:shared]) != np.array(other[:shared]))
        shared = int(different[0]) if len(different) else shared
    return shared


def _notes(room: EngineEstimate) -> tuple[str, ...]:
    if len(room.uses) > 1:
        return ("what the models beside the target cost is not counted",)
    return ()
