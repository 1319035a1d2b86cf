"""Plays the schedule of a job: which rows run at once, and how many steps there are."""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from batchgen.forecast.step_cost import StepCost

Ints = npt.NDArray[np.int64]

MOST_SIMULATED = 8_000
"""Jobs with more answers: simulate this many and scale the time."""
_REFILL_SHARE = 8
"""Prompts are read once an eighth of the places are free, or all that wait have a place, as
`Scheduler` does."""


@dataclass(frozen=True, slots=True)
class Places:
    """What the engine has room for: rows at once, tokens of the paged cache, and tokens of one
    prefill.

    The first `prefix` tokens of every prompt are in the cache from the first row on; `samples` rows
    in a run share one prompt, in whole blocks of `block` tokens.
    """

    rows: int
    tokens: int
    batched_tokens: int
    prefix: int = 0
    samples: int = 1
    block: int = 16


@dataclass(frozen=True, slots=True)
class Played:
    """What a simulated run took: seconds of all forwards and until the first row ended, decode
    steps and their mean number of rows."""

    seconds: float
    steps: float
    mean_rows: float
    first_s: float = 0.0


def play(
    cost: StepCost,
    places: Places,
    prompts: Ints,
    answers: Ints,
    *,
    total: int | None = None,
    per_forward: float = 1.0,
    width: int = 1,
) -> Played:
    """Play a job of [N] prompts and answers, in tokens; samples of a row follow each other.

    A row starts when a place is free and the cache holds all running rows with their whole answers.
    It stays as many steps as it has tokens, or fewer with several `per_forward`; a forward reads
    `width` tokens of it. Between two ends of rows all steps have the same rows, so they are added
    up at once. With more answers in `total` than given, half of the given are played as well, and
    the others take as long as the second half, which has neither a beginning nor an end.
    """
    number = len(prompts)
    whole = _Run(cost, places, per_forward, width).play(prompts, answers)
    if total is None or total <= number:
        return whole
    half = number - max(number // 2, 1)
    begun = _Run(cost, places, per_forward, width).play(prompts[:half], answers[:half])
    more = (total - number) / (number - half)
    return Played(
        whole.seconds + more * (whole.seconds - begun.seconds),
        whole.steps + more * (whole.steps - begun.steps),
        whole.mean_rows,
        whole.first_s,
    )


class _Run:
    """A job while it is played."""

    def __init__(self, cost: StepCost, places: Places, per_forward: float, width: int) -> None:
        self._cost, self._places = cost, places
        self._per_forward, self._width = per_forward, width
        self.seconds = 0.0
        self.steps = 0
        self.row_steps = 0
        self._ends: list[tuple[int, int]] = []  # (step in which the row ends, its number)
        self._first_s = 0.0
        self._reserved = 0  # tokens of the rows that run, with their whole answers
        self._context = 0.0  # tokens that they have in the cache now

    def play(self, prompts: Ints, answers: Ints) -> Played:
        """Run all rows."""
        answers = np.maximum(answers, 1)
        lasting = np.maximum(np.ceil(answers / self._per_forward), 1).astype(np.int64).tolist()
        read, sizes = prompts.tolist(), (prompts + answers).tolist()
        waiting, total = 0, len(read)
        while waiting < total or self._ends:
            started = self._startable(waiting, total, sizes)
            if started > waiting:
                self._prefill(read, waiting, started)
                for row in range(waiting, started):
                    heapq.heappush(self._ends, (self.steps + lasting[row], row))
                    self._reserved += sizes[row]
                    self._context += read[row]
                waiting = started
            self._decode()
            self._first_s = self._first_s or self.seconds
            while self._ends and self._ends[0][0] <= self.steps:
                _, row = heapq.heappop(self._ends)
                self._reserved -= sizes[row]
                self._context -= sizes[row]
            if not self._ends:
                self._context = 0.0
        mean_rows = self.row_steps / max(self.steps, 1)
        return Played(self.seconds, self.steps, mean_rows, self._first_s)

    def _startable(self, waiting: int, total: int, sizes: list[int]) -> int:
        """Up to which row rows start now."""
        running, places = len(self._ends), self._places
        free = places.rows - running
        if running and free * _REFILL_SHARE < places.rows and free < total - waiting:
            return waiting
        until, reserved = waiting, self._reserved
        while until < min(waiting + free, total):
            reserved += sizes[until]
            if reserved > places.tokens and (running or until > waiting):
                break
            until += 1
        return until

    def _prefill(self, read: list[int], first: int, until: int) -> None:
        """Read the prompts of some rows; what they share with earlier ones is in the cache."""
        places, block = self._places, self._places.block
        tokens, pairs = 0, 0.0
        for row in range(first, until):
            known = 0 if row == 0 else places.prefix
            if row % places.samples:
                known = max(known, (read[row] - 1) // block * block)
            new = max(read[row] - known, 1)
            tokens += new
            pairs += new * (read[row] + known) / 2
        steps = max(-(-tokens // places.batched_tokens), 1)
        self.seconds += self._cost.prefill(tokens, until - first, pairs, steps)

    def _decode(self) -> None:
        """Run the steps until the next row ends."""
        rows = len(self._ends)
        steps = self._ends[0][0] - self.steps
        grown = rows * self._per_forward * steps
        context = self._context + grown / 2
        self.seconds += steps * self._cost.decode(rows, context, self._width)
        self._context += grown
        self.steps += steps
        self.row_steps += steps * rows
