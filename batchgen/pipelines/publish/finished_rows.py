"""Reads the rows of a complete job, with their grades, or the rows of a set.

A *set* is a folder of rows that `select` or `export` wrote from jobs. Exports, `push`, `trace` and
`audit` open rows with `open_rows`, and read them through `FinishedRows`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from batchgen.config.groups.adapter_names import ADAPTER
from batchgen.evals.grades.finished_shards import FinishedShards
from batchgen.evals.grades.visible_columns import VisibleColumns, Wanted
from batchgen.storage.folder.open_folder import open_job_reader, refuse_incomplete
from batchgen.storage.folder.whole_shards import WholeShards, whole_shards
from batchgen.storage.leases.job_files import refuse_links
from batchgen.storage.stores.folder_storage import FolderStorage
from batchgen.storage.stores.job_storage import Storage
from batchgen.storage.stores.manifest import runs_of_row
from batchgen.util.errors import ConfigError, JobError
from batchgen.util.fingerprint import fingerprint_text
from batchgen.util.paths import is_url, user_path
from batchgen.util.text.row_json import row_reader

SET_FILE = "selection.json"
"""The file of a set that says from which jobs its rows came, and how they were chosen."""
SET_FORMAT = 1


@dataclass(frozen=True)
class LocatedRow:
    """A row with its location.

    Attributes:
        shard: the shard of the row.
        position: the index of the row in its shard.
        variables: the values that expressions and templates can use, by name.
    """

    shard: int
    position: int
    variables: Mapping[str, Any]


def set_row_name(row: LocatedRow) -> str:
    """Return the name of a row for messages: its id, if that was read, otherwise its location."""
    variables = row.variables
    name = variables.get("row_id", variables.get("id"))
    return f"row {row.position} of shard {row.shard}" if name is None else f"row {name!r}"


class FinishedRows(FinishedShards):
    """The rows of a complete job or of a set, which no longer change.

    Attributes:
        user_path: the folder as the user typed it.
        text_column: the column of the generated texts.
        columns: the columns of rows and grades, by the names that expressions use.
        manifest: the content of a job's manifest.json; empty for a set.
        metrics: the content of a job's metrics.json; empty for a set.
        facts: the content of a set's SET_FILE; None for a job.
        config: the job's configuration by group. For a set, the configuration of its first job if
            all its jobs have equal prompts, otherwise empty.
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
            raise ConfigError(
                f"the rows of {user_path} have no column {text_column!r} of texts: make the set "
                "again with the text column in --columns"
            )
        grades = self.grade_schema.names if facts is None else ()
        self.columns = VisibleColumns(self.schema.names, grades)

    @property
    def is_set(self) -> bool:
        """Whether the rows are those of a set."""
        return self.facts is not None

    def refuse_set(self, what: str) -> None:
        """Raise ConfigError if the rows are those of a set, which do not record how generation
        ended.

        Args:
            what: the use that needs a job, for the message.
        """
        if self.is_set:
            raise ConfigError(f"{what} is for jobs, and {self.user_path} is a set: give its job")

    def group(self, name: str) -> dict[str, Any]:
        """Return a group of the configuration; empty if there is none."""
        values = self.config.get(name)
        return values if isinstance(values, dict) else {}

    @cached_property
    def is_grid(self) -> bool:
        """Whether rows ran with several adapters (`model.lora_grid`), so that ids occur once for
        each adapter."""
        jobs = [{"manifest": self.manifest}] if self.facts is None else self.facts["jobs"]
        try:
            return any(runs_of_row(job["manifest"]) > 1 for job in jobs if job.get("manifest"))
        except (LookupError, TypeError, AttributeError):  # somebody else's set may have any facts
            return False

    @property
    def grid_column(self) -> str | None:
        """The column with the adapter of each row; None without `is_grid`, or if a set was written
        without this column."""
        return ADAPTER if self.is_grid and ADAPTER in self.schema.names else None

    def full_id(self, row: Mapping[str, Any]) -> str:
        """Return the id of a row, which must have its id and its `grid_column`.

        In rows that ran with several adapters it is ADAPTER/ID; in a set of several jobs
        JOB/ADAPTER/ID.
        """
        row_id = str(row["id" if self.is_set else "row_id"])
        adapter = None if self.grid_column is None else row.get(self.grid_column)
        if adapter is None:
            return row_id
        has_jobs = self.facts is not None and len(self.facts["jobs"]) > 1
        job, slash, bare = row_id.partition("/") if has_jobs else ("", "", row_id)
        return f"{job}{slash}{adapter}/{bare}"

    @property
    def digest(self) -> str:
        """A digest of all shards and grades, from their checksums."""
        if not self.columns.grades:
            return self.fingerprint
        return fingerprint_text(self.fingerprint, self.grades_digest)

    def rows(self, wanted: Wanted) -> Iterator[LocatedRow]:
        """Yield the rows in order, with the wanted columns."""
        names, graded = self.columns.ordered(wanted)
        parse = row_reader(pa.schema([self.schema.field(name) for name in names]))
        for shard in range(len(self.shards)):
            index = 0
            for table, grades in self.tables(shard, names, graded):
                grade_rows = grades.to_pylist() if graded else [{}] * len(table)
                for fields, grade_fields in zip(table.to_pylist(), grade_rows, strict=True):
                    yield LocatedRow(
                        shard, index, self.columns.variables(parse(fields), grade_fields)
                    )
                    index += 1


def is_set(job_path: str) -> bool:
    """Whether a folder was written by `select` or `export`."""
    if is_url(job_path):
        return False
    path = user_path(job_path, "OUT")
    return (path / SET_FILE).is_file() and not (path / "manifest.json").exists()


def open_rows(job_path: str) -> FinishedRows:
    """Open the rows of a complete job or of a set.

    Raises:
        ConfigError: the folder has neither, or the job is not complete. The message says what to
            do.
        JobError: the rows are damaged.
    """
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
        JobError: SET_FILE is missing or malformed.
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
    """Read the SET_FILE of a folder, and check that the folder has all shards that it names.

    Raises:
        ConfigError, JobError: as in `set_facts` and `whole_shards`.
        JobError: the rows differ from those that were written.
    """
    facts = set_facts(path)
    whole = whole_shards(FolderStorage(path), user_path, facts.get("rows"), SET_FILE)
    digest = set_digest(whole)
    if facts.get("digest", digest) != digest:  # a set may have no digest
        raise JobError(
            f"{user_path}: its rows differ from those that were written, as {SET_FILE} lists "
            "them; make the set again in another folder"
        )
    return facts, whole


def set_digest(whole: WholeShards) -> str:
    """Return a digest of all rows of a set and of its columns, computed from the checksums of its
    shards."""
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
    have_one_prompt = configs and all(prompt == prompts[0] for prompt in prompts)
    config = configs[0] if have_one_prompt else {}
    text = facts.get("text_column", "")
    return FinishedRows(user_path, FolderStorage(path), whole, config, text, {}, {}, facts)
