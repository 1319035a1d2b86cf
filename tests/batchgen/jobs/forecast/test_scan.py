"""Going through rows, with a clock that moves when a row is tokenised."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import pytest

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.inputs.dataset.source import Row
from batchgen.inputs.prompts.row_prompts import fit_prompt
from batchgen.jobs.forecast.scan import SAMPLE, STREAM, Reading, Scan, sample_indices, scan_rows

ROOM = 5000


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

    def scan(self, cuts: bool = False) -> Scan:
        too_long = "truncate_left" if cuts else "error"
        choice = Constraint.make("choice", ["a"])
        reading = Reading(
            source=self,  # type: ignore[arg-type]
            check=lambda row: None,
            token_ids=self.token_ids,
            sampling=lambda row: RequestParams(max_new_tokens=1 + row.index),
            fit=lambda ids, _: fit_prompt(ids, ROOM, too_long),  # type: ignore[arg-type]
            constrained=lambda row, params: (
                replace(params, constraint=choice) if row.index < 5 else params
            ),
            room=ROOM,
        )
        return scan_rows(reading, sample_s=1, rows_s=5, clock=lambda: self.now)


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
    assert [tokens for *_, tokens in scan.longest] == sorted(expected, reverse=True)[:10]
    assert {c.kind: found.count for c, found in scan.constraints.items()} == {"choice": 5}
    assert scan.longest_answer == 101  # the mean of 1 to 200 without 14


def test_many_rows_are_tokenised_if_there_is_time() -> None:
    rows = Rows(lengths_of(4000))
    scan = rows.scan()
    assert len(scan.lengths) == 3999 and len(set(rows.tokenised)) == len(rows.tokenised) == 4000
    assert len(scan.sample) in (SAMPLE, SAMPLE - 1)


def test_prompts_that_are_cut_are_no_errors() -> None:
    scan = Rows([100, 4 * ROOM]).scan(cuts=True)
    assert scan.cut == 1 and not scan.bad
    assert scan.lengths.tolist() == [35, ROOM]


def test_huge_data_is_looked_at_in_a_sample() -> None:
    rows = Rows(lengths_of(100_000), token_s=0.002)
    scan = rows.scan()
    assert scan.num_rows == 100_000
    assert scan.looked_at == pytest.approx(500, abs=2)
    assert len(scan.lengths) == scan.looked_at - scan.num_bad
    assert max(rows.tokenised) > 90_000  # the sample is spread over all


def test_of_a_stream_the_beginning_is_read() -> None:
    short = Rows(lengths_of(300), stream=True).scan()
    assert (short.num_rows, short.looked_at) == (300, 300)
    assert Rows([], stream=True).scan().num_rows == 0
    long = Rows(lengths_of(STREAM + 10), stream=True).scan()
    assert (long.num_rows, long.looked_at) == (None, STREAM)


def test_a_sample_is_the_same_in_every_run_and_has_no_row_twice() -> None:
    chosen = sample_indices(10_000)
    assert chosen == sample_indices(10_000)
    assert len(set(chosen)) == SAMPLE and max(chosen) < 10_000
    assert sorted(sample_indices(7)) == list(range(7))
