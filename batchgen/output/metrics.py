"""metrics.json: what a job did, over all its attempts."""

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

SAVE_SECONDS = 30.0
Status = Literal["running", "complete", "stopped", "failed", "killed"]


@dataclass
class Attempt:
    """One run of the command.

    Attributes:
        status: `killed` is what a later attempt makes of a `running` one.
        rows_resumed: output rows that were there at its start.
        rows: output rows that it computed, error rows included.
        wall_s: from the start of the attempt, with loading; generate_s: with the engine running.
        memory: the engine's plan of the device's memory, in bytes; empty if none was built.
        engine: the engine's own counts at the end.
    """

    rows_resumed: int
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


OUTCOMES = {
    "satisfied": "complete",
    "cut": "ended by sampling.max_new_tokens before it was complete",
    "conflict": "no token was left that the constraint and the sampling options allow",
    "stopped": "ended by a stop string before it was complete",
    "unconstrained": "without a constraint",
    "error": "without an answer",
}
"""What becomes of a row of a constrained job."""


def constraint_outcome(finish_reason: str, satisfied: bool | None) -> str:
    """One of OUTCOMES, from what the row's columns say."""
    if finish_reason == "error":
        return "error"
    if satisfied is None:
        return "unconstrained"
    if satisfied:
        return "satisfied"
    return {"length": "cut", "constraint_conflict": "conflict"}.get(finish_reason, "stopped")


@dataclass(frozen=True)
class Totals:
    """Counts over the shards of a complete job; the only source is the shards themselves.

    Attributes:
        counts: sums of what the strategy counts for each row (`OutputSchema.counts`).
        constraint: rows by what became of their constraint (`OUTCOMES`); empty if the job has none.
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
            constrained: the shards say whether rows satisfied their constraint.
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
    """The file metrics.json; written now and then, so that a killed attempt is in it too.

    Attributes:
        totals: of a complete job, for `save`.
        was_complete: an earlier attempt completed the job.
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
        """Generated tokens of this attempt per second of generation."""
        return self.attempt.generated_tokens / max(self.attempt.generate_s, 1e-9)

    def due(self) -> bool:
        """Whether it is time to save what a killed attempt shall leave behind."""
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
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return round(peak / (2**20 if sys.platform == "darwin" else 2**10), 1)


def _count(counts: dict[str, int], values: Any) -> None:
    for item in pc.value_counts(values).to_pylist():
        counts[item["values"]] = counts.get(item["values"], 0) + item["counts"]
