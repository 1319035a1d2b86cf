"""Makes the sections of a job's report: headings, sentences, charts and tables, which
`report.html.jinja` renders."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from batchgen.pages.report.charts import (
    Fact,
    Section,
    Table,
    bars,
    cut_text,
    experts,
    histogram,
    numbers,
    timeline_charts,
)
from batchgen.pages.report.eval_charts import adapter_section, both_intervals, score_section
from batchgen.pages.report.pass_rates import HEADER
from batchgen.pages.report.report_data import Collected
from batchgen.pages.report.token_facts import TokenFacts
from batchgen.pages.rows.class_scores import HEADER as CLASSES_HEADER
from batchgen.pages.rows.class_scores import MOST_CLASSES
from batchgen.pages.tokens.step_name import step_name
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.storage.metrics.tally import OUTCOMES
from batchgen.util.duration import duration
from batchgen.util.text.text_table import counted, percent_text, score_value

_MOST_MESSAGES = 20
"""The maximum number of types of error whose first message is shown."""


def headline(job: JobSummary, report: Collected) -> list[Fact]:
    """Return the numbers at the top of the page: score, answers, tokens, speed, time, cost."""
    facts, totals = [], job.totals
    if job.score is not None and job.mean_mark is not None:
        name, as_text = job.score.get("column", "score"), score_value(job.score)
        facts.append(Fact(name, as_text(job.mean_mark), both_intervals(job.score["avg"], as_text)))
    failed = sum(report.errors.values())
    notes = [] if job.questions is None else [f"to {counted(job.questions, 'question')}"]
    if failed:
        notes.append(counted(failed, "error"))
    facts.append(Fact("answers", f"{report.rows:,}", ", ".join(notes)))
    if not job.is_begun:
        return facts
    prompts = f"from {totals.prompt_tokens:,} of prompts"
    return [
        *facts,
        Fact("generated tokens", f"{totals.generated_tokens:,}", prompts),
        Fact("speed", f"{job.tokens_per_s:,.1f}", "tokens per second"),
        Fact("time", duration(job.wall_s), f"{duration(job.generate_s)} generating"),
        # The cost is a text such as `90 s; 0.3 s per kept row`: the value, then the note.
        *([] if job.cost is None else [Fact("device", *job.cost.split("; ", 1))]),
    ]


def sections(
    job: JobSummary,
    timeline: Sequence[Sequence[float]],
    report: Collected,
    facts: TokenFacts,
    links: Mapping[int, str],
) -> list[Section]:
    """Return the sections that have a chart or a table.

    Args:
        job: the job's metrics and scores.
        timeline: the list `timeline` of metrics.json, which `timeline_charts` draws.
        report: counts over the job's rows.
        facts: counts over the tokens of the first rows.
        links: the anchor in the page of each row that the page shows, by the row's key.
    """
    result = [
        score_section(job.score, report, links),
        adapter_section(job),
        _row_steps(job),
        _until(report),
        _classes(report),
        _outcomes(report),
        _lengths(report),
        Section("speed", "Throughput", charts=timeline_charts(timeline)),
        _steps(job, facts),
        _experts(facts),
    ]
    return [section for section in result if section.charts or section.table]


def _row_steps(job: JobSummary) -> Section:
    """Return how many rows of the data set each row step dropped, and some of the reasons."""
    section, facts = Section("rows", "Steps of rows"), job.row_facts
    if facts is not None:
        section.notes.append(f"{facts.funnel}.")
        lines = [
            (
                step.name,
                f"{step.rows_in:,}",
                f"{step.rows_out:,}",
                f"{step.dropped:,}",
                f"{step.failed:,}",
                "; ".join(f"{row.id}: {row.reason}" for row in step.examples),
            )
            for step in facts.steps
        ]
        header = ("step", "rows before", "rows after", "taken out", "failed", "taken out, some")
        section.table = Table("What each step did", header, lines)
    return section


def _until(report: Collected) -> Section:
    """Return how sampling of rows ended in a job with sampling.until, which samples each row until
    enough of its samples are valid."""
    section, rates = Section("until", "Samples until enough are valid"), report.until
    if not (outcomes := rates.outcomes):
        return section
    section.notes.append(
        "When sampling of a row ends depends on which samples are valid, so the share of valid "
        "ones is a biased estimate of the rate at which the model finds one; scores are unbiased."
    )
    if rates.exhausted:
        more = outcomes["exhausted"] - len(rates.exhausted)
        names = ", ".join(map(cut_text, rates.exhausted)) + (f" and {more:,} more" if more else "")
        section.notes.append(f"Exhausted, with their valid samples: {names}.")
    section.charts.append(bars("Rows", outcomes, "outcome", unit="rows"))
    if rates.rates:
        section.charts.append(
            bars("Rows by their share of valid samples", rates.in_order(), "rows", unit="rows")
        )
    section.table = Table("Samples of groups of rows", HEADER, rates.table())
    return section


def _classes(report: Collected) -> Section:
    """Return the scores that a classifier or reward model gave to the rows."""
    section, classes = Section("classes", "Class scores"), report.classes
    if not classes.rows:
        return section
    if len(classes.labels) > 1:
        title = "Rows by the class with the highest score"
        section.charts.append(bars(title, classes.best, "class", unit="rows"))
    note = f", the first {MOST_CLASSES}" if len(classes.labels) > MOST_CLASSES else ""
    section.table = Table(f"Scores of each class{note}", CLASSES_HEADER, classes.table())
    return section


def _outcomes(report: Collected) -> Section:
    """Return counts of finish reasons, constraint outcomes and errors."""
    section = Section("outcomes", "Outcomes")
    if report.reasons:
        note = "stop: the answer came to its end; length: it was cut at sampling.max_new_tokens."
        if "no_answer" in report.reasons:
            note += " no_answer: the model ended by itself before it answered."
        section.charts.append(bars("Finish reasons", report.reasons, "finish_reason", note))
    constrained = {name: count for name, count in report.constraint.items() if count}
    if constrained:
        note = "; ".join(f"{name}: {OUTCOMES[name]}" for name in constrained) + "."
        section.charts.append(bars("Constraint", constrained, "outcome", note))
    both = {"Errors": report.errors, "Answers without a grade": report.grade_errors}
    section.charts += [bars(title, counts, "type") for title, counts in both.items() if counts]
    if report.messages:
        rows = [
            (type, f"{report.errors[type]:,}", cut_text(message))
            for type, message in report.messages.items()
        ]
        header = ("type", "answers", "message")
        section.table = Table("First message of each type", header, rows[:_MOST_MESSAGES])
    return section


def _lengths(report: Collected) -> Section:
    """Return histograms of the lengths of prompts and answers, in tokens."""
    section = Section("lengths", "Lengths")
    if report.prompt.total:
        section.charts.append(histogram("Prompts", report.prompt, "tokens of the prompt"))
    if report.output.total:
        cut = report.reasons["length"]
        note = f"{cut:,} were cut at max_new_tokens." if cut else ""
        section.charts.append(histogram("Answers", report.output, "tokens of the answer", note))
    return section


def _steps(job: JobSummary, facts: TokenFacts) -> Section:
    """Return how many tokens a forward generates, in jobs with speculative decoding or block
    diffusion."""
    name = step_name(job.config)
    section = Section("steps", "Speculation" if name == "forward" else "Steps")
    counts = job.totals.counts or {}
    if forwards := counts.get("num_forwards"):
        tokens = job.totals.generated_tokens / forwards
        section.notes.append(f"{tokens:.2f} tokens per forward overall.")
    if drafts := counts.get("num_draft_tokens"):
        accepted = counts["num_accepted_tokens"]
        section.notes.append(
            f"{accepted:,} of {drafts:,} drafts were accepted ({percent_text(accepted / drafts)})."
        )
    if facts.per_step:
        note = f"{facts.tokens_per_step:.2f} on average.{_some(facts)}"
        tokens_of = f"tokens of one {name}"
        section.charts.append(
            numbers(
                f"Tokens of a {name}",
                facts.per_step,
                x_name=tokens_of,
                y_name=f"{name}s",
                note=note,
            )
        )
    if (steps := facts.accepted.total()) and max(facts.accepted):
        positions = range(1, max(facts.accepted) + 1)
        at_least = {
            position: sum(n for accepted, n in facts.accepted.items() if accepted >= position)
            for position in positions
        }
        note = (
            "Share of forwards in which the draft at each position was accepted: a draft can be "
            f"accepted only if all before it were.{_some(facts)}"
        )
        section.charts.append(
            numbers(
                "Accepted drafts",
                at_least,
                x_name="position of the draft",
                y_name="held",
                note=note,
                of=steps,
            )
        )
    if blocks := _steps_per_block(job):
        section.charts.append(
            numbers("Steps of a block", blocks, x_name="denoise steps", y_name="blocks")
        )
    return section if section.charts or section.notes else Section("steps", "")


def _some(facts: TokenFacts) -> str:
    """Return a note for charts for which only the first rows were read; empty if all were."""
    return "" if facts.all_rows else f" Of the first {facts.rows:,} answers."


def _steps_per_block(job: JobSummary) -> Counter[int]:
    """Return how many blocks took each number of denoise steps, summed over all attempts (runs of
    the job)."""
    blocks: Counter[int] = Counter()
    for attempt in job.attempts:
        stats = (attempt["engine"] or {}).get("strategy") or {}
        for steps, count in (stats.get("steps_per_block") or {}).items():
            blocks[int(steps)] += count
    return blocks


def _experts(facts: TokenFacts) -> Section:
    """Return a heat map of how often tokens were routed to each expert."""
    section = Section("experts", "Experts")
    if facts.experts is not None:
        note = (
            "The darker, the more tokens went through the expert; red is about eight times the "
            f"mean of its layer, or more.{_some(facts)}"
        )
        section.charts.append(experts(facts.experts, layers=facts.layers, note=note))
    return section
