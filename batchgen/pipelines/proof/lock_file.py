"""Lock files: how a data set was made and the digests of the result, in a few kB.

A lock file is a pipeline file. Its `steps` have all keys that decide their rows, and `proof` has,
for each step, digests of its inputs and of its rows. `batchgen lock` writes it and `batchgen
rebuild` makes the rows again. Nothing in a lock file runs, and the paths in it are not trusted
until the user confirms them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from batchgen.config.compose.job_file import read_job_file
from batchgen.config.groups.convert_value import plain_value
from batchgen.util.errors import ConfigError
from batchgen.util.text.plain_yaml import yaml_text

LOCK, PROOF, STEPS, VERSIONS = "batchgen_lock", "proof", "steps", "versions"
FORMAT_VERSION = 1
MOST_BYTES = 2**20
"""Larger files are no lock files."""


@dataclass(frozen=True)
class StepProof:
    """Digests of one step, as hex digits.

    Attributes:
        fingerprints: the fingerprints in the manifest: models, dtype, constraint, row steps and the
            files that row steps read.
        dataset: the last digest of the rows that were read; None if it cannot be known.
        dataset_rows: the number of rows that were read; None for a stream.
        columns: a digest of the names and types of the output columns.
        rows: the number of output rows.
        shards: the number of shards.
        root: the Merkle root over all rows.
        shard_roots: the Merkle root of each shard; empty if there are many.
        files: digests of the bytes of each shard; empty if there are many.
        grades: the Merkle root over the grades; None without any.
    """

    fingerprints: Mapping[str, str]
    columns: str
    rows: int
    shards: int
    root: str
    dataset: str | None = None
    dataset_rows: int | None = None
    shard_roots: Sequence[str] = ()
    files: Sequence[str] = ()
    grades: str | None = None


@dataclass(frozen=True)
class LockFile:
    """The content of a lock file.

    Attributes:
        steps: the values of each step in the form of a pipeline file, in topological order; `${` is
            escaped.
        proof: step name → the digests of the step.
        versions: package → the version with which the rows were made.
        locations: key → its line in the file, for messages.
    """

    steps: Mapping[str, Mapping[str, Any]]
    proof: Mapping[str, StepProof]
    versions: Mapping[str, str]
    locations: Mapping[str, str] = field(default_factory=dict)

    def text(self) -> str:
        """The text of the file."""
        proof = {
            name: {
                key: value for key, value in asdict(step_proof).items() if value not in (None, ())
            }
            for name, step_proof in self.proof.items()
        }
        values = {LOCK: FORMAT_VERSION, VERSIONS: dict(self.versions)}
        values |= {STEPS: plain_value(self.steps), PROOF: plain_value(proof)}
        return yaml_text(values, width=200)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Read a lock file.

        Raises:
            ConfigError: the file is not a lock file, or has another format version.
        """
        if path.is_file() and path.stat().st_size > MOST_BYTES:
            raise ConfigError(f"{path} is not a lock file: it has more than {MOST_BYTES >> 20} MiB")
        values, locations = read_job_file(path)
        try:
            if values[LOCK] != FORMAT_VERSION:
                raise ConfigError(
                    f"{path} has format version {values[LOCK]!r}, and this batchgen reads "
                    f"{FORMAT_VERSION}"
                )
            proof = {name: _proof(one) for name, one in values[PROOF].items()}
            versions = {str(k): str(v) for k, v in values[VERSIONS].items()}
            steps = values[STEPS]
            if not isinstance(steps, dict) or not steps or steps.keys() != proof.keys():
                raise ValueError("steps and proof name different steps")
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            if isinstance(error, ConfigError):
                raise
            raise ConfigError(
                f"{path} is not a lock file of batchgen ({type(error).__name__}: {error}): "
                "`batchgen lock OUT` writes one"
            ) from None
        return cls(steps, proof, versions, locations)


def _proof(values: Mapping[str, Any]) -> StepProof:
    """The proof of a step, with its types checked."""
    proof = StepProof(**values)
    texts = [
        proof.columns,
        proof.root,
        *proof.shard_roots,
        *proof.files,
        *proof.fingerprints.values(),
    ]
    texts += [text for text in (proof.dataset, proof.grades) if text is not None]
    numbers = [proof.rows, proof.shards, proof.dataset_rows or 0]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError("a digest is not a text")
    if not all(type(number) is int and number >= 0 for number in numbers):
        raise TypeError("a number of rows is not a number")
    if proof.shard_roots and not len(proof.shard_roots) == len(proof.files) == proof.shards:
        raise ValueError("the number of digests differs from that of shards")
    return proof
