"""Runs a pipeline to its end, or resumes one that was stopped or killed.

`run_pipeline` is the entry point of the command: it opens the pipeline, runs its steps, and writes
and pushes exports.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

from batchgen.pages.report.funnel import StepCounts, funnel, funnel_table
from batchgen.pages.report.pipeline_report import write_report
from batchgen.pipelines.run.make_sets import make_exports, push_all, refuse_wrong_exports
from batchgen.pipelines.run.open_pipeline import OpenPipeline
from batchgen.pipelines.run.pipeline import Pipeline
from batchgen.pipelines.run.run_steps import run_pipeline_steps
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.paths import is_url


@dataclass(frozen=True)
class PipelineResult:
    """How a pipeline ended, if it did not fail.

    Attributes:
        exit_code: the highest exit code of a step; if a signal or a spent budget stopped the
            pipeline, that of the stopped step.
        stopped_by: the number of the signal that stopped it; None without one.
        message: text for the user.
    """

    exit_code: int
    stopped_by: int | None
    message: str


def run_pipeline(pipeline: Pipeline) -> PipelineResult:
    """Run all steps, write the exports, and make the pushes.

    Raises:
        ConfigError: there is a mistake in the pipeline or in a step.
        JobError: a step cannot continue, or has too many errors. Finished rows are safe.
    """
    with OpenPipeline(pipeline) as opened:
        refuse_wrong_exports(opened)
        opened.write()  # pipeline.yaml, and pipeline.json with the current folder of each step
        try:
            results = run_pipeline_steps(opened)
        except (ConfigError, JobError) as error:
            error.add_note(funnel_table(counts(opened)))
            raise
        last = results[-1]  # steps that were stopped come last
        if last.stopped_by is not None or last.is_spent:
            return PipelineResult(last.exit_code, last.stopped_by, last.message)
        lines = [funnel_table(counts(opened))]
        if pipeline.exports:
            with opened.alone():  # other processes may run the same pipeline in this folder
                lines += make_exports(opened)
        # Pushes take long, and do not write into the folder, so they need no lock.
        lines += push_all(opened, lambda line: print(line, file=sys.stderr))
        has_report = any(step.config.output.report for step in pipeline.steps.values())
        if has_report and not is_url(pipeline.out):
            lines.append(f"report: {write_report(Path(pipeline.out), pipeline.out)}")
        return PipelineResult(max(result.exit_code for result in results), None, "\n".join(lines))


def counts(opened: OpenPipeline) -> list[StepCounts]:
    """Count the rows of the current version of each step."""
    current = opened.record.current
    return funnel(opened.pipeline.out, {name: current[name] for name in opened.pipeline.steps})
