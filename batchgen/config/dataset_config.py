"""The configuration group `dataset`: where the rows come from and how they are read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from batchgen.util.errors import ConfigError

STDIN = "-"
"""The `dataset.path` of rows that come from standard input."""
COLUMN_TYPES = ("string", "int64", "float64", "bool", "date32", "timestamp[s]")
"""What `dataset.types` may call the cells of a column, in the words of Arrow."""


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetConfig:
    """Where the rows come from, which of them are used, and which of their columns are copied. The
    kind `demo` is the rows that come with batchgen; it is the only one without a path."""

    kind: Literal["demo", "files", "hub"]
    path: str | None = None
    name: str | None = None
    split: str | None = None
    revision: str | None = None
    streaming: bool = False
    limit: int | None = None
    id_column: str | None = None
    columns: tuple[str, ...] | None = None
    types: Mapping[str, str] | None = None
    delimiter: str | None = None
    encoding: str | None = None

    def __post_init__(self) -> None:
        if self.kind == "demo":
            allowed = "null for the demo rows (files are dataset=files)"
            _check(self.path is None, "path", allowed, self.path)
        else:
            _check(bool(self.path), "path", "a file, folder, glob or hub name", self.path)
        _check(self.split != "", "split", "null or the name of a split", self.split)
        if self.limit is not None:
            _check(self.limit >= 1, "limit", "null (all rows) or at least 1", self.limit)
        if self.columns is not None and len(set(self.columns)) != len(self.columns):
            raise ConfigError(f"dataset.columns names a column twice: {list(self.columns)}")
        for key, value, kinds in (
            ("name", self.name, ("hub", "files")),
            ("revision", self.revision, ("hub",)),
        ):
            if value is not None and self.kind not in kinds:
                raise ConfigError(
                    f"dataset.{key} must be null for {self.kind}, got {value!r}: drop it, or use "
                    "dataset=hub"
                )
        self._check_reading()

    def _check_reading(self) -> None:
        """Check the keys that say how text files are read."""
        for key, value in self.reading.items():
            if self.kind != "files":
                raise ConfigError(
                    f"dataset.{key} must be null for {self.kind}, got {value!r}: it is for text "
                    "files (dataset=files)"
                )
        for name, kind in (self.types or {}).items():
            known = f"one of {', '.join(COLUMN_TYPES)}"
            _check(kind in COLUMN_TYPES, f"types.{name}", known, kind)
        if self.delimiter is not None:
            if self.delimiter == r"\t":
                object.__setattr__(self, "delimiter", "\t")
            fits = len(self.delimiter) == 1 and self.delimiter not in '"\r\n'
            _check(fits, "delimiter", "one character, such as ';' or '\\t'", self.delimiter)
        if self.encoding is not None:
            try:
                "".encode(self.encoding)
            except LookupError:
                raise ConfigError(
                    f"dataset.encoding: {self.encoding!r} is no encoding that Python knows: give "
                    "one such as utf-8, latin-1, cp1252, utf-16, gb18030 or shift_jis"
                ) from None

    @property
    def reading(self) -> dict[str, Any]:
        """The keys that say how text files are read, as far as they are set."""
        keys = {"types": self.types, "delimiter": self.delimiter, "encoding": self.encoding}
        return {key: value for key, value in keys.items() if value is not None}


def _check(ok: bool, key: str, allowed: str, value: object) -> None:
    if not ok:
        raise ConfigError(f"dataset.{key} must be {allowed}, got {value!r}")
