"""Writes the sections of a report, in the form that its template shows."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from batchgen.pages.report.charts import Chart, bars, experts, histogram, numbers, timeline_charts
from batchgen.pages.report.eval_charts import Estimate, intervals, question_dots, score_by_length
from batchgen.pages.report.pass_rates import HEADER
from batchgen.pages.report.report_data import MOST_QUESTIONS, Collected
from batchgen.pages.report.token_facts import TokenFacts
from batchgen.pages.rows.class_scores import HEADER as CLASSES_HEADER
from batchgen.pages.rows.class_scores import MOST_CLASSES
from batchgen.pages.tokens.step_name import step_name
from batchgen.storage.folder.job_summary import JobSummary
from batchgen.storage.metrics.tally import OUTCOMES
from batchgen.util.duration import duration
from batchgen.util.text.text_table import COUNT_AS, counted, percent_text, score_value, value_range

_MOST_SUBSETS = 100
_MOST_TEXT = 300  # characters of a message or a name


@dataclass
class Section:
    """A part of the page with a heading of its own: sentences, charts, a table behind them."""

    id: str  # its anchor
    title: str
    notes: list[str] = field(default_factory=list)
    charts: list[Chart] = field(default_factory=list)
    table: tuple[str, Sequence[str], Sequence[Sequence[str]]] | None = None  # title, header, rows


@dataclass(frozen=True, slots=True)
class Fact:
    """A headline number, and what qualifies it."""

    name: str
    value: str
    note: str = ""


def headline(job: JobSummary, report: Collected) -> list[Fact]:
    """The numbers at the top of the page."""
    facts, totals = [], job.totals
    if job.score is not None and job.mean_mark is not None:
        name, as_text = job.score.get("column", "score"), score_value(job.score)
        facts.append(Fact(name, as_text(job.mean_mark), _two_intervals(job.score["avg"], as_text)))
    failed = sum(report.errors.values())
    of = [counted(failed, "error")] if failed else []
    if job.questions is not None:
        of.insert(0, f"to {counted(job.questions, 'question')}")
    facts.append(Fact("answers", f"{report.rows:,}", ", ".join(of)))
    if not job.is_begun:
        return facts
    prompts = f"from {totals.prompt_tokens:,} of prompts"
    return [
        *facts,
        Fact("generated tokens", f"{totals.generated_tokens:,}", prompts),
        Fact("speed", f"{job.tokens_per_s:,.1f}", "tokens per second"),
        Fact("time", duration(job.wall_s), f"{duration(job.generate_s)} generating"),
        *([] if job.cost is None else [Fact("device", *job.cost.split("; ", 1))]),
    ]


def sections(
    job: JobSummary,
    timeline: Sequence[Sequence[float]],
    report: Collected,
    facts: TokenFacts,
    links: Mapping[int, str],
) -> list[Section]:
    """All sections of which something is known.

    Args:
        timeline: as in metrics.json.
        links: from the keys of the rows that the page has to their anchors.
    """
    result = [
        _scores(job.score, report, links),
        _adapters(job),
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
    """The effect of the row steps on the rows of the data set."""
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
                "; ".join(f"{one.id}: {one.reason}" for one in step.examples),
            )
            for step in facts.steps
        ]
        header = ("step", "rows before", "rows after", "taken out", "failed", "taken out, some")
        section.table = ("What each step did", header, lines)
    return section


def _adapters(job: JobSummary) -> Section:
    """The score of each adapter that rows run with."""
    section, scores = Section("scores", "Scores"), job.adapter_scores
    parts = [
        _estimate(name, one["avg"], "population")
        for name, one in scores.items()
        if one["avg"]["value"] is not None
    ]
    if parts:
        note = "With 95% intervals for new questions; batchgen compare OUT --by adapter pairs them."
        as_text = score_value(next(iter(scores.values())))
        section.charts.append(intervals("Adapters", parts, note, as_text))
    return section


def _scores(
    score: Mapping[str, Any] | None, report: Collected, links: Mapping[int, str]
) -> Section:
    section = Section("scores", "Scores")
    if score is None or score["avg"]["value"] is None:
        return section
    average = score["avg"]
    estimates = [_estimate("mean", average, "population")]
    same = average["same_questions"]
    if same is not None and same["low"] is not None:
        estimates.append(_estimate("mean, same questions", average, "same_questions"))
    elif same is not None:
        section.notes.append(
            "How far the score would move if the same questions were asked again is unknown: all "
            "samples of each question have the same mark."
        )
    if (meaning := COUNT_AS.get(score.get("cut_texts", ""))) is not None:
        section.notes.append(
            f"Texts that were cut at max_new_tokens are {meaning} (score.cut_texts) in the "
            "scores and charts. The rows show the marks that the steps gave them."
        )
    estimates += [
        _estimate(name, value, "population")
        for name, value in score.items()
        if name.startswith(("pass", "maj")) and value["value"] is not None
        if name.partition("@")[2] != "1" and not name.endswith("^1")
    ]
    note = (
        "With 95% intervals: blue for new questions of the same kind, orange for the same "
        "questions asked again."
    )
    as_text = score_value(score)
    section.charts.append(intervals("Estimates", estimates, note, as_text))
    subsets = list(score.get("subsets", {}).items())
    if subsets:
        parts = [_estimate(n, part["avg"], "population") for n, part in subsets[:_MOST_SUBSETS]]
        note = f"The first {_MOST_SUBSETS} of {len(subsets)}." * (len(subsets) > _MOST_SUBSETS)
        section.charts.append(intervals("Subsets", parts, note, as_text))
    of_marks = "column" not in score
    if of_marks and report.output.marked.sum() > 1:
        section.charts.append(score_by_length(report.output))
    if of_marks and report.questions:
        section.charts.append(question_dots(report.questions, links, _questions_note(report)))
    rates = [(name.replace("_", " "), percent_text(rate)) for name, rate in score["rates"].items()]
    if (chance := score.get("chance")) is not None:
        section.notes.append(f"{percent_text(chance)} of random guesses would be right.")
    if of_marks and score["bounds"][0] != score["bounds"][1]:
        wrong, right = (percent_text(bound) for bound in score["bounds"])
        rates.append(
            ("score if all answers without a mark were wrong, or all right", f"{wrong}, {right}")
        )
    section.table = ("What the score leaves open", ("of all answers", "share"), rates)
    return section


def _questions_note(report: Collected) -> str:
    several = max(len(question.marks) for question in report.questions) > 1
    what = (
        "A column is a question and a dot one of its samples" if several else "A dot is a question"
    )
    note = f"{what}, the best first: filled is right, hollow is wrong."
    if report.num_questions > len(report.questions):
        note += f" {MOST_QUESTIONS} of {report.num_questions:,} questions, chosen at random."
    if several:
        note += f" Of all questions {report.disagreeing:,} have samples that disagree."
    return note


def _estimate(name: str, metric: Mapping[str, Any], interval: str) -> Estimate:
    bounds = metric[interval] or {"low": None, "high": None}
    return Estimate(_short(name), metric["value"], bounds["low"], bounds["high"], interval)


def _until(report: Collected) -> Section:
    """How rows ended that are sampled until enough samples are valid."""
    section, rates = Section("until", "Samples until enough are valid"), report.until
    if not (outcomes := rates.outcomes):
        return section
    section.notes.append(
        "When sampling of a row ends depends on which samples are valid, so the share of valid "
        "ones is a biased estimate of the rate at which the model finds one; scores are unbiased."
    )
    if rates.exhausted:
        more = outcomes["exhausted"] - len(rates.exhausted)
        names = ", ".join(map(_short, rates.exhausted)) + (f" and {more:,} more" if more else "")
        section.notes.append(f"Exhausted, with their valid samples: {names}.")
    section.charts.append(bars("Rows", outcomes, "outcome", unit="rows"))
    if rates.rates:
        section.charts.append(
            bars("Rows by their share of valid samples", rates.in_order(), "rows", unit="rows")
        )
    section.table = ("Samples of groups of rows", HEADER, rates.table())
    return section


def _classes(report: Collected) -> Section:
    """The scores that a classifier or reward model gave to the rows."""
    section, classes = Section("classes", "Class scores"), report.classes
    if not classes.rows:
        return section
    if len(classes.labels) > 1:
        title = "Rows by the class with the highest score"
        section.charts.append(bars(title, classes.best, "class", unit="rows"))
    note = f", the first {MOST_CLASSES}" if len(classes.labels) > MOST_CLASSES else ""
    section.table = (f"Scores of each class{note}", CLASSES_HEADER, classes.table())
    return section


def _outcomes(report: Collected) -> Section:
    section = Section("outcomes", "Outcomes")
    if report.reasons:
        note = "stop: the answer came to its end; length: it was cut at sampling.max_new_tokens."
        if "no_answer" in report.reasons:
            note += " no_answer: the model ended by itself before it answered."
        section.charts.append(bars("Finish reasons", report.reasons, "finish_reason", note))
    constrained = {n: c for n, c in report.constraint.items() if c}
    if constrained:
        note = "; ".join(f"{name}: {OUTCOMES[name]}" for name in constrained) + "."
        section.charts.append(bars("Constraint", constrained, "outcome", note))
    both = {"Errors": report.errors, "Answers without a grade": report.grade_errors}
    section.charts += [bars(title, counts, "type") for title, counts in both.items() if counts]
    if report.messages:
        rows = [(k, f"{report.errors[k]:,}", _short(text)) for k, text in report.messages.items()]
        section.table = ("First message of each type", ("type", "answers", "message"), rows[:20])
    return section


def _short(text: str) -> str:
    return text if len(text) <= _MOST_TEXT else text[:_MOST_TEXT] + "…"


def _lengths(report: Collected) -> Section:
    section = Section("lengths", "Lengths")
    if report.prompt.total:
        section.charts.append(histogram("Prompts", report.prompt, "tokens of the prompt"))
    if report.output.total:
        cut = report.reasons["length"]
        note = f"{cut:,} were cut at max_new_tokens." if cut else ""
        section.charts.append(histogram("Answers", report.output, "tokens of the answer", note))
    return section


def _steps(job: JobSummary, facts: TokenFacts) -> Section:
    """How many tokens a forward brings, with speculation or block diffusion."""
    name = step_name(job.config)
    section = Section("steps", "Speculation" if name == "forward" else "Steps")
    counts = job.totals.counts or {}
    if forwards := counts.get("num_forwards"):
        tokens = job.totals.generated_tokens / forwards
        section.notes.append(f"{tokens:.2f} tokens per forward overall.")
    if drafts := counts.get("num_draft_tokens"):
        held = counts["num_accepted_tokens"]
        section.notes.append(
            f"{held:,} of {drafts:,} drafts were accepted ({percent_text(held / drafts)})."
        )
    if facts.per_step:
        note = f"{facts.tokens_per_step:.2f} on average.{_some(facts)}"
        tokens_of = f"tokens of one {name}"
        section.charts.append(
            numbers(f"Tokens of a {name}", facts.per_step, tokens_of, f"{name}s", note)
        )
    if (steps := facts.accepted.total()) and max(facts.accepted):
        positions = range(1, max(facts.accepted) + 1)
        at_least = {p: sum(c for held, c in facts.accepted.items() if held >= p) for p in positions}
        note = (
            "Share of forwards in which the draft at each position was accepted: a draft can be "
            f"accepted only if all before it were.{_some(facts)}"
        )
        section.charts.append(
            numbers("Accepted drafts", at_least, "position of the draft", "held", note, of=steps)
        )
    if blocks := _steps_per_block(job):
        section.charts.append(numbers("Steps of a block", blocks, "denoise steps", "blocks", ""))
    return section if section.charts or section.notes else Section("steps", "")


def _some(facts: TokenFacts) -> str:
    """The note on sections for which only some rows were read."""
    return "" if facts.all_rows else f" Of the first {facts.rows:,} answers."


def _steps_per_block(job: JobSummary) -> Counter[int]:
    """How many blocks took how many steps, over all attempts."""
    blocks: Counter[int] = Counter()
    for attempt in job.attempts:
        stats = (attempt["engine"] or {}).get("strategy") or {}
        for steps, count in (stats.get("steps_per_block") or {}).items():
            blocks[int(steps)] += count
    return blocks


def _experts(facts: TokenFacts) -> Section:
    section = Section("experts", "Experts")
    if facts.experts is not None:
        note = (
            "The darker, the more tokens went through the expert; red is about eight times the "
            f"mean of its layer, or more.{_some(facts)}"
        )
        section.charts.append(experts(facts.experts, facts.layers, note))
    return section


def _two_intervals(average: Mapping[str, Any], format_value: Callable[[float | None], str]) -> str:
    names = {"population": "new questions", "same_questions": "same questions"}
    bounds = ((name, value_range(average[key], format_value)) for key, name in names.items())
    return "; ".join(f"{name} {text}" for name, text in bounds if text)
