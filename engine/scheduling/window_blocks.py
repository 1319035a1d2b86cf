"""Hands out the blocks of layers with a sliding window, and takes back those that a window has
passed.

Such a layer reads only the last tokens of a row. So its blocks form a separate pool, and a long row
needs few of them. `BlockManager` calls `WindowBlocks` and keeps the pool of all other layers
itself.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable

import numpy as np
import numpy.typing as npt

from batchgen.engine.rows.sequence import Sequence


class WindowBlocks:
    """The pool of blocks of all layers with a sliding window.

    The entries of a row's `window_table` correspond to those of its `block_table`. Blocks that lie
    wholly before the window of the row's next token go back to the pool, and their entries become
    0. A row gets its blocks chunk by chunk while it is prefilled, so that even a long prompt needs
    blocks for one window and one chunk only.

    A *tail* is the blocks of the window that ends with a prefix. Another row can start after that
    prefix as long as none of its tail's blocks was handed out again. Blocks of tails are handed out
    last, in the order in which they were freed. Block 0 is scratch and never handed out.

    Args:
        window: the most tokens that a query attends to in any of the layers, including its own
            token.
        row_blocks: the most blocks that a decoding row has.
    """

    def __init__(self, num_blocks: int, block_size: int, window: int, row_blocks: int) -> None:
        assert num_blocks > row_blocks >= 1 and window >= 1
        self.num_blocks, self.block_size = num_blocks, block_size
        self.window, self.row_blocks = window, row_blocks
        self._owners = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._tails: dict[bytes, tuple[int, ...]] = {}
        self._tails_of: dict[int, set[bytes]] = {}

    @property
    def num_free(self) -> int:
        """The number of blocks that no row owns, including those of tails."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of the blocks that rows own, from 0 to 1."""
        return 1 - self.num_free / (self.num_blocks - 1)

    @property
    def chunk_capacity(self) -> int:
        """The most tokens of a row that one prefill can read if no other row runs."""
        # The first token's window takes blocks, too, and the chunk may start and end inside a
        # block.
        blocks = self.num_blocks - 1 - -(-(self.window - 1) // self.block_size)
        return max(blocks - 2, 0) * self.block_size

    def will_hold(self, lengths: npt.NDArray[np.int64]) -> bool:
        """Return whether rows that grow to `lengths` [R] tokens fit together."""
        blocks = np.minimum(-(-lengths // self.block_size), self.row_blocks)
        return int(blocks.sum()) < self.num_blocks

    def passed(self, position: int) -> int:
        """Return the number of first blocks of a row that no token at `position` or later attends
        to."""
        return max(position - (self.window - 1), 0) // self.block_size

    def has_tail(self, digest: bytes) -> bool:
        """Return whether a row can start after the prefix with this digest."""
        return digest in self._tails

    def idle(self, digest: bytes) -> int:
        """Return how many blocks in the tail of the prefix with this digest no row owns."""
        return sum(block in self._free for block in self._tails[digest])

    def start(self, seq: Sequence, num_blocks: int, digest: bytes | None) -> None:
        """Give a row that owns no window blocks the tail of a prefix.

        Args:
            num_blocks: the number of blocks of the prefix.
            digest: the digest of the prefix; None if the row starts from no prefix.
        """
        assert not seq.window_table
        tail = () if digest is None else self._tails[digest]
        for block in tail:
            self._free.pop(block, None)
            self._owners[block] += 1
        seq.num_passed_blocks = num_blocks - len(tail)
        seq.window_table = [0] * seq.num_passed_blocks + list(tail)

    def room(self, seq: Sequence) -> int:
        """Return how many tokens the row's blocks could hold if it got all free blocks."""
        return (len(seq.window_table) + self.num_free) * self.block_size

    def reserve(self, seq: Sequence, num_tokens: int) -> None:
        """Extend the row's table until it holds `num_tokens` tokens; at most `room`."""
        for _ in range(-(-num_tokens // self.block_size) - len(seq.window_table)):
            block, _ = self._free.popitem(last=False)
            for digest in tuple(self._tails_of.get(block, ())):
                self.forget(digest)
            self._owners[block] = 1
            seq.window_table.append(block)

    def trim(self, seq: Sequence, num_blocks: int) -> None:
        """Take back the row's blocks after the first `num_blocks`."""
        while len(seq.window_table) > num_blocks:
            self._release(seq.window_table.pop())

    def pass_blocks(self, seq: Sequence, num_blocks: int) -> None:
        """Take back the row's first `num_blocks` blocks, which its window has passed. All forwards
        that read them must have been launched."""
        for i in range(seq.num_passed_blocks, num_blocks):
            self._release(seq.window_table[i])
            seq.window_table[i] = 0
        seq.num_passed_blocks = max(seq.num_passed_blocks, num_blocks)

    def free(self, seq: Sequence) -> None:
        """Take back all blocks of a row."""
        for block in seq.window_table[seq.num_passed_blocks :]:
            self._release(block)
        seq.window_table, seq.num_passed_blocks = [], 0

    def _release(self, block: int) -> None:
        """Remove one owner of a block. A block without owners becomes the next to be handed out, or
        the last if it belongs to a tail."""
        self._owners[block] -= 1
        if not self._owners[block]:
            self._free[block] = None
            self._free.move_to_end(block, last=block in self._tails_of)

    def keep_tail(self, seq: Sequence, num_blocks: int, digest: bytes) -> None:
        """Let other rows start after the row's first `num_blocks` blocks, whose digest is given.
        The row must still own the blocks of the window that ends there. Every forward from the next
        one on finds them written."""
        if digest in self._tails:
            return
        first = self.passed(num_blocks * self.block_size)
        assert seq.num_passed_blocks <= first
        tail = tuple(seq.window_table[first:num_blocks])
        self._tails[digest] = tail
        for block in tail:
            self._tails_of.setdefault(block, set()).add(digest)

    def forget(self, digest: bytes) -> None:
        """Drop the tail with this digest, if there is one, because some of its blocks were handed
        out."""
        for block in self._tails.pop(digest, ()):
            digests = self._tails_of[block]
            digests.remove(digest)
            if not digests:
                del self._tails_of[block]
                if block in self._free:
                    self._free.move_to_end(block, last=False)

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Assert that owner counts, free blocks, tables and tails agree."""
        owned: Counter[int] = Counter()
        for seq in seqs:
            assert not any(seq.window_table[: seq.num_passed_blocks]), "a passed block is kept"
            owned.update(seq.window_table[seq.num_passed_blocks :])
        assert 0 not in owned, "a row owns the scratch block"
        for block in range(1, self.num_blocks):
            assert self._owners[block] == owned[block], f"block {block}: wrong owner count"
            assert (block in self._free) == (owned[block] == 0), f"block {block}: free and owned"
        of_tails = {(block, d) for d, tail in self._tails.items() for block in tail}
        known = {(block, d) for block, digests in self._tails_of.items() for d in digests}
        assert of_tails == known, "unmatched tails"
