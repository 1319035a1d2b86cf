"""A tree of digests over the rows of a folder, by which one row can be proven.

A leaf is a digest of one row: of the names, types and values of its columns, to the bit. A node is
a digest of two nodes or leaves; of an odd number the last one goes up as it is. The root of a shard
stands over its rows, and the root of a folder over those of its shards. So whoever knows the root
of a folder can be shown that a row is in it, by about log2(rows) digests.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import pyarrow as pa

from batchgen.dataset.row_digest import array_digest
from batchgen.shards.checked_file import CheckedFile

Digest = bytes
SIZE = 32
"""Bytes of a digest, so that nobody finds two rows with one."""
_LEAF, _NODE, _NONE = b"batchgen row", b"batchgen node", b"batchgen none"
_BATCH = 256


class Step(NamedTuple):
    """One step from a leaf to its root: the digest beside it, and whether that stands before it."""

    beside: Digest
    is_before: bool


def leaves(batch: pa.RecordBatch | pa.Table) -> Iterator[Digest]:
    """The leaf of each row."""
    names = [f"{field.name}\0{field.type}\0".encode() for field in batch.schema]
    for row in range(batch.num_rows):
        one = batch.slice(row, 1)
        digest = blake2b(digest_size=SIZE, person=_LEAF)
        for name, column in zip(names, one.columns, strict=True):
            array = pa.concat_arrays(column.chunks) if isinstance(one, pa.Table) else column
            digest.update(len(name).to_bytes(8, "little") + name + array_digest(array, SIZE))
        yield digest.digest()


def shard_leaves(path: Path) -> list[Digest]:
    """The leaves of the rows of a shard, in order; JobError if it is damaged."""
    with CheckedFile(path) as file:
        return [leaf for batch in file.batches(_BATCH) for leaf in leaves(batch)]


def root(digests: Sequence[Digest]) -> Digest:
    """The root over leaves, or over the roots of shards."""
    level = list(digests)
    if not level:
        return blake2b(digest_size=SIZE, person=_NONE).digest()
    while len(level) > 1:
        level = _above(level)
    return level[0]


def way_up(digests: Sequence[Digest], place: int) -> list[Step]:
    """The steps from the digest at a place to the root."""
    level, found = list(digests), list[Step]()
    while len(level) > 1:
        beside = place ^ 1
        if beside < len(level):
            found.append(Step(level[beside], is_before=beside < place))
        level, place = _above(level), place // 2
    return found


def climbed(digest: Digest, way: Sequence[Step]) -> Digest:
    """Where the steps lead from a digest."""
    for step in way:
        digest = _node(step.beside, digest) if step.is_before else _node(digest, step.beside)
    return digest


def _above(level: Sequence[Digest]) -> list[Digest]:
    pairs = [_node(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
    return pairs + list(level[len(level) - len(level) % 2 :])


def _node(left: Digest, right: Digest) -> Digest:
    return blake2b(left + right, digest_size=SIZE, person=_NODE).digest()
