"""The scores of a job: one of all rows, or one for each adapter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class JobScores:
    """The scores that follow from the marks of a job's rows.

    Attributes:
        score: of all rows, see `batchgen.evals.scores.scores.compute_scores`; None without marks,
            and where rows run with several adapters, of which one score would say nothing.
        adapters: the same of the rows of each adapter, by its name; empty for other jobs.
    """

    score: Mapping[str, Any] | None = None
    adapters: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
