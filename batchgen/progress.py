"""What a job shows on the terminal: a bar while it runs, and a table when it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Self, TextIO

from tqdm import tqdm

from batchgen.output.dataset_card import how_to_read

if TYPE_CHECKING:
    from batchgen.engine.cache.memory_plan import MemoryPlan
    from batchgen.engine.strategy import Hooks
    from batchgen.output.metrics import Metrics, Totals

LINE_SECONDS = 30.0


class Progress:
    """A bar of tqdm over the output rows, or a line every 30 seconds if there is no terminal."""

    def __init__(self, total: int | None, resumed: int, stream: TextIO | None = None) -> None:
        """
        Args:
            total: output rows of the whole job, None if that is not known.
            resumed: output rows that earlier attempts have written.
            stream: where to show it; None is stderr.
        """
        self._stream = stream if stream is not None else sys.stderr
        is_terminal = self._stream.isatty()
        self._interval = 0.5 if is_terminal else LINE_SECONDS
        self._shown = time.monotonic()
        self._is_terminal = is_terminal
        self._bar = tqdm(
            total=total,
            initial=resumed,
            unit="row",
            file=self._stream,
            disable=not is_terminal,
            dynamic_ncols=True,
            mininterval=0.5,
        )
        self._rows = resumed
        self._resumed = resumed
        self._total = total
        self._started = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def add(self, rows: int) -> None:
        self._rows += rows
        self._bar.update(rows)

    def due(self) -> bool:
        """Whether it is time to call `show` again, whose figures are not free to get."""
        return time.monotonic() - self._shown >= self._interval

    def show(self, tokens_per_s: float, in_flight: int) -> None:
        """Show how fast tokens come and how many requests the engine has."""
        self._shown = now = time.monotonic()
        if self._is_terminal:
            self._bar.set_postfix_str(f"{tokens_per_s:,.0f} tok/s, {in_flight} in flight")
            return
        done = f"{self._rows:,}" + (f"/{self._total:,}" if self._total is not None else "")
        rate = (self._rows - self._resumed) / max(now - self._started, 1e-9)
        left = ""
        if self._total is not None and rate > 0:
            left = f", about {_duration((self._total - self._rows) / rate)} left"
        line = f"{done} rows, {tokens_per_s:,.0f} tok/s, {in_flight} in flight{left}"
        print(line, file=self._stream, flush=True)


def show_memory(plan: MemoryPlan) -> None:
    """Say on stderr how the engine's memory is divided: that decides how many rows run at once."""
    print(f"memory: {plan}", file=sys.stderr, flush=True)


def summary(
    totals: Totals,
    folder: str,
    metrics: Metrics | None = None,
    strategy: Hooks | None = None,
) -> str:
    """The table at the end of a job.

    Args:
        metrics: of this attempt, if it was the one that completed the job.
        strategy: has lines of its own to add.
    """
    lines = [
        ("rows", f"{totals.rows:,}"),
        ("finish reasons", _counts(totals.finish_reasons)),
        ("errors", _counts(totals.errors)),
        ("prompt tokens", f"{totals.prompt_tokens:,}"),
        ("generated tokens", f"{totals.generated_tokens:,}"),
    ]
    if totals.constraint:
        lines.append(("constraint", _outcomes(totals.constraint)))
    if strategy is not None:
        stats = {} if metrics is None else metrics.attempt.engine.get("strategy", {})
        lines += strategy.summary(totals.counts, stats, totals.generated_tokens)
    if metrics is not None:
        attempt = metrics.attempt
        if attempt.rows_resumed:
            lines[0] = ("rows", f"{totals.rows:,} ({attempt.rows_resumed:,} from before)")
        seconds = f"{_duration(attempt.wall_s)} ({_duration(attempt.generate_s)} generating)"
        lines += [("time", seconds), ("speed", f"{metrics.tokens_per_s:,.1f} tokens/s")]
    lines.append(("read it", f"{how_to_read(folder)['datasets']}; others: see its README.md"))
    lines.append(("output", folder))
    width = max(len(name) for name, _ in lines)
    table = [f"{name:<{width}}  {value}" for name, value in lines]
    if metrics is not None and (why := metrics.attempt.batch_dependence) is not None:
        table.append(f"A row's tokens may depend on the rows beside it: {why}.")
    remark = None if strategy is None else strategy.remark(totals.counts)
    return "\n".join(table if remark is None else [*table, remark])


def _outcomes(counts: Mapping[str, int]) -> str:
    """How many of the constrained rows ended in which way; ways that none took are left out."""
    constrained = {n: c for n, c in counts.items() if n not in ("unconstrained", "error")}
    shown = [f"{n} {c:,}" for n, c in constrained.items() if c or n == "satisfied"]
    return f"{', '.join(shown)} of {sum(constrained.values()):,} constrained rows"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"


def _duration(seconds: float) -> str:
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}"
