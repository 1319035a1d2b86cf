"""The verb `batchgen plan …`: estimates what a job would read, need and cost, in seconds and
without loading its weights."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from batchgen.cli.job_outcome import exit_code
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.jobs.planning.plan_settings import PlanSettings
    from batchgen.pipelines.run.pipeline import Pipeline

_HELP = """\
usage: batchgen plan [FILE.yaml] [GROUP=CHOICE …] [KEY=VALUE …] [plan.KEY=VALUE …] [--json]

Estimate what a job would read, need and cost; the arguments are those of the job. This takes
seconds, loads no weights and writes nothing. The plan shows all that --dry-run shows, and memory,
disk, and the time as (low, likely, bound) with its assumptions; with budget.price_per_hour also the
price. In a pipeline only steps whose rows are known are planned: those whose inputs are complete.

  plan.like=OUT            assume answer lengths and speed of an earlier job; a job that is
                           already in output.dir is used without being named
  plan.device=H100         plan for another device: {devices}
  plan.most_bad=0.01       the largest acceptable share of bad rows

Exit codes: 0; 1 if the job would be refused (because of its output folder, memory or disk) or more
rows than plan.most_bad are bad; 2 for a mistake in the configuration."""


def main(arguments: Sequence[str]) -> int:
    """Run the verb, and return its exit code."""
    return exit_code(lambda: _plan(list(arguments)))


def _plan(arguments: list[str]) -> int:
    """Print the plan of a job or a pipeline, and return the exit code: 1 if the job would be
    refused."""
    if {"--help", "-h"} & set(arguments):
        from batchgen.jobs.forecast.devices import DEVICES

        print(_HELP.format(devices=f"cpu, {', '.join(list(DEVICES)[1:4])} …"))
        return 0
    from batchgen.cli.options import parse_options
    from batchgen.cli.run_options import composed, composed_pipeline
    from batchgen.jobs.planning.plan_settings import split_settings

    settings, rest = split_settings([a for a in arguments if a != "--json"])
    options = parse_options(rest)
    allowed = {"--config-dir", "--config-path", "--config-name", "--trust"}
    if unsupported := sorted(options.flags - allowed):
        raise ConfigError(
            f"plan: {unsupported[0]} does not apply: a plan is for one job and runs nothing"
        )
    if (pipeline := composed_pipeline(options)) is not None:
        return _plan_steps(pipeline, settings, as_json="--json" in arguments)
    config = composed(options)
    model, data = config.model.path, config.dataset.shown
    print(f"batchgen: reading model {model} and data set {data} …", file=sys.stderr, flush=True)
    from batchgen.jobs.resolve.early_checks import check_early

    check_early(config, folder=False)
    from batchgen.jobs.planning.planner import make_plan  # takes seconds, so print first

    plan = make_plan(config, settings)
    if "--json" in arguments:
        print(json.dumps(plan.summary(), indent=2, ensure_ascii=False))
    else:
        from batchgen.jobs.planning.plan_text import plan_text

        print(plan_text(plan))
        print(f"Nothing was run; planned in {plan.plan_s:.1f} s.")
    return 1 if plan.errors else 0


def _plan_steps(pipeline: Pipeline, settings: PlanSettings, *, as_json: bool) -> int:
    """Print the plans of a pipeline's steps, and return the exit code."""
    print(f"batchgen: reading the models of {len(pipeline.steps)} steps …", file=sys.stderr)
    pipeline.check_early()
    from batchgen.pipelines.run.planned_steps import plan_steps, plans_summary, plans_text

    steps = plan_steps(pipeline, settings)
    if as_json:
        print(json.dumps(plans_summary(steps), indent=2, ensure_ascii=False))
    else:
        print(plans_text(pipeline, steps))
        print("Nothing was run.")
    return int(any(step.plan is not None and step.plan.errors for step in steps))
