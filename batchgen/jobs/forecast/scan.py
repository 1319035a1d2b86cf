"""Reads rows of a job before it runs: lengths of prompts, and rows that cannot have an answer."""

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
"""Rows that are looked at, drawn with a fixed seed over the whole data set; of a stream the first
ones."""
SHOWN = 3
"""The first rows, which are always looked at."""
_NAMED = 5


@dataclass
class RowTally:
    """A count of bad rows, with the error of the first one, and the index and id of some."""

    message: str
    count: int = 0
    rows: list[tuple[int, str]] = field(default_factory=list)


class ReadRow(NamedTuple):
    """A row, and what the job asks of the engine for it."""

    row: Row
    request: RowRequest


@dataclass
class Scan:
    """The results of a scan.

    `num_rows` is None for a stream whose end was not reached. `sample` has the rows with a prompt,
    in order, and `bad` those of each type of error. `image_tokens` of the tokens of the prompts
    stand for images.
    """

    num_rows: int | None
    looked_at: int = 0
    sample: list[ReadRow] = field(default_factory=list)
    bad: dict[str, RowTally] = field(default_factory=dict)
    image_tokens: int = 0

    @cached_property
    def lengths(self) -> npt.NDArray[np.int64]:
        """The tokens [R] of the prompts, and of the answers that are scored behind them."""
        requests = [read.request for read in self.sample]
        scored = [0 if each.answer is None else len(each.answer) for each in requests]
        return np.array([len(each.prompt) for each in requests], np.int64) + scored

    @property
    def longest_answer(self) -> int:
        """The mean of the most tokens that an answer may have, rounded up."""
        longest = [read.request.params.max_new_tokens for read in self.sample]
        return -(-sum(longest) // max(len(longest), 1))

    @property
    def num_bad(self) -> int:
        """The number of rows that will have an error."""
        return sum(bad.count for bad in self.bad.values())

    @property
    def bad_share(self) -> float:
        """Their share of the rows that were looked at."""
        return self.num_bad / max(self.looked_at, 1)

    def note_bad(self, type: str, message: str, rows: Sequence[Row]) -> None:
        """Count rows with an error."""
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
    """Look at a sample of a job's rows, for at most `seconds` of the clock.

    `request` raises RequestError for a row without a prompt, and the token `image_token_id` stands
    for images. Seconds are the processor's: a busy machine takes longer and finds out as much.
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
    """Different indices below `number`: the first, and some that are spread over all, in random
    order; the same in every run."""
    spread = random_words(0, (number,)).argsort()[:SAMPLE].tolist()
    return [*dict.fromkeys([*range(min(SHOWN, number)), *spread])][:SAMPLE]
