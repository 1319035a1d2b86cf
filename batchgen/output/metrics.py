"""The file metrics.json, which says what a job did in each of its attempts."""

import itertools
import json
import resource
import socket
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import pyarrow.compute as pc
import pyarrow.parquet as pq

from batchgen.output.manifest import write_atomic

SAVE_SECONDS = 30.0  # between two times that a running job saves the file
Status = Literal["running", "complete", "stopped", "failed", "killed"]


@dataclass
class Attempt:
    """One run of the command.

    Attributes:
        rows_resumed: output rows that earlier attempts had written.
        rows_total: output rows of the whole job; None if that is not known.
        status: how it ended. If it was killed, the file still says `running`, and the next attempt
            changes that to `killed`.
        rows: output rows that it has computed, with error rows.
        error_rows: how many of them have an error instead of an answer.
        wall_s: seconds since the attempt began, with the loading of the weights.
        generate_s: seconds since the engine began.
        peak_rss_mib: the most memory that the process had, in MiB.
        memory: how the engine divides the device's memory, in bytes; empty without an engine.
        engine: what the engine itself has counted.
        batch_dependence: why a token's bits depend on what else is in the batch, as was found out
            on this CPU; None if they do not, and on a GPU.
    """

    rows_resumed: int
    rows_total: int | None = None
    status: Status = "running"
    started: str = field(default_factory=lambda: time.strftime("%Y-%m-%dT%H:%M:%S%z"))
    host: str = field(default_factory=socket.gethostname)
    rows: int = 0
    error_rows: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    wall_s: float = 0.0
    generate_s: float = 0.0
    peak_rss_mib: float = 0.0
    memory: Mapping[str, int | None] = field(default_factory=dict)
    engine: Mapping[str, Any] = field(default_factory=dict)
    batch_dependence: str | None = None


OUTCOMES = {
    "satisfied": "complete",
    "cut": "ended by sampling.max_new_tokens before it was complete",
    "conflict": "no token was left that the constraint and the sampling options allow",
    "stopped": "ended by a stop string before it was complete",
    "unconstrained": "without a constraint",
    "error": "without an answer",
}
"""How a row of a job with a constraint can end, and what that means."""


def constraint_outcome(finish_reason: str, satisfied: bool | None) -> str:
    """The one of OUTCOMES that a row has.

    Args:
        finish_reason: what the row has in the column of that name.
        satisfied: what the row has in the column `constraint_satisfied`.
    """
    if finish_reason == "error":
        return "error"
    if satisfied is None:
        return "unconstrained"
    if satisfied:
        return "satisfied"
    return {"length": "cut", "constraint_conflict": "conflict"}.get(finish_reason, "stopped")


@dataclass(frozen=True)
class Totals:
    """Counts over all rows of a complete job, read from its shards alone.

    Attributes:
        finish_reasons: how many rows ended for which reason.
        errors: how many rows have an error of which type.
        counts: sums of what the strategy counts for each row (`OutputSchema.counts`).
        constraint: how many rows ended in which of OUTCOMES; empty if the job has no constraint.
    """

    rows: int
    error_rows: int
    finish_reasons: Mapping[str, int]
    errors: Mapping[str, int]
    prompt_tokens: int
    generated_tokens: int
    counts: Mapping[str, int]
    constraint: Mapping[str, int]

    @classmethod
    def read(cls, shards: list[Path], counts: Sequence[str], constrained: bool = False) -> "Totals":
        """Count the rows of all shards; only the small columns are read.

        Args:
            counts: names of further columns to sum.
            constrained: whether the shards say which rows satisfied their constraint.
        """
        reasons: dict[str, int] = {}
        errors: dict[str, int] = {}
        outcomes = dict.fromkeys(OUTCOMES if constrained else (), 0)
        satisfied = ["constraint_satisfied"] if constrained else []
        sums = dict.fromkeys(["num_prompt_tokens", "num_generated_tokens", *counts], 0)
        rows = 0
        for path in shards:
            table = pq.read_table(
                path, columns=["finish_reason", "error", *sums, *satisfied], partitioning=None
            )
            rows += table.num_rows
            for name in sums:
                sums[name] += pc.sum(table[name]).as_py() or 0
            _count(reasons, table["finish_reason"])
            if constrained:
                pairs = zip(
                    table["finish_reason"].to_pylist(), table[satisfied[0]].to_pylist(), strict=True
                )
                for outcome, number in Counter(
                    itertools.starmap(constraint_outcome, pairs)
                ).items():
                    outcomes[outcome] += number
            _count(errors, pc.struct_field(table["error"], "type").drop_null())
        prompt, generated = sums.pop("num_prompt_tokens"), sums.pop("num_generated_tokens")
        failed = sum(errors.values())
        return cls(rows, failed, reasons, errors, prompt, generated, sums, outcomes)


class Metrics:
    """The content of metrics.json.

    It is saved while the job runs, so that it tells of an attempt that was killed, too.

    Attributes:
        attempt: the present one.
        totals: of all rows; None until the job is complete.
        was_complete: whether an earlier attempt completed the job.
    """

    def __init__(self, path: Path, rows_resumed: int) -> None:
        self._path = path
        self._started = time.monotonic()
        self._saved = 0.0
        self.attempt = Attempt(rows_resumed)
        self.totals: Totals | None = None
        self._earlier: list[dict[str, Any]] = []
        self.was_complete = False
        if path.exists():
            earlier = json.loads(path.read_text(encoding="utf-8"))
            self._earlier = earlier["attempts"]
            self.was_complete = earlier["status"] == "complete"
        for earlier in self._earlier:
            if earlier["status"] == "running":
                earlier["status"] = "killed"

    @property
    def tokens_per_s(self) -> float:
        """How many tokens this attempt has generated in each second that the engine ran."""
        return self.attempt.generated_tokens / max(self.attempt.generate_s, 1e-9)

    def due(self) -> bool:
        """Whether SAVE_SECONDS have passed since the file was saved."""
        return time.monotonic() - self._saved >= SAVE_SECONDS

    def save(self, status: Status) -> None:
        """Write the file.

        Raises:
            JobError: it cannot be written.
        """
        self._saved = now = time.monotonic()
        self.attempt.status = status
        self.attempt.wall_s = round(now - self._started, 3)
        self.attempt.peak_rss_mib = peak_rss_mib()
        attempts = [*self._earlier, asdict(self.attempt)]
        summary: dict[str, Any] = {"status": status}
        if self.totals is not None:
            summary |= asdict(self.totals)
        for key in ("wall_s", "generate_s"):
            summary[key] = round(sum(attempt[key] for attempt in attempts), 3)
        tokens = sum(attempt["generated_tokens"] for attempt in attempts)
        summary["tokens_per_s"] = round(tokens / max(summary["generate_s"], 1e-3), 1)
        summary["attempts"] = attempts
        write_atomic(self._path, json.dumps(summary, indent=2, ensure_ascii=False) + "\n")


def peak_rss_mib() -> float:
    """The most memory that this process has had so far, in MiB."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _count(counts: dict[str, int], values: Any) -> None:
    for item in pc.value_counts(values).to_pylist():
        counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
