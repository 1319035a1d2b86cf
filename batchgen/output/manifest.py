"""The manifest: what decided the content of an output folder, and how another job differs."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

from batchgen.errors import ConfigError, JobError
from batchgen.output.journal import fsync_path

FORMAT_VERSION = 1
_PACKAGES = ("torch", "transformers", "datasets", "pyarrow")


@dataclass(frozen=True)
class Manifest:
    """Two jobs with equal identity and fingerprints write equal shards.

    Attributes:
        identity: the part of the configuration that decides the content, nested by group.
        fingerprints: of what the configuration only points to: dataset, model, tokenizer.
        versions: of the packages that the job was started with; for the reader, not compared.
    """

    identity: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    versions: Mapping[str, str]
    format_version: int = FORMAT_VERSION

    @classmethod
    def build(cls, identity: Mapping[str, Any], fingerprints: Mapping[str, str]) -> Self:
        versions = {"python": platform.python_version()}
        versions |= {name: version(name) for name in _PACKAGES}
        # Through JSON once, so that it equals what is read back (tuples become lists).
        return cls(json.loads(json.dumps(identity)), dict(fingerprints), versions)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest.

        Raises:
            ConfigError: the file is not one of this version's manifests.
        """
        try:
            values = json.loads(path.read_text(encoding="utf-8"))
            found = values["format_version"]
            if found == FORMAT_VERSION:
                return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{path} is not a manifest of batchgen ({error}): choose another output.dir"
            ) from None
        raise ConfigError(
            f"{path} has format version {found}, this batchgen writes {FORMAT_VERSION}: choose "
            "another output.dir, or finish the job with the version that started it"
        )

    def write(self, path: Path) -> None:
        write_atomic(path, json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n")

    def differences(self, new: "Manifest") -> list[str]:
        """A line `key: old → new` for everything that would change the content."""
        olds = _flat(self.identity) | _flat(self.fingerprints, "fingerprint.")
        news = _flat(new.identity) | _flat(new.fingerprints, "fingerprint.")
        return [
            f"{key}: {olds.get(key, '(not set)')} → {news.get(key, '(not set)')}"
            for key in dict.fromkeys([*olds, *news])
            if olds.get(key) != news.get(key)
        ]


def write_atomic(path: Path, text: str) -> None:
    """Write a file that is whole whenever it is there.

    Raises:
        JobError: the file cannot be written.
    """
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        temporary.rename(path)
    except OSError as error:
        raise JobError(f"cannot write {path}: {error.strerror or error}") from error
    fsync_path(path.parent)


def _flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Nested mappings as `group.key` → JSON of the value, by which values are compared."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return flat
