"""The manifest of an output folder: everything that decides its content, and how another job
differs.

The check of a job's folder compares the manifest in it with that of the job (`refused_folder.py`).
"""

import functools
import json
import platform
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Self

from batchgen.config.groups.class_names import with_short_names
from batchgen.util.errors import ConfigError

FORMAT_VERSION = 2
_PACKAGES = ("torch", "transformers", "datasets", "pyarrow", "xgrammar", "triton")
ROWS = "dataset rows"
"""The key in `Manifest.growing` of the number of rows that the job uses."""
OF_ADAPTER, OF_ADAPTERS = "adapter", "adapters"
"""Keys of `Manifest.fingerprints`: of an adapter, followed by its name if there are several; and of
the list of their names."""
SAMPLES = "sampling.n"
UNTIL_VALID, UNTIL_MOST = "sampling.until.valid", "sampling.until.most"
UNTIL_WIDTH = "sampling.until.width"
READ_JOB = "read job"
"""The beginning of the keys of `Manifest.fingerprints` for other jobs, whose rows are read."""
CONTRACT = "contract "
"""The beginning of the keys of `Manifest.fingerprints` that decide only the bits of rows. Jobs with
engine.deterministic=true on a GPU have them."""
_DATASET = "dataset"
_BLOCK = 1000  # rows of a digest; the same as in row_digest.py, whose import would load datasets
_CONTRACT_KEY = f"fingerprint.{CONTRACT}"
_BOTH_ACCEPTED = "engine.deterministic=false accepts rows of both"


class DifferentJob(ConfigError):
    """A folder holds rows of another job.

    Attributes:
        differences: lines that describe the differences.
    """

    def __init__(self, folder: str, differences: Sequence[str]) -> None:
        super().__init__(
            f"output.dir={folder} holds the output of a different job:\n  "
            + "\n  ".join(differences)
            + "\nuse another output.dir, or output.overwrite=true to delete that output"
        )
        self.differences = differences


RowDigests = Callable[[int], list[str] | None]
"""A function that computes digests of the first N rows of the data set
(`batchgen.inputs.dataset.row_digest`)."""
ChangedRow = Callable[[int, int], str | None]
"""A function that names the first changed row between two row indices; None if it is not known."""


def runs_of_row(manifest: Mapping[str, Any]) -> int:
    """The number of times that each row of a job's data runs: once, or once with each of several
    adapters."""
    if manifest["identity"].get("model", {}).get("lora_grid") is not True:
        return 1
    return len(str(manifest["fingerprints"].get(OF_ADAPTERS, "")).split(", "))


