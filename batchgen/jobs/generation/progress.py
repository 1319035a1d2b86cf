"""The display of a running job on the terminal: a bar, first errors, some answers.

`Generation` reports rows and speeds to `Progress`, which prints to stderr.
"""

from __future__ import annotations

import sys
import time
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Self, TextIO

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from batchgen.jobs.generation.remaining import TimeLeft
from batchgen.storage.folder.job_summary import tokens_per_s
from batchgen.util.duration import duration
from batchgen.util.shorten import beginning, end
from batchgen.util.text.text_table import counted, row_name

if TYPE_CHECKING:
    from batchgen.jobs.generation.running_score import RunningScore
    from batchgen.storage.shards.output_schema import FinishedRow

LINE_SECONDS = 30.0  # between two lines where there is no terminal
SPEED_SECONDS = 10.0  # the speed that is shown is the mean over this time
SHOWN_PROMPT, SHOWN_ANSWER, SHOWN_ERROR = 70, 200, 500  # characters
_PROMPT_TOKENS = 64  # the last ones of a prompt, more than SHOWN_PROMPT characters need


class Progress:
    """Shows how far the job is, as a bar over the output rows, or as a line every 30 seconds where
    there is no terminal.

    The first error of each type and, at intervals, a finished answer are printed above the bar.
    """

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
        batch_share: float = 1.0,
        title: str = "",
        score: RunningScore | None = None,
    ) -> None:
        """Show the bar.

        Args:
            total: output rows of the whole job; None if that is not known.
            resumed, resumed_errors: output rows that earlier attempts have written, and their
                errors.
            show_every: seconds between two finished answers that are shown; 0 shows none.
            decode: turns token ids into text, to show the ends of prompts with answers.
            stream: where to print; None means stderr.
            longest: the most tokens of an answer.
            batch_share: the time of a decode step of one row, as a share of a full batch's.
            title: the name of a pipeline's step, printed before each line.
            score: the score of the answers so far; None for a job without grading.
        """
        self._stream = stream if stream is not None else sys.stderr
        self._is_terminal = self._stream.isatty()
        self._title = f"{title}: " if title else ""
        self._interval = 0.5 if self._is_terminal else LINE_SECONDS
        rows = "{n:,} answers" if total is None else "{n:,}/{total:,} answers"
        bar = "" if total is None else "{percentage:3.0f}%|{bar}| "
        self._bar = tqdm(
            total=total,
            initial=resumed,
            file=self._stream,
            disable=not self._is_terminal,
            dynamic_ncols=True,
            mininterval=0.5,
            bar_format=self._title + bar + rows + "{postfix}",
        )
        self._rows = resumed
        self._others, self._others_rows, self._others_speed = 0, 0, 0.0
        self._others_errors = 0
        self._before: dict[int, int] = {}  # worker → rows it had finished before this one began
        self._resumed = resumed
        self._copied = 0
        self._total = total
        self._errors: Counter[str] = Counter()
        self._resumed_errors = resumed_errors
        self._score = score
        self._show_every = show_every
        self._decode = decode
        self._started = self._shown = self._answer_shown = time.monotonic()
        self._speed = _Speed(self._started)
        self._left = None  # estimates the time left
        if total is not None:
            self._left = TimeLeft(total - resumed, longest, batch_share, self._started)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._score is not None:
            self._score.close()
        seconds = time.monotonic() - self._started
        self._bar.set_postfix_str(", ".join([*self._error_count(), f"in {duration(seconds)}"]))
        self._bar.close()

    def add(self, finished: Sequence[FinishedRow]) -> None:
        """Count finished rows, and show new kinds of errors and sample answers among them."""
        self._rows += len(finished)
        self._bar.update(len(finished))
        self._copied += sum(row.is_copied for row in finished)
        if self._score is not None:
            self._score.add(finished)
        for row in finished:
            if self._left is not None:
                generated = None if row.is_copied else row.output
                self._left.add(None if generated is None else len(generated.token_ids))
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
        """Show the rows, errors and speeds that other workers report in their heartbeats.

        Args:
            number: the number of this worker. Rows that workers with a lower number report at the
                first call were finished before this worker began, and are not counted again.
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
        self._others_speed = sum(tokens_per_s(beat.get("attempt", {})) for beat in living)

    def due(self) -> bool:
        """Whether it is time to call `show` again."""
        return time.monotonic() - self._shown >= self._interval

    def show(self, generated_tokens: int, running: npt.NDArray[np.int64]) -> None:
        """Show the speed in tokens per second, the number of running requests and the time left.

        Args:
            generated_tokens: tokens generated since this object was made.
            running: [R] the tokens that each request in the engine has generated.
        """
        self._shown = now = time.monotonic()
        speed = self._speed.at(now, generated_tokens) + self._others_speed
        facts = [f"{speed:,.0f} tok/s", f"{len(running):,} running"]
        if self._others:
            facts.append(f"{1 + self._others} workers")
        if self._copied:
            facts.append(f"{self._copied:,} copied")
        if self._score is not None and (score := self._score.text()):
            facts.append(score)
        facts += self._error_count()
        left = self._seconds_left(now, generated_tokens, running)
        facts += [] if left is None else [f"{duration(left, 0)} left"]
        if self._is_terminal:
            self._bar.set_postfix_str(", ".join(facts))
            return
        done = f"{self._rows:,}" + (f"/{self._total:,}" if self._total is not None else "")
        self._print(", ".join([f"{done} answers", *facts]))

    def _seconds_left(
        self, now: float, generated_tokens: int, running: npt.NDArray[np.int64]
    ) -> float | None:
        """The estimated seconds to the end; None if they are not known.

        With several workers the mean rate of rows decides, because this worker does not know how
        long the unfinished answers of the others are.
        """
        if self._left is None:
            return None
        if not self._others:
            return self._left.seconds(now, generated_tokens, running)
        rate = (self._rows - self._resumed) / max(now - self._started, 1e-9)
        assert self._total is not None
        return (self._total - self._rows) / rate if rate > 0 else None

    def _error_count(self) -> list[str]:
        number = self._resumed_errors + self._errors.total() + self._others_errors
        return [counted(number, "error")] if number else []

    def _answer(self, row: FinishedRow) -> str:
        """A finished row in lines: its name, the end of its prompt, and its answer."""
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
        tqdm.write(self._title + text, file=self._stream)
        self._stream.flush()


class _Speed:
    """The speed in tokens per second over about the last SPEED_SECONDS."""

    def __init__(self, started: float) -> None:
        self._samples = deque([(started, 0)])

    def at(self, now: float, tokens: int) -> float:
        """Note the total number of `tokens` at the time `now`, and return the speed."""
        self._samples.append((now, tokens))
        while now - self._samples[1][0] >= SPEED_SECONDS:
            self._samples.popleft()
        then, before = self._samples[0]
        return (tokens - before) / max(now - then, 1e-9)
