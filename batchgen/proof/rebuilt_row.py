"""Makes one row of a lock again, and proves that it is in a set."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from batchgen.dataset.source import Source
from batchgen.jobs.job_parts import job_parts
from batchgen.proof.audit.first_difference import first_difference
from batchgen.proof.audit.rows_again import compute_again
from batchgen.proof.lock_file import StepProof
from batchgen.proof.locked_jobs import LockedJobs
from batchgen.proof.merkle import Digest, climbed, leaves, root, shard_leaves, way_up
from batchgen.proof.rebuilt import opened
from batchgen.row_index.indexed_source import IndexedSource
from batchgen.shards.checked_file import CheckedFile
from batchgen.shards.row_order import KEYS
from batchgen.shards.shard_files import read_columns, shard_files
from batchgen.util.errors import ConfigError, JobError

_ID = "row_id"


def rebuild_row(jobs: LockedJobs, name: str, row_id: str, below: Path) -> tuple[Path, pa.Table]:
    """Compute all samples of a row of a step, and before them the rows of other steps that it is
    made of.

    Args:
        below: a folder in which each step gets a folder of its own.

    Returns:
        The folder of the step, whose job has this row alone, and its rows.

    Raises:
        ConfigError: there is no such row, it cannot be made alone, or models or data are not those
            of the lock.
        JobError: it cannot be computed.
    """
    step, proof = jobs.pipeline.steps[name], jobs.lock.proof[name]
    folders = {other: str(below / other) for other in jobs.pipeline.steps}
    folder = below / name
    folder.mkdir(parents=True)
    config = jobs.config(name, folders)
    if not step.reads:
        with opened(config, name, proof) as (config, parts):
            index = _index_of(parts.source, name, row_id)
            return folder, compute_again(config, parts, [index], folder, None)
    if len(step.parents) != 1 or step.tables:
        raise ConfigError(f"step {name} reads several jobs: {_WHOLE}")
    of_samples = config.dataset.rows in (None, "samples")
    of_row, _, sample = row_id.rpartition("#")
    if not of_samples:
        of_row = row_id
    elif not sample.isdecimal() or not of_row:
        raise _no_row(name, row_id)
    rebuild_row(jobs, step.parents[0], of_row, below)
    with closing(job_parts(config)) as parts:
        if isinstance(parts.source, IndexedSource):
            raise ConfigError(
                f"step {name} has steps of rows, which look at the rows before this one: {_WHOLE}"
            )
        index = _index_of(parts.source, name, row_id)
        return folder, compute_again(config, parts, [index], folder, None)


_WHOLE = "a row of it cannot be made alone; leave out --row to make all of them"


def _index_of(source: Source, name: str, row_id: str) -> int:
    """The number of the row with an id."""
    if isinstance(source, IndexedSource):
        source.find_index(None)
    for row in source.rows():
        if row.id == row_id:
            return row.index
    raise _no_row(name, row_id)


def _no_row(name: str, row_id: str) -> ConfigError:
    return ConfigError(f"--row {row_id}: step {name} has no row with this id")


@dataclass(frozen=True)
class ProvenRow:
    """What became of a row beside a set: the sample, its place, and why it is not proven, in words;
    None if it is."""

    sample: int
    shard: int
    place: int
    difference: str | None


def prove(made: pa.Table, proof: StepProof, folder: Path, shown: str) -> list[ProvenRow]:
    """Prove that rows which were made again are in the set of a lock: each is a leaf of the tree
    whose root the lock has, as the set in `folder` shows.

    Raises:
        ConfigError: the folder has no such row, or is not the set of the lock.
        JobError: a file is damaged.
    """
    files = list(shard_files(folder / "data").values()) if (folder / "data").is_dir() else []
    if len(files) != proof.shards:
        raise ConfigError(
            f"{shown} has {len(files):,} shards, and the lock says {proof.shards:,}: it is not the "
            "set of the lock"
        )
    number, places = _find(files, made[_ID][0].as_py(), shown)
    in_shard = shard_leaves(files[number])
    roots = [bytes.fromhex(one) for one in proof.shard_roots]
    roots = roots or [root(shard_leaves(path)) for path in files]
    with CheckedFile(files[number]) as file:
        stored = file.read()
    found = []
    for place in places:
        one = stored.slice(place, 1)
        sample = one[KEYS[1]][0].as_py()
        own = made.filter(pc.equal(made[KEYS[1]], sample))
        difference = _different(own, one, in_shard, place)
        if difference is None and not _leads_up(in_shard, place, roots, number, proof):
            difference = f"it is as in {shown}, which is not the set of the lock: roots differ"
        found.append(ProvenRow(sample, number, place, difference))
    return found


def _find(files: Sequence[Path], row_id: str, shown: str) -> tuple[int, list[int]]:
    """The shard that has a row, and the places of its samples there."""
    for number, path in enumerate(files):
        ids = read_columns(path, [_ID])[_ID]
        if places := pc.indices_nonzero(pc.equal(ids, row_id)).to_pylist():
            return number, places
    raise ConfigError(f"{shown} has no row with the id {row_id}")


def _different(
    own: pa.Table, stored: pa.Table, in_shard: Sequence[Digest], place: int
) -> str | None:
    """How a row that was made again differs from the stored one. Its number among all rows is not
    known where it was made alone, and is taken from there."""
    if not own.num_rows:
        return "there is no such sample here"
    if own.schema.names != stored.schema.names:
        return "it has other columns"
    at = own.schema.get_field_index(KEYS[0])
    own = own.set_column(at, own.schema.field(at), stored[KEYS[0]])
    if (difference := first_difference(own, stored, own.schema.names)) is not None:
        return difference
    (leaf,) = leaves(own)
    if leaf != in_shard[place]:
        raise JobError("two equal rows have different digests")
    return None


def _leads_up(
    in_shard: Sequence[Digest],
    place: int,
    roots: Sequence[Digest],
    number: int,
    proof: StepProof,
) -> bool:
    """Whether the steps from a leaf lead to the root of the lock."""
    of_shard = climbed(in_shard[place], way_up(in_shard, place))
    return climbed(of_shard, way_up(roots, number)).hex() == proof.root
