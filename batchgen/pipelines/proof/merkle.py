"""A Merkle tree over the rows of a folder: one digest of the rows' values, whatever the bytes of
the files are. `folder_proof` computes it for lock files.

A leaf is a digest of one row: of the names, types and values of its columns, bit by bit. An inner
node is a digest of two nodes. The last node of an odd number moves up unchanged. The root of a
shard is over the leaves of its rows, and the root of a folder is over the roots of its shards.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import blake2b
from pathlib import Path

import pyarrow as pa

from batchgen.inputs.dataset.row_digest import array_digest
from batchgen.storage.shards.checked_file import CheckedFile

Digest = bytes
SIZE = 32
"""The bytes of a digest, enough that nobody can make two rows with equal digests."""
_LEAF, _NODE, _NONE = b"batchgen row", b"batchgen node", b"batchgen none"
_BATCH = 256


def leaves(batch: pa.RecordBatch | pa.Table) -> Iterator[Digest]:
    """Yield the leaf of each row."""
    names = [f"{field.name}\0{field.type}\0".encode() for field in batch.schema]
    for row in range(batch.num_rows):
        row_slice = batch.slice(row, 1)
        digest = blake2b(digest_size=SIZE, person=_LEAF)
        for name, column in zip(names, row_slice.columns, strict=True):
            array = pa.concat_arrays(column.chunks) if isinstance(row_slice, pa.Table) else column
            digest.update(len(name).to_bytes(8, "little") + name + array_digest(array, SIZE))
        yield digest.digest()


def shard_leaves(path: Path) -> list[Digest]:
    """Return the leaves of the rows of a shard, in order. Raises JobError if the shard is
    damaged."""
    with CheckedFile(path) as file:
        return [leaf for batch in file.batches(_BATCH) for leaf in leaves(batch)]


def root(digests: Sequence[Digest]) -> Digest:
    """Return the root over leaves, or over the roots of shards."""
    level = list(digests)
    if not level:
        return blake2b(digest_size=SIZE, person=_NONE).digest()
    while len(level) > 1:
        level = _above(level)
    return level[0]


def _above(level: Sequence[Digest]) -> list[Digest]:
    """Return the next level of the tree."""
    parents = [_node(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
    return parents + list(level[len(level) - len(level) % 2 :])


def _node(left: Digest, right: Digest) -> Digest:
    return blake2b(left + right, digest_size=SIZE, person=_NODE).digest()
