"""Predicts for `batchgen plan` whether a job's budget will suffice."""

from __future__ import annotations

from dataclasses import dataclass

from batchgen.config.groups.job_config import JobConfig
from batchgen.jobs.forecast.forecast import Forecast
from batchgen.jobs.forecast.range import Range
from batchgen.jobs.generation.spending import Used, amount_text
from batchgen.storage.stores.open_storage import job_metrics


@dataclass(frozen=True)
class Outlook:
    """Whether one limit of the budget will suffice.

    Attributes:
        key: the key of the budget.
        limit: its value, in the unit of the key, as are the next two.
        used: what earlier attempts have used.
        needed: what the job still needs.
    """

    key: str
    limit: float
    used: float
    needed: Range

    @property
    def verdict(self) -> str:
        """`suffices`; `may not suffice`; or `will not suffice`, if the likely need is more than
        what is left."""
        if self.used + self.needed.likely > self.limit:
            return "will not suffice"
        return "suffices" if self.used + self.needed.bound <= self.limit else "may not suffice"

    @property
    def text(self) -> str:
        """The verdict with its figures, as a sentence."""
        needed, limit = amount_text(self.key, self.needed.likely), amount_text(self.key, self.limit)
        used = f" besides {amount_text(self.key, self.used)} used" if self.used else ""
        return f"budget.{self.key} {self.verdict}: {limit}, and the job likely needs {needed}{used}"


def outlooks(config: JobConfig, expected: Forecast) -> list[Outlook]:
    """Predict the outlook of each limit that is set, from the forecast and from what earlier
    attempts have used."""
    if not config.budget.limits:
        return []
    figures = job_metrics(config.output.dir)
    used = Used() if figures is None else Used.of(figures["attempts"])
    hours = expected.seconds.times(config.engine.tensor_parallel / 3600)
    needed = {
        "tokens": expected.generated_tokens.plus(Range.exactly(expected.prompt_tokens)),
        "minutes": expected.seconds.times(1 / 60),
        "gpu_hours": hours,
        "price": hours.times(config.budget.price_per_hour or 0.0),
    }
    before = used.by_limit(config.budget)
    return [
        Outlook(key, limit, before[key], needed[key]) for key, limit in config.budget.limits.items()
    ]
