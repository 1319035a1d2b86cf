"""Counts over the finished rows of a job, for metrics.json and the summary."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.storage.shards.enough import OUTCOME, VALID
from batchgen.storage.shards.enough import OUTCOMES as UNTIL_OUTCOMES
from batchgen.storage.shards.row_order import SAMPLE_COLUMN

if TYPE_CHECKING:
    from batchgen.storage.shards.output_schema import FinishedRow

# A column of batchgen.storage.shards.output_schema, which is not imported because it loads torch.
_CHANNEL = "channel"
_CUT = "length"
OUTCOMES = {
    "satisfied": "complete",
    "cut": "ended by sampling.max_new_tokens before it was complete",
    "conflict": "no token was left that the constraint and the sampling options allow",
    "stopped": "ended by a stop string before it was complete",
    "unconstrained": "without a constraint",
    "error": "without an answer",
}
"""The ways in which a row of a job with a constraint can end, and their meanings. Rows of a job
with `sampling.until` have outcomes too, which `UNTIL_OUTCOMES` names."""


def constraint_outcome(finish_reason: str, satisfied: bool | None) -> str:
    """The key of OUTCOMES for a row that ended in this way."""
    if finish_reason == "error":
        return "error"
    if satisfied is None:
        return "unconstrained"
    if satisfied:
        return "satisfied"
    return {_CUT: "cut", "constraint_conflict": "conflict"}.get(finish_reason, "stopped")


@dataclass(frozen=True)
class Totals:
    """Counts over all finished rows of a job.

    Attributes:
        rows, error_rows: all rows, and those with an error.
        finish_reasons: finish reason → the number of rows.
        errors: type of error → the number of rows.
        prompt_tokens, generated_tokens: sums over all rows.
        counts: sums of what the strategy counts for each row (`OutputSchema.counts`).
        constraint: the number of rows for each of OUTCOMES; empty if the job has no constraint.
        until: the number of input rows for each of `shards.enough.OUTCOMES`, and the number of
            samples that are `valid`; empty without `sampling.until`. Input rows get an outcome when
            their shard is published. While a job runs, only those of shards from earlier attempts
            are counted; a complete job counts all of its shards again.
        cut_in: channel → the number of rows that ended in it by `length`. Channels are the parts of
            an answer, such as its reasoning and its final text; empty without channels.
    """

    rows: int = 0
    error_rows: int = 0
    finish_reasons: Mapping[str, int] = field(default_factory=dict)
    errors: Mapping[str, int] = field(default_factory=dict)
    prompt_tokens: int = 0
    generated_tokens: int = 0
    counts: Mapping[str, int] = field(default_factory=dict)
    constraint: Mapping[str, int] = field(default_factory=dict)
    until: Mapping[str, int] = field(default_factory=dict)
    cut_in: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, metrics: Mapping[str, Any]) -> Totals:
        """Read the totals from the content of metrics.json."""
        return cls(**{f.name: metrics[f.name] for f in fields(cls) if f.name in metrics})


class Tally:
    """Counts finished rows: those of earlier attempts from tables, and new rows as they finish.

    Attributes:
        columns: the names of the columns that tables need.
    """

    def __init__(
        self,
        counts: Sequence[str],
        constrained: bool = False,
        until: bool = False,
        channels: bool = False,
    ) -> None:
        """Create counters.

        Args:
            counts: the columns to sum, besides those of tokens.
            constrained: whether the job has a constraint.
            until: whether the job has `sampling.until`.
            channels: whether rows have channels.
        """
        self._rows = 0
        self._reasons: Counter[str] = Counter()
        self._errors: Counter[str] = Counter()
        self._outcomes: Counter[str] = Counter()
        self._constrained = constrained
        self._sums = dict.fromkeys(["num_prompt_tokens", "num_generated_tokens", *counts], 0)
        satisfied = ["constraint_satisfied"] if constrained else []
        self._until = dict.fromkeys([*UNTIL_OUTCOMES, VALID], 0) if until else {}
        until_columns = [SAMPLE_COLUMN, OUTCOME, VALID] if until else []
        self._channels, self._cut_in = [_CHANNEL] if channels else [], Counter[str]()
        known = ["finish_reason", "error", *self._sums, *satisfied, *until_columns]
        self.columns = [*known, *self._channels]

    @property
    def totals(self) -> Totals:
        """The counts so far."""
        sums = dict(self._sums)
        prompt, generated = sums.pop("num_prompt_tokens"), sums.pop("num_generated_tokens")
        return Totals(
            rows=self._rows,
            error_rows=self._errors.total(),
            finish_reasons=dict(self._reasons),
            errors=dict(self._errors),
            prompt_tokens=prompt,
            generated_tokens=generated,
            counts=sums,
            constraint={n: self._outcomes[n] for n in OUTCOMES} if self._constrained else {},
            until=dict(self._until),
            cut_in=dict(self._cut_in),
        )

    def add_table(self, table: pa.Table) -> None:
        """Count rows of the output; the table must have `columns`."""
        self._rows += table.num_rows
        for name in self._sums:
            self._sums[name] += pc.sum(table[name]).as_py() or 0
        _count(self._reasons, table["finish_reason"])
        _count(self._errors, pc.struct_field(table["error"], "type").drop_null())
        if self._constrained:
            reasons, satisfied = table["finish_reason"], table["constraint_satisfied"]
            pairs = zip(reasons.to_pylist(), satisfied.to_pylist(), strict=True)
            self._outcomes.update(itertools.starmap(constraint_outcome, pairs))
        if self._channels:
            is_cut = pc.equal(table["finish_reason"], _CUT)
            _count(self._cut_in, table[_CHANNEL].filter(is_cut).drop_null())
        if self._until:
            self._until[VALID] += pc.sum(table[VALID]).as_py() or 0
            # All samples of an input row have its outcome, or null in a journal: sample 0 counts.
            first = table[OUTCOME].filter(pc.equal(table[SAMPLE_COLUMN], 0)).drop_null()
            for item in pc.value_counts(first).to_pylist():
                self._until[item["values"]] += item["counts"]

    def add(self, rows: Sequence[FinishedRow]) -> None:
        """Count rows that have just finished. They have no outcome of `sampling.until` yet."""
        reasons = [row.finish_reason for row in rows]
        outputs = [row.output for row in rows]
        answers = [output for output in outputs if output is not None]
        self._rows += len(rows)
        self._reasons.update(reasons)
        self._errors.update([row.failure.type for row in rows if row.failure is not None])
        self._sums["num_prompt_tokens"] += sum([len(o.prompt_token_ids) for o in answers])
        self._sums["num_generated_tokens"] += sum([len(o.token_ids) for o in answers])
        for name, count in [pair for output in answers for pair in output.counts.items()]:
            self._sums[name] += count
        if self._channels:
            cut = [row.extra.get(_CHANNEL) for row in rows if row.finish_reason == _CUT]
            self._cut_in.update([channel for channel in cut if channel is not None])
        if self._constrained:
            satisfied = [None if o is None else o.constraint_satisfied for o in outputs]
            self._outcomes.update(map(constraint_outcome, reasons, satisfied))
        if self._until:
            self._until[VALID] += sum([row.valid is True for row in rows])


def _count(counts: Counter[str], values: pa.ChunkedArray) -> None:
    """Count each value of a column."""
    for item in pc.value_counts(values).to_pylist():
        counts[item["values"]] += item["counts"]
