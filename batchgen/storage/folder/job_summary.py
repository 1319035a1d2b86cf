"""Sums up a job, and writes the summary as lines for the terminal.

Reports, the viewer and the data set card show the same `JobSummary`; `end_table` is printed at the
end of a job, and `status_line` by `batchgen status`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from batchgen.config.groups.model_sampling import sampling_text
from batchgen.storage.costs.chain_costs import JobCost, all_steps, cost_line
from batchgen.storage.folder.how_to_read import how_to_read
from batchgen.storage.metrics.tally import Totals
from batchgen.storage.shards.enough import OUTCOMES
from batchgen.util.duration import duration
from batchgen.util.text.text_table import (
    Line,
    adapter_lines,
    answers_text,
    counted,
    score_lines,
    table_text,
)

if TYPE_CHECKING:
    from batchgen.engine.strategy import Strategy
    from batchgen.storage.folder.read_job import JobFolderReader
    from batchgen.storage.folder.row_funnel import IndexFacts

_NOT_BEGUN = "not begun"
_MANY_CUT = 0.05
"""The share of rows cut before their answer from which on the end of a job remarks on it."""


@dataclass(frozen=True)
class JobSummary:
    """The figures of a whole job. Those of a running job may be ten seconds old.

    Figures that the folder does not have are empty, 0 or None.

    Attributes:
        totals: the counts over all rows.
        status: complete, running, stopped, failed, killed or not begun.
        attempts: the attempts in metrics.json.
        score: the score in metrics.json.
        config: the configuration by group.
        tokens_per_s: generated tokens per second.
        wall_s, generate_s: seconds of the job, and those of generating.
        row_facts: the counts of the row steps.
        rows_copied: rows copied from older jobs instead of being computed.
        costs: the costs of the jobs whose rows it has read, and its cost.
        sampling: each sampling option with the model's recommendation, as in metrics.json.
        questions: the number of input rows; None if it is not known.
        adapter_scores: the scores by the adapter's name.
    """

    totals: Totals
    status: str = "complete"
    attempts: Sequence[Mapping[str, Any]] = ()
    score: Mapping[str, Any] | None = None
    config: Mapping[str, Any] = field(default_factory=dict)
    tokens_per_s: float = 0.0
    wall_s: float = 0.0
    generate_s: float = 0.0
    row_facts: IndexFacts | None = None
    rows_copied: int = 0
    costs: Sequence[JobCost] = ()
    sampling: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    questions: int | None = None
    adapter_scores: Mapping[str, Any] = field(default_factory=dict)

    @classmethod
    def of(
        cls,
        metrics: Mapping[str, Any],
        config: Mapping[str, Any] | None = None,
        row_facts: IndexFacts | None = None,
        name: str = "this job",
        questions: int | None = None,
    ) -> JobSummary:
        """Sum up a folder from the content of its metrics.json, config.yaml and manifest.json."""
        return cls(
            Totals.of(metrics),
            status=metrics.get("status", _NOT_BEGUN),
            attempts=metrics.get("attempts") or (),
            score=metrics.get("score"),
            config=config or {},
            tokens_per_s=metrics.get("tokens_per_s") or 0.0,
            wall_s=metrics.get("wall_s", 0.0),
            generate_s=metrics.get("generate_s", 0.0),
            row_facts=row_facts,
            rows_copied=metrics.get("rows_copied", 0),
            costs=all_steps(metrics, name),
            sampling=metrics.get("sampling") or {},
            questions=questions,
            adapter_scores=metrics.get("adapter_scores") or {},
        )

    @property
    def is_begun(self) -> bool:
        return self.status != _NOT_BEGUN

    @property
    def attempt(self) -> Mapping[str, Any]:
        """The last attempt; empty before there is one."""
        return self.attempts[-1] if self.attempts else {}

    @property
    def rows_total(self) -> int | None:
        """The number of rows that the job will have when it is complete; None if that is not
        known."""
        total: int | None = self.attempt.get("rows_total")
        return total

    @property
    def rows_recorded(self) -> int:
        """The number of unfinished rows whose tokens so far are recorded, over the workers of the
        last attempt."""
        session = self.attempt.get("session")
        last = (attempt for attempt in self.attempts if attempt.get("session") == session)
        return sum(attempt.get("rows_recorded", 0) for attempt in last)

    @property
    def mean_mark(self) -> float | None:
        """The mean mark of the answers; None without a score."""
        value: float | None = None if self.score is None else self.score["avg"]["value"]
        return value

    @property
    def cost(self) -> str | None:
        """The cost of the jobs up to this one, in all and per row with an answer; None if no time
        was measured."""
        kept = self.totals.rows - self.totals.error_rows
        return cost_line(self.costs, kept, self.price_per_hour) if self.costs else None

    @property
    def price_per_hour(self) -> float | None:
        """The price of an hour of the engine's devices; None if it is not known."""
        price = self.group("budget").get("price_per_hour")
        return None if price is None else price * self.group("engine").get("tensor_parallel", 1)

    def group(self, name: str) -> Mapping[str, Any]:
        """A group of the configuration."""
        return self.config.get(name) or {}

    @property
    def model_name(self) -> str:
        """The name of the model for people."""
        model = self.group("model")
        return model.get("name") or model.get("path") or "a model"

    @property
    def strategy_name(self) -> str:
        """The short name of the strategy, or the name of its class; empty if that is not known."""
        return str(self.group("strategy").get("_target_", "")).rpartition(".")[2]


