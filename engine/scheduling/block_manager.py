"""Hands out the blocks of the paged cache, and keeps the prefix cache.

The scheduler asks `BlockManager` for the blocks of each row. *Headroom* is the number of blocks
that rows must still be able to get when a row is admitted, so that running rows can grow.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import takewhile
from math import lcm

from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.caches.state_slots import StateSlots
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.block_owners import BlockOwners
from batchgen.engine.scheduling.page_pool import PagePool
from batchgen.engine.scheduling.prefix import Prefix, block_digests, has_blocks
from batchgen.engine.scheduling.window_blocks import WindowBlocks


class BlockManager:
    """Hands out the blocks of the paged cache, and the state slots of models with recurrent layers.

    A block is free, or owned by one or more rows. Blocks that known tokens fill are published under
    a hash of their tokens and of all tokens before them, so that rows with a common prefix share
    its blocks. A published block without owners stays in the prefix cache until its page is handed
    out again. Pages are handed out in the order in which they were freed; with sliding windows,
    those come first that hold nothing for other rows. Block 0 is scratch and never handed out. A
    page may have several blocks: a row fills a page of its own before it takes the next one.

    With recurrent layers, a prefix can be reused only if there is a snapshot of the state at its
    end. A prefill leaves one snapshot at the last possible position of its prompt, and another
    where the prompt departs from an earlier prompt. With sliding windows, it leaves window tails at
    the same positions.

    Args:
        prefix_caching: whether blocks are published and shared.
        states: the state slots; None for models without recurrent layers.
        state_multiple: a snapshot can be taken only after a multiple of this many tokens.
        tokens_ahead: the number of later tokens on which some model's cache entry of a token
            depends. A block is then shared only by rows that agree in these tokens, too.
        prompts_only: share only blocks of prompts, because generated tokens are computed in another
            way.
    """

    def __init__(
        self,
        needs: PageNeeds,
        prefix_caching: bool,
        states: StateSlots | None = None,
        state_multiple: int = 1,
        tokens_ahead: int = 0,
        prompts_only: bool = False,
    ) -> None:
        self.needs, self._layout, self.pool = needs, needs.layout, PagePool(needs.layout)
        self.block_size, self._per_page = needs.block_size, needs.layout.full_blocks
        self.capacity = needs.capacity  # the most tokens of a row that runs alone
        self.prefix_caching = prefix_caching
        self._owners = BlockOwners(self.pool, self._per_page, self._layout.page_of_full)
        self._hashes: dict[int, dict[int, bytes]] = {}  # of published blocks, by page and block
        self._published: dict[bytes, int] = {}
        self.states = states
        self.window = WindowBlocks(needs, self.pool) if needs.window else None
        # With snapshots or tails, rows can start only from prompts: generated tokens leave neither.
        self._needs_ends = states is not None or self.window is not None
        self._within_prompts = self._needs_ends or prompts_only
        self._ahead = tokens_ahead
        # A snapshot can be taken only after a multiple of this many blocks.
        self._snapshot_blocks = lcm(self.block_size, state_multiple) // self.block_size

    @property
    def usage(self) -> float:
        """The share of the pages in which rows own blocks, from 0 to 1."""
        return 1 - self.pool.num_free / self.needs.usable

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks this many tokens of a row take."""
        return -(-num_tokens // self.block_size)

    def room_of(self, seq: Sequence) -> int:
        """Return how many tokens fit into the row's blocks."""
        tables = (seq.block_table,) if self.window is None else (seq.block_table, seq.window_table)
        return min(map(len, tables)) * self.block_size

    def new_pages(self, seq: Sequence, num_tokens: int) -> int:
        """Return how many pages the row lacks before its blocks hold `num_tokens` tokens."""
        new = self.blocks_for(num_tokens) - len(seq.block_table) - self._left(seq)
        pages = max(-(-new // self._per_page), 0)
        return pages if self.window is None else pages + self.window.new_pages(seq, num_tokens)

    def _left(self, seq: Sequence) -> int:
        """Return how many more blocks fit into the page that the row fills."""
        return self._owners.left(seq.block_table[-1] if seq.block_table else 0, seq.full_page)

    def find_prefix(self, seq: Sequence) -> Prefix:
        """Find the longest cached prefix of the tokens that the row has to prefill.

        The prefix ends early enough that a forward still computes all that is needed:

        - the last token, if the prefill must yield a token, and in the case of `tokens_ahead` the
          tokens that the prefix's last entries depend on;
        - the tokens whose logits score an answer.

        With recurrent layers or sliding windows, the prefix also ends within the prompt.
        """
        if not self.prefix_caching:
            return Prefix([])
        digests = self._digests(seq, self._num_sought(seq))
        matched = list(takewhile(lambda b: b is not None, map(self._published.get, digests)))
        blocks = [block for block in matched if block is not None]
        return self._cut_back(blocks, digests) if self._needs_ends else Prefix(blocks)

    def _num_sought(self, seq: Sequence) -> int:
        """Return how many of the row's first blocks may come from the prefix cache."""
        tokens = min(seq.num_shareable_tokens, seq.num_prefill_tokens - self._ahead)
        if self._within_prompts:
            tokens = min(tokens, seq.answer_start)
        return tokens // self.block_size

    def is_mostly_cached(self, seq: Sequence) -> bool:
        """Return whether the prefix cache holds at least half of the row's known tokens."""
        half = self.blocks_for(seq.num_tokens) // 2
        sizes = self.block_size, self._ahead
        return 0 < half <= self._num_sought(seq) and has_blocks(self._published, seq, half, *sizes)

    def _cut_back(self, blocks: list[int], digests: list[bytes]) -> Prefix:
        """Shorten a prefix of published blocks to the longest one that has what recurrent layers
        and sliding windows need at its end: a snapshot, and a window tail."""
        step = self._snapshot_blocks
        longest = len(blocks) // step * step
        for count in range(longest, 0, -step):
            digest, slot = digests[count - 1], None
            if self.window is not None and not self.window.has_tail(digest):
                continue
            if self.states is not None:
                if self.states.is_pending(digest):
                    return Prefix([], is_pending=True)
                slot = self.states.find(digest)
                if slot is None:
                    continue
            branch = longest if count < longest else 0
            tail = None if self.window is None else digest
            return Prefix(blocks[:count], slot, branch_tokens=branch * self.block_size, tail=tail)
        return Prefix([], branch_tokens=longest * self.block_size)

    def admit(self, seq: Sequence, headroom: int, most_tokens: int = 0) -> bool:
        """Give a row that owns no blocks the blocks for its known tokens, sharing those of a cached
        prefix.

        On success the row also has a state slot if the model has states, and
        `seq.num_computed_tokens` is the length of the cached prefix. Blocks of layers with a
        sliding window are reserved later, chunk by chunk.

        Args:
            headroom: the number of running rows; 0 admits any row that fits alone.
            most_tokens: the most tokens that the row will ever need room for.

        Returns:
            False, with nothing changed, if there would be too little headroom, or if the row can
                start from a longer prefix one batch later.
        """
        assert not seq.block_table and not seq.num_computed_tokens
        prefix = self.find_prefix(seq)
        if prefix.is_pending:
            return False
        full, tail = self._pages_of(prefix)
        tokens = max(most_tokens - len(prefix.blocks) * self.block_size, 0)
        run = max((run.end - run.start for run in seq.runs), default=0)
        if not self.needs.fits_after(len(full), len(tail), tokens, run):
            prefix, full, tail = Prefix([]), set(), set()
        cached = prefix.blocks
        tokens = seq.num_tokens - len(cached) * self.block_size
        needed = self.needs.full(tokens) + self.needs.full(headroom * self.block_size)
        if self.window is not None and headroom:
            # The beginning of the prefill, up to one window; a row alone can have any chunks.
            needed += self.needs.windows(min(tokens, self.needs.window))
            needed += -(-headroom // self._layout.window_blocks)
        if sum(map(self.pool.is_free, full | tail)) + needed > self.pool.num_free:
            return False
        for block in cached:
            self._owners.add(block)
        seq.block_table.extend(cached)
        seq.num_computed_tokens = len(cached) * self.block_size
        seq.branch_tokens = prefix.branch_tokens
        if self.states is not None:
            seq.state_slot = self.states.take()
            seq.restore_from = prefix.snapshot
        if self.window is not None:
            self.window.start(seq, len(cached), prefix.tail)
        self._extend(seq, self.blocks_for(tokens))
        return True

    def _pages_of(self, prefix: Prefix) -> tuple[set[int], set[int]]:
        """Return the pages with the prefix's blocks, and those with its window tail."""
        full = {self._layout.page_of_full(block)[0] for block in prefix.blocks}
        if self.window is None or prefix.tail is None:
            return full, set()
        return full, self.window.tail_pages(prefix.tail)

    def chunk_room(self, seq: Sequence) -> int | None:
        """Return how many tokens of a row can be prefilled next with the free blocks; None if
        blocks set no limit."""
        return None if self.window is None else self.window.room(seq) - seq.num_computed_tokens

    def reserve_chunk(self, seq: Sequence, end: int) -> None:
        """Reserve the window blocks for a prefill up to `end`; there must be enough."""
        if self.window is not None:
            self.window.reserve(seq, end, self._take_page)

    def snapshots(self, seq: Sequence, start: int, end: int) -> list[tuple[int, int]]:
        """Reserve the snapshots, and keep the window tails, of a prefill of the row's tokens from
        `start` to `end`. Other rows find these snapshots only after `publish_snapshots`.

        Returns:
            For each snapshot, the number of tokens of the row that its state has read, and its
                state slot.
        """
        if not self._needs_ends or not self.prefix_caching:
            return []
        step = self._snapshot_blocks * self.block_size
        # No other row has this row's answer after the same prompt, so no snapshot is taken in it.
        last = min(seq.num_shareable_tokens, seq.answer_start)
        snapshots = []
        for tokens in sorted({last // step * step, seq.branch_tokens}):
            if start < tokens <= end:
                digest = self._digests(seq, tokens // self.block_size)[-1]
                if self.window is not None:
                    self.window.keep_tail(seq, tokens // self.block_size, digest)
                slot = None if self.states is None else self.states.reserve(digest)
                if slot is not None:
                    snapshots.append((tokens, slot))
        return snapshots

    def reserve(self, seq: Sequence, num_tokens: int) -> bool:
        """Extend the row's block tables until they hold `num_tokens` tokens. Returns False, with
        nothing changed, if too few blocks are free."""
        if self.new_pages(seq, num_tokens) > self.pool.num_free:
            return False
        self.reserve_chunk(seq, num_tokens)
        self._extend(seq, self.blocks_for(num_tokens) - len(seq.block_table))
        return True

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        """Append a number of new blocks to the row's block table."""
        for _ in range(num_blocks):
            left = self._left(seq)
            if not left:
                seq.full_page, left = self._take_page(), self._per_page
            block = self._layout.full_block(seq.full_page, self._per_page - left)
            self._owners.add(block)
            seq.block_table.append(block)

    def _take_page(self) -> int:
        """Take a free page, and remove what it holds from the prefix cache."""
        page = self.pool.take()
        for digest in self._hashes.pop(page, {}).values():
            del self._published[digest]
            if self.states is not None:
                self.states.forget(digest)
            if self.window is not None:
                self.window.forget(digest)
        if self.window is not None:
            self.window.forget_page(page)
        return page

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks that the row's first `num_tokens` tokens do not need."""
        while len(seq.block_table) > self.blocks_for(num_tokens):
            block = seq.block_table.pop()
            seq.full_page = self._layout.page_of_full(block)[0]
            assert self._owners.count(block) == 1, "a shared lookahead"
            assert block not in self._hashes.get(seq.full_page, ()), "a published lookahead"
            self._release(block)
        if self.window is not None:
            self.window.trim(seq, self.blocks_for(num_tokens))

    def _release(self, block: int) -> None:
        """Remove one owner of a block."""
        self._owners.remove(block, self._is_wanted)

    def _is_wanted(self, page: int) -> bool:
        """Return whether a free page is handed out last: if it has published blocks, or if no
        window tails need pages."""
        return self.window is None or page in self._hashes

    def publish_snapshots(self) -> None:
        """Let rows find the snapshots reserved so far: their batch was launched."""
        if self.states is not None:
            self.states.publish()

    def publish(self, seq: Sequence, num_tokens: int) -> None:
        """Let other rows share the full blocks among the row's first `num_tokens` tokens.

        These tokens must be final, and the models must have read them or read them in the next
        forward. In that same forward another row may already share a block, because each layer
        writes the keys and values of all tokens before it reads any.
        """
        if not self.prefix_caching:
            return
        if self._within_prompts:
            # A layer may round prompt tokens differently from generated ones. A row that has
            # another row's generated tokens in its prompt must not share their blocks.
            num_tokens = min(num_tokens, seq.answer_start)
        full = min(num_tokens, seq.num_tokens - self._ahead) // self.block_size
        if full <= seq.num_published_blocks:
            return
        digests = self._digests(seq, full)
        for i in range(seq.num_published_blocks, full):
            block = seq.block_table[i]
            if digests[i] not in self._published:
                of_page = self._hashes.setdefault(self._layout.page_of_full(block)[0], {})
                if block not in of_page:
                    self._published[digests[i]] = block
                    of_page[block] = digests[i]
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Take back the row's blocks and state slot. The row's last blocks are freed first, and so
        reused first, because a prefix is useless without its beginning."""
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table.clear()
        seq.full_page = 0
        seq.num_computed_tokens = 0
        seq.num_published_blocks = 0
        if self.window is not None:
            self.window.free(seq)
        if seq.state_slot and self.states is not None:
            self.states.give(seq.state_slot)
            seq.state_slot, seq.restore_from = 0, None

    def _digests(self, seq: Sequence, num_blocks: int) -> list[bytes]:
        """Return the digests of the row's first `num_blocks` full blocks."""
        return block_digests(seq, num_blocks, self.block_size, self._ahead)

    def check_integrity(self, seqs: Iterable[Sequence]) -> None:
        """Assert that owner counts, pages and published hashes agree."""
        seqs = list(seqs)
        pages = self._owners.check_integrity(seq.block_table for seq in seqs)
        hashes = [item for of_page in self._hashes.values() for item in of_page.items()]
        assert {b: h for h, b in self._published.items()} == dict(hashes), "unmatched hashes"
        slots = [seq.state_slot for seq in seqs if seq.state_slot]
        assert len(set(slots)) == len(slots), "two rows have one state slot"
        if self.window is not None:
            of_windows = self.window.check_integrity(seqs)
            assert not pages.keys() & of_windows.keys(), "a page holds blocks of both kinds"
            pages += of_windows
        self.pool.check_integrity(pages)
