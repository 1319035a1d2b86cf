"""The funnel of a pipeline: the number of rows that each step read, made and kept. The pipeline's
summary and its page use it.

```
step    read  made  dropped  rows  answers  errors  kept  state
write    100   300       20   380      380       2   378  complete
judge    378     0        0   378      120       0   120  running
```
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from batchgen.config.groups.workers_config import WorkersConfig
from batchgen.storage.costs.chain_costs import JobCost, cost_line
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.metrics.tally import Totals
from batchgen.storage.stores.manifest import ROWS
from batchgen.storage.stores.metrics_file import METRICS
from batchgen.storage.stores.open_storage import open_storage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.text_table import columns

HEADER = ("step", "read", "made", "dropped", "rows", "answers", "errors", "kept", "state")
_NOT_BEGUN, _DAMAGED = "not begun", "damaged"


@dataclass(frozen=True)
class StepCounts:
    """The row counts of a step.

    Attributes:
        name: the name of the step.
        folder: the name of the step's folder.
        state: the status in metrics.json, or that the step has not begun or is damaged.
        left: (filter, number of rows after it), in order; the first entry is the number of rows
            that were read.
        answers: the number of finished answers, errors included.
        errors: the number of answers with an error.
        device_s: seconds of device time.
        price_per_hour: the price of an hour of its devices, if it is known.
        damage: for a damaged step, what is wrong and what to do; otherwise None.
    """

    name: str
    folder: str
    state: str = _NOT_BEGUN
    left: Sequence[tuple[str, int]] = ()
    answers: int = 0
    errors: int = 0
    device_s: float = 0.0
    price_per_hour: float | None = None
    damage: str | None = None

    @property
    def is_begun(self) -> bool:
        return self.state != _NOT_BEGUN

    @property
    def read(self) -> int | None:
        """The number of rows or answers that the step read."""
        return self.left[0][1] if self.left else None

    @property
    def rows(self) -> int | None:
        """The number of rows that the step has after all filters."""
        return self.left[-1][1] if self.left else None

    @property
    def made(self) -> Sequence[tuple[str, int]]:
        """The filters or row steps that added rows, each with the number of added rows."""
        return [(what, more) for what, more in self._changes() if more > 0]

    @property
    def dropped(self) -> Sequence[tuple[str, int]]:
        """The filters that left rows out, each with the number of dropped rows."""
        return [(what, -more) for what, more in self._changes() if more < 0]

    def _changes(self) -> Iterator[tuple[str, int]]:
        for (_, before), (what, after) in pairwise(self.left):
            yield what, after - before

    @property
    def kept(self) -> int:
        """The number of answers without an error."""
        return self.answers - self.errors

    def cells(self) -> tuple[str, ...]:
        """The line of the table, as texts."""
        num_made, num_dropped = (
            sum(count for _, count in changes) if self.left else None
            for changes in (self.made, self.dropped)
        )
        numbers = [
            self.read,
            num_made,
            num_dropped,
            self.rows,
            *((self.answers, self.errors, self.kept) if self.is_begun else ()),
        ]
        texts = ["–" if number is None else f"{number:,}" for number in numbers]
        missing = len(HEADER) - 2 - len(texts)  # cells between the name and the state
        return (self.name, *texts, *["–"] * missing, self.state)


def funnel(out: str, folders: Mapping[str, str]) -> list[StepCounts]:
    """Return the counts of all steps. `folders` maps step names to the names of their folders in
    the pipeline's folder."""
    return [_counts(name, f"{out.rstrip('/')}/{at}", at) for name, at in folders.items()]


def funnel_table(steps: Sequence[StepCounts]) -> str:
    """Return the counts as lines of text."""
    lines = columns([HEADER, *(step.cells() for step in steps)])
    for step in steps:
        for verb, changes in (("made", step.made), ("dropped", step.dropped)):
            if changes:
                by = ", ".join(f"{count:,} by {what}" for what, count in changes)
                lines.append(f"{step.name}: {verb} {by}")
    if (cost := costs(steps)) is not None:
        lines.append(f"device: {cost}")
    return "\n".join(lines)


def costs(steps: Sequence[StepCounts]) -> str | None:
    """The costs of the steps, and their sum per row that the last step has kept. None if nothing
    was measured or no row is kept yet."""
    known = [JobCost(step.name, step.device_s, step.answers) for step in steps if step.device_s]
    prices = {step.price_per_hour for step in steps if step.device_s}
    # Steps whose hours cost differently have no price in common.
    price = prices.pop() if len(prices) == 1 else None
    return cost_line(known, steps[-1].kept, price) if known and steps[-1].kept else None


def _counts(name: str, folder: str, at: str) -> StepCounts:
    """Read the counts of the step `name` from its folder, whose last part is `at`."""
    try:
        reader = open_job_reader(folder)
        metrics = reader.metrics
        totals = Totals.of(metrics)
        state = str(metrics.get("status", _NOT_BEGUN))
        left = _answers_left(reader, metrics)
        rows, errors = int(totals.rows), int(totals.error_rows)
        job = JobSummary.of(metrics, reader.config)
        device_s = float(metrics.get("device_s", 0.0))
        return StepCounts(name, at, state, left, rows, errors, device_s, job.price_per_hour)
    except ConfigError as error:
        with closing(open_storage(folder, WorkersConfig())) as storage:
            is_begun = storage.exists(storage.path / METRICS)
        return (
            StepCounts(name, at, _DAMAGED, damage=str(error)) if is_begun else StepCounts(name, at)
        )
    except JobError as error:
        return StepCounts(name, at, _DAMAGED, damage=str(error))
    # What somebody else wrote can have any shape.
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        why = f"{folder} has a file that is not of batchgen ({type(error).__name__}: {error})"
        return StepCounts(name, at, _DAMAGED, damage=f"{why}: copy the folder again")


def _answers_left(reader: JobFolderReader, metrics: Mapping[str, Any]) -> list[tuple[str, int]]:
    """The number of rows that were read, and the number after each filter."""
    steps = [(str(what), int(rows)) for what, rows in metrics.get("funnel", ())]
    facts = reader.row_facts
    rows = reader.manifest["growing"].get(ROWS) if facts is None else facts.read_rows
    if not steps and rows is not None:
        steps = [("rows", rows)]
    if facts is not None:
        steps += [(step.short, step.rows_out) for step in facts.steps]
    return steps
