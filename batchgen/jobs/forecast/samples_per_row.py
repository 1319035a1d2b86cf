"""Estimates how many samples the rows of a job will have, before they are drawn."""

from __future__ import annotations

from typing import NamedTuple

from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.jobs.forecast.forecast import Range
from batchgen.storage.shards.enough import Enough


class MeasuredSamples(NamedTuple):
    """Counts from a job with `sampling.until`: `rows` rows have all their samples, which are
    `samples` in all; a row needed `valid` valid ones, or an interval at most `width` wide."""

    rows: int = 0
    samples: int = 0
    valid: int | None = 1
    width: float | None = None


class SamplesPerRow(NamedTuple):
    """The number of samples of a row; `known_by` says where it comes from if it is not fixed."""

    number: Range
    known_by: str | None = None

    @property
    def whole(self) -> int:
        """The likely number, as a whole one."""
        return max(round(self.number.likely), 1)

    @property
    def spread(self) -> Range:
        """The numbers over the `whole` one."""
        return self.number.times(1 / self.whole)


def samples_per_row(
    sampling: SamplingConfig, measured: MeasuredSamples | None = None
) -> SamplesPerRow:
    """The samples of a row: `sampling.n`; with `sampling.until` as `measured`, and anything that is
    possible where nothing was."""
    until = sampling.until
    if until is None:
        return SamplesPerRow(Range(sampling.n, sampling.n, sampling.n))
    fewest = Enough(until.valid, until.most, until.width).fewest
    if measured is None or not measured.rows:
        likely = (fewest + until.most) / 2
        text = f"{fewest:,} to {until.most:,} samples of each row, as their number is unknown"
        return SamplesPerRow(Range(fewest, likely, until.most), text)
    # By width a row needs about as many as the square of it says.
    more = (
        (measured.width or until.width) ** 2 / until.width**2
        if until.width is not None
        else (until.valid or 1) / (measured.valid or 1)
    )
    mean = min(measured.samples / measured.rows * more, until.most)
    text = f"{mean:,.1f} samples of each row, as in the {measured.rows:,} complete ones"
    return SamplesPerRow(Range(mean, mean, mean), text)
