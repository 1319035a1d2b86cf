"""Makes the plan of a job for `batchgen plan`, in seconds and without loading weights.

`make_plan` reads some rows (`outlined`), estimates the engine and its memory on a device, and from
both the time, the tokens and the bytes of the output.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import fields, replace
from itertools import pairwise, takewhile
from pathlib import Path
from tempfile import gettempdir

from batchgen.config.compose.load_config import resolved
from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.layers.mxfp4_format import Units
from batchgen.engine.memory.memory_plan import MemoryPlan
from batchgen.engine.strategy import TARGET
from batchgen.jobs.forecast.calibration import Calibration, seen_in
from batchgen.jobs.forecast.devices import Device, device_here, device_named
from batchgen.jobs.forecast.engine_estimate import EngineEstimate, estimate_engine
from batchgen.jobs.forecast.forecast import Forecast, forecast
from batchgen.jobs.forecast.run_time import Work
from batchgen.jobs.forecast.step_cost import StepCost
from batchgen.jobs.launchers.launch import check_launcher
from batchgen.jobs.planning.budget_outlook import outlooks
from batchgen.jobs.planning.disk import DiskUse, disk_use
from batchgen.jobs.planning.job_plan import Plan
from batchgen.jobs.planning.outline import Outline, outlined
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.run.checked_rows import output_schema
from batchgen.storage.folder.open_folder import open_folder
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

_COMPARED = 50
"""The most prompts that are compared, each with the one before, to find what they share."""
_SAME_SPEED = ("model", "strategy", "engine", "constraint")
"""The groups of the configuration that decide a job's speed."""


def make_plan(config: JobConfig, settings: PlanSettings) -> Plan:
    """Find out what a job will read, need and cost. Nothing is written, and no weights are loaded.

    Raises:
        ConfigError: the job would be refused before its folder is looked at.
    """
    started = time.perf_counter()
    if settings.device is not None:  # this machine need not have the device of the job's config
        config = replace(config, engine=replace(config.engine, device="auto"))
    check_launcher(config)
    with outlined(config) as outline:
        return _Planner(outline, settings).plan(started)


