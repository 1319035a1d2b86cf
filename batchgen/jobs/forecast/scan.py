"""Reads a sample of a job's rows before it runs: lengths of prompts, and rows that cannot have an
answer.

`batchgen plan` and `batchgen validate` call `scan_rows`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import islice
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.outputs import RequestError
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.util.random_bits import random_words

SAMPLE = 2000
"""The most rows that are read: the first ones of a stream, otherwise rows drawn with a fixed seed
over the whole data set."""
SHOWN = 3
"""The number of rows at the start of the data set that are always read."""
_NAMED = 5  # rows with the same type of error that are named


@dataclass
class RowTally:
    """The rows with one type of error.

    Attributes:
        message: the error of the first of them.
        count: how many there are.
        rows: the index and the id of some.
    """

    message: str
    count: int = 0
    rows: list[tuple[int, str]] = field(default_factory=list)


class ReadRow(NamedTuple):
    """A row, and the request that the job makes of it."""

    row: Row
    request: RowRequest


@dataclass
class Scan:
    """The results of a scan.

    Attributes:
        num_rows: rows of the data set; None for a stream whose end was not reached.
        looked_at: rows that were read.
        sample: the rows with a prompt, in order.
        bad: the rows without a prompt, by the type of their error.
        image_tokens: tokens in the prompts of `sample` that stand for images.
    """

    num_rows: int | None
    looked_at: int = 0
    sample: list[ReadRow] = field(default_factory=list)
    bad: dict[str, RowTally] = field(default_factory=dict)
    image_tokens: int = 0

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """[R] The tokens of each row's prompt, together with those of an answer that is scored
        after it."""
        requests = [read.request for read in self.sample]
        scored = [0 if request.answer is None else len(request.answer) for request in requests]
        return np.array([len(request.prompt) for request in requests], np.int64) + scored

    @property
    def longest_answer(self) -> int:
        """The most tokens that an answer may have, as the mean over the rows, rounded up."""
        longest = [read.request.params.max_new_tokens for read in self.sample]
        return -(-sum(longest) // max(len(longest), 1))

    @property
    def num_bad(self) -> int:
        """The number of rows that will have an error."""
        return sum(bad.count for bad in self.bad.values())

    @property
    def bad_share(self) -> float:
        """The share of the rows read that will have an error."""
        return self.num_bad / max(self.looked_at, 1)

    def note_bad(self, type: str, message: str, rows: Sequence[Row]) -> None:
        """Count rows that have an error of this type."""
        tally = self.bad.setdefault(type, RowTally(message))
        tally.count += len(rows)
        named = [*tally.rows, *((row.index, row.id) for row in rows)]
        tally.rows = sorted(named)[:_NAMED]


def scan_rows(
    source: Source,
    request: Callable[[Row], RowRequest],
    image_token_id: int | None = None,
    seconds: float = 5.0,
    clock: Callable[[], float] = time.process_time,
) -> Scan:
    """Read a sample of a job's rows, for at most `seconds` of the clock.

    The default clock is the processor time of this process: on a busy machine a scan takes longer,
    but reads as many rows.

    Args:
        request: makes the request of a row; raises RequestError for a row without a prompt.
        image_token_id: the token that stands for images in prompts.
    """
    scan = Scan(source.num_rows)
    if (number := source.num_rows) is None:
        rows = source.rows()
    else:
        rows = iter(source.rows_at(sample_indices(number)))
    started = clock()
    for row in islice(rows, SAMPLE):
        scan.looked_at += 1
        try:
            source.passthrough(row)
            scan.sample.append(ReadRow(row, request(row)))
        except RequestError as error:
            scan.note_bad(error.type, str(error), [row])
        if clock() - started > seconds:
            break
    else:
        if number is None and scan.looked_at < SAMPLE:
            scan.num_rows = scan.looked_at
    scan.sample.sort(key=lambda read: read.row.index)
    if image_token_id is not None:
        prompts = (read.request.prompt for read in scan.sample)
        scan.image_tokens = sum(prompt.count(image_token_id) for prompt in prompts)
    return scan


def sample_indices(number: int) -> list[int]:
    """Different indices below `number`: the first `SHOWN`, and then others in a random order over
    the whole data set, which is the same in every run."""
    spread = random_words(0, (number,)).argsort()[:SAMPLE].tolist()
    return [*dict.fromkeys([*range(min(SHOWN, number)), *spread])][:SAMPLE]
