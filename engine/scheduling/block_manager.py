"""Hands out the blocks of the paged cache, and keeps the prefix cache.

The scheduler asks `BlockManager` for the blocks of each row. *Headroom* is the number of blocks
that must stay free when a row is admitted, so that running rows can grow.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable
from itertools import takewhile
from math import lcm

from batchgen.engine.caches.state_slots import StateSlots
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.scheduling.prefix import Prefix, block_digests
from batchgen.engine.scheduling.window_blocks import WindowBlocks


class BlockManager:
    """Hands out the blocks of the paged cache, and the state slots of models with recurrent layers.

    A block is free, or owned by one or more rows. Full blocks of known tokens are published under a
    hash of their tokens and of all tokens before them, so that rows with a common prefix share its
    blocks. A published block without owners stays in the prefix cache until it is handed out again.
    Blocks are handed out in the order in which they were freed. Block 0 is scratch and never handed
    out.

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
        window: the blocks of layers with a sliding window; None for models without such layers.
        prompts_only: share only blocks of prompts, because generated tokens are computed in another
            way.
    """

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        prefix_caching: bool,
        states: StateSlots | None = None,
        state_multiple: int = 1,
        tokens_ahead: int = 0,
        window: WindowBlocks | None = None,
        prompts_only: bool = False,
    ) -> None:
        assert num_blocks >= 2 and block_size >= 1
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._owners = [0] * num_blocks
        self._free = OrderedDict.fromkeys(range(1, num_blocks))
        self._hash_of: dict[int, bytes] = {}
        self._published: dict[bytes, int] = {}
        self.states, self.window = states, window
        # With snapshots or tails, rows can start only from prompts: generated tokens leave neither.
        self._needs_ends = states is not None or window is not None
        self._within_prompts = self._needs_ends or prompts_only
        self._ahead = tokens_ahead
        # A snapshot can be taken only after a multiple of this many blocks.
        self._snapshot_blocks = lcm(block_size, state_multiple) // block_size

    @property
    def capacity(self) -> int:
        """The number of tokens that fit into all blocks but the scratch block."""
        return (self.num_blocks - 1) * self.block_size

    @property
    def num_free(self) -> int:
        """The number of blocks that no row owns, including published ones."""
        return len(self._free)

    @property
    def usage(self) -> float:
        """The share of the blocks that rows own, from 0 to 1; with two pools, the larger of the two
        shares."""
        usage = 1 - self.num_free / (self.num_blocks - 1)
        return usage if self.window is None else max(usage, self.window.usage)

    def blocks_for(self, num_tokens: int) -> int:
        """Return how many blocks this many tokens of a row take."""
        return -(-num_tokens // self.block_size)

    def room_of(self, seq: Sequence) -> int:
        """Return how many tokens fit into the row's blocks."""
        blocks = len(seq.block_table)
        if self.window is not None:
            blocks = min(blocks, len(seq.window_table))
        return blocks * self.block_size

    def lacks(self, num_blocks: int) -> bool:
        """Return whether fewer than `num_blocks` blocks are free."""
        if self.window is not None and num_blocks > self.window.num_free:
            return True
        return num_blocks > self.num_free

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
        digests = self._sought_digests(seq)
        matched = list(takewhile(lambda b: b is not None, map(self._published.get, digests)))
        blocks = [block for block in matched if block is not None]
        return self._cut_back(blocks, digests) if self._needs_ends else Prefix(blocks)

    def _sought_digests(self, seq: Sequence) -> list[bytes]:
        """Return the digests of the row's first blocks that may come from the prefix cache."""
        tokens = min(seq.num_shareable_tokens, seq.num_prefill_tokens - self._ahead)
        if self._within_prompts:
            tokens = min(tokens, seq.answer_start)
        return self._digests(seq, tokens // self.block_size)

    def is_mostly_cached(self, seq: Sequence) -> bool:
        """Return whether the prefix cache holds at least half of the row's known tokens."""
        if not self._published:
            return False
        half = self.blocks_for(seq.num_tokens) // 2
        digests = self._sought_digests(seq)
        # The last blocks of a prefix leave the cache first, so one block stands for all before it.
        return 0 < half <= len(digests) and digests[half - 1] in self._published

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

    def admit(self, seq: Sequence, headroom: int) -> bool:
        """Give a row that owns no blocks the blocks for its known tokens, sharing those of a cached
        prefix.

        On success the row also has a state slot if the model has states, and
        `seq.num_computed_tokens` is the length of the cached prefix. Blocks of layers with a
        sliding window are reserved later, chunk by chunk.

        Returns:
            False, with nothing changed, if fewer than `headroom` blocks would stay free, or if the
                row can start from a longer prefix one batch later.
        """
        assert not seq.block_table and not seq.num_computed_tokens
        prefix = self.find_prefix(seq)
        if prefix.is_pending:
            return False
        cached = prefix.blocks
        idle = sum(1 for block in cached if block in self._free)
        new = self.blocks_for(seq.num_tokens) - len(cached)
        if self.num_free - idle - new < headroom:
            return False
        if not self._window_fits(seq, prefix, headroom):
            return False
        for block in cached:
            self._free.pop(block, None)
            self._owners[block] += 1
        seq.block_table.extend(cached)
        seq.num_computed_tokens = len(cached) * self.block_size
        seq.branch_tokens = prefix.branch_tokens
        if self.states is not None:
            seq.state_slot = self.states.take()
            seq.restore_from = prefix.snapshot
        if self.window is not None:
            self.window.start(seq, len(cached), prefix.tail)
        self._extend(seq, new)
        return True

    def _window_fits(self, seq: Sequence, prefix: Prefix, headroom: int) -> bool:
        """Return whether the window pool has blocks for the beginning of the row's prefill (up to
        one window) and `headroom` more. Always True if no other row runs: such a row can be
        prefilled in chunks of any size."""
        if self.window is None or not headroom:
            return True
        idle = 0 if prefix.tail is None else self.window.idle(prefix.tail)
        tokens = seq.num_tokens - len(prefix.blocks) * self.block_size
        new = self.blocks_for(min(tokens, self.window.window))
        return self.window.num_free - idle - new >= headroom

    def chunk_room(self, seq: Sequence) -> int | None:
        """Return how many tokens of a row can be prefilled next with the free blocks; None if
        blocks set no limit."""
        return None if self.window is None else self.window.room(seq) - seq.num_computed_tokens

    def reserve_chunk(self, seq: Sequence, end: int) -> None:
        """Reserve the window blocks for a prefill of the row's tokens up to `end`. There must be
        enough (`chunk_room`); all other blocks were reserved at admission."""
        if self.window is not None:
            self.window.reserve(seq, end)

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
        new = self.blocks_for(num_tokens) - len(seq.block_table)
        if new > self.num_free:
            return False
        if self.window is not None:
            if num_tokens > self.window.room(seq):
                return False
            self.window.reserve(seq, num_tokens)
        self._extend(seq, new)
        return True

    def _extend(self, seq: Sequence, num_blocks: int) -> None:
        """Append a number of free blocks to the row's block table."""
        for _ in range(num_blocks):
            block, _ = self._free.popitem(last=False)
            digest = self._hash_of.pop(block, None)
            if digest is not None:
                del self._published[digest]
                if self.states is not None:
                    self.states.forget(digest)
                if self.window is not None:
                    self.window.forget(digest)
            self._owners[block] = 1
            seq.block_table.append(block)

    def trim(self, seq: Sequence, num_tokens: int) -> None:
        """Take back the blocks that the row's first `num_tokens` tokens do not need."""
        while len(seq.block_table) > self.blocks_for(num_tokens):
            block = seq.block_table.pop()
            assert self._owners[block] == 1 and block not in self._hash_of, "a shared lookahead"
            self._release(block)
        if self.window is not None:
            self.window.trim(seq, self.blocks_for(num_tokens))

    def _release(self, block: int) -> None:
        """Remove one owner; a block without owners is free and last in line to be handed out."""
        self._owners[block] -= 1
        if not self._owners[block]:
            self._free[block] = None

    def publish_snapshots(self) -> None:
        """Let rows find the snapshots that were reserved so far. The batch that writes them was
        launched, so it runs before any later forward."""
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
            if digests[i] not in self._published and block not in self._hash_of:
                self._published[digests[i]] = block
                self._hash_of[block] = digests[i]
        seq.num_published_blocks = full

    def free(self, seq: Sequence) -> None:
        """Take back the row's blocks and state slot. The row's last blocks are freed first, and so
        reused first, because a prefix is useless without its beginning."""
        for block in reversed(seq.block_table):
            self._release(block)
        seq.block_table.clear()
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
        """Assert that owner counts, free blocks and published hashes agree."""
        seqs = list(seqs)
        owned = Counter(block for seq in seqs for block in seq.block_table)
        assert 0 not in owned, "a row owns the scratch block"
        for block in range(1, self.num_blocks):
            assert self._owners[block] == owned[block], f"block {block}: wrong owner count"
            assert (block in self._free) == (owned[block] == 0), f"block {block}: free and owned"
        assert {b: h for h, b in self._published.items()} == self._hash_of, "unmatched hashes"
        slots = [seq.state_slot for seq in seqs if seq.state_slot]
        assert len(set(slots)) == len(slots), "two rows have one state slot"
        if self.window is not None:
            self.window.check_integrity(seqs)