class _Planner:
    """Makes one plan, and collects its errors and warnings."""

    def __init__(self, outline: Outline, settings: PlanSettings) -> None:
        self._outline, self._settings = outline, settings
        self._config, self._opened, self._scan = outline.config, outline.opened, outline.scan
        self._errors: list[str] = []
        self._warnings: list[str] = []

    def plan(self, started: float) -> Plan:
        config, outline = self._config, self._outline
        if outline.refusal is not None:
            self._errors.append(str(outline.refusal))
        if self._settings.device is None:
            device = device_here(config.engine.device, self._opened.dtype)
        else:  # None is the CPU, whose speed is measured on this machine
            device = device_named(self._settings.device) or device_here("cpu", self._opened.dtype)
        engine, memory = self._engine(device)
        expected, disk = None, None
        if memory is not None and outline.scan.sample:
            expected = self._forecast(engine, memory, device)
            disk = self._disk(expected)
        self._errors += self._row_errors()
        if disk is not None:
            self._check_disk(disk)
        outlook = [] if expected is None else outlooks(config, expected)
        self._warnings += (
            f"the job will likely stop before its end, with exit code 4: {limit.text}"
            for limit in outlook
            if limit.verdict == "will not suffice"
        )
        return Plan(
            **{field.name: getattr(outline, field.name) for field in fields(outline)},
            engine=engine,
            memory=memory,
            forecast=expected,
            disk=disk,
            errors=self._errors,
            warnings=self._warnings,
            outlook=outlook,
            plan_s=time.perf_counter() - started,
        )

    def _engine(self, device: Device) -> tuple[EngineEstimate, MemoryPlan | None]:
        """Return the engine on a device, and the plan of its memory, which is None if the job does
        not fit there."""
        opened, memory = self._opened, device.memory or None
        four_bits = device.is_gpu and opened.dtype.itemsize == 2
        units = Units(device.fp8, four_bits, opened.dtype)
        if device.is_gpu and (lack := opened.model.kv_cache_lack(units)) is not None:
            self._errors.append(lack)
        engine = estimate_engine(opened, self._config, memory, units)
        try:
            return engine, engine.memory(memory)
        except ValueError as error:
            self._errors.append(f"engine: {error}")
            return engine, None

    def _forecast(self, engine: EngineEstimate, memory: MemoryPlan, device: Device) -> Forecast:
        """Forecast the job on a device."""
        config, scan, settings = self._config, self._scan, engine.settings
        sampling, samples = config.sampling, self._outline.samples
        prompts = [read.request.prompt for read in scan.sample[:_COMPARED]]
        block, cached = settings.block_size, settings.prefix_caching
        # Prompts that begin alike share the whole blocks of that beginning in the cache: examples
        # that all rows have, or the text of a document in several rows one after another.
        shared = [_common(*pair) // block * block for pair in pairwise(prompts)]
        prefix = sum(shared) / max(len(shared), 1)
        likely = samples.number.likely
        # The rows that still need an answer, without those that will have an error.
        rows = self._outline.answers / likely - self._outline.rows * scan.bad_share
        longest = scan.longest_answer or sampling.max_new_tokens
        kv_tokens, window_tokens = memory.window_tokens(float(scan.lengths.mean()) + longest)
        work = Work(
            prompts=scan.lengths,
            answers=samples.number.times(max(rows, 1 / likely)),  # at least one answer
            longest=longest,
            exact=sampling.ignore_eos and not (sampling.stop or sampling.stop_token_ids),
            width=max(engine.uses[TARGET].widths),
            min_width=self._opened.strategy.least_tokens,
            rows=settings.max_num_seqs,
            kv_tokens=kv_tokens,
            window_tokens=window_tokens,
            batched_tokens=settings.max_batched_tokens,
            weight_bytes=engine.weight_bytes,
            prefix=prefix if cached else 0,
            samples=max(round(likely), 1) if cached else 1,
            block=block,
            seen=self._calibration(device),
        )
        return forecast(StepCost(engine.sizes, device), work)

    def _calibration(self, device: Device) -> Calibration | None:
        """The measurements of the job `plan.like`, or of earlier attempts of this job; None if
        there are none."""
        config, like = self._config, self._settings.like
        values = resolved(config)
        same = {group: values[group] for group in _SAME_SPEED}
        if like is not None:
            calibration = seen_in(open_folder(like, "plan.like").path, same, device.is_gpu, like)
            if calibration is None:
                raise ConfigError(f"plan.like={like}: none of its rows has an answer yet")
            return calibration
        folder = Path(config.output.dir)
        if is_url(config.output.dir) or not (folder / "metrics.json").is_file():
            return None  # the metrics of an earlier attempt are not downloaded for a plan
        return seen_in(folder, same, device.is_gpu, config.output.dir)

    def _disk(self, expected: Forecast) -> DiskUse:
        """Estimate the bytes of the output."""
        config, outline = self._config, self._outline
        answers = max(outline.answers + outline.reused, 1)
        return disk_use(
            output_schema(config, self._opened).columns,
            # Answers that are copied are taken to be as long as those that are computed.
            expected.generated_tokens.times(answers / max(outline.answers, 1)),
            float(self._scan.lengths.mean()),
            answers,
            per_shard=config.output.rows_per_shard * config.sampling.most_samples,
            folder=Path(gettempdir() if is_url(config.output.dir) else config.output.dir),
        )

    def _row_errors(self) -> Iterator[str]:
        """The plan's error about rows, if there is one. A small share of bad rows is only a
        warning."""
        scan, limit = self._scan, self._settings.most_bad
        text = f"{scan.num_bad:,} of {scan.looked_at:,} rows"
        if scan.looked_at and not scan.sample:
            yield "no row that was looked at has a prompt"
        elif scan.bad_share > limit:
            yield (
                f"{text} ({scan.bad_share:.1%}) will have an error instead of an answer, more than "
                f"plan.most_bad={limit:g}"
            )
        elif scan.num_bad:
            self._warnings.append(f"{text} will have an error instead of an answer")

    def _check_disk(self, disk: DiskUse) -> None:
        if disk.output.likely > disk.free:
            self._errors.append("the output will probably not fit on the disk of output.dir")
        elif disk.output.bound > disk.free:
            self._warnings.append("the output may not fit on the disk of output.dir")


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    """Return the number of tokens with which both prompts begin."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
