"""Collects the facts that pages about a pipeline show: its steps, what each step reads, and its
exports. The entry point is `PipelineFacts.of`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batchgen.pages.report.funnel import StepCounts, funnel
from batchgen.storage.folder.export_record import EXPORTS, ExportRecord
from batchgen.storage.folder.pipeline_record import PipelineRecord, step_folder_name, step_of
from batchgen.storage.folder.step_folders import find_record
from batchgen.util.errors import JobError
from batchgen.util.text.text_table import size_text

_MOST_COUNTED = 2**27
"""The maximum bytes of a file whose lines are counted."""
_JSON_LINES = ".jsonl"


@dataclass(frozen=True)
class ExportedSet:
    """An export of the pipeline.

    Attributes:
        name: the name of its file or folder.
        step: the step whose rows were exported.
        kind: its format; empty for unchanged columns.
        extent: its number of rows or its size, as a text.
    """

    name: str
    step: str
    kind: str
    extent: str


@dataclass(frozen=True)
class PipelineFacts:
    """A pipeline as pages show it.

    Attributes:
        steps: the current steps in topological order.
        parents: for each step, the steps that it reads.
        sets: the exports.
        old: the names of the folders of older versions of steps.
    """

    steps: Sequence[StepCounts]
    parents: Mapping[str, Sequence[str]]
    sets: Sequence[ExportedSet]
    old: Sequence[str]

    @classmethod
    def of(cls, out: Path) -> PipelineFacts | None:
        """Read the pipeline in a folder; None if the folder has no pipeline."""
        record = find_record(str(out))
        if record is None:
            return None
        current = record.current
        steps = funnel(str(out), current)
        parents = {name: _parents(record, name, current) for name in current}
        older = [step_folder_name(s, at) for s, known in record.steps.items() for at in known.older]
        return cls(steps, parents, list(_sets(out)), older)

    @property
    def changes(self) -> list[tuple[str, str, int, str]]:
        """The changes in the number of rows: the step, `made` or `dropped`, the number of rows, and
        the filter or row step."""
        return [
            (step.name, verb, count, what)
            for step in self.steps
            for verb, some in (("made", step.made), ("dropped", step.dropped))
            for what, count in some
        ]


def _parents(record: PipelineRecord, step: str, current: Mapping[str, str]) -> list[str]:
    """Return the steps that the current version of a step reads."""
    known = record.steps[step]
    assert known.current is not None
    return [name for name in known.versions[known.current].parents if name in current]


def _sets(out: Path) -> Iterator[ExportedSet]:
    try:
        exports = ExportRecord.read(out / EXPORTS).exports
    except JobError:  # the pages are about the steps; `batchgen` says so where it writes sets
        return
    for name, one in exports.items():
        path = out / EXPORTS / name
        if "/" in name or name in ("", ".", "..") or path.is_symlink() or not path.exists():
            continue
        kind = one.settings.get("to")
        yield ExportedSet(
            name, step_of(one.of) or "", kind if isinstance(kind, str) else "", _extent(path)
        )


def _extent(path: Path) -> str:
    """Return the number of rows of a file of JSON lines, or the size of another file, as a text."""
    if path.is_dir():
        return "a folder"
    size = path.stat().st_size
    if path.suffix != _JSON_LINES or size > _MOST_COUNTED:
        return size_text(size)
    with path.open("rb") as lines:
        return f"{sum(1 for _ in lines):,} rows"
