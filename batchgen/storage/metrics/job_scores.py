"""The scores of a job: one of all rows, or one for each adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class JobScores:
    """The scores that follow from the marks of a job's rows.

    Attributes:
        score: the score of all rows, see `batchgen.evals.scores.scores.compute_scores`; None
            without marks, and for rows that run with several adapters, because one score would mix
            these.
        adapters: the score of the rows of each adapter, by its name; empty for other jobs.
    """

    score: Mapping[str, Any] | None = None
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
