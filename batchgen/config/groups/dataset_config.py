"""The configuration group `dataset`: where the rows come from and how they are read. The files
conf/dataset/*.yaml explain the keys."""

from __future__ import annotations

import glob
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any, Literal

from batchgen.config.groups.convert_value import check
from batchgen.util.errors import ConfigError
from batchgen.util.paths import is_url

STDIN = "-"
"""The `dataset.path` of rows from standard input."""
AUTO = "auto"
"""The value of `dataset.quote_char` that reads double quotes as quotes."""
COLUMN_TYPES = ("string", "int64", "float64", "bool", "date32", "timestamp[s]")
"""The types in `dataset.types`, by Arrow's names."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Where the rows come from, which of them are used, and which of their columns are copied.

    The kinds without a path are `demo`, the rows that come with batchgen, and `count`.
    """

    kind: Literal["demo", "files", "hub", "job", "count"]
    path: str | tuple[str, ...] | None = None
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    streaming: bool = False
    limit: int | None = None
    id_column: str | None = None
    columns: tuple[str, ...] | None = None
    types: Mapping[str, str] | None = None
    delimiter: str | None = None
    quote_char: str | None = AUTO
    escape_char: str | None = None
    encoding: str | None = None
    rename: Mapping[str, str] | None = None
    rows: Literal["samples", "rows", "best"] | None = None
    best: str | None = None
    where: str | None = None
    text_as: str | None = None
    errors: Literal["drop", "keep"] | None = None
    follow: bool = False

    def __post_init__(self) -> None:
        if self.kind in ("demo", "count"):
            what = "the demo rows" if self.kind == "demo" else "counted rows"
            allowed = f"null for {what} (files are dataset=files)"
            _check(self.path is None, "path", allowed, self.path)
        elif self.kind == "job":
            allowed = "the folder of a job, a glob of such folders, or a list of them"
            _check(bool(self.path) and all(self.paths), "path", allowed, self.path)
        else:
            allowed = "a file, folder, glob or hub name"
            _check(isinstance(self.path, str) and bool(self.path), "path", allowed, self.path)
        self._check_of_job()
        if self.kind == "count":
            _check(self.limit is not None, "limit", "the number of rows to count", None)
        self._check_names()
        _check(self.split != "", "split", "null or the name of a split", self.split)
        if self.limit is not None:
            _check(self.limit >= 1, "limit", "null (all rows) or at least 1", self.limit)
        if self.columns is not None and len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"dataset.columns names a column twice: {list(self.columns)}")
        for key, value, kinds in (
            ("name", self.name, ("hub", "files")),
            ("revision", self.revision, ("hub",)),
            ("split", self.split, ("hub", "files", "demo")),
            ("streaming", self.streaming or None, ("hub", "files", "demo")),
            ("id_column", self.id_column, ("hub", "files", "demo")),
            ("columns", self.columns, ("hub", "files", "demo", "job")),
        ):
            if value is not None and self.kind not in kinds:
                use = f": drop it, or use dataset={kinds[0]}"
                allowed = "null" if key != "streaming" else "false"
                raise ConfigError(
                    f"dataset.{key} must be {allowed} for {self.kind}, got {value!r}{use}"
                )
        self._check_reading()

    @property
    def paths(self) -> tuple[str, ...]:
        """The one `path`, or all paths of a list."""
        return (self.path,) if isinstance(self.path, str) else self.path or ()

    @property
    def shown(self) -> str:
        """The name of the data set for people: its path, or its kind."""
        return ", ".join(self.paths) or self.kind

    def _check_of_job(self) -> None:
        """Check the keys that only rows of other jobs have, and set their defaults."""
        if self.kind == "job":
            object.__setattr__(self, "rows", self.rows or "samples")
            object.__setattr__(self, "errors", self.errors or "drop")
            is_best, best = self.rows == "best", self.best
            _check(best is None or is_best, "best", f"null with dataset.rows={self.rows}", best)
            _check(bool(best) or not is_best, "best", "a column, with dataset.rows=best", best)
            _check(self.text_as != "", "text_as", "null or a name", self.text_as)
            self._check_follow()
            return
        _check(not self.follow, "follow", f"false for dataset={self.kind}", self.follow)
        for key in ("rows", "best", "where", "text_as", "errors"):
            if (value := getattr(self, key)) is not None:
                raise ConfigError(
                    f"dataset.{key} must be null for dataset={self.kind}, got {value!r}: it is for "
                    "the rows of other jobs (dataset=job)"
                )

    def _check_follow(self) -> None:
        """Check that the job to follow is one job in a folder of this machine."""
        path = self.paths[0]
        if self.follow and (len(self.paths) > 1 or glob.has_magic(path) or is_url(path)):
            raise ConfigError(
                f"dataset.follow=true reads one job in a folder of this machine, got {self.shown}: "
                "wait until what it reads is complete and use dataset.follow=false (in a pipeline: "
                "after: complete)"
            )

    def _check_names(self) -> None:
        """Check the new names of columns."""
        if self.rename is None:
            return
        if self.kind == "count":
            raise ConfigError("dataset.rename must be null for dataset=count: there are no columns")
        new = list(self.rename.values())
        _check(all(new), "rename", "a mapping of columns to other names", dict(self.rename))
        if twice := [name for name in dict.fromkeys(new) if new.count(name) > 1]:
            raise ConfigError(
                f"dataset.rename gives two columns the name {twice[0]!r}: choose different names"
            )

    def _check_reading(self) -> None:
        """Check the keys for reading text files."""
        for key, value in self.reading.items():
            if self.kind != "files":
                allowed = AUTO if key == "quote_char" else "null"
                raise ConfigError(
                    f"dataset.{key} must be {allowed} for {self.kind}, got {value!r}: it is for "
                    "text files (dataset=files)"
                )
        for name, kind in (self.types or {}).items():
            known = f"one of {', '.join(COLUMN_TYPES)}"
            _check(kind in COLUMN_TYPES, f"types.{name}", known, kind)
        if self.delimiter is not None:
            if self.delimiter == r"\t":
                object.__setattr__(self, "delimiter", "\t")
            fits = len(self.delimiter) == 1 and self.delimiter not in '"\r\n'
            _check(fits, "delimiter", "one character, such as ';' or '\\t'", self.delimiter)
        self._check_quotes()
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except LookupError:
                raise ConfigError(
                    f"dataset.encoding: {self.encoding!r} is not an encoding that Python knows: "
                    "give one such as utf-8, latin-1, cp1252, utf-16, gb18030 or shift_jis"
                ) from None

    def _check_quotes(self) -> None:
        """Check the quote and escape characters."""
        quote, escape = self.quote_char, self.escape_char
        taken = {"\r", "\n", " ", self.delimiter or ","}
        if quote not in (None, AUTO):
            allowed = "auto, null (quotes are text) or one character that is not the delimiter"
            _check(len(quote) == 1 and quote not in taken, "quote_char", allowed, quote)
        if escape is not None:
            allowed = "null or one character that is neither the delimiter nor the quote"
            fits = len(escape) == 1 and escape not in taken | {'"' if quote == AUTO else quote}
            _check(fits, "escape_char", allowed, escape)

    @property
    def reading(self) -> dict[str, Any]:
        """The keys for reading text files that are set."""
        names = ("types", "delimiter", "quote_char", "escape_char", "encoding")
        defaults = {f.name: f.default for f in fields(self)}
        keys = {name: getattr(self, name) for name in names}
        return {name: value for name, value in keys.items() if value != defaults[name]}


def is_usual(key: str, value: Any) -> bool:
    """Whether a key has a value that reads files in the same way as its default."""
    return key == "quote_char" and value in (AUTO, '"')


def dataset_name(group: Mapping[str, Any]) -> str:
    """The name of a config.yaml's data set for people: its path, or its kind."""
    path = group.get("path") or group.get("kind") or ""
    return ", ".join(map(str, path)) if isinstance(path, list) else str(path)


def _check(ok: bool, key: str, allowed: str, value: object) -> None:
    check(ok, f"dataset.{key}", allowed, value)
