"""The costs of a chain of jobs, each of which reads the rows of the job before.

The metrics.json of a job holds the costs of the jobs whose rows it has read (`read_steps`) and the
cost of the job itself (`own_cost`). Reports and `batchgen status` show them step by step, and per
row that was kept.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from batchgen.util.duration import duration


@dataclass(frozen=True)
class JobCost:
    """The cost of one job of a chain.

    Attributes:
        job: the job's short name.
        device_s: the seconds that a device computed for it.
        rows: the rows that it wrote.
    """

    job: str
    device_s: float
    rows: int

    @property
    def per_row(self) -> float:
        """Seconds of the device for each row."""
        return self.device_s / max(self.rows, 1)


def own_cost(metrics: Mapping[str, Any], job: str) -> JobCost | None:
    """The cost of the job of a metrics.json; None if no time was measured."""
    seconds = metrics.get("device_s")
    if not isinstance(seconds, int | float) or not seconds:
        return None
    return JobCost(job, float(seconds), int(metrics.get("rows", 0)))


def read_steps(metrics: Mapping[str, Any]) -> list[JobCost]:
    """The costs, in order, of the jobs whose rows the job of a metrics.json has read."""
    return [
        JobCost(str(cost["job"]), float(cost["device_s"]), int(cost["rows"]))
        for cost in metrics.get("read_jobs") or ()
    ]


def all_steps(metrics: Mapping[str, Any], job: str) -> list[JobCost]:
    """The costs of the jobs that were read, each once, followed by the cost of the job itself."""
    costs = own_cost(metrics, job)
    return list(dict.fromkeys([*read_steps(metrics), *([] if costs is None else [costs])]))


def as_values(steps: Sequence[JobCost]) -> list[dict[str, Any]]:
    """The costs in the form of metrics.json."""
    return [asdict(step) for step in steps]


def cost_line(steps: Sequence[JobCost], kept: int, price_per_hour: float | None = None) -> str:
    """A line with the cost of each step, and with their sum per row that was kept at the end."""
    parts = [f"{step.job} {_seconds(step.device_s)}" for step in steps]
    total = sum(step.device_s for step in steps)
    text = " + ".join(parts) if len(parts) > 1 else _seconds(total)
    if len(parts) > 1:
        text += f" = {_seconds(total)}"
    if price_per_hour is not None:
        text += f" ({price_of(total, price_per_hour)})"
    if kept:
        text += f"; {_seconds(total / kept)} per kept row"
        if price_per_hour is not None:
            text += f" ({price_of(1000 * total / kept, price_per_hour)} for 1,000)"
    return text


def price_of(seconds: float, price_per_hour: float) -> str:
    """The price of some seconds of the device, in the currency of `price_per_hour`."""
    return f"{seconds / 3600 * price_per_hour:,.2f}"


def _seconds(seconds: float) -> str:
    """Seconds for people, with three digits."""
    return f"{seconds:,.3g} s" if seconds < 100 else duration(seconds)
