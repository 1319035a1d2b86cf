"""Plans a pipeline without running it: `plan_steps` for `batchgen plan`, `show_steps` for
`--dry-run`. Only steps whose rows are known can be planned."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from batchgen.jobs.forecast.range import Range
from batchgen.jobs.planning.dry_run import show
from batchgen.jobs.planning.job_plan import Plan
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import plan_text
from batchgen.jobs.planning.planner import make_plan
from batchgen.pipelines.run.make_sets import refuse_wrong_exports
from batchgen.pipelines.run.open_pipeline import OpenPipeline
from batchgen.pipelines.run.pipeline import Pipeline
from batchgen.pipelines.run.run_steps import of_step
from batchgen.storage.folder.open_folder import open_job_reader
from batchgen.storage.stores.manifest import ROWS
from batchgen.util.duration import duration
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.text_table import counted


@dataclass(frozen=True)
class PlannedStep:
    """The plan of a step that has not run.

    Attributes:
        plan: the plan; None if the rows of the step are not known yet.
        waits_for: the steps that must run before the rows are known.
        most_rows: the most rows that the step can have; None if unknown.
    """

    name: str
    folder: str
    plan: Plan | None
    waits_for: tuple[str, ...] = ()
    most_rows: int | None = None

    def text(self, samples: int) -> str:
        """Return the plan as text; `samples` is the number of samples of each row."""
        head = f"── step {self.name}: {self.folder}"
        if self.plan is not None:
            return f"{head}\n{plan_text(self.plan)}"
        rows = "its rows" if self.most_rows is None else f"at most {counted(self.most_rows, 'row')}"
        more = "" if self.most_rows is None else f", {counted(self.most_rows * samples, 'answer')}"
        return (
            f"{head}\nwaits for {' and '.join(self.waits_for)}: {rows}{more}; neither their "
            "content nor their time is known yet"
        )


def plan_steps(pipeline: Pipeline, settings: PlanSettings) -> list[PlannedStep]:
    """Plan the steps whose rows are known. Writes nothing. Raises ConfigError for a mistake in a
    step."""
    planned: dict[str, PlannedStep] = {}
    with OpenPipeline(pipeline) as opened:
        for name, step in pipeline.steps.items():
            waits = waits_for(opened, name)
            waits += [n for n in step.reads if n not in waits and _grows(planned[n], pipeline)]
            plan, total = None, None
            if waits:
                counts = [_answers(planned[parent], pipeline) for parent in step.parents]
                known_counts = [count for count in counts if count is not None]
                if step.parents and len(known_counts) == len(counts):
                    total = sum(known_counts)
                if step.config.dataset.limit is not None and total is not None:
                    total = min(total, step.config.dataset.limit)
            else:
                plan = _plan(opened, name, settings)
            planned[name] = PlannedStep(name, opened.folder(name), plan, tuple(waits), total)
    return [*planned.values()]


def waits_for(opened: OpenPipeline, name: str) -> list[str]:
    """Return the steps that must be complete before the rows of a step are known."""
    reads = opened.pipeline.steps[name].reads
    return [other for other in reads if not _is_complete(opened.folder(other))]


def _grows(step: PlannedStep, pipeline: Pipeline) -> bool:
    """Whether a step will have more answers, so that its readers will have more rows."""
    if step.plan is None:
        return True
    if pipeline.steps[step.name].config.sampling.until is None:
        return step.plan.answers > 0
    # With `until`, the answers per row cannot be predicted; only more rows mean more answers.
    job = open_job_reader(step.folder)
    rows = job.manifest["growing"].get(ROWS) if job.row_facts is None else job.row_facts.rows
    return step.plan.scan.num_rows != rows


def plans_text(pipeline: Pipeline, steps: list[PlannedStep]) -> str:
    """Return the plans of all steps as text, and the total time."""
    parts = [step.text(_samples(pipeline, step.name)) for step in steps]
    plans = [step.plan for step in steps if step.plan is not None]
    if (whole := total_seconds(plans)) is not None:
        known = "all steps" if len(plans) == len(steps) else f"{len(plans)} of {len(steps)} steps"
        low, likely, bound = (duration(s, 0) for s in whole)
        parts.append(f"time of {known}, one after the other: {low} to {bound}, likely {likely}")
    return "\n\n".join(parts)


def plans_summary(steps: list[PlannedStep]) -> dict[str, Any]:
    """Return the plans as JSON values, for `--json`."""
    return {
        "steps": {
            step.name: {
                "folder": step.folder,
                "waits_for": step.waits_for,
                "most_rows": step.most_rows,
                "plan": None if step.plan is None else step.plan.summary(),
            }
            for step in steps
        }
    }


def total_seconds(plans: list[Plan]) -> Range | None:
    """Return the time of jobs that run one after the other; None if the time of one is unknown."""
    total = Range.exactly(0)
    for plan in (plan for plan in plans if plan.answers):
        if plan.forecast is None:
            return None
        total = total.plus(plan.forecast.seconds)
    return total if total.bound else None


def show_steps(pipeline: Pipeline) -> int:
    """Print the dry run of each step whose rows are known. Returns the highest exit code."""
    codes = [0]
    with OpenPipeline(pipeline) as opened:
        refuse_wrong_exports(opened)
        for name in pipeline.steps:
            print(f"── step {name}: {opened.folder(name)}")
            if waits := waits_for(opened, name):
                print(f"waits for {' and '.join(waits)}, whose answers are its rows\n")
                continue
            try:
                codes.append(show(opened.config(name)))
            except (ConfigError, JobError) as error:
                raise of_step(name, error) from None
            print()
    return max(codes)


def _plan(opened: OpenPipeline, name: str, settings: PlanSettings) -> Plan:
    try:
        return make_plan(opened.config(name), settings)
    except (ConfigError, JobError) as error:
        raise of_step(name, error) from None


def _is_complete(folder: str) -> bool:
    try:
        return open_job_reader(folder).metrics.get("status") == "complete"
    except (ConfigError, JobError):  # the job has not begun, or has lost rows
        return False


def _samples(pipeline: Pipeline, name: str) -> int:
    """Return the most samples that a step takes per row."""
    sampling = pipeline.steps[name].config.sampling
    return sampling.n if sampling.until is None else sampling.until.most


def _answers(step: PlannedStep, pipeline: Pipeline) -> int | None:
    """Return the most answers that a step can have; None if unknown."""
    rows = step.most_rows if step.plan is None else step.plan.scan.num_rows
    return None if rows is None else rows * _samples(pipeline, step.name)
