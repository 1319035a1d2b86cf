"""Reads the rows of a job before it runs: lengths of prompts, and rows that cannot have an answer.

`batchgen plan` and `--dry-run` print the result; no weights are needed.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import islice
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from batchgen.config.groups.job_config import JobConfig
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.interface.trajectory import answer_ids
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.constraint.row_params import RowParams
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.prompts.row_prompts import fit_prompt, prompt_room
from batchgen.util.random_bits import random_words

if TYPE_CHECKING:
    from batchgen.jobs.resolve.opened_job import OpenedJob

SAMPLE = 800
"""Rows that are looked at first, drawn with a fixed seed over the whole data set."""
STREAM = 5000
"""Streams: plan from the first 5,000 rows, or from `dataset.limit` if that is fewer."""
LONGEST = 10
"""How many of the longest prompts are named."""
_NAMED = 10


@dataclass(frozen=True, slots=True, kw_only=True)
class Reading:
    """The steps from a row to its request, as the job would make them; they raise RequestError for
    a bad row.

    `fit` cuts or refuses a prompt that leaves an answer no room. `room` is the most tokens of a
    prompt beside the job's longest answer. `image_token_id` is the token that stands for images,
    None where rows have none.
    """

    source: Source
    check: Callable[[Row], object]
    token_ids: Callable[[Row], list[int]]
    sampling: Callable[[Row], RequestParams]
    fit: Callable[[list[int], RequestParams], list[int]]
    constrained: Callable[[Row, RequestParams], RequestParams]
    room: int
    image_token_id: int | None = None


def job_reading(config: JobConfig, opened: OpenedJob) -> Reading:
    """The reading of a job whose longest answer leaves room for a prompt."""
    source, prompt, tokenizer = opened.source, opened.prompt, opened.model.tokenizer
    room = opened.max_model_len - config.sampling.max_new_tokens
    assert room >= 1
    params = RowParams(config, source.features, opened.check_params)
    bos_id = None if tokenizer is None else tokenizer.bos_token_id

    def fit(ids: list[int], params: RequestParams) -> list[int]:
        limit = prompt_room(opened.max_model_len, params.max_new_tokens)
        return fit_prompt(ids, limit, config.prompt.too_long, bos_id)

    def token_ids(row: Row) -> list[int]:
        # The tokens of an answer that is scored are read with those of the prompt.
        scored = [] if opened.answer is None else answer_ids(opened.answer.of(row))
        return prompt.token_ids(row) + scored

    return Reading(
        source=source,
        check=source.passthrough,
        token_ids=token_ids,
        sampling=params.sampling,
        fit=fit,
        constrained=params.constrained,
        room=room,
        image_token_id=None if opened.images is None else opened.images.image_token_id,
    )


@dataclass
class RowTally:
    """A count of rows, with the index and id of some of them, and the error of the first one if
    they are bad."""

    message: str = ""
    count: int = 0
    rows: list[tuple[int, str]] = field(default_factory=list)

    def add(self, row: Row) -> None:
        """Count one more row."""
        self.count += 1
        self.rows.append((row.index, row.id))

    def keep_first(self) -> None:
        """Forget all but the first rows, and keep the count."""
        self.rows = sorted(self.rows)[:_NAMED]


@dataclass(frozen=True, slots=True)
class ReadRow:
    """A row with its prompt as the model will read it, of `whole` tokens before it was cut, and its
    parameters."""

    row: Row
    ids: list[int]
    whole: int
    params: RequestParams


@dataclass
class Scan:
    """The results of a scan.

    `num_rows` is None for a stream whose end was not reached. `lengths` [R] are the tokens of all
    good rows by index, `longest` has index, id and tokens. `sample` and `longest` are in order.
    `bad` has the rows of each type of error, `constraints` those of each constraint. `cut` prompts
    will be cut to the room. `longest_answer` is the mean over the good rows of the most tokens that
    an answer may have, rounded up. `image_tokens` of the tokens of the prompts stand for images.
    """

    num_rows: int | None
    looked_at: int = 0
    sample: list[ReadRow] = field(default_factory=list)
    lengths: npt.NDArray[np.int64] = field(default_factory=lambda: np.empty(0, np.int64))
    longest: list[tuple[int, str, int]] = field(default_factory=list)
    bad: dict[str, RowTally] = field(default_factory=dict)
    cut: int = 0
    longest_answer: int = 0
    image_tokens: int = 0
    constraints: dict[Constraint, RowTally] = field(default_factory=dict)

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
    sample_s: float = 1.2,
    rows_s: float = 5.0,
    clock: Callable[[], float] = time.process_time,
) -> Scan:
    """Go through the rows of a job.

    First comes a sample, for at most `sample_s` seconds of the clock. If its speed says that all
    rows can be tokenised in `rows_s`, they are; else the sample is all. Seconds are the
    processor's: a busy machine takes longer and finds out as much.
    """
    source, scanner = reading.source, Scanner(reading)
    first = None if source.num_rows is not None else list(islice(source.rows(), STREAM))
    number = source.num_rows if first is None else len(first)
    assert number is not None
    if first is not None and number < STREAM:
        scanner.found.num_rows = number
    chosen = sample_indices(number)
    started, seen = clock(), set[int]()
    for row in source.rows_at(chosen) if first is None else (first[at] for at in chosen):
        seen.add(row.index)
        if isinstance(read := scanner.look(row), ReadRow):
            scanner.found.sample.append(read)
        if clock() - started > sample_s:
            break
    left = number - len(seen)
    if left and (clock() - started) / len(seen) * left <= rows_s:
        for row in source.rows() if first is None else first:
            if row.index not in seen:
                scanner.look(row)
    return scanner.finished()


def sample_indices(number: int, limit: int = SAMPLE) -> list[int]:
    """Different indices below `number`, spread over all, in random order; the same in every run."""
    chosen: list[int] = random_words(0, (number,)).argsort()[:limit].tolist()
    return chosen


class Scanner:
    """A scan while it runs, of the rows that `look` is called with."""

    def __init__(self, reading: Reading) -> None:
        self._reading = reading
        self.found = Scan(reading.source.num_rows)
        self._good: list[tuple[int, str, int, int]] = []
        """Index, id, tokens and the most tokens of an answer of each row with a prompt."""

    def look(self, row: Row) -> ReadRow | RequestError:
        """Make the prompt of a row, or note its error."""
        scan, reading = self.found, self._reading
        scan.looked_at += 1
        try:
            read = self._read(row)
        except RequestError as error:
            scan.bad.setdefault(error.type, RowTally(str(error))).add(row)
            return error
        self._good.append((row.index, row.id, len(read.ids), read.params.max_new_tokens))
        scan.cut += len(read.ids) < read.whole
        if reading.image_token_id is not None:
            scan.image_tokens += read.ids.count(reading.image_token_id)
        return read

    def _read(self, row: Row) -> ReadRow:
        """The prompt and the parameters of a row, whose constraint is noted. Raises RequestError if
        it has no prompt, or its columns cannot be copied."""
        reading = self._reading
        reading.check(row)
        if row.failure is not None:
            raise row.failure
        params = reading.constrained(row, reading.sampling(row))
        if params.constraint is not None:
            self.found.constraints.setdefault(params.constraint, RowTally()).add(row)
        ids = reading.token_ids(row)
        return ReadRow(row, reading.fit(ids, params), len(ids), params)

    def finished(self) -> Scan:
        """Put everything into the order of the rows."""
        scan, good = self.found, sorted(self._good)
        scan.longest_answer = -(-sum(longest for *_, longest in good) // max(len(good), 1))
        scan.lengths = np.array([tokens for _, _, tokens, _ in good], np.int64)
        order = np.argsort(-scan.lengths, kind="stable")[:LONGEST]
        scan.longest = [good[i][:3] for i in order]
        scan.sample.sort(key=lambda read: read.row.index)
        for rows in (*scan.bad.values(), *scan.constraints.values()):
            rows.keep_first()
        return scan
