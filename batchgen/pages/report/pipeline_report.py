"""Writes the page about a pipeline: its steps as a graph, their costs, sample rows, and the
exports. The entry point is `write_report`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from markupsafe import Markup

from batchgen.pages.report.charts import Chart, Fact, bars
from batchgen.pages.report.funnel import HEADER, StepCounts, costs
from batchgen.pages.report.pipeline_facts import PipelineFacts
from batchgen.pages.report.report_rows import JobData
from batchgen.pages.report.step_graph import step_graph
from batchgen.pages.report.write_report import REPORT, page_html, style_sheets
from batchgen.pages.rows.row_facts import RowFacts
from batchgen.pages.rows.row_page import PageLimits, RowPage
from batchgen.pages.tokens.decode_tokens import job_decode
from batchgen.storage.costs.chain_costs import price_of
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.stores.manifest import ROWS
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.duration import duration
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.shorten import short_name
from batchgen.util.text.text_table import counted

_SAMPLES = 3
"""The number of sample rows of each step: the first, one in the middle, and the last."""
_LIMITS = PageLimits(text=2_000, tokens=0)


@dataclass(frozen=True)
class StepSample:
    """A sample row of a step.

    Attributes:
        gist: a short text in the row's heading.
        html: the content below the heading.
    """

    facts: RowFacts
    gist: str
    html: Markup


def write_report(out: Path, display_name: str) -> Path:
    """Write the page about a pipeline, with links to the reports of its steps, and return its path.

    Raises:
        ConfigError: the folder has no pipeline.
    """
    facts = PipelineFacts.of(out)
    if facts is None:
        raise ConfigError(
            f"{display_name} is not the folder of a pipeline: it has no pipeline.json"
        )
    linked = [step.name for step in facts.steps if (out / step.folder / REPORT).is_file()]
    samples = {step.name: _samples(out / step.folder, step.name) for step in facts.steps}
    path = out / REPORT
    write_atomic(path, pipeline_html(display_name, facts, linked, samples))
    return path


def pipeline_html(
    display_name: str,
    facts: PipelineFacts,
    linked: Sequence[str] = (),
    samples: dict[str, list[StepSample]] | None = None,
) -> str:
    """Return the HTML of the page.

    Args:
        linked: the names of the steps that have a report.
        samples: sample rows, by the step's name.
    """
    states = sorted({step.state for step in facts.steps})
    about = [counted(len(facts.steps), "step"), ", ".join(states)]
    return page_html(
        "pipeline.html.jinja",
        style_sheets(),
        title=short_name(display_name),
        path=display_name,
        about=about,
        facts=_headline(facts),
        charts=[step_graph(facts), *_costs(facts.steps)],
        header=HEADER,
        steps=facts.steps,
        changes=facts.changes,
        linked=linked,
        sets=facts.sets,
        samples={name: some for name, some in (samples or {}).items() if some},
        file=REPORT,
    )


def _headline(facts: PipelineFacts) -> list[Fact]:
    """Return the figures at the top of the page."""
    # Steps without parents read the data set.
    first = [s.read for s in facts.steps if not facts.parents[s.name] and s.read is not None]
    last = facts.steps[-1:]
    headline = [Fact("questions", f"{max(first):,}", "rows of the data set")] if first else []
    headline += [Fact("kept", f"{step.kept:,}", f"answers of {step.name}") for step in last]
    if (errors := sum(step.errors for step in facts.steps)) > 0:
        headline.append(Fact("errors", f"{errors:,}", "in all steps"))
    if (line := costs(facts.steps)) is not None:
        # The line ends with the cost per kept row, after "; ".
        total = sum(step.device_s for step in facts.steps)
        headline.append(Fact("device", duration(total), line.rpartition("; ")[2]))
    return headline


def _costs(steps: Sequence[StepCounts]) -> Iterator[Chart]:
    """Yield a chart of the device time of each step, with prices where they are known; nothing if
    no time was measured."""
    took = {step.name: step.device_s for step in steps if step.device_s}
    if not took:
        return
    prices = {step.name: step.price_per_hour for step in steps}
    priced = [
        f"{name} {price_of(seconds, price)}"
        for name, seconds in took.items()
        if (price := prices[name]) is not None
    ]
    note = f"Prices: {', '.join(priced)}." if priced else ""
    yield bars("Time of the device", took, "step", note, unit="time", number=duration, ranked=False)


def _samples(folder: Path, step: str) -> list[StepSample]:
    """Return sample rows of a step; none if the step has not begun or is damaged."""
    try:
        reader = JobFolderReader(folder)
        data, config = JobData(reader), reader.config
        last = int(reader.manifest["growing"][ROWS]) - 1
        if data.schema is None or last < 0:
            return []
        page = RowPage(config, data.schema, job_decode(config))
        rows = sorted({last * index // (_SAMPLES - 1) for index in range(_SAMPLES)})
        # A row's key is its index, shifted by 31 bits, plus the number of the sample: here 0.
        return [
            StepSample(facts, facts.gist(page.columns.text), _html(page, facts, step))
            for row, grades in data.chosen(np.array(rows, np.int64) << 31)
            if (facts := RowFacts(row, grades))
        ]
    except ConfigError:  # the step has not begun
        return []
    # A damaged file can have any content. The page's table says that the step is damaged.
    except (JobError, ValueError, LookupError, TypeError, AttributeError):
        return []


def _html(page: RowPage, facts: RowFacts, step: str) -> Markup:
    return page.html(facts, key=f"{step}-{facts.row['row_index']}", limits=_LIMITS)