@dataclass(frozen=True)
class Manifest:
    """Everything that decides the content of a job's shards: its identity, its fingerprints, its
    columns.

    Two jobs that agree in these and in `growing` write equal shards. A job of which `growing` has
    increased continues in the same folder.

    Attributes:
        identity: the part of the configuration that decides the content, by group and key.
        fingerprints: digests of files that the configuration points to, such as data set and model.
        columns: output column → its type.
        growing: settings that may change while the job continues, by their keys: the numbers of
            rows and samples, and the paths of data set and model.
        row_digests: digests of the rows that the job uses. By them a data set with another
            fingerprint is recognised if it begins with the same rows. None if they are not known.
        versions: the packages with which the job was started; for people, not compared.
        batch_dependence: why bits of rows computed on a CPU could depend on other rows; None if
            they could not. For people, not compared.
        history: the changes since the job was started, the oldest first. Each entry has `when`,
            `changed` (lines `key: old → new`), `rows` (finished output rows) and `versions`.
        format_version: the version of the file's format.
    """

    identity: Mapping[str, Any]
    fingerprints: Mapping[str, str]
    versions: Mapping[str, str]
    columns: Mapping[str, str] = field(default_factory=dict)
    growing: Mapping[str, Any] = field(default_factory=dict)
    row_digests: Sequence[str] | None = None
    batch_dependence: str | None = None
    history: Sequence[Mapping[str, Any]] = ()
    format_version: int = FORMAT_VERSION

    @classmethod
    def build(
        cls,
        identity: Mapping[str, Any],
        fingerprints: Mapping[str, str],
        columns: Mapping[str, str] | None = None,
        growing: Mapping[str, Any] | None = None,
    ) -> Self:
        """The manifest of a job as it is now, without `row_digests`, for which the whole data set
        must be read."""
        # JSON turns tuples into lists, so that the identity equals one that is read from a file.
        identity = json.loads(json.dumps(identity))
        return cls(identity, dict(fingerprints), _versions(), columns or {}, growing or {})

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read the manifest of a file; see `parse`."""
        return cls.parse(path.read_bytes(), str(path))

    @classmethod
    def parse(cls, content: bytes, name: str) -> Self:
        """Parse the content of a file. `name` names it in messages.

        Raises:
            ConfigError: the file is not a manifest, or has another format version.
        """
        try:
            values = json.loads(content)
            version = values["format_version"]
            if version == FORMAT_VERSION:
                return cls(**values)
        except (ValueError, TypeError, KeyError) as error:
            raise ConfigError(
                f"{name} is not a manifest of batchgen ({error}): choose another output.dir"
            ) from None
        raise ConfigError(
            f"{name} has format version {version}, this batchgen reads and writes "
            f"{FORMAT_VERSION}: use the version that started the job, or for a new job another "
            "output.dir"
        )

    def text(self) -> str:
        """The content of a file with this manifest."""
        return json.dumps(asdict(self), indent=2, ensure_ascii=False) + "\n"

    def differences(
        self, new: "Manifest", digests: RowDigests, changed_row: ChangedRow = lambda *_: None
    ) -> list[str]:
        """A line `key: old → new` for every difference that makes the content differ.

        `digests` computes digests of the new manifest's rows, and is called only if they matter.
        `changed_row` names a row that changed.
        """
        olds, news = self._compared(), new._compared()
        if not any(name.startswith(CONTRACT) for name in new.fingerprints):
            # Without engine.deterministic a job goes on under any contract.
            olds = {key: text for key, text in olds.items() if not key.startswith(_CONTRACT_KEY)}
        lines = [
            _difference(key, olds.get(key, "(not set)"), news.get(key, "(not set)"))
            for key in dict.fromkeys([*olds, *news])
            if olds.get(key) != news.get(key)
        ]
        for key in (SAMPLES, UNTIL_VALID, UNTIL_MOST):
            samples, wanted = self.growing.get(key, 0), new.growing.get(key, 0)
            if key in new.growing and wanted < samples:
                lines.append(
                    f"{key}: {samples} → {wanted} (a job can have more samples later, not fewer: "
                    f"use {key}={samples} or more)"
                )
        width = self.growing.get(UNTIL_WIDTH)
        if width is not None and new.growing.get(UNTIL_WIDTH, width) > width:
            lines.append(
                f"{UNTIL_WIDTH}: {width} → {new.growing[UNTIL_WIDTH]} (a wider interval needs "
                f"fewer samples, and a job can only have more: use {UNTIL_WIDTH}={width} or less)"
            )
        if changed := self._changed_rows(new, digests, changed_row):
            lines.append(changed)
        return lines

    def digests(self, stop: int) -> list[str] | None:
        """Digests of the first `stop` rows, as far as this manifest has them."""
        rows, digests = self.growing.get(ROWS), self.row_digests
        if digests is None or rows is None:
            return None
        return [*digests] if stop >= rows else [*digests[: stop // _BLOCK]]

    def grown(self, new: "Manifest") -> list[str]:
        """A line `key: old → new` for each setting that may change and has changed."""
        olds, news = flat(self.growing), flat(new.growing)
        lines = [
            f"{key}: {olds.get(key, '(not set)')} → {value}"
            for key, value in news.items()
            if olds.get(key) != value
        ]
        if self.contract and not new.contract:
            lines.append("engine.deterministic: true → false")
        if not lines and self.fingerprints != new.fingerprints:
            lines.append("dataset: other files with the same rows")
        return lines

    def other_contract(self, new: "Manifest") -> list[str]:
        """The lines of `differences` about contracts."""
        olds, news = self.contract, new.contract
        return [
            _difference(f"{_CONTRACT_KEY}{name}", *(_text(side.get(name)) for side in (olds, news)))
            for name in dict.fromkeys([*olds, *news])
            if news and olds.get(name) != news.get(name)
        ]

    @property
    def contract(self) -> dict[str, str]:
        """The fingerprints that decide the bits of the rows, by name; empty if the job has no
        contract."""
        return {
            name.removeprefix(CONTRACT): text
            for name, text in self.fingerprints.items()
            if name.startswith(CONTRACT)
        }

    def goes_on(self, new: "Manifest", changed: Sequence[str], rows: int) -> "Manifest":
        """This manifest, updated by the fingerprints, rows and `growing` of a newer one.

        Its history gets an entry with the lines `changed` and the number of output `rows` that were
        finished before.
        """
        when = time.strftime("%Y-%m-%dT%H:%M:%S%z")
        entry = {"when": when, "changed": list(changed), "rows": rows, "versions": new.versions}
        return replace(
            self,
            fingerprints=new.fingerprints,
            growing=new.growing,
            row_digests=new.row_digests,
            history=[*self.history, entry],
        )

    def with_rows(self, other: "Manifest", digests: Sequence[str] | None) -> "Manifest":
        """This manifest with the rows of another one, which have these digests."""
        prints = {**self.fingerprints, _DATASET: other.fingerprints[_DATASET]}
        growing = {**self.growing, ROWS: other.growing.get(ROWS)}
        return replace(self, fingerprints=prints, growing=growing, row_digests=digests)

    def _compared(self) -> dict[str, str]:
        """The values that must be equal in two manifests of the same job, by key."""
        others = {name: text for name, text in self.fingerprints.items() if name != _DATASET}
        columns = {f"column {name}": kind for name, kind in self.columns.items()}
        return flat(with_short_names(self.identity)) | flat(others, "fingerprint.") | columns

    def _changed_rows(
        self, new: "Manifest", digests: RowDigests, changed_row: ChangedRow
    ) -> str | None:
        """Describe how the rows that the job knows have changed in the data set; None if they have
        not."""
        before, after = self.fingerprints.get(_DATASET), new.fingerprints.get(_DATASET)
        if before == after:
            return None
        # The number of rows that the job had before, and that it has now.
        rows, now = self.growing.get(ROWS), new.growing.get(ROWS)
        if self.row_digests is None or rows is None or now is None:
            line = f"fingerprint.{_DATASET}: {before or '(not set)'} → {after or '(not set)'}"
            return line + ("" if rows is None or now is not None else " (streamed)")
        if rows <= now:
            known = self.row_digests
        else:  # the last digest may be of a shorter block, which has no counterpart
            known = self.row_digests[: now // _BLOCK]
        computed = digests(min(rows, now)) or []
        pairs = zip(known, computed, strict=False)
        block = next((i for i, (old, new) in enumerate(pairs) if old != new), None)
        if block is not None:
            first, last = _BLOCK * block, min(_BLOCK * (block + 1), rows) - 1
            where = f"the first row that differs is one of {first:,} to {last:,}"
            if (named := changed_row(first, min(last, now - 1))) is not None:
                where = f"the first finished row that differs is {named}"
        elif now < rows:
            gone, same = rows - now, _BLOCK * (now // _BLOCK)
            where = "1 row is gone" if gone == 1 else f"{gone:,} rows are gone"
            where += f", the first {same:,} are the same" if same else ""
        else:
            return None
        return (
            f"dataset: {rows:,} rows → {now:,} rows; {where} (counted from 0; rows can be added "
            "at the end, earlier rows must stay as they are)"
        )


def _difference(key: str, old: str, new: str) -> str:
    """The line for a difference, in words for the keys that users do not know."""
    line = f"{key}: {old} → {new}"
    if key.startswith(_CONTRACT_KEY):
        name = key.removeprefix(_CONTRACT_KEY)
        return f"contract of the rows' bits, {name}: {old} → {new} ({_BOTH_ACCEPTED})"
    if key.startswith("fingerprint.") and key.endswith("model"):
        name = key.removeprefix("fingerprint.")
        return f"{name}: a different model, or its files have changed ({line})"
    if key.startswith(f"fingerprint.{READ_JOB}"):
        return f"dataset.path: a different job from the one whose rows were read ({line})"
    return line


def _text(value: str | None) -> str:
    return "(not set)" if value is None else json.dumps(value)


@functools.cache
def _versions() -> Mapping[str, str]:
    versions = {name: text for name in _PACKAGES if (text := _version(name)) is not None}
    return {"python": platform.python_version(), **versions}


def _version(package: str) -> str | None:
    """The installed version of a package; None if it is absent (Triton is, except on Linux)."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def flat(values: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """`group.key` → the JSON text of its value, by which values are compared."""
    flattened: dict[str, str] = {}
    for key, value in values.items():
        if isinstance(value, Mapping) and value:
            flattened |= flat(value, f"{prefix}{key}.")
        else:
            flattened[f"{prefix}{key}"] = json.dumps(value, sort_keys=True, ensure_ascii=False)
    return flattened
