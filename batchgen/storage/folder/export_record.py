"""The file export/exports.json of a pipeline: what each export was made from, and its digest.

An export is a file or folder that `batchgen export` writes for training, from rows of the pipeline.
By this record the pipeline knows which files it has written, and it replaces only those. The digest
is recorded before the file gets its name. So after a kill the file under that name is either the
new one or the one before, and the record has the digests of both.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from batchgen.storage.folder.pipeline_record import step_of
from batchgen.storage.stores.whole_file import write_atomic
from batchgen.util.errors import ConfigError, JobError

EXPORTS, RECORD_FILE = "export", "exports.json"
"""The folder of a pipeline's exports, and the name of the record in it."""
FORMAT_VERSION = 2
_OLDEST = 1
"""The first format, without `format_version`: each name had only the request as its value."""


@dataclass(frozen=True)
class ExportEntry:
    """The record of one export.

    Attributes:
        request: a digest of the rows and the options that it was made from.
        digests: the digests of the file or folder, and of the one that it replaces. Empty in a
            record of format 1, by which every file of a recorded name was written by the pipeline.
        of: the name of the folder of the step whose rows it has.
        settings: its options, as in the pipeline file.
    """

    request: str
    digests: tuple[str, ...] = ()
    of: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def was_written(self, digest: str) -> bool:
        """Whether the pipeline has written a file with this digest."""
        return digest in self.digests or not self.digests


@dataclass(frozen=True)
class ExportRecord:
    """The content of exports.json.

    Attributes:
        folder: the folder of the file.
        exports: the exports by their names.
    """

    folder: Path
    exports: dict[str, ExportEntry]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the record in a folder; empty if there is none.

        Raises:
            JobError: the record is damaged or of another version.
        """
        path = folder / RECORD_FILE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values.pop("format_version", _OLDEST)
            if version == _OLDEST:
                return cls(folder, {str(k): ExportEntry(str(v)) for k, v in values.items()})
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version}")
            return cls(folder, {name: _export(value) for name, value in values["exports"].items()})
        except FileNotFoundError:
            return cls(folder, {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise JobError(
                f"{path} is not a record of batchgen ({type(error).__name__}: {error}): move the "
                "folder away, and run the pipeline again, which writes the exports again"
            ) from None

    def current_digest(self, name: str) -> str | None:
        """The present digest of an export; None if it is missing or is an empty file, and so may be
        written.

        Raises:
            ConfigError: there is something else of this name that the pipeline has not written.
        """
        path, known = self.folder / name, self.exports.get(name)
        if path.is_symlink():
            raise ConfigError(f"export: {path} is a link, and exports are never links: remove it")
        if path.is_file() and not path.stat().st_size:
            return None
        digest = content_digest(path)
        if digest is not None and (known is None or not known.was_written(digest)):
            raise ConfigError(
                f"export: {path} exists already and was not written by this pipeline: move it "
                "away, or give the export another `out`"
            )
        return digest

    def write(self, name: str, export: ExportEntry) -> None:
        """Record an export under its name."""
        self.exports[name] = export
        exports = {name: asdict(export) for name, export in self.exports.items()}
        values = {"format_version": FORMAT_VERSION, "exports": exports}
        text = json.dumps(values, indent=2, ensure_ascii=False) + "\n"
        write_atomic(self.folder / RECORD_FILE, text)


def _export(values: Mapping[str, Any]) -> ExportEntry:
    """The record of one export from its JSON.

    Raises:
        TypeError: a value is of a wrong type.
    """
    export = ExportEntry(**values)
    texts = [export.request, export.of, *export.digests]
    if not export.digests or not all(isinstance(text, str) for text in texts):
        raise TypeError("a digest is not a text")
    if not isinstance(export.settings, dict) or step_of(export.of) is None:
        raise TypeError(f"{export.of!r} is not a step's folder, or it has no settings")
    return ExportEntry(export.request, tuple(export.digests), export.of, export.settings)


def content_digest(path: Path) -> str | None:
    """A digest of a file, or of all files of a folder and their names; None if nothing is there."""
    if not path.exists():
        return None
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(file for file in path.rglob("*") if file.is_file())
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        with file.open("rb") as content:
            file_digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
        digest.update(name.encode() + b"\0" + file_digest.digest())
    return digest.hexdigest()
