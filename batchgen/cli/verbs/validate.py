"""The verb `batchgen validate OUT`: checks every row of a finished job against its constraint,
without the job's engine.

    batchgen validate OUT

The exit code is 1 if some row violates its constraint although the engine reported it as satisfied,
2 if nothing could be checked, and 0 otherwise. Rows whose text was cut are counted separately, not
as valid.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

from batchgen.cli.verb_table import VerbParser
from batchgen.config.compose.load_config import constraint_config
from batchgen.config.groups.constraint_config import (
    AnyConstraintConfig,
    NoConstraintConfig,
    constraint_column,
    job_value,
)
from batchgen.engine.constraint.json_schema.json_text import parse_json
from batchgen.inputs.constraint.row_constraints import MAX_CACHED, cell_text
from batchgen.inputs.constraint.text_checks import CHECKED_BY, Check, Unchecked, make_check
from batchgen.inputs.constraint.timed_checks import choices_of
from batchgen.inputs.dataset.dataset_columns import column_path, value_at
from batchgen.inputs.dataset.stored_json import stored_feature
from batchgen.storage.folder.open_folder import open_folder, refuse_incomplete
from batchgen.storage.folder.read_job import JobFolderReader
from batchgen.storage.metrics.tally import OUTCOMES, constraint_outcome
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.text.row_json import row_reader
from batchgen.util.text.terminal import guard_terminal

SHOWN = 5
"""How many problems of each kind the report lists."""
_COLUMNS = ("row_id", "sample_index", "finish_reason", "constraint_satisfied")
"""The columns that the check reads, besides the text and the constraint."""
_MEANINGS = {
    "valid": "satisfied, and checked",
    "invalid": "satisfied according to the engine, but INVALID",
    "unchecked": "satisfied according to the engine; cannot be checked",
    **{name: meaning for name, meaning in OUTCOMES.items() if name != "satisfied"},
}
"""Each outcome of a row, and its meaning as the report shows it. The engine's outcome `satisfied`
becomes `valid`, `invalid` or `unchecked`."""


@dataclass
class Report:
    """The result of checking a job.

    Attributes:
        checked_by: the checker of the texts, as the report names it.
        counts: the number of rows of each outcome (the keys of `_MEANINGS`).
        problems: for the outcomes `invalid` and `unchecked`, the first few rows, each as a text
            with row, sample and reason.
    """

    checked_by: str
    counts: Counter[str] = field(default_factory=Counter)
    problems: dict[str, list[str]] = field(default_factory=lambda: {"invalid": [], "unchecked": []})

    @property
    def rows(self) -> int:
        """The number of checked rows."""
        return self.counts.total()

    def add(self, outcome: str, where: str, reason: str | None) -> None:
        """Count a row.

        Args:
            where: the row and sample.
            reason: None unless the outcome is `invalid` or `unchecked`.
        """
        self.counts[outcome] += 1
        if reason is not None and len(self.problems[outcome]) < SHOWN:
            self.problems[outcome].append(f"{where}: {reason}")

    def __str__(self) -> str:
        always = ("valid", "invalid", "cut")
        lines = [f"{'rows':<13} {self.rows:>9,}  checked by {self.checked_by}"]
        for name, meaning in _MEANINGS.items():
            if name in always or self.counts[name]:
                lines.append(f"{name:<13} {self.counts[name]:>9,}  {meaning}")
            lines += [f"    {problem}" for problem in self.problems.get(name, ())]
        return "\n".join(lines)


def validate(folder: str | Path) -> Report:
    """Check all rows of a job, reading only its output folder.

    Raises:
        ConfigError: the folder does not contain a complete job with a constraint, or each row has
            its own constraint and the folder does not contain these.
        JobError: a shard is damaged.
    """
    reader = open_folder(str(folder), "validate")
    config, output = _config(reader)
    text, column = output["text_column"], constraint_column(config)
    has_reasoning = output.get("reasoning_end") is not None
    checks, report = _Checks(config, column, has_reasoning), Report(CHECKED_BY[config.kind])
    for row in _rows(reader, text, column):
        outcome, reason = _outcome(row, row[text], checks)
        report.add(outcome, f"row {row['row_id']}, sample {row['sample_index']}", reason)
    return report


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command, and return its exit code. `arguments` defaults to those of the process."""
    parser = VerbParser(
        "validate",
        "Check every row of a finished job against its constraint.",
    )
    parser.add_argument("out", help="the job's output.dir")
    try:
        report = validate(parser.parse_args(arguments).out)
    except (ConfigError, JobError) as error:
        print(f"batchgen: {error}", file=sys.stderr)
        return 2
    print(report)
    return 1 if report.counts["invalid"] else 0


