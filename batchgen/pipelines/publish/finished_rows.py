"""Reads the rows of a complete job with their grades, or those of a set.

A *set* is a folder of rows that `select` or `export` wrote from jobs. Trainer formats, `push`,
`trace` and `audit` read rows through `FinishedRows`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.evals.grades.finished_shards import FinishedShards
from batchgen.evals.grades.visible_columns import VisibleColumns, Wanted
from batchgen.storage.folder.open_folder import open_job_reader, refuse_incomplete
from batchgen.storage.folder.whole_shards import WholeShards, whole_shards
from batchgen.storage.leases.own_files import refuse_links
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.fingerprint import fingerprint_text
from batchgen.util.paths import is_url, user_path
from batchgen.util.text.row_json import row_reader

SET_FILE = "selection.json"
"""The file of a set that says which jobs its rows came from, and how they were chosen."""
SET_FORMAT = 1


@dataclass(frozen=True)
class LocatedRow:
    """A row with its location; `variables` are the values that expressions and templates see."""

    shard: int
    position: int  # in its shard, from 0
    variables: Mapping[str, Any]


def set_row_name(row: LocatedRow) -> str:
    """The name of a row in messages, by its id if that was read."""
    variables = row.variables
    name = variables.get("row_id", variables.get("id"))
    return f"row {row.position} of shard {row.shard}" if name is None else f"row {name!r}"


class FinishedRows(FinishedShards):
    """Rows that will not change any more.

    Attributes:
        user_path: the folder as the user typed it.
        manifest: the content of a job's manifest.json; empty for a set.
        facts: the content of a set's SET_FILE; None for a job.
        metrics: the content of metrics.json; empty for a set.
        config: the configuration by group; of a set, that of its jobs, if they had equal
            prompts, else empty.
    """

    def __init__(
        self, user_path: str, storage: Storage, whole: WholeShards, config: Mapping[str, Any],
        text_column: str, manifest: Mapping[str, Any], metrics: Mapping[str, Any],
        facts: Mapping[str, Any] | None = None,
    ) -> None:  # fmt: skip
        super().__init__(storage, user_path, whole)
        self.config, self.text_column = config, text_column
        self.manifest, self.metrics, self.facts = manifest, metrics, facts
        if text_column not in self.schema.names:
            raise ConfigError(f"the rows of {user_path} have no column {text_column!r} of texts")
        grades = self.grade_schema.names if facts is None else ()
        self.columns = VisibleColumns(self.schema.names, grades)

    @property
    def is_set(self) -> bool:
        """Whether the rows are those of a set."""
        return self.facts is not None

    def refuse_set(self, what: str) -> None:
        """Raise ConfigError if the rows are those of a set, which do not say how they ended."""
        if self.is_set:
            raise ConfigError(f"{what} is for jobs, and {self.user_path} is a set: give its job")

    def group(self, name: str) -> dict[str, Any]:
        """A group of the configuration; empty if there is none."""
        values = self.config.get(name)
        return values if isinstance(values, dict) else {}

    @property
    def digest(self) -> str:
        """A digest of all shards and grades, from their checksums."""
        if not self.columns.grades:
            return self.fingerprint
        return fingerprint_text(self.fingerprint, self.grades_digest)

    def rows(self, wanted: Wanted) -> Iterator[LocatedRow]:
        """The rows with some columns, in order."""
        names, graded = self.columns.ordered(wanted)
        parse = row_reader(pa.schema([self.schema.field(name) for name in names]))
        for shard in range(len(self.shards)):
            index = 0
            for table, grades in self.tables(shard, names, graded):
                grade_rows = grades.to_pylist() if graded else [{}] * len(table)
                for fields, one in zip(table.to_pylist(), grade_rows, strict=True):
                    yield LocatedRow(shard, index, self.columns.variables(parse(fields), one))
                    index += 1


def is_set(job_path: str) -> bool:
    """Whether a folder is one that `select` or `export` wrote."""
    if is_url(job_path):
        return False
    path = user_path(job_path, "OUT")
    return (path / SET_FILE).is_file() and not (path / "manifest.json").exists()


def open_rows(job_path: str) -> FinishedRows:
    """Open the rows of a complete job or of a set. Raises ConfigError, which says what to do."""
    if is_set(job_path):
        return _open_set(job_path, user_path(job_path, "OUT"))
    reader = open_job_reader(job_path)
    refuse_incomplete(reader, job_path)
    facts = reader.text_column, reader.manifest, reader.metrics
    return FinishedRows(job_path, reader.storage, reader.whole, reader.config, *facts)


def set_facts(path: Path) -> dict[str, Any]:
    """Read the SET_FILE of a folder.

    Raises:
        ConfigError: a file of the folder is a link.
        JobError: SET_FILE is not one of this program.
    """
    refuse_links(path)
    if (path / SET_FILE).is_symlink():
        raise ConfigError(f"{path / SET_FILE} is a link, and the files of a set are never links")
    try:
        facts: dict[str, Any] = json.loads((path / SET_FILE).read_text(encoding="utf-8"))
        texts = [facts["kind"], facts["request"], facts.get("text_column", "")]
        is_known = facts["format"] == SET_FORMAT and all(isinstance(one, str) for one in texts)
        if is_known and all(isinstance(one["path"], str) for one in facts["jobs"]):
            return facts
        why = f"format {facts['format']}"
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        why = f"{type(error).__name__}: {error}"
    raise JobError(f"{path / SET_FILE} cannot be read ({why}): make the set again")


def whole_set(path: Path, user_path: str) -> tuple[dict[str, Any], WholeShards]:
    """Read the SET_FILE of a folder, and check that the shards are those that it names.

    Raises:
        ConfigError, JobError: see `set_facts` and `whole_shards`, or other rows lie there.
    """
    facts = set_facts(path)
    whole = whole_shards(FolderStorage(path), user_path, facts.get("rows"), SET_FILE)
    if facts.get("digest", digest := set_digest(whole)) != digest:
        raise JobError(
            f"{user_path}: its rows differ from those that were written, as {SET_FILE} lists "
            "them; make the set again in another folder"
        )
    return facts, whole


def set_digest(whole: WholeShards) -> str:
    """A digest of all rows of a set and of their columns, from the checksums of its shards."""
    columns = [f"{field.name} {field.type}" for field in whole.schema]
    return fingerprint_text(*columns, *(shard.digest or "" for shard in whole.shards))


def _open_set(user_path: str, path: Path) -> FinishedRows:
    facts, whole = whole_set(path, user_path)
    if facts["kind"] != "rows":
        raise ConfigError(
            f"{user_path} is an export for a trainer ({facts['kind']}): give the job or the set "
            "that it was made from"
        )
    configs = [c if isinstance(c := one.get("config"), dict) else {} for one in facts["jobs"]]
    prompts = [config.get("prompt") for config in configs]
    is_one = configs and all(prompt == prompts[0] for prompt in prompts)
    config = configs[0] if is_one else {}
    text = facts.get("text_column", "")
    return FinishedRows(user_path, FolderStorage(path), whole, config, text, {}, {}, facts)
