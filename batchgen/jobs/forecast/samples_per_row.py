"""How many samples the rows of a job have, as far as that is known before they are drawn."""

from __future__ import annotations

from typing import NamedTuple

from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.jobs.forecast.forecast import Range


class MeasuredSamples(NamedTuple):
    """How many rows of a job have all their samples, how many samples these are, and how many of a
    row had to be valid."""

    rows: int = 0
    samples: int = 0
    valid: int = 1


class SamplesPerRow(NamedTuple):
    """How many samples a row has, and how that is known, if it is not simply so many."""

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
    if measured is None or not measured.rows:
        likely = (until.valid + until.most) / 2
        text = f"{until.valid:,} to {until.most:,} samples of each row, as nothing is known of them"
        return SamplesPerRow(Range(until.valid, likely, until.most), text)
    mean = min(measured.samples / measured.rows * until.valid / measured.valid, until.most)
    text = f"{mean:,.1f} samples of each row, as of the {measured.rows:,} that are complete"
    return SamplesPerRow(Range(mean, mean, mean), text)
