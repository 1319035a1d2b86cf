"""The plan of a job: what it will read, need and cost.

`planner.make_plan` makes it, `plan_text` prints it, and `batchgen plan --json` prints
`Plan.summary`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.forecast.engine_estimate import EngineEstimate
from batchgen.jobs.forecast.forecast import Forecast, Range
from batchgen.jobs.forecast.samples_per_row import SamplesPerRow
from batchgen.jobs.forecast.scan import Scan
from batchgen.jobs.launchers.launch import launcher_text

if TYPE_CHECKING:
    from batchgen.engine.memory.memory_plan import MemoryPlan
    from batchgen.inputs.dataset.source import Left
    from batchgen.jobs.planning.budget_outlook import Outlook
    from batchgen.jobs.planning.disk import DiskUse
    from batchgen.jobs.planning.planned_reuse import PlannedReuse


@dataclass(frozen=True, slots=True)
class Constraints:
    """Counts of the different constraints of the rows and of those that were compiled, and the kind
    and text of the one that took longest to compile."""

    distinct: int
    compiled: int = 0
    slowest_s: float = 0.0
    slowest: str = ""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The plan of a job.

    Attributes:
        config: the job's configuration.
        model, data: the model and the data set, in words.
        scan: what was found in the rows.
        prompts: titles and texts of the first prompts.
        room: the most tokens of a prompt beside the job's longest answer.
        constraints: the constraints of the rows; None if there are none.
        engine: the engine as it would be built.
        memory: how the device's memory would be divided; None if the job does not fit.
        folder: what lies in the output folder, in words; `done` answers of the job are there.
        reuse: how many answers are copied from older jobs; None if none are.
        samples: how many answers each row has.
        forecast: the estimated time; None if nothing can run or the device is not known.
        disk: the bytes that will be written; None without a forecast.
        price: the cost in the user's currency; None without `plan.price_per_hour`.
        errors: reasons why the job would be refused or is not worth a start.
        warnings: further remarks for the user.
        seconds: the time that making the plan took.
        funnel: how many rows are left after each step that chooses among them.
        outlook: whether each limit of the budget will suffice.
    """

    config: JobConfig
    model: str
    data: str
    scan: Scan
    prompts: list[tuple[str, str]]
    room: int
    constraints: Constraints | None
    engine: EngineEstimate
    memory: MemoryPlan | None
    folder: str
    done: int
    reuse: PlannedReuse | None
    samples: SamplesPerRow
    forecast: Forecast | None
    disk: DiskUse | None
    price: Range | None
    errors: list[str]
    warnings: list[str]
    seconds: float
    funnel: Sequence[Left] = ()
    outlook: Sequence[Outlook] = ()

    @property
    def at_once(self) -> int:
        """The number of rows that run at once if answers have their likely length."""
        if self.memory is None or not len(self.scan.lengths):
            return 0
        tokens = float(self.scan.lengths.mean()) + self.mean_answer
        return max(min(self.engine.settings.max_num_seqs, self.memory.fitting_rows(tokens)), 1)

    @property
    def mean_answer(self) -> float:
        """The likely mean of the answers' tokens."""
        if self.forecast is None:
            return float(self.config.sampling.max_new_tokens)
        return self.forecast.generated.likely / max(self.answers, 1)

    @property
    def answers(self) -> int:
        """The likely number of answers that are still to be computed, of the rows that are
        known."""
        rows = self.scan.num_rows or self.scan.looked_at
        reused = 0 if self.reuse is None else self.reuse.answers
        return max(round(rows * self.samples.number.likely) - self.done - reused, 0)

    def summary(self) -> dict[str, Any]:
        """Everything as plain values, for `--json`."""
        scan, lengths, memory = self.scan, self.scan.lengths, self.memory
        return {
            "model": self.model,
            "data": self.data,
            "rows": scan.num_rows,
            "rows_looked_at": scan.looked_at,
            "funnel": [asdict(left) for left in self.funnel],
            "prompt_tokens": length_figures(lengths),
            "room": self.room,
            "longest": [{"row": i, "id": id, "tokens": n} for i, id, n in scan.longest],
            "bad_rows": {type: asdict(bad) for type, bad in scan.bad.items()},
            "cut": scan.cut,
            "prompts": [{"row": title, "text": text} for title, text in self.prompts],
            "constraints": None if self.constraints is None else asdict(self.constraints),
            "kv_bytes_per_token": self.engine.token_bytes,
            "state_bytes_per_row": self.engine.row_bytes,
            "window_bytes_per_row": self.engine.window_bytes,
            "memory": None if memory is None else asdict(memory),
            "rows_at_once": self.at_once,
            "samples_per_row": asdict(self.samples.number),
            "answers": self.answers,
            "answers_done": self.done,
            "answers_copied": self.reuse and asdict(self.reuse),
            "folder": self.folder,
            "launcher": launcher_text(self.config),
            "disk": None if self.disk is None else asdict(self.disk),
            "forecast": None if self.forecast is None else self.forecast.summary(),
            "gpu_hours": self.gpu_hours and asdict(self.gpu_hours),
            "price": self.price and asdict(self.price),
            "budget": [{**asdict(one), "verdict": one.verdict} for one in self.outlook],
            "errors": self.errors,
            "warnings": self.warnings,
            "seconds": round(self.seconds, 2),
        }

    @property
    def gpu_hours(self) -> Range | None:
        """Hours of all GPUs of the engine together; None on a CPU or without a forecast."""
        memory, expected = self.memory, self.forecast
        if memory is None or memory.total is None or expected is None:
            return None
        return expected.seconds.times(self.config.engine.tensor_parallel / 3600)


def length_figures(lengths: np.ndarray) -> Mapping[str, float] | None:
    """Median, 99th percentile, largest, mean and sum of lengths; None if there are none."""
    if not len(lengths):
        return None
    p50, p99 = np.percentile(lengths, [50, 99], method="higher")
    return {
        "p50": int(p50),
        "p99": int(p99),
        "max": int(lengths.max()),
        "mean": round(float(lengths.mean()), 1),
        "sum": int(lengths.sum()),
    }
