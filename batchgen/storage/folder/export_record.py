"""The file export/exports.json: what each export of a pipeline was made of, and its digest.

An export is a file or folder that `batchgen export` writes for training, from rows of the pipeline.
The record tells the pipeline which files are its own, so that it replaces those and no others. The
digest is written before the file gets its name. So after a kill the file under that name is either
the new one or the one before, and both have a digest in the record.
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

EXPORTS, MADE = "export", "exports.json"
"""The folder of a pipeline's exports, and the file in it that says of what each was made."""
FORMAT_VERSION = 2
_OLDEST = 1
"""The first format, without `format_version`: each name had only the request as its value."""


@dataclass(frozen=True)
class MadeExport:
    """The record of one export.

    Attributes:
        request: a digest of the rows and the options that it was made of.
        digests: those of the file or folder itself and of the one that it replaces; empty in a
            record of format 1, in which every file of a recorded name counted as the pipeline's
            own.
        of: the name of the folder of the step whose rows it has.
        settings: its options, as the pipeline file has them.
    """

    request: str
    digests: tuple[str, ...] = ()
    of: str = ""
    settings: Mapping[str, Any] = field(default_factory=dict)

    def is_own(self, digest: str) -> bool:
        """Whether the pipeline has written a file with this digest."""
        return digest in self.digests or not self.digests


@dataclass(frozen=True)
class ExportRecord:
    """The content of exports.json in a folder: the exports by the names of their files."""

    folder: Path
    exports: dict[str, MadeExport]

    @classmethod
    def read(cls, folder: Path) -> Self:
        """The record in a folder, which is empty if there is none. Raises JobError if it is damaged
        or of another version."""
        path = folder / MADE
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            version = values.pop("format_version", _OLDEST)
            if version == _OLDEST:
                return cls(folder, {str(k): MadeExport(str(v)) for k, v in values.items()})
            if version != FORMAT_VERSION:
                raise ValueError(f"format version {version}")
            return cls(folder, {name: _export(one) for name, one in values["exports"].items()})
        except FileNotFoundError:
            return cls(folder, {})
        except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise JobError(
                f"{path} is not a record of batchgen ({type(error).__name__}: {error}): move the "
                "folder away, and run the pipeline again, which writes the exports again"
            ) from None

    def own_digest(self, name: str) -> str | None:
        """The present digest of an export; None if it is missing or an empty file, in whose place
        it may be written. Raises ConfigError if there is anything else of this name that the
        pipeline has not written."""
        path, known = self.folder / name, self.exports.get(name)
        if path.is_symlink():
            raise ConfigError(f"export: {path} is a link, and exports are never links: remove it")
        if path.is_file() and not path.stat().st_size:
            return None
        there = content_digest(path)
        if there is not None and (known is None or not known.is_own(there)):
            raise ConfigError(
                f"export: {path} exists already and was not written by this pipeline: move it "
                "away, or give the export another `out`"
            )
        return there

    def write(self, name: str, one: MadeExport) -> None:
        """Record what an export is made of."""
        self.exports[name] = one
        exports = {name: asdict(one) for name, one in self.exports.items()}
        values = {"format_version": FORMAT_VERSION, "exports": exports}
        write_atomic(self.folder / MADE, json.dumps(values, indent=2, ensure_ascii=False) + "\n")


def _export(values: Mapping[str, Any]) -> MadeExport:
    one = MadeExport(**values)
    texts = [one.request, one.of, *one.digests]
    if not one.digests or not all(isinstance(text, str) for text in texts):
        raise TypeError("a digest is not a text")
    if not isinstance(one.settings, dict) or step_of(one.of) is None:
        raise TypeError(f"{one.of!r} is not a step's folder, or it has no settings")
    return MadeExport(one.request, tuple(one.digests), one.of, one.settings)


def content_digest(path: Path) -> str | None:
    """A digest of a file, or of all files of a folder and their names; None if nothing is there."""
    if not path.exists():
        return None
    digest = hashlib.blake2b(digest_size=16)
    files = [path] if path.is_file() else sorted(one for one in path.rglob("*") if one.is_file())
    for file in files:
        name = "" if file == path else file.relative_to(path).as_posix()
        with file.open("rb") as content:
            file_digest = hashlib.file_digest(content, lambda: hashlib.blake2b(digest_size=16))
        digest.update(name.encode() + b"\0" + file_digest.digest())
    return digest.hexdigest()
