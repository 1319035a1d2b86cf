"""Going through rows, with a clock that moves when a row is tokenised or sized, or it is read."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import SamplingParams
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import fit_prompt
from batchgen.jobs.forecast.prompt_reading import Reading
from batchgen.jobs.forecast.scan import (
    SAMPLE,
    STREAM,
    Budget,
    Scan,
    estimated,
    sample_indices,
    scan_rows,
)

ROOM = 5000


@dataclass
class Rows:
    """Rows whose text is as many letters as `lengths` says; 4 letters are a token, and 10 tokens
    stand around them. Row 13 cannot be filled."""

    lengths: Sequence[int]
    token_s: float = 1e-6
    size_s: float = 1e-6
    stream: bool = False
    clock_s: float = 0.0
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

    def size(self, row: Row) -> int:
        self.now += self.size_s
        if row.index == 13:
            raise RequestError("missing_field", "it is null")
        return int(row.fields["length"])

    def token_ids(self, row: Row) -> list[int]:
        self.now += self.token_s
        self.tokenised.append(row.index)
        return list(range(10)) + [7] * (row.fields["length"] // 4)

    def _clock(self) -> float:
        self.now += self.clock_s
        return self.now

    def scan(self, budget: Budget | None = None, cuts: bool = False, growth: int = 1) -> Scan:
        too_long = "truncate_left" if cuts else "error"
        choice = Constraint.make("choice", ["a"])
        reading = Reading(
            source=self,  # type: ignore[arg-type]
            check=lambda row: None,
            size=self.size,
            text=lambda row: "x" * (row.fields["length"] + 20),
            token_ids=self.token_ids,
            sampling=lambda row: SamplingParams(max_new_tokens=1 + row.index),
            fit=lambda ids, _: fit_prompt(ids, ROOM, too_long),  # type: ignore[arg-type]
            constrained=lambda row, params: (
                replace(params, constraint=choice) if row.index < 5 else params
            ),
            room=ROOM,
            growth=growth,
        )
        return scan_rows(reading, budget, self._clock)


def lengths_of(number: int) -> list[int]:
    lengths: list[int] = np.random.default_rng(1).integers(100, 2000, number).tolist()
    return lengths


def test_few_rows_are_all_tokenised() -> None:
    given = lengths_of(200)
    scan = Rows(given).scan()
    assert (scan.num_rows, scan.looked_at, scan.tokenised) == (200, 200, 199)
    expected = [10 + n // 4 for index, n in enumerate(given) if index != 13]
    assert scan.lengths.tolist() == expected
    assert scan.bad["missing_field"].rows == [(13, "r13")]
    assert [read.row.index for read in scan.sample] == [i for i in range(200) if i != 13]
    assert [tokens for *_, tokens in scan.longest] == sorted(expected, reverse=True)[:10]
    assert {c.kind: found.count for c, found in scan.constraints.items()} == {"choice": 5}
    assert scan.longest_answer == 101  # the mean of 1 to 200 without 14


def test_many_rows_are_tokenised_if_there_is_time() -> None:
    rows = Rows(lengths_of(4000))
    scan = rows.scan()
    assert scan.tokenised == 3999 and len(set(rows.tokenised)) == len(rows.tokenised) == 3999


def test_without_the_time_the_size_of_the_text_tells_the_tokens() -> None:
    given = lengths_of(4000)
    rows = Rows(given, token_s=0.01)
    scan = rows.scan(Budget(sample=1, rows=5, long_rows=1))
    assert scan.looked_at == 4000 and 100 < scan.tokenised < 300
    expected = np.array([10 + n // 4 for index, n in enumerate(given) if index != 13])
    assert np.abs(scan.lengths - expected).max() <= 1
    assert scan.longest[0][2] == expected.max()
    assert scan.bad["missing_field"].count == 1


def test_rows_that_may_be_too_long_are_tokenised_however_few_they_are() -> None:
    given = lengths_of(4000)
    given[77], given[3000] = 4 * ROOM, 4 * (ROOM - 11)  # one is too long, one just not
    rows = Rows(given, token_s=0.01)
    scan = rows.scan(Budget(sample=1, rows=5, long_rows=5))
    assert scan.bad["prompt_too_long"].rows == [(77, "r77")]
    assert scan.longest[0] == (3000, "r3000", ROOM - 1)
    assert scan.unsure == 0 and scan.looked_at == 4000
    assert len(scan.lengths) == 3998


def test_rows_that_are_not_looked_at_in_time_are_counted() -> None:
    given = [4 * ROOM] * 4000
    scan = Rows(given, token_s=0.01).scan(Budget(sample=1, rows=5, long_rows=1))
    assert scan.unsure > 3500
    assert scan.unsure + scan.num_bad == 4000
    assert not len(scan.lengths) or scan.lengths.max() <= ROOM


def test_a_tokenizer_that_lengthens_texts_makes_more_rows_suspicious() -> None:
    given = [ROOM // 2] * 4000
    budget = Budget(sample=1, rows=5, long_rows=0.1)
    assert Rows(given, token_s=0.01).scan(budget).unsure == 0
    assert Rows(given, token_s=0.01).scan(budget, growth=11).unsure > 3000


def test_prompts_that_are_cut_are_no_errors() -> None:
    scan = Rows([100, 4 * ROOM]).scan(cuts=True)
    assert scan.cut == 1 and not scan.bad
    assert scan.lengths.tolist() == [35, ROOM]


def test_huge_data_is_looked_at_in_a_sample() -> None:
    rows = Rows(lengths_of(100_000), token_s=0.001, size_s=0.001)
    scan = rows.scan(Budget(sample=1, rows=5, long_rows=1))
    assert scan.num_rows == 100_000
    assert scan.looked_at == pytest.approx(500, abs=2)
    assert len(scan.lengths) == scan.tokenised
    assert max(rows.tokenised) > 90_000  # the sample is spread over all


@pytest.mark.thorough
def test_a_clock_that_takes_longer_than_a_row_does_not_end_the_scan() -> None:
    rows = Rows(lengths_of(100_000), token_s=1e-3, clock_s=1e-4)
    scan = rows.scan(Budget(sample=1, rows=5, long_rows=1))
    assert scan.looked_at == 100_000 > scan.tokenised


def test_of_a_stream_the_beginning_is_read() -> None:
    short = Rows(lengths_of(300), stream=True).scan()
    assert (short.num_rows, short.looked_at) == (300, 300)
    long = Rows(lengths_of(STREAM + 10), stream=True).scan()
    assert (long.num_rows, long.looked_at) == (None, STREAM)


def test_a_sample_is_the_same_in_every_run_and_has_no_row_twice() -> None:
    chosen = sample_indices(10_000)
    assert chosen == sample_indices(10_000)
    assert len(set(chosen)) == SAMPLE and max(chosen) < 10_000
    assert sorted(sample_indices(7)) == list(range(7))


def test_a_line_through_the_counted_prompts() -> None:
    sizes, tokens = np.array([0, 100, 200, 400]), np.array([5, 30, -1, 105])
    assert estimated(sizes, tokens).tolist() == [5, 30, 55, 105]
    assert estimated(sizes, np.array([9, -1, -1, 1])).tolist() == [9, 5, 5, 1]  # never falls
    assert estimated(np.array([5, 5]), np.array([7, -1])).tolist() == [7, 7]