def tokens_per_s(attempt: Mapping[str, Any]) -> float:
    """The generated tokens per second of an attempt; 0 before it has an engine."""
    computed = attempt.get("generated_tokens", 0) - attempt.get("tokens_begun", 0)
    return float(computed / max(attempt.get("generate_s", 0), 1e-3))


def status_line(reader: JobFolderReader, name: str) -> str:
    """A line that says how far a job is, how fast it runs and when it should end.

    `name` is the folder as the user typed it. The rows of a killed job are counted in its files.
    """
    job = JobSummary.of(reader.metrics)
    rows, errors, total = job.totals.rows, job.totals.error_rows, job.rows_total
    if job.status in ("killed", _NOT_BEGUN):
        rows, errors = _counted_rows(reader)
    if job.status == "complete" or total is None:
        facts = [answers_text(reader.questions if job.status == "complete" else None, rows)]
    else:
        facts = [f"{rows:,} of {total:,} answers ({rows / max(total, 1):.0%})"]
    if errors:
        facts.append(counted(errors, "error"))
    if (until := until_line(job)) is not None:
        facts.append(until)
    if job.rows_copied:
        facts.append(f"{job.rows_copied:,} copied")
    if job.status != "complete" and job.rows_recorded:
        facts.append(f"{job.rows_recorded:,} begun")
    if job.tokens_per_s:
        facts.append(f"{job.tokens_per_s:,.0f} tokens/s")
    if job.status == "running" and total is not None and (speed := _rows_per_s(job.attempts)):
        facts.append(f"about {duration((total - rows) / speed, 0)} left")
    goes_on = job.status in ("stopped", "killed", "failed")
    end = "; the job's command resumes it" if goes_on else ""
    return f"{name}: {job.status}, {', '.join(facts)}{end}"


def _rows_per_s(attempts: Sequence[Mapping[str, Any]]) -> float:
    """The rows per second of all running workers together."""
    running = [each for each in attempts if each["status"] == "running" and each["generate_s"]]
    return sum(
        float((attempt["rows"] - attempt.get("rows_copied", 0)) / attempt["generate_s"])
        for attempt in running
    )


def _counted_rows(reader: JobFolderReader) -> tuple[int, int]:
    """The number of finished rows, and the number of those with an error."""
    rows = errors = 0
    if reader.schema is not None:
        for batch in reader.batches(["error"]):
            rows += batch.num_rows
            errors += batch.num_rows - batch.column("error").null_count
    return rows, errors


