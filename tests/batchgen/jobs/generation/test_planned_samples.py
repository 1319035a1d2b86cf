"""How many samples a plan expects of rows with `sampling.until`."""

from __future__ import annotations

import pytest

from batchgen.config.groups.sampling_config import SamplingConfig, UntilConfig
from batchgen.jobs.forecast.range import Range
from batchgen.jobs.forecast.samples_per_row import samples_per_row

WIDTH = SamplingConfig(temperature=1.0, until=UntilConfig(where="mark == 1", width=0.3, most=64))
UNTIL = SamplingConfig(temperature=1.0, until=UntilConfig(where="mark == 1", valid=2, most=8))


def test_as_many_as_are_asked_for() -> None:
    found = samples_per_row(SamplingConfig(temperature=1.0, n=4))
    assert found.number == Range(4, 4, 4) and found.known_by is None


@pytest.mark.parametrize(
    ("complete", "samples", "number", "says"),
    [
        (0, 0, Range(2, 5, 8), "2 to 8 samples of each row, as their number is unknown"),
        (10, 30, Range(3, 3, 3), "3.0 samples of each row, the mean of the 10 that are complete"),
        (10, 90, Range(8, 8, 8), "8.0 samples of each row, the mean of the 10 that are complete"),
    ],
)
def test_what_was_measured_or_anything_possible(
    complete: int, samples: int, number: Range, says: str
) -> None:
    assert samples_per_row(UNTIL, complete, samples) == (number, says)
    assert samples_per_row(WIDTH).number == Range(9, 36.5, 64)
