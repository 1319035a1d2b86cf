"""Counts how many samples rows needed until enough were valid (`sampling.until`), for a report."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from batchgen.storage.shards.enough import NUM_SAMPLES, NUM_VALID, OUTCOME, OUTCOMES
from batchgen.util.text.text_table import percent_text

COLUMNS = (OUTCOME, NUM_VALID, NUM_SAMPLES)
MOST_EXHAUSTED = 20
"""The maximum number of exhausted rows that are named."""
_MOST_GROUPS = 100
_BOUNDS = (0.0, 0.1, 0.25, 0.5, 0.75, 0.9, 1.0)
"""The bounds of the ranges of shares."""
_ALL = None
"""The key of the group of all rows, which the table calls `all`. A subset may have this name."""
HEADER = ("rows", *("number", *OUTCOMES), "samples", "valid", "pass rate")


@dataclass
class _Group:
    """The counts of some rows: rows by their outcome, and their samples."""

    outcomes: Counter[str] = field(default_factory=Counter)
    samples: int = 0
    valid: int = 0


class PassRates:
    """Counts rows by their outcome, and by the share of their samples that are valid.

    Attributes:
        exhausted: texts about the first rows that ended with too few valid samples.
        rates: the number of rows in each range of shares.
    """

    def __init__(self) -> None:
        self.exhausted: list[str] = []
        self.rates: Counter[str] = Counter()
        self._groups: dict[str | None, _Group] = {}  # by the value of the subset's column

    @property
    def outcomes(self) -> Counter[str]:
        """The number of rows for each outcome."""
        return self._groups[_ALL].outcomes if self._groups else Counter()

    def add(self, table: pa.Table, begins: np.ndarray, subset: str | None) -> None:
        """Count the rows of a table. Rows of shards that are not published have no outcome yet, and
        are skipped.

        Args:
            table: all samples of its rows.
            begins: the position of each row's first sample.
            subset: the column by which rows are grouped.
        """
        rows = table.take(pa.array(begins))
        rows = rows.filter(pc.is_valid(rows[NUM_SAMPLES]))
        outcomes = rows[OUTCOME].to_pylist()
        valid, samples = (np.asarray(rows[name]) for name in (NUM_VALID, NUM_SAMPLES))
        ids = rows["row_id"].to_pylist()
        groups = rows[subset].to_pylist() if subset in rows.column_names else [None] * len(ids)
        for row_id, outcome, num_valid, num_samples, group in zip(
            ids, outcomes, valid.tolist(), samples.tolist(), groups, strict=True
        ):
            for name in (_ALL,) if group is None else (_ALL, str(group)):
                if name in self._groups or len(self._groups) < _MOST_GROUPS:
                    counts = self._groups.setdefault(name, _Group())
                    counts.outcomes[outcome] += 1
                    counts.samples += num_samples
                    counts.valid += num_valid
            if outcome == "exhausted" and len(self.exhausted) < MOST_EXHAUSTED:
                self.exhausted.append(f"{row_id} ({num_valid:,} of {num_samples:,})")
            if outcome != "failed":
                self.rates[_range(num_valid / num_samples)] += 1

    def table(self) -> list[tuple[str, ...]]:
        """Return a line for all rows, and one for each group, with the columns of HEADER."""
        return [
            (
                "all" if name is _ALL else name,
                f"{group.outcomes.total():,}",
                *(f"{group.outcomes[outcome]:,}" for outcome in OUTCOMES),
                f"{group.samples:,}",
                f"{group.valid:,}",
                percent_text(group.valid / max(group.samples, 1)),
            )
            for name, group in self._groups.items()
        ]

    def in_order(self) -> dict[str, int]:
        """Return `rates` in ascending order of the ranges, without those that are empty."""
        names = dict.fromkeys([_range(0.0), *map(_range, _BOUNDS[1:])])
        return {name: self.rates[name] for name in names if self.rates[name]}


def _range(rate: float) -> str:
    """Return the name of the range that contains a share: "none" for 0, "10% to 25%" for 0.2."""
    if rate == 0:
        return "none"
    above = max(bound for bound in _BOUNDS if bound < rate)
    upto = min(bound for bound in _BOUNDS if bound >= rate)
    return f"{above:.0%} to {upto:.0%}"
