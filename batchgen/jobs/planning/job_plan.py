"""The plan of a job: what it will read, need and cost. `planner.py` makes it for `batchgen
plan`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from batchgen.jobs.launchers.launch import launcher_text
from batchgen.jobs.planning.outline import Outline
from batchgen.jobs.planning.outline_text import length_figures, shown_prompts

if TYPE_CHECKING:
    from batchgen.engine.memory.memory_plan import MemoryPlan
    from batchgen.jobs.forecast.engine_estimate import EngineEstimate
    from batchgen.jobs.forecast.forecast import Forecast
    from batchgen.jobs.forecast.range import Range
    from batchgen.jobs.planning.budget_outlook import Outlook
    from batchgen.jobs.planning.disk import DiskUse


@dataclass(frozen=True, kw_only=True)
class Plan(Outline):
    """The plan of a job.

    Attributes:
        engine: the engine as it would be built.
        memory: the division of the device's memory; None if the job does not fit.
        forecast: the expected time and tokens; None if nothing can run.
        disk: the bytes of the output; None without a forecast.
        errors: reasons why the job would be refused, or is not worth a start.
        warnings: what else the user should know.
        outlook: whether each limit of the budget will suffice.
        plan_s: the seconds that making the plan took.
    """

    engine: EngineEstimate
    memory: MemoryPlan | None
    forecast: Forecast | None
    disk: DiskUse | None
    errors: list[str]
    warnings: list[str]
    outlook: Sequence[Outlook]
    plan_s: float

    @property
    def at_once(self) -> int:
        """The number of rows that run at the same time if answers have their likely length."""
        if self.memory is None or not len(self.scan.lengths):
            return 0
        answer = float(self.config.sampling.max_new_tokens)
        if self.forecast is not None:
            answer = self.forecast.generated_tokens.likely / max(self.answers, 1)
        fitting = self.memory.fitting_rows(float(self.scan.lengths.mean()) + answer)
        return max(min(self.engine.settings.max_num_seqs, fitting), 1)

    @property
    def device_hours(self) -> Range | None:
        """Hours of all devices of the engine together; None without a forecast."""
        share = self.config.engine.tensor_parallel / 3600
        return None if self.forecast is None else self.forecast.seconds.times(share)

    @property
    def price(self) -> Range | None:
        """The price of the device hours; None without `budget.price_per_hour`."""
        hours, per_hour = self.device_hours, self.config.budget.price_per_hour
        return None if hours is None or per_hour is None else hours.times(per_hour)

    def summary(self) -> dict[str, Any]:
        """The whole plan as plain values, for `--json`."""
        scan = self.scan
        return {
            "model": self.opened.model.config.architecture,
            "data": self.config.dataset.shown,
            "rows": scan.num_rows,
            "rows_looked_at": scan.looked_at,
            "funnel": [asdict(left) for left in self.opened.source.funnel],
            "prompt_tokens": length_figures(scan.lengths),
            "room": self.room,
            "bad_rows": {type: asdict(bad) for type, bad in scan.bad.items()},
            "full_prompts": self.full,
            "prompts": [{"row": title, "text": text} for title, text in shown_prompts(self)],
            "kv_bytes_per_token": self.engine.token_bytes,
            "state_bytes_per_row": self.engine.row_bytes,
            "window_bytes_per_row": self.engine.window_bytes,
            "memory": self.memory and asdict(self.memory),
            "rows_at_once": self.at_once,
            "samples_per_row": asdict(self.samples.number),
            "answers": self.answers,
            "answers_done": self.folder.done,
            "answers_copied": self.reuse and asdict(self.reuse),
            "folder": self.folder.text,
            "launcher": launcher_text(self.config),
            "disk": self.disk and asdict(self.disk),
            "forecast": self.forecast and asdict(self.forecast),
            "device_hours": self.device_hours and asdict(self.device_hours),
            "price": self.price and asdict(self.price),
            "budget": [{**asdict(item), "verdict": item.verdict} for item in self.outlook],
            "errors": self.errors,
            "warnings": self.warnings,
            "seconds": round(self.plan_s, 2),
        }
