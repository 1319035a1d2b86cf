"""Makes the plan of a job for `batchgen plan`: in seconds, without loading weights."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from tempfile import gettempdir
from typing import TYPE_CHECKING

import torch

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.layers.mxfp4_format import Units, units_of
from batchgen.jobs.forecast.devices import DEVICES, Device, device_named
from batchgen.jobs.forecast.engine_estimate import EngineEstimate, estimate_engine
from batchgen.jobs.forecast.forecast import Forecast, forecast
from batchgen.jobs.forecast.samples_per_row import samples_per_row
from batchgen.jobs.forecast.scan import Scan, job_reading, scan_rows
from batchgen.jobs.forecast.step_cost import StepCost
from batchgen.jobs.forecast.work import here, job_work, same_speed
from batchgen.jobs.planning.budget_outlook import Outlook, outlooks, used_before
from batchgen.jobs.planning.job_plan import Plan
from batchgen.jobs.planning.plan_checks import compiled_constraints, rows_and_disk
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import row_title, shown_prompt
from batchgen.jobs.planning.planned_reuse import planned_reuse
from batchgen.kernels.compile_ahead import have_compiled
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

if TYPE_CHECKING:
    from batchgen.engine.memory.memory_plan import MemoryPlan
    from batchgen.jobs.forecast.calibration import Calibration
    from batchgen.jobs.forecast.scan import Reading
    from batchgen.jobs.planning.disk import DiskUse
    from batchgen.jobs.planning.folder_state import FolderState
    from batchgen.jobs.resolve.opened_job import OpenedJob

SHOWN_PROMPTS = 2


@contextmanager
def opened_rows(config: JobConfig) -> Iterator[tuple[OpenedJob, Reading]]:
    """Open a job as a run would, and prepare to read its rows. Raises ConfigError for what a run
    refuses before it looks into its folder."""
    from batchgen.jobs.resolve.open_job import open_job
    from batchgen.jobs.run.checked_rows import check_rows

    with closing(open_job(config)) as opened:
        check_rows(config, opened)
        from batchgen.jobs.planning.folder_state import (
            find_rows,  # it loads the libraries of the data
        )

        find_rows(config, opened.source)
        yield opened, job_reading(config, opened)


def output_folder(config: JobConfig, opened: OpenedJob) -> tuple[FolderState, ConfigError | None]:
    """The state of the output folder, and the reason why the job would be refused because of it, if
    there is one."""
    from batchgen.jobs.planning.folder_state import FolderState, folder_state

    try:
        return folder_state(config, opened), None
    except ConfigError as error:  # rows are checked all the same
        return FolderState(f"{config.output.dir}: refused"), error


def make_plan(config: JobConfig, settings: PlanSettings) -> Plan:
    """Find out what a job will read, need and cost. Raises ConfigError if there is nothing to plan.

    Nothing is written, and no weights are loaded.
    """
    started = time.perf_counter()
    from batchgen.jobs.launchers.launch import check_launcher

    if settings.device is not None:  # the job's own device need not be here
        config = replace(config, engine=replace(config.engine, device="auto"))
    check_launcher(config)
    with opened_rows(config) as (opened, reading):
        return _Planner(config, settings, opened, reading).plan(started)


class _Planner:
    def __init__(
        self,
        config: JobConfig,
        settings: PlanSettings,
        opened: OpenedJob,
        reading: Reading,
    ) -> None:
        self._config, self._settings, self._opened = config, settings, opened
        self._reading = reading
        self._errors: list[str] = []
        self._warnings: list[str] = []

    def plan(self, started: float) -> Plan:
        config, opened, reading = self._config, self._opened, self._reading
        (folder, done, measured), refusal = output_folder(config, opened)
        self._samples = samples_per_row(config.sampling, measured)
        if refusal is not None:
            self._errors.append(str(refusal))
        scan = scan_rows(reading)
        reuse = planned_reuse(config, opened, scan)
        reused = 0 if reuse is None else reuse.answers
        constraints = compiled_constraints(opened, config, scan)
        device = self._device()
        gpu_bytes = device.memory if device is not None and device.is_gpu else None
        # A GPU that is not in the table is this machine's.
        four_bits = opened.dtype.itemsize == 2
        units = (
            units_of(torch.device("cuda"), opened.dtype)
            if device is None
            else Units(device.fp8, device.is_gpu and four_bits, opened.dtype)
        )
        on_gpu = device is None or device.is_gpu
        if on_gpu and (lack := opened.model.kv_cache_lack(units)) is not None:
            self._errors.append(lack)
        engine = estimate_engine(opened, config, gpu_bytes, units)
        memory = self._memory(engine, gpu_bytes)
        expected = None
        if memory is not None and device is not None and scan.sample:
            expected = self._forecast(engine, memory, device, scan, done + reused)
        disk = None if expected is None else self._disk(scan, expected, done, reused)
        errors, warnings = rows_and_disk(scan, disk, self._settings.most_bad)
        self._errors += errors
        self._warnings += warnings
        outlook = self._outlook(expected)
        price = None
        per_device = self._settings.price_per_hour or config.budget.price_per_hour
        if expected is not None and per_device is not None:
            per_hour = per_device * config.engine.tensor_parallel
            price = expected.seconds.times(per_hour / 3600)
        return Plan(
            config=config,
            model=opened.model.config.architecture,
            data=config.dataset.shown,
            scan=scan,
            prompts=list(self._prompts(scan)),
            room=reading.room,
            constraints=constraints,
            engine=engine,
            memory=memory,
            folder=folder,
            done=done,
            reuse=reuse,
            samples=self._samples,
            forecast=expected,
            disk=disk,
            price=price,
            outlook=outlook,
            errors=self._errors,
            warnings=self._warnings,
            seconds=time.perf_counter() - started,
            funnel=opened.source.funnel,
        )

    def _device(self) -> Device | None:
        """The device to plan for; None if it is a GPU that is not in the table."""
        if self._settings.device is not None:
            config = replace(self._config, engine=replace(self._config.engine, device="cpu"))
            return device_named(self._settings.device) or here(config, self._opened.dtype)
        device = here(self._config, self._opened.dtype)
        if device is None:
            self._warnings.append(
                "this GPU is not in the table of plan.device, so no time is predicted: name the "
                f"nearest with plan.device ({', '.join(DEVICES)})"
            )
        return device

    def _memory(self, engine: EngineEstimate, gpu_bytes: int | None) -> MemoryPlan | None:
        try:
            return engine.memory(gpu_bytes)
        except ValueError as error:
            self._errors.append(f"engine: {error}")
            return None

    def _forecast(
        self, engine: EngineEstimate, memory: MemoryPlan, device: Device, scan: Scan, done: int
    ) -> Forecast:
        config = self._config
        rows = scan.num_rows or scan.looked_at
        answering = max(rows * (1 - scan.bad_share) - done / self._samples.number.likely, 0)
        work = job_work(
            config,
            self._opened,
            engine,
            memory,
            scan,
            max(round(answering), 1),
            samples=self._samples,
            seen=self._calibration(device),
            compiled=self._settings.device is None and have_compiled(),
        )
        return forecast(StepCost(engine.sizes, device, self._opened.model.config.vocab_size), work)

    def _calibration(self, device: Device) -> Calibration | None:
        """Measurements of the job `plan.like`, or of earlier attempts of this one."""
        from batchgen.jobs.forecast.calibration import seen_in

        config, like = self._config, self._settings.like
        same = same_speed(config)
        if like is not None:
            from batchgen.storage.folder.open_folder import open_folder

            calibration = seen_in(open_folder(like, "plan.like").path, same, device.is_gpu, like)
            if calibration is None:
                raise ConfigError(f"plan.like={like}: none of its rows has an answer yet")
            return calibration
        if is_url(config.output.dir):  # measurements in an object store are not downloaded for this
            return None
        folder = Path(config.output.dir)
        is_there = (folder / "manifest.json").is_file() and (folder / "metrics.json").is_file()
        return seen_in(folder, same, device.is_gpu, config.output.dir) if is_there else None

    def _outlook(self, expected: Forecast | None) -> list[Outlook]:
        """Whether the budget will suffice, of which a warning tells where it likely does not."""
        if expected is None:
            return []
        result = outlooks(self._config, expected, used_before(self._config))
        for limit in result:
            if limit.verdict == "will not suffice":
                self._warnings.append(
                    f"the job will likely stop before its end, with exit code 4: {limit.text}"
                )
        return result

    def _prompts(self, scan: Scan) -> Iterator[tuple[str, str]]:
        for read in scan.sample[:SHOWN_PROMPTS]:
            title = f"{row_title(read.row)}: {len(read.ids):,} tokens"
            yield title, shown_prompt(read.ids, self._opened.model.tokenizer)

    def _disk(self, scan: Scan, expected: Forecast, done: int, reused: int) -> DiskUse:
        from batchgen.jobs.planning.disk import disk_use
        from batchgen.jobs.run.checked_rows import output_schema

        config = self._config
        answers = round((scan.num_rows or scan.looked_at) * self._samples.number.likely) - done
        return disk_use(
            output_schema(config, self._opened).columns,
            # Answers that are copied are taken to be as long as those that are computed.
            expected.generated.times(max(answers, 1) / max(answers - reused, 1)),
            float(scan.lengths.mean()),
            max(answers, 1),
            open_rows=config.output.rows_per_shard * config.sampling.most_samples,
            folder=Path(gettempdir() if is_url(config.output.dir) else config.output.dir),
        )
