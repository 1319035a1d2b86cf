"""What rows.json says: how many rows the steps of a job left, and of what they took out."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Self

from batchgen.storage.stores.manifest import ROWS, Manifest
from batchgen.util.errors import ConfigError

FORMAT_VERSION = 1


class DroppedRow(NamedTuple):
    """A row that a step took out: its id there, the step's place in `rows`, and why."""

    id: str
    step: int
    reason: str


@dataclass
class StepCount:
    """How many rows a step had and what became of them; `examples` are some that it took out."""

    name: str
    rows_in: int = 0
    rows_out: int = 0
    dropped: int = 0
    failed: int = 0
    examples: list[DroppedRow] = field(default_factory=list)

    @property
    def short(self) -> str:
        """The step's name without its place."""
        return self.name.partition(" ")[2]


@dataclass(frozen=True)
class IndexPart:
    """How many rows a part of the index has, and how many were dropped meanwhile."""

    rows: int
    dropped: int


@dataclass(frozen=True)
class IndexFacts:
    """What rows.json says.

    Attributes:
        key: a digest of the steps and of what they read besides the rows.
        dataset: the fingerprint of the data set.
        data_rows: how many of its rows are covered.
        read_rows: how many of them were read; fewer where a step needs no more.
        rows: the rows of the job.
        error_rows: those of them in which a step has failed.
        steps: what became of rows at each step.
    """

    key: str
    dataset: str
    data_rows: int
    read_rows: int
    rows: int
    error_rows: int
    steps: Sequence[StepCount]
    parts: Sequence[IndexPart]
    format_version: int = FORMAT_VERSION

    @property
    def funnel(self) -> str:
        """How many rows are left behind each step, in one line."""
        left = [f"{step.short} {step.rows_out:,}" for step in self.steps]
        return " → ".join([f"{self.read_rows:,} rows of the data set", *left])

    @property
    def nothing_left(self) -> ConfigError:
        """The error for steps that take out all rows, with some that each of them took out."""
        lines = [f"rows: the steps drop every row: {self.funnel}"]
        for step in self.steps:
            if step.examples:
                lines.append(f"  {step.name} dropped {step.dropped:,} of {step.rows_in:,}:")
                lines += [f"    {one.id}: {one.reason}" for one in step.examples]
        return ConfigError("\n".join(lines))

    @classmethod
    def parse(cls, content: bytes | None) -> Self | None:
        """The facts in a file; None if it is not there or was written otherwise."""
        if content is None:
            return None
        try:
            values = json.loads(content)
            if values["format_version"] != FORMAT_VERSION:
                return None
            steps = [
                StepCount(**{**step, "examples": [DroppedRow(*one) for one in step["examples"]]})
                for step in values["steps"]
            ]
            parts = [IndexPart(**part) for part in values["parts"]]
            return cls(**{**values, "steps": steps, "parts": parts})
        except (ValueError, TypeError, KeyError):
            return None

    def text(self) -> str:
        """What the file holds."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


def num_questions(manifest: Manifest, facts: IndexFacts | None) -> int | None:
    """The number of rows of a job, after its steps of `rows`; None if it is not known yet."""
    read: int | None = manifest.growing.get(ROWS)
    return read if facts is None else facts.rows