class _Checks:
    """Provides the check of each row. Rows with the same constraint share one check.

    Args:
        config: the job's constraint.
        column: the data set's column that holds each row's constraint; None if all rows have the
            job's.
        after_reasoning: whether texts begin after the marker `start_after`.
    """

    def __init__(
        self, config: AnyConstraintConfig, column: str | None, after_reasoning: bool
    ) -> None:
        self._config, self._column = config, column
        # Made at the first row, so that a constraint that cannot be checked makes rows unchecked.
        self._of_job = lru_cache(1)(
            lambda: make_check(config, job_value(config), after_reasoning=after_reasoning)
        )
        self._of_cell = lru_cache(MAX_CACHED)(partial(_cell_check, config, after_reasoning))

    def of(self, row: Mapping[str, Any]) -> Check | None:
        """Return the check of a row; None if the row has no constraint.

        Raises:
            Unchecked: its constraint cannot be checked.
        """
        if self._column is None:
            return self._of_job()
        try:
            text = cell_text(self._config.kind, row[self._column])
            return None if text is None else self._of_cell(text)
        except (ValueError, RecursionError) as error:
            raise Unchecked(f"column {self._column!r}: {error}") from None


def _cell_check(config: AnyConstraintConfig, after_reasoning: bool, text: str) -> Check:
    """Make the check of a constraint that a row holds as text."""
    if config.kind == "choice":
        return make_check(config, choices_of(text), after_reasoning=after_reasoning)
    is_json = config.kind in ("json_schema", "structural_tag")
    return make_check(
        config, parse_json(text) if is_json else text, after_reasoning=after_reasoning
    )


def _outcome(row: Mapping[str, Any], text: str, checks: _Checks) -> tuple[str, str | None]:
    """Return the outcome of a row (a key of `_MEANINGS`), and the reason if it is invalid or
    unchecked."""
    outcome = constraint_outcome(row["finish_reason"], row["constraint_satisfied"])
    if outcome == "error":
        return outcome, None
    try:
        check = checks.of(row)
        if check is None:
            return "unconstrained", None
        if outcome == "unconstrained":
            return "invalid", "the constraint was not applied to the row"
        if outcome != "satisfied":
            return outcome, None
        reason = check(text)
    except Unchecked as why:
        return "unchecked", str(why)
    return ("valid", None) if reason is None else ("invalid", reason)


def _config(reader: JobFolderReader) -> tuple[AnyConstraintConfig, dict[str, Any]]:
    """Return the constraint of a complete job, and its configuration group `output`.

    Both are read from the manifest, because users may edit config.yaml. Raises ConfigError if the
    job has no constraint or is incomplete.
    """
    display_name = reader.storage.display_name
    identity = reader.manifest["identity"]
    config = constraint_config(identity.get("constraint", {"kind": "none"}))
    if isinstance(config, NoConstraintConfig):
        rows = "" if "column" not in identity.get("sampling", {}) else " for all rows"
        raise ConfigError(
            f"the job in {display_name} has no constraint{rows}: there is nothing to check"
        )
    refuse_incomplete(reader, display_name)
    return config, identity["output"]


def _rows(reader: JobFolderReader, text: str, column: str | None) -> Iterator[dict[str, Any]]:
    """Yield the rows of all shards, with the columns that the check needs.

    Args:
        text: the name of the column of generated text.
        column: the data set's column with each row's constraint, a dotted name; the yielded rows
            have its value under this name. None if all rows have the job's constraint.
    """
    schema = list(reader.schema or ())
    read = row_reader(schema)
    path: tuple[str, ...] | None = None
    if column is not None:
        features = {field.name: stored_feature(field) for field in schema}
        if (path := column_path(column, features)) is None:
            raise ConfigError(
                f"the rows' constraints are in the dataset column {column!r}, which the job did "
                f"not copy to {reader.storage.display_name}: list it in dataset.columns and run "
                "the job again"
            )
    for row in reader.rows([*_COLUMNS, text, *([] if path is None else [path[0]])]):
        if column is not None and path is not None:
            row |= read({path[0]: row[path[0]]})
            row[column] = value_at(row, path)
        yield row


if __name__ == "__main__":
    guard_terminal()
    sys.exit(main())
