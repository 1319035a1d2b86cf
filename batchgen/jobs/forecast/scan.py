"""Goes through the rows of a job: how long prompts are, and which rows will have no answer."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice

import numpy as np
import numpy.typing as npt

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.prompt_tokens import text_bytes
from batchgen.jobs.forecast.prompt_reading import Reading
from batchgen.util.random_bits import random_words

SAMPLE = 800
"""Rows that are looked at first, drawn with a fixed seed over the whole data set."""
STREAM = 5000
"""Streams: plan from the first 5,000 rows, or from `dataset.limit` if that is fewer."""
LONGEST = 10
"""How many of the longest prompts are named."""
_MOST_TEXT = 50
"""Rows with the most text that are tokenised, to find the LONGEST."""
_NAMED = 10
_FRAME = 64
"""Tokens that a prompt may have beyond its bytes of text: special ones that are added."""
_TIMED = 200
"""Rows that are looked at again to time them: a clock that is read for every row can take longer
than the row."""
_FRAMES = 100
"""Prompts whose text is compared with `Prompt.size`."""


@dataclass(frozen=True, slots=True)
class Budget:
    """The seconds of the processor that a scan may take for the sample, for all rows, and for rows
    that may be too long. A busy machine takes longer and finds out as much."""

    sample: float = 1.2
    rows: float = 5.0
    long_rows: float = 1.0


@dataclass
class FoundRows:
    """Some rows: why the first is bad, if it is; how many; and index and id of some."""

    message: str = ""
    count: int = 0
    rows: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Note one more."""
        self.count += 1
        self.rows.append((row.index, row.id))

    def keep_first(self) -> None:
        """Forget all but the first rows, but not how many there were."""
        self.rows = sorted(self.rows)[:_NAMED]


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row with its prompt as the model will read it, and its parameters.

    `whole` is the number of tokens before the prompt was cut, and `size` is `Prompt.size`.
    """

    row: Row
    ids: list[int]
    whole: int
    size: int
    params: SamplingParams


@dataclass
class Scan:
    """What was found in the rows that were looked at.

    `num_rows` is None for a stream whose end was not reached. `tokenised` good rows were counted,
    the others have an estimate; `lengths` [R] are the tokens of all good rows by index, `longest`
    has index, id and tokens. `sample` and `longest` are in order. `bad` has the rows of each type
    of error, `constraints` those of each constraint. `cut` prompts will be cut to the room, and
    `unsure` rows may be too long and were not tokenised for want of time. `longest_answer` is the
    mean over the good rows of the most tokens that an answer may have, rounded up. `image_tokens`
    of the `read_tokens` of the prompts that were tokenised in full stand for images.
    """

    num_rows: int | None
    looked_at: int = 0
    tokenised: int = 0
    sample: list[ReadRow] = field(default_factory=list)
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    longest: list[tuple[int, str, int]] = field(default_factory=list)
    bad: dict[str, FoundRows] = field(default_factory=dict)
    cut: int = 0
    unsure: int = 0
    longest_answer: int = 0
    image_tokens: int = 0
    read_tokens: int = 0
    constraints: dict[Constraint, FoundRows] = field(default_factory=dict)

    @property
    def num_bad(self) -> int:
        """How many of the rows that were looked at will have an error."""
        return sum(bad.count for bad in self.bad.values())

    @property
    def bad_share(self) -> float:
        """The share of those rows."""
        return self.num_bad / max(self.looked_at, 1)


def scan_rows(
    reading: Reading,
    budget: Budget | None = None,
    clock: Callable[[], float] = time.process_time,
) -> Scan:
    """Go through the rows of a job, with `budget` in seconds of the clock.

    First comes a sample. If its speed says that all rows can be tokenised in time, they are. Else
    only the size of their text is taken, which finds the rows whose templates cannot be filled and
    tells by the sample how many tokens there are; rows with so much text that they may be too long
    are then tokenised, the longest first. Without time for that either, the sample is all.
    """
    return Scanner(reading, budget, clock).scan()


def sample_indices(number: int, most: int = SAMPLE) -> list[int]:
    """Different indices below `number`, spread over all, in random order; the same in every run."""
    chosen: list[int] = random_words(0, (number,)).argsort()[:most].tolist()
    return chosen


@dataclass(slots=True)
class _Good:
    """A row that has a prompt; `tokens` is -1 where they were not counted, and `longest` the most
    tokens of its answer."""

    index: int
    id: str
    size: int
    longest: int
    tokens: int


class Scanner:
    """A scan while it runs: of all rows, or of those that `look` is called with."""

    def __init__(
        self,
        reading: Reading,
        budget: Budget | None = None,
        clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._reading, self._budget, self._clock = reading, budget or Budget(), clock
        self._found = Scan(reading.source.num_rows)
        self._good: list[_Good] = []  # in any order
        self._frame = 0  # the most bytes of a prompt that `size` does not count

    def scan(self) -> Scan:
        source, found = self._reading.source, self._found
        if source.num_rows is None:
            rows = list(islice(source.rows(), STREAM))
            number = len(rows)
            found.num_rows = number if number < STREAM else None
            self._go_through(number, lambda at: (rows[i] for i in at), lambda: iter(rows))
        else:
            self._go_through(source.num_rows, source.rows_at, source.rows)
        return self.finished()

    def _go_through(
        self,
        number: int,
        rows_at: Callable[[Sequence[int]], Iterator[Row]],
        rows: Callable[[], Iterator[Row]],
    ) -> None:
        """Read the sample, and then all rows if there is time."""
        started = self._clock()
        seen: set[int] = set()
        for row in rows_at(sample_indices(number)):
            seen.add(row.index)
            if isinstance(made := self.look(row), ReadRow):
                self._found.sample.append(made)
            if self._clock() - started > self._budget.sample:
                break
        left = number - len(seen)
        if not left:
            return
        each = (self._clock() - started) / len(seen)
        if each * left <= self._budget.rows:
            look: Callable[[Row], object] = self.look
        elif self._seconds_of_size() * left <= self._budget.rows:
            look = self._size
        else:
            return
        for row in rows():
            if row.index not in seen:
                look(row)
        if look == self._size:
            self._tokenise_long(rows_at)

    def look(self, row: Row) -> ReadRow | RequestError:
        """Make the prompt of a row, or note its error."""
        reading = self._reading
        self._found.looked_at += 1
        try:
            size, params = self._checked_size(row)
            ids = reading.token_ids(row)
            if len(self._good) < _FRAMES and (text := reading.text(row)) is not None:
                self._frame = max(self._frame, text_bytes(text) - size)
            fitted = self._fitted(ids, params)
        except RequestError as error:
            return self._note(row, error)
        self._good.append(_Good(row.index, row.id, size, params.max_new_tokens, len(fitted)))
        self._found.read_tokens += len(fitted)
        if reading.image_token_id is not None:
            self._found.image_tokens += fitted.count(reading.image_token_id)
        return ReadRow(row, fitted, len(ids), size, params)

    def _fitted(self, ids: list[int], params: SamplingParams) -> list[int]:
        """The prompt as the model will read it; RequestError if it is refused."""
        fitted = self._reading.fit(ids, params)
        self._found.cut += len(fitted) < len(ids)
        return fitted

    def _size(self, row: Row) -> None:
        """Note the size of a row's prompt."""
        self._found.looked_at += 1
        try:
            size, params = self._checked_size(row)
        except RequestError as error:
            self._note(row, error)
        else:
            self._good.append(_Good(row.index, row.id, size, params.max_new_tokens, -1))

    def _checked_size(self, row: Row) -> tuple[int, SamplingParams]:
        """The size of a row's prompt and its parameters, whose constraint is noted; RequestError if
        it has no prompt or none such, or its columns cannot be copied."""
        size, params = self._size_and_params(row)
        if params.constraint is not None:
            self._found.constraints.setdefault(params.constraint, FoundRows()).add(row)
        return size, params

    def _size_and_params(self, row: Row) -> tuple[int, SamplingParams]:
        reading = self._reading
        reading.check(row)
        if row.failure is not None:
            raise row.failure
        params = reading.sampling(row)
        return reading.size(row), reading.constrained(row, params)

    def _seconds_of_size(self) -> float:
        """How long a row takes of which only the size is looked at."""
        some = self._found.sample[:_TIMED]
        started = self._clock()
        for read in some:
            self._size_and_params(read.row)
        return (self._clock() - started) / max(len(some), 1)

    def _note(self, row: Row, error: RequestError) -> RequestError:
        self._found.bad.setdefault(error.type, FoundRows(str(error))).add(row)
        return error

    def _tokenise_long(self, rows_at: Callable[[Sequence[int]], Iterator[Row]]) -> None:
        """Count the tokens of the rows with the most text, and of all that may be too long: no text
        has more tokens than bytes, if the tokenizer does not lengthen it first."""
        reading = self._reading
        bound = reading.room // reading.growth - self._frame - _FRAME
        uncounted = [good for good in self._good if good.tokens < 0]
        uncounted.sort(key=lambda good: good.size, reverse=True)
        most = max(sum(good.size > bound for good in uncounted), _MOST_TEXT)
        wanted = uncounted[:most] + [good for good in uncounted[most:] if not good.size]
        end = self._clock() + self._budget.long_rows
        bad: set[int] = set()
        done = 0
        for good, row in zip(wanted, rows_at([good.index for good in wanted]), strict=True):
            if self._clock() > end:
                break
            done += 1
            try:
                good.tokens = len(self._fitted(reading.token_ids(row), reading.sampling(row)))
            except RequestError as error:
                self._note(row, error)
                bad.add(row.index)
        self._found.unsure = sum(good.size > bound for good in wanted[done:])
        self._good = [good for good in self._good if good.index not in bad]

    def finished(self) -> Scan:
        """Put everything into the order of the rows."""
        found, good = self._found, sorted(self._good, key=lambda good: good.index)
        found.tokenised = sum(one.tokens >= 0 for one in good)
        sizes = np.array([one.size for one in good], np.int64)
        counted = np.array([one.tokens for one in good], np.int64)
        found.longest_answer = -(-sum(one.longest for one in good) // max(len(good), 1))
        found.lengths = np.minimum(estimated(sizes, counted), self._reading.room)
        order = np.argsort(-found.lengths, kind="stable")[:LONGEST]
        found.longest = [(good[i].index, good[i].id, int(found.lengths[i])) for i in order]
        found.sample.sort(key=lambda read: read.row.index)
        for rows in (*found.bad.values(), *found.constraints.values()):
            rows.keep_first()
        return found


def estimated(sizes: npt.NDArray[np.int64], tokens: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
    """The [R] tokens of prompts from the sizes of their texts: those that were counted, and where
    `tokens` is -1 a line of least squares through them, which does not fall and says at least one.
    """
    known = tokens >= 0
    if known.all() or not known.any():
        return np.maximum(tokens, 0)
    x, y = sizes[known].astype(float), tokens[known].astype(float)
    spread = float(((x - x.mean()) ** 2).sum())
    slope = max(float(((x - x.mean()) * (y - y.mean())).sum()) / spread, 0.0) if spread else 0.0
    line = y.mean() + slope * (sizes - x.mean())
    found: npt.NDArray[np.int64] = np.where(known, tokens, np.maximum(np.rint(line), 1))
    return found.astype(np.int64)
