"""The file rows.json of a job's folder: how many rows each row step kept, dropped and failed on."""

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
    """A row that a row step dropped.

    Attributes:
        id: the id that the row had at that step.
        step: the step's index in the key `rows`.
        reason: why it was dropped.
    """

    id: str
    step: int
    reason: str


@dataclass
class StepCount:
    """The number of rows that a step read, kept, dropped and failed on.

    Attributes:
        name: the step's index and name.
        examples: some of the dropped rows.
    """

    name: str
    rows_in: int = 0
    rows_out: int = 0
    dropped: int = 0
    failed: int = 0
    examples: list[DroppedRow] = field(default_factory=list)

    @property
    def short(self) -> str:
        """The step's name without its index."""
        return self.name.partition(" ")[2]


@dataclass(frozen=True)
class IndexPart:
    """A part of the row index: the number of its rows, and of the rows that were dropped while it
    was made."""

    rows: int
    dropped: int


@dataclass(frozen=True)
class IndexFacts:
    """The content of rows.json.

    Attributes:
        key: a digest of the steps and of the files that they read besides the rows.
        dataset: the fingerprint of the data set.
        data_rows: the number of its rows that are covered.
        read_rows: the number of rows that were read; fewer if the steps stop early.
        rows: the number of rows of the job.
        error_rows: the number of these rows in which a step has failed.
        steps: the counts of each step.
        parts: the parts of the row index.
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
        """One line with the number of rows after each step."""
        left = [f"{step.short} {step.rows_out:,}" for step in self.steps]
        return " → ".join([f"{self.read_rows:,} rows of the data set", *left])

    @property
    def nothing_left(self) -> ConfigError:
        """The error for steps that drop all rows, with examples from each step."""
        lines = [f"rows: the steps drop every row: {self.funnel}"]
        for step in self.steps:
            if step.examples:
                lines.append(f"  {step.name} dropped {step.dropped:,} of {step.rows_in:,}:")
                lines += [f"    {row.id}: {row.reason}" for row in step.examples]
        return ConfigError("\n".join(lines))

    @classmethod
    def parse(cls, content: bytes | None) -> Self | None:
        """Parse a file's content; None if there is no file or it has another format."""
        if content is None:
            return None
        try:
            values = json.loads(content)
            if values["format_version"] != FORMAT_VERSION:
                return None
            steps = [
                StepCount(**{**step, "examples": [DroppedRow(*row) for row in step["examples"]]})
                for step in values["steps"]
            ]
            parts = [IndexPart(**part) for part in values["parts"]]
            return cls(**{**values, "steps": steps, "parts": parts})
        except (ValueError, TypeError, KeyError):
            return None

    def text(self) -> str:
        """The text of the file."""
        return json.dumps(dataclasses.asdict(self), indent=2, ensure_ascii=False) + "\n"


def num_questions(manifest: Manifest, facts: IndexFacts | None) -> int | None:
    """The number of rows of a job, after its steps of `rows`; None if it is not known yet."""
    read: int | None = manifest.growing.get(ROWS)
    return read if facts is None else facts.rows
