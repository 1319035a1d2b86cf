"""The manifest of an output folder: what decides its content, and how another job differs."""

import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from batchgen.errors import ConfigError, JobError
from batchgen.output.journal import fsync_path

FORMAT_VERSION = 1
_PACKAGES = ("torch", "transformers", "datasets", "pyarrow", "xgrammar", "triton")


@dataclass(frozen=True)
class Manifest:
    """What decides the content of a job's shards: its identity and its fingerprints.

    Two jobs that agree in both write equal shards.

    Attributes:
        identity: the part of the configuration that decides the content, by group and key.
        fingerprints: of what the configuration only points to, such as the data set and the model.
        versions: of the packages with which the job was started; for people, they are not compared.
        huge_files: how fingerprints were taken of files over 256 MiB. Manifests that do not say it
            are from versions of batchgen that read only samples of such files.
        batch_dependence: why on the machine that computed rows their bits could depend on other
            rows, although the device is a CPU; None if they could not. For people, not compared.
    """

    identity: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    versions: Mapping[str, str]
    huge_files: str = "sampled"
    batch_dependence: str | None = None
    format_version: int = FORMAT_VERSION

    @classmethod
    def build(cls, identity: Mapping[str, Any], fingerprints: Mapping[str, str]) -> Self:
        versions = {"python": platform.python_version()}
        versions |= {name: found for name in _PACKAGES if (found := _version(name)) is not None}
        # JSON makes lists of tuples: only then does it equal what is read from a file.
        identity = json.loads(json.dumps(identity))
        return cls(identity, dict(fingerprints), versions, huge_files="read whole")

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a manifest.

        Raises:
            ConfigError: the file is no manifest, or one of another format version.
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
        """A line `key: old → new` for everything that would make the content another one."""
        olds = _flat(self.identity) | _flat(self.fingerprints, "fingerprint.")
        news = _flat(new.identity) | _flat(new.fingerprints, "fingerprint.")
        lines = [
            f"{key}: {olds.get(key, '(not set)')} → {news.get(key, '(not set)')}"
            for key in dict.fromkeys([*olds, *news])
            if olds.get(key) != news.get(key)
        ]
        if self.fingerprints != new.fingerprints and self.huge_files != new.huge_files:
            lines.append(
                f"files over 256 MiB: {self.huge_files} → {new.huge_files} (their fingerprints "
                "differ for that alone: finish such a job with the version that started it)"
            )
        return lines


def _version(package: str) -> str | None:
    """The installed version of a package; None if it is absent (Triton is, except on Linux)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def write_atomic(path: Path, text: str) -> None:
    """Write a file so that it is either whole or not there, whenever the program is killed.

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
    """From `group.key` to the JSON text of its value. Values are compared by that text."""
    flat: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[f"{prefix}{key}"] = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return flat
