"""Ownership of KV blocks: reservation, reference counts and the prefix cache."""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Iterable
from hashlib import blake2b

from batchgen.engine.sequence import Sequence


class BlockManager:
    """Hands out the blocks of the paged KV cache.

    A block is free, or owned by one or more sequences. Full blocks of known tokens are published
    under a hash of their tokens and of all tokens before them, so that rows with a common prefix
    share its blocks. A published block that nobody owns stays findable until it is handed out
    again; the least recently freed go first. Block 0 is scratch and never handed out.

    Args:
        num_blocks: of the cache, the scratch block included.
        block_size: tokens per block.
        prefix_caching: publish and share blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, prefix_caching: bool) -> None:
        assert num_blocks >= 2 and block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._owners = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}

    @property
    def capacity(self) -> int:
        """Tokens that fit when nothing is cached."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def usage(self) -> float:
        """Share of the blocks that rows own."""
        return 1 - self.num_free / (self.num_blocks - 1)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, seq: Sequence) -> list[int]:
        """Published blocks that hold the longest cached prefix of the tokens to prefill, less one
        if a forward must yield a token from it.
        """
        found: list[int] = []
        if not self.prefix_caching:
            return found
        tokens = seq.num_prefill_tokens - seq.prefill_yields
        for digest in self._hashes(seq, tokens // self.block_size):
            block = self._published.get(digest)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, seq: Sequence, headroom: int) -> bool:
        """Give a row without blocks all that its known tokens need, sharing cached prefixes.

        Refuses, changing nothing, if fewer than `headroom` blocks would stay free. On success
        `seq.num_computed_tokens` counts the tokens found in the cache.
        """
        assert not seq.block_table and not seq.num_computed_tokens
        cached = self.find_prefix(seq)
        idle = sum(1 for block in cached if block in self._free)
        new = self.blocks_for(seq.num_tokens) - len(cached)
        if self.num_free - idle - new < headroom:
            return False
        for block in cached:
            self._free.pop(block, None)
            self._owners[block] += 1
        seq.block_table.extend(cached)
        seq.num_computed_tokens = seq.num_shared_tokens = len(cached) * self.block_size
        return self.reserve(seq, seq.num_tokens)

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the row's table to hold `num_tokens` tokens; False, changing nothing, if full."""
        new = self.blocks_for(num_tokens) - len(seq.block_table)
        if new > self.num_free:
            return False
        for _ in range(new):
            block, _ = self._free.popitem(last=False)
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._published[digest]
            self._owners[block] = 1
            seq.block_table.append(block)
        return True

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the row's blocks behind those of its first `num_tokens` tokens."""
        while len(seq.block_table) > self.blocks_for(num_tokens):
            block = seq.block_table.pop()
            assert self._owners[block] == 1 and block not in self._hash_of, "a shared lookahead"
            self._release(block)

    def _release(self, block: int) -> None:
        """One owner less; without any it is free, and the last in line to be handed out."""
        self._owners[block] -= 1
        if not self._owners[block]:
            self._free[block] = None

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let others share the row's full blocks among its first `num_tokens` tokens.

        Those tokens are final and their KV is computed, or is written by the very next forward:
        a row that shares a block in that same forward reads it after the write, layer by layer.
        """
        if not self.prefix_caching:
            return
        full = num_tokens // self.block_size
        if full <= seq.num_published_blocks:
            return
        digests = self._hashes(seq, full)
        for i in range(seq.num_published_blocks, full):
            block = seq.block_table[i]
            if digests[i] not in self._published and block not in self._hash_of:
                self._published[digests[i]] = block
                self._hash_of[block] = digests[i]
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Take the row's blocks back, its last blocks first in line to be reused."""
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table.clear()
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0

    def _hashes(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Chained digests of the row's first full blocks, computed once and kept on the row."""
        size = self.block_size
        hashes = seq.block_hashes
        while len(hashes) < num_blocks:
            start = len(hashes) * size
            parent = hashes[-1] if hashes else b""
            tokens = array("q", seq.token_ids[start : start + size]).tobytes()
            hashes.append(blake2b(parent + tokens, digest_size=16).digest())
        return hashes[:num_blocks]

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Assert that the books balance, given every row that owns blocks."""
        owned = Counter(block for seq in seqs for block in seq.block_table)
        assert 0 not in owned, "a row owns the scratch block"
        for block in range(1, self.num_blocks):
            assert self._owners[block] == owned[block], f"block {block}: wrong owner count"
            assert (block in self._free) == (owned[block] == 0), f"block {block}: free and owned"
        assert {b: h for h, b in self._published.items()} == self._hash_of, "unmatched hashes"
