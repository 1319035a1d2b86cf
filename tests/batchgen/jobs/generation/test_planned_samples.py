"""How many samples a plan expects of rows with `sampling.until`."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from batchgen.config.groups.sampling_config import SamplingConfig, UntilConfig
from batchgen.jobs.forecast.forecast import Range
from batchgen.jobs.forecast.samples_per_row import MeasuredSamples, samples_per_row

WIDTH = SamplingConfig(temperature=1.0, until=UntilConfig(where="mark == 1", width=0.3, most=64))
UNTIL = SamplingConfig(temperature=1.0, until=UntilConfig(where="mark == 1", valid=2, most=8))


def test_as_many_as_are_asked_for() -> None:
    found = samples_per_row(SamplingConfig(temperature=1.0, n=4))
    assert found.number == Range(4, 4, 4) and found.known_by is None and found.whole == 4
    assert asdict(found.spread) == {"low": 1.0, "likely": 1.0, "bound": 1.0}


@pytest.mark.parametrize(
    ("measured", "number", "said"),
    [
        (None, Range(2, 5, 8), "2 to 8 samples of each row, as their number is unknown"),
        (MeasuredSamples(), Range(2, 5, 8), "2 to 8 samples of each row"),
        (
            MeasuredSamples(10, 30, 2),
            Range(3, 3, 3),
            "3.0 samples of each row, as in the 10 complete",
        ),
        (MeasuredSamples(10, 30, 1), Range(6, 6, 6), "6.0 samples of each row"),  # valid has grown
        (MeasuredSamples(10, 70, 1), Range(8, 8, 8), "8.0 samples of each row"),
    ],
)
def test_what_was_measured_or_anything_possible(
    measured: MeasuredSamples | None, number: Range, said: str
) -> None:
    found = samples_per_row(UNTIL, measured)
    assert found.number == number
    assert found.known_by is not None and found.known_by.startswith(said)
    assert samples_per_row(WIDTH).number == Range(9, 36.5, 64)
    narrow = samples_per_row(WIDTH, MeasuredSamples(10, 100, None, 0.6))
    assert narrow.number == Range(40, 40, 40)
    spread = found.spread
    assert spread.low * found.whole == number.low and spread.bound * found.whole == number.bound
