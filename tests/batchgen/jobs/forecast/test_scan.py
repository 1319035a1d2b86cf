"""Going through rows, with a clock that moves when a row is tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np
import pytest

from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.dataset.source import Row, Source
from batchgen.inputs.prompts.row_request import RowRequest
from batchgen.jobs.forecast.scan import SAMPLE, SHOWN, Scan, sample_indices, scan_rows


@dataclass
class Rows:
    """Rows whose text is as many letters as `lengths` says; 4 letters are a token, and 10 tokens
    stand around them. Row 13 cannot be filled."""

    lengths: Sequence[int]
    token_s: float = 1e-6
    stream: bool = False
    now: float = 0.0
    tokenised: list[int] = field(default_factory=list)

    @property
    def num_rows(self) -> int | None:
        return None if self.stream else len(self.lengths)

    def rows(self, start: int = 0) -> Iterator[Row]:
        return (self._row(index) for index in range(start, len(self.lengths)))

    def rows_at(self, indices: Sequence[int]) -> Iterator[Row]:
        assert not self.stream
        return (self._row(index) for index in indices)

    def _row(self, index: int) -> Row:
        return Row(index, f"r{index}", {"length": self.lengths[index]})

    def token_ids(self, row: Row) -> list[int]:
        self.now += self.token_s
        self.tokenised.append(row.index)
        if row.index == 13:
            raise RequestError("missing_field", "it is null")
        return list(range(10)) + [7] * (row.fields["length"] // 4)

    def passthrough(self, row: Row) -> None:
        """All columns can be copied."""

    def request(self, row: Row) -> RowRequest:
        return RowRequest(self.token_ids(row), RequestParams(max_new_tokens=1 + row.index))

    def scan(self) -> Scan:
        source: Source = self  # type: ignore[assignment]
        return scan_rows(source, self.request, image_token_id=7, clock=lambda: self.now)


def lengths_of(number: int) -> list[int]:
    lengths: list[int] = np.random.default_rng(1).integers(100, 2000, number).tolist()
    return lengths


def test_few_rows_are_all_tokenised() -> None:
    given = lengths_of(200)
    scan = Rows(given).scan()
    assert (scan.num_rows, scan.looked_at) == (200, 200)
    expected = [10 + n // 4 for index, n in enumerate(given) if index != 13]
    assert scan.lengths.tolist() == expected
    assert scan.bad["missing_field"].rows == [(13, "r13")]
    assert [read.row.index for read in scan.sample] == [i for i in range(200) if i != 13]
    assert scan.image_tokens == sum(expected) - 9 * 199
    assert scan.longest_answer == 101  # the mean of 1 to 200 without 14


def test_huge_data_is_looked_at_in_a_sample() -> None:
    rows = Rows(lengths_of(100_000))
    scan = rows.scan()
    assert (scan.num_rows, scan.looked_at) == (100_000, SAMPLE)
    assert len(scan.lengths) == SAMPLE - scan.num_bad
    assert [read.row.index for read in scan.sample[:SHOWN]] == [0, 1, 2]
    assert max(rows.tokenised) > 90_000  # the sample is spread over all


def test_long_prompts_are_looked_at_for_some_seconds() -> None:
    rows = Rows(lengths_of(100_000), token_s=0.01)
    assert rows.scan().looked_at == pytest.approx(500, abs=2)
    assert max(rows.tokenised) > 90_000


def test_of_a_stream_the_beginning_is_read() -> None:
    short = Rows(lengths_of(300), stream=True).scan()
    assert (short.num_rows, short.looked_at) == (300, 300)
    assert Rows([], stream=True).scan().num_rows == 0
    long = Rows(lengths_of(SAMPLE + 10), stream=True).scan()
    assert (long.num_rows, long.looked_at) == (None, SAMPLE)


def test_a_sample_is_the_same_in_every_run_and_has_no_row_twice() -> None:
    chosen = sample_indices(10_000)
    assert chosen == sample_indices(10_000)
    assert len(set(chosen)) == SAMPLE and max(chosen) < 10_000
    assert sorted(sample_indices(7)) == list(range(7))
