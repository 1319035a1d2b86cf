"""What a person sees of a job: a bar while it runs, a table when it ends."""

import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self, TextIO

from tqdm import tqdm

from batchgen.output.metrics import Metrics, Totals

if TYPE_CHECKING:
    from batchgen.engine.cache.memory_plan import MemoryPlan

LINE_SECONDS = 30.0


class Progress:
    """A tqdm bar over output rows; a line now and then if the stream is not a terminal."""

    def __init__(self, total: int | None, resumed: int, stream: TextIO | None = None) -> None:
        """
        Args:
            total: output rows of the whole job, None if unknown.
            resumed: output rows that are there already.
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
        """Whether it is time to show the figures that `show` takes, which cost something."""
        return time.monotonic() - self._shown >= self._interval

    def show(self, tokens_per_s: float, in_flight: int) -> None:
        """Show the rate and how many requests the engine has."""
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


def show_memory(plan: "MemoryPlan") -> None:
    """Say on stderr what the engine's memory is used for, which decides how much runs at once."""
    print(f"memory: {plan}", file=sys.stderr, flush=True)


@dataclass(frozen=True)
class Speculation:
    """What a job must know of it to say whether it was of use.

    Attributes:
        acceptance_floor: share of drafts that held, below which it was not.
    """

    proposer: str
    acceptance_floor: float

    def remark(self, counts: Mapping[str, int]) -> str | None:
        """A sentence for the user of a job that did not gain from its drafts.

        Args:
            counts: the sums of all rows.
        """
        proposed, accepted = counts["num_draft_tokens"], counts["num_accepted_tokens"]
        if not counts["num_forwards"]:
            return None
        if not proposed:
            why = "none would have saved time"
            if self.proposer == "ngram":
                why += ", or no text came twice"
            return f"No drafts were proposed: {why}. strategy=ar is as fast here."
        if accepted >= self.acceptance_floor * proposed:
            return None
        other = "draft with a draft model" if self.proposer == "ngram" else "ngram"
        return (
            f"Only {accepted / proposed:.1%} of the drafts held, and strategy.acceptance_floor is "
            f"{self.acceptance_floor:.1%}: use strategy=ar, another proposer "
            f"(strategy.proposer={other}), or fewer drafts (strategy.num_spec_tokens)."
        )


def summary(
    totals: Totals,
    folder: str,
    metrics: Metrics | None = None,
    speculation: Speculation | None = None,
) -> str:
    """The table at the end of a job; with `metrics` if it was this attempt that completed it."""
    lines = [
        ("rows", f"{totals.rows:,}"),
        ("finish reasons", _counts(totals.finish_reasons)),
        ("errors", _counts(totals.errors)),
        ("prompt tokens", f"{totals.prompt_tokens:,}"),
        ("generated tokens", f"{totals.generated_tokens:,}"),
    ]
    if totals.constraint:
        lines.append(("constraint", _outcomes(totals.constraint)))
    lines += _speculated(totals)
    if metrics is not None:
        attempt = metrics.attempt
        if attempt.rows_resumed:
            lines[0] = ("rows", f"{totals.rows:,} ({attempt.rows_resumed:,} from before)")
        if "num_commit_forwards" in totals.counts:
            lines.append(("steps per block", _shares(attempt.engine["forwards_per_yield"])))
        seconds = f"{_duration(attempt.wall_s)} ({_duration(attempt.generate_s)} generating)"
        lines += [("time", seconds), ("speed", f"{metrics.tokens_per_s:,.1f} tokens/s")]
    lines.append(("output", folder))
    width = max(len(name) for name, _ in lines)
    table = [f"{name:<{width}}  {value}" for name, value in lines]
    remark = None if speculation is None else speculation.remark(totals.counts)
    return "\n".join(table if remark is None else [*table, remark])


def _speculated(totals: Totals) -> list[tuple[str, str]]:
    """What the strategy counts of forwards and drafts, if it does."""
    lines = []
    if proposed := totals.counts.get("num_draft_tokens", 0):
        share = totals.counts["num_accepted_tokens"] / proposed
        lines.append(("drafts", f"{proposed:,} proposed, {share:.1%} accepted"))
    if forwards := totals.counts.get("num_forwards", 0):
        lines.append(("tokens per forward", f"{totals.generated_tokens / forwards:.2f} of a row"))
    if (commits := totals.counts.get("num_commit_forwards")) is not None:
        lines.append(("forwards", f"{forwards - commits:,} to denoise, {commits:,} to commit"))
    return lines


def _shares(counts: Mapping[int, int]) -> str:
    """How often each number came, of this attempt."""
    total = sum(counts.values())
    return ", ".join(f"{number}: {count / total:.1%}" for number, count in counts.items()) or "none"


def _outcomes(counts: Mapping[str, int]) -> str:
    """How many constrained rows did what; those that all did well are one number."""
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
