"""Identifies the blocks of the prefix cache by digests of their tokens.

`BlockManager` publishes full blocks under these digests and finds the prefix of a new row by them.
"""

from __future__ import annotations

from array import array
from collections.abc import Container
from hashlib import blake2b
from typing import NamedTuple

from batchgen.engine.rows.sequence import Sequence


class Prefix(NamedTuple):
    """The part of a row's tokens that the prefix cache already holds."""

    blocks: list[int]  # the cached blocks of the prefix
    # The state slot of the snapshot at the end of the prefix; None without a prefix, and for models
    # without recurrent layers.
    snapshot: int | None = None
    # Whether the batch being planned will leave a snapshot after a longer prefix, so that the row
    # should wait for the next batch.
    is_pending: bool = False
    # The number of tokens up to the last published block that matches the row, if no snapshot or
    # window tail exists there; otherwise 0. The row's prefill should leave one there.
    branch_tokens: int = 0
    # The digest of the window tail at the end of the prefix; None without a prefix, and for models
    # without sliding windows.
    tail: bytes | None = None


def block_digests(
    seq: Sequence, num_blocks: int, block_size: int, tokens_ahead: int
) -> list[bytes]:
    """Return the digests of the row's first `num_blocks` full blocks; they are computed once and
    kept in `seq.block_hashes`.

    A digest covers the block's tokens, the `tokens_ahead` tokens after them, the images that the
    tokens stand for or attend to (and which part of each), and the digest of the block before.
    """
    digests = seq.block_hashes
    while len(digests) < num_blocks:
        start = len(digests) * block_size
        parent = digests[-1] if digests else seq.prefix_root
        end = start + block_size + tokens_ahead
        assert end <= seq.num_tokens, "the token ahead is not known yet"
        tokens = array("q", seq.token_ids[start:end]).tobytes()
        images = seq.images_among(start, start + block_size)
        digests.append(blake2b(parent + tokens + images, digest_size=16).digest())
    return digests[:num_blocks]


def has_blocks(
    cached: Container[bytes], seq: Sequence, num_blocks: int, block_size: int, tokens_ahead: int
) -> bool:
    """Return whether the row's first `num_blocks` > 0 blocks are in the prefix cache, whose digests
    are `cached`.

    The last blocks of a prefix leave the cache first. So one block stands for all before it, and
    after a block that is not cached no digest is computed.
    """
    known = seq.block_hashes
    while len(known) < num_blocks:
        if known and known[-1] not in cached:
            return False
        block_digests(seq, len(known) + 1, block_size, tokens_ahead)
    return known[num_blocks - 1] in cached
