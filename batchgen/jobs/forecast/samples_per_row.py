"""Estimates how many samples (answers) the rows of a job will have, before they are drawn. With
`sampling.until`, a row is sampled until enough of its samples are valid; otherwise the number is
`sampling.n`. A plan uses this."""

from __future__ import annotations

from typing import NamedTuple

from batchgen.config.groups.sampling_config import SamplingConfig
from batchgen.jobs.forecast.range import Range
from batchgen.storage.shards.enough import Enough


class SamplesPerRow(NamedTuple):
    """The number of samples of a row; `known_by` says where it comes from if it is not fixed."""

    number: Range
    known_by: str | None = None


def samples_per_row(sampling: SamplingConfig, complete: int = 0, samples: int = 0) -> SamplesPerRow:
    """Estimate the number of samples of a row.

    It is `sampling.n`, or with `sampling.until` the mean over the `complete` rows, which have
    `samples` in all. Without complete rows it is the range of what `until` allows.
    """
    until = sampling.until
    if until is None:
        return SamplesPerRow(Range.exactly(sampling.n))
    if complete:
        mean = min(samples / complete, until.most)
        text = f"{mean:,.1f} samples of each row, the mean of the {complete:,} that are complete"
        return SamplesPerRow(Range.exactly(mean), text)
    fewest = Enough(until.valid, until.most, until.width).fewest
    text = f"{fewest:,} to {until.most:,} samples of each row, as their number is unknown"
    return SamplesPerRow(Range(fewest, (fewest + until.most) / 2, until.most), text)
