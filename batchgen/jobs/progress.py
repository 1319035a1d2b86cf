"""What a job shows on the terminal: a bar while it runs, and a table when it ends."""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from batchgen.folder.dataset_card import how_to_read
from batchgen.forecast.remaining import TimeLeft
from batchgen.texts.row_text import row_name
from batchgen.texts.text_table import score_lines
from batchgen.util.duration import duration
from batchgen.util.shorten import beginning, end

if TYPE_CHECKING:
    from batchgen.engine.memory.memory_plan import MemoryPlan
    from batchgen.engine.strategy import Strategy
    from batchgen.folder.job_metrics import Metrics, Totals
    from batchgen.forecast.forecast import Forecast
    from batchgen.shards.output_schema import FinishedRow

LINE_SECONDS = 30.0
SPEED_SECONDS = 10.0  # the speed that is shown is that of so many seconds
SHOWN_PROMPT, SHOWN_ANSWER, SHOWN_ERROR = 70, 200, 500  # characters
_PROMPT_TOKENS = 64  # the last ones of a prompt, more than SHOWN_PROMPT characters need


class Progress:
    """Shows how far the job is: a bar over the output rows, or a line every 30 seconds if there is
    no terminal. Above it stand the first error of each type, and now and then a finished answer."""

    def __init__(
        self,
        total: int | None,
        resumed: int,
        show_every: float = 0.0,
        decode: Callable[[list[int]], str] | None = None,
        stream: TextIO | None = None,
        *,
        resumed_errors: int = 0,
        longest: int = 1 << 16,
        expected: Forecast | None = None,
    ) -> None:
        """
        Args:
            total: output rows of the whole job, None if that is not known.
            resumed: output rows that earlier attempts have written.
            show_every: seconds between two finished answers that are shown; 0 shows none.
            decode: the text of token ids, to show prompts; with None only answers are shown.
            stream: where to show it; None is stderr.
            resumed_errors: how many of the resumed rows have an error.
            longest: the most tokens of an answer.
            expected: what the job is expected to take, which is shown until the first row ends;
                None shows nothing then.
        """
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._interval = 0.5 if self._is_terminal else LINE_SECONDS
        rows = "{n:,} rows" if total is None else "{n:,}/{total:,} rows"
        bar = "" if total is None else "{percentage:3.0f}%|{bar}| "
        self._bar = tqdm(
            total=total,
            initial=resumed,
            file=self._stream,
            disable=not self._is_terminal,
            dynamic_ncols=True,
            mininterval=0.5,
            bar_format=bar + rows + "{postfix}",
        )
        self._rows = resumed
        self._others, self._others_rows, self._others_speed = 0, 0, 0.0
        self._others_errors = 0
        self._before: dict[int, int] = {}  # by worker: what it had finished before this one came
        self._resumed = resumed
        self._total = total
        self._errors: Counter[str] = Counter()
        self._resumed_errors = resumed_errors
        self._show_every = show_every
        self._decode = decode
        self._started = self._shown = self._answer_shown = time.monotonic()
        self._speed = _Speed(self._started)
        self._left = None
        self._expected = expected
        if total is not None:
            batch_share = 0.0 if expected is None else expected.batch_share
            self._left = TimeLeft(total - resumed, longest, batch_share, self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        seconds = time.monotonic() - self._started
        self._bar.set_postfix_str(", ".join([*self._error_count(), f"in {duration(seconds)}"]))
        self._bar.close()

    def add(self, finished: Sequence[FinishedRow]) -> None:
        """Count finished rows, and show what the terminal has not seen of them."""
        self._rows += len(finished)
        self._bar.update(len(finished))
        for row in finished:
            if self._left is not None:
                self._left.add(None if row.output is None else len(row.output.token_ids))
            if (error := row.failure) is not None:
                self._errors[error.type] += 1
                if self._errors[error.type] == 1:
                    message = beginning(str(error), SHOWN_ERROR)
                    name = row_name(row.row_id, row.sample_index)
                    self._print(f"first {error.type}, {name}: {message}")
        now = time.monotonic()
        if self._show_every and now - self._answer_shown >= self._show_every:
            answered = (row for row in finished if row.failure is None)
            if (chosen := next(answered, None)) is not None:
                self._answer_shown = now
                self._print(self._answer(chosen))

    def set_others(self, beats: Sequence[Mapping[str, Any]], number: int) -> None:
        """Count what other workers have finished, as of their last heartbeats.

        Args:
            beats: of all other workers.
            number: of this worker. What those before it have finished until now was there already
                when it came.
        """
        living = [beat for beat in beats if not beat["dead"]]
        rows = 0
        for beat in beats:
            done = beat["attempt"]["rows"] if "attempt" in beat else 0
            if beat["worker"] < number:
                done -= self._before.setdefault(beat["worker"], done)
            rows += done
        self._bar.update(rows - self._others_rows)
        self._rows += rows - self._others_rows
        self._others_rows = rows
        self._others_errors = sum(b["totals"]["error_rows"] for b in beats if "totals" in b)
        self._others = len(living)
        self._others_speed = sum(
            beat["attempt"]["generated_tokens"] / max(beat["attempt"]["generate_s"], 1e-9)
            for beat in living
            if "attempt" in beat
        )

    def due(self) -> bool:
        """Whether it is time to call `show` again, whose figures are not free to get."""
        return time.monotonic() - self._shown >= self._interval

    def show(self, generated_tokens: int, running: npt.NDArray[np.int64]) -> None:
        """Show how fast tokens come, how many requests run and when the job should end.

        Args:
            generated_tokens: all that were generated since this object was made.
            running: the tokens that each request has generated which runs in the engine, not those
                that wait for their turn.
        """
        self._shown = now = time.monotonic()
        speed = self._speed.at(now, generated_tokens) + self._others_speed
        facts = [f"{speed:,.0f} tok/s", f"{len(running):,} running"]
        if self._others:
            facts.append(f"{1 + self._others} workers")
        facts += self._error_count()
        left = self._seconds_left(now, generated_tokens, running)
        facts += self._estimate(now) if left is None else [f"{duration(left, 0)} left"]
        if self._is_terminal:
            self._bar.set_postfix_str(", ".join(facts))
            return
        done = f"{self._rows:,}" + (f"/{self._total:,}" if self._total is not None else "")
        self._print(", ".join([f"{done} rows", *facts]))

    def _seconds_left(
        self, now: float, generated_tokens: int, running: npt.NDArray[np.int64]
    ) -> float | None:
        """When the job should end. With other workers that is as the rows of all have come so far,
        because how far theirs are is not known here."""
        if self._left is None:
            return None
        if not self._others:
            return self._left.seconds(now, generated_tokens, running)
        rate = (self._rows - self._resumed) / max(now - self._started, 1e-9)
        assert self._total is not None
        return (self._total - self._rows) / rate if rate > 0 else None

    def _estimate(self, now: float) -> list[str]:
        """When the first rows and all should end, as long as none has ended and nothing is known
        but the forecast. That is of one worker, so with several there is none."""
        if self._expected is None or self._others or self._rows > self._resumed:
            return []
        seconds, passed = self._expected.seconds, now - self._started
        done = self._expected.start_s + passed
        if done >= seconds.bound:
            return []
        first = self._expected.first_s - passed
        parts = [f"the first row within {duration(first, 0)}"] if first > 0 else []
        low, bound = seconds.low - done, duration(seconds.bound - done, 0)
        parts.append(f"all in {duration(low, 0)} to {bound}" if low > 0 else f"all within {bound}")
        return [f"estimated: {', '.join(parts)}"]

    def _error_count(self) -> list[str]:
        number = self._resumed_errors + self._errors.total() + self._others_errors
        return [f"{number:,} error{'s' * (number > 1)}"] if number else []

    def _answer(self, row: FinishedRow) -> str:
        """Three lines about a finished row: which it is, the end of its prompt, and its answer."""
        output = row.output
        assert output is not None
        name = row_name(row.row_id, row.sample_index)
        lines = [f"{name}, {output.finish_reason}, {len(output.token_ids):,} tokens:"]
        if self._decode is not None:
            prompt = self._decode(output.prompt_token_ids[-_PROMPT_TOKENS:])
            lines.append(f"  {end(prompt, SHOWN_PROMPT)}")
        return "\n".join([*lines, f"  → {beginning(output.text, SHOWN_ANSWER)}"])

    def _print(self, text: str) -> None:
        """Print above the bar, if there is one."""
        tqdm.write(text, file=self._stream)
        self._stream.flush()


class _Speed:
    """Tokens per second in about the last SPEED_SECONDS, from totals that come now and then."""

    def __init__(self, started: float) -> None:
        self._samples = deque([(started, 0)])

    def at(self, now: float, tokens: int) -> float:
        """The speed, given how many tokens there are now in all."""
        self._samples.append((now, tokens))
        while now - self._samples[1][0] >= SPEED_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        return (tokens - before) / max(now - then, 1e-9)


def show_memory(plan: MemoryPlan) -> None:
    """Say on stderr how the engine's memory is divided: that decides how many rows run at once."""
    print(f"memory: {plan}", file=sys.stderr, flush=True)


def summary(
    totals: Totals,
    folder: str,
    metrics: Metrics | None = None,
    strategy: Strategy | None = None,
    score: Mapping[str, Any] | None = None,
    report: str | None = None,
) -> str:
    """The table at the end of a job.

    Args:
        metrics: of this attempt, if it was the one that completed the job.
        strategy: has lines of its own to add.
        score: what the job's marks come to, if it has some.
        report: the path or URL of the page about the job, if it was made.
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
    if score is not None:
        lines += score_lines(score)
    if metrics is not None:
        attempt = metrics.attempt
        if attempt.rows_resumed:
            lines[0] = ("rows", f"{totals.rows:,} ({attempt.rows_resumed:,} from before)")
        seconds = f"{duration(attempt.wall_s)} ({duration(attempt.generate_s)} generating)"
        lines += [("time", seconds), ("speed", f"{metrics.tokens_per_s:,.1f} tokens/s")]
        if attempt.memory.get("row_states"):
            lines.append(("row states", _row_states(attempt.memory)))
    lines.append(("read it", f"{how_to_read(folder)['datasets']}; others: see its README.md"))
    if report is not None:
        lines.append(("report", report))
    lines.append(("output", folder))
    width = max(len(name) for name, _ in lines)
    table = [f"{name:<{width}}  {value}" for name, value in lines]
    if metrics is not None and (why := metrics.attempt.batch_dependence) is not None:
        table.append(f"A row's tokens may depend on the rows beside it: {why}.")
    remark = None if strategy is None else strategy.remark(totals.counts)
    return "\n".join(table if remark is None else [*table, remark])


def _row_states(memory: Mapping[str, int | None]) -> str:
    """What the states of recurrent layers take of the memory, which the KV cache does not have."""
    rows, checkpoints = memory["row_states"] or 0, memory["checkpoints"] or 0
    return (
        f"{rows / 2**30:.2f} GiB for rows, {checkpoints / 2**30:.2f} GiB for "
        f"{memory['num_checkpoints']:,} checkpoints of prefixes"
    )


def _outcomes(counts: Mapping[str, int]) -> str:
    """How many of the constrained rows ended in which way; ways that none took are left out."""
    constrained = {n: c for n, c in counts.items() if n not in ("unconstrained", "error")}
    shown = [f"{n} {c:,}" for n, c in constrained.items() if c or n == "satisfied"]
    return f"{', '.join(shown)} of {sum(constrained.values()):,} constrained rows"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counts.items())) or "none"