def end_table(
    job: JobSummary, folder: str, strategy: Strategy | None = None, report: str | None = None
) -> str:
    """The table at the end of a job: scores; answers; time and cost; files.

    Args:
        job: the summary. Its attempts are those of the workers that ran at the end, and the last
            one completed the job; it has none if the job was complete before.
        folder: the job's folder as people call it.
        strategy: adds lines to the table.
        report: the path or URL of report.html, if it was made.
    """
    totals, attempt = job.totals, job.attempt
    more = []
    if resumed := attempt.get("rows_resumed"):
        more.append(f"{resumed:,} from before")
    if job.rows_copied:
        more.append(f"{job.rows_copied:,} copied from older jobs")
    amount = answers_text(job.questions, totals.rows) + (f" ({', '.join(more)})" if more else "")
    lines = [
        ("answers", amount),
        *([] if job.row_facts is None else [("steps of rows", job.row_facts.funnel)]),
        ("finish reasons", _counts(totals.finish_reasons)),
        ("errors", _counts(totals.errors)),
        ("prompt tokens", f"{totals.prompt_tokens:,}"),
        ("generated tokens", f"{totals.generated_tokens:,}"),
    ]
    if job.sampling:
        lines.append(("sampling", sampling_text(job.sampling)))
    if totals.constraint:
        lines.append(("constraint", _outcomes(totals.constraint)))
    if (until := until_line(job)) is not None:
        lines.append(("until enough", until))
    if strategy is not None:
        stats = attempt.get("engine", {}).get("strategy", {})
        lines += strategy.summary(totals.counts, stats, totals.generated_tokens)
    scores = [] if job.score is None else score_lines(job.score)
    scores += adapter_lines(job.adapter_scores)
    times = _times(job.attempts) if attempt else []
    if job.cost is not None:
        times.append(("device", job.cost))
    files = [
        ("output", folder),
        *([] if report is None else [("report", report)]),
        ("read with", f"{how_to_read(folder)['datasets']} (pandas, polars, duckdb: README.md)"),
    ]
    text = [table_text(scores, lines, times, files)]
    if (why := attempt.get("batch_dependence")) is not None:
        text.append(f"A row's tokens may depend on the other rows of its batch: {why}.")
    if (cut := cut_remark(totals)) is not None:
        text.append(cut)
    if strategy is not None and (remark := strategy.remark(totals.counts)) is not None:
        text.append(remark)
    return "\n".join(text)


def cut_remark(totals: Totals) -> str | None:
    """A remark for a user if many rows were cut before the model began to answer; otherwise
    None."""
    cut = sum(totals.cut_in.values()) - totals.cut_in.get("final", 0)
    if cut < _MANY_CUT * totals.rows or not cut:
        return None
    where = _counts({name: count for name, count in totals.cut_in.items() if name != "final"})
    return (
        f"{cut:,} of {counted(totals.rows, 'answer')} ({cut / totals.rows:.0%}) were cut before "
        f"the model began to answer ({where}): their text is null, which counts as wrong. Raise "
        "sampling.max_new_tokens, or let the model think less "
        "(prompt.template_kwargs.reasoning_effort=low)."
    )


def _times(attempts: Sequence[Mapping[str, Any]]) -> list[Line]:
    """The time of the last attempt, the memory of recurrent states of its engine, and the speed of
    all attempts together, which ran at the same time."""
    attempt = attempts[-1]
    seconds = f"{duration(attempt['wall_s'])} ({duration(attempt['generate_s'])} generating)"
    speed = sum(map(tokens_per_s, attempts))
    lines = [("time", seconds), ("speed", f"{speed:,.1f} tokens/s")]
    memory = attempt["memory"]
    if memory.get("row_states"):
        rows, checkpoints = memory["row_states"] or 0, memory["checkpoints"] or 0
        text = (
            f"{rows / 2**30:.2f} GiB for rows, {checkpoints / 2**30:.2f} GiB for "
            f"{memory['num_checkpoints']:,} snapshots of prefixes"
        )
        lines.append(("row states", text))
    return lines


def _outcomes(counts: Mapping[str, int]) -> str:
    """The number of constrained rows that ended in each way."""
    constrained = {n: c for n, c in counts.items() if n not in ("unconstrained", "error")}
    texts = [f"{n} {c:,}" for n, c in constrained.items() if c or n == "satisfied"]
    return f"{', '.join(texts)} of {sum(constrained.values()):,} constrained rows"


def until_line(job: JobSummary) -> str | None:
    """The number of rows of a job with `sampling.until` that got enough valid samples, and how the
    others ended. None for other jobs, and until the job is complete: a row gets its outcome when
    its shard is published, and metrics.json counts these shards at the end."""
    totals, until = job.totals, job.totals.until
    if job.status != "complete" or not until:
        return None
    rows = sum(until[name] for name in OUTCOMES)
    text = f"{until['enough']:,} of {counted(rows, 'row')} have enough"
    text += "".join(f", {until[name]:,} {name}" for name in OUTCOMES[1:] if until[name])
    share = until["valid"] / max(totals.rows, 1)
    return f"{text}; {until['valid']:,} of {counted(totals.rows, 'sample')} valid ({share:.1%})"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
