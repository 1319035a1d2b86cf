"""A fake device for the scheduler: it checks what each forward reads and writes in the cache."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batchgen.engine.interface.outputs import HostOutput
from batchgen.engine.rows.scheduled_batch import (
    DecodeBatch,
    MixedBatch,
    PrefillBatch,
    ScheduledBatch,
)
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.block_manager import BlockManager

STOP = 99
Part = DecodeBatch | PrefillBatch


@dataclass(eq=False)
class Row:
    """A request whose output is known before it is generated.

    Attributes:
        output: what it must end with; the last token is STOP unless it ends by its length.
    """

    seq: Sequence
    output: list[int]

    @classmethod
    def make(cls, name: str, prompt: list[int], length: int, limit: int, seed: int) -> Row:
        """Ends by itself after `length` tokens, or exactly by its length if that is the limit."""
        rng = random.Random(seed)
        output = [rng.randrange(5) for _ in range(length)]
        if length < limit:
            output[-1] = STOP
        stop = StopRule({STOP: "stop"} if length < limit else {}, (), 0, limit)
        return cls(Sequence(name, list(prompt), RequestParams(), stop, ()), output)

    def token(self, place: int) -> int:
        """Generated at a place; a device that runs ahead goes on after the row's end."""
        return self.output[place] if place < len(self.output) else 5


def parts_of(batch: ScheduledBatch) -> tuple[DecodeBatch | None, PrefillBatch | None]:
    if isinstance(batch, MixedBatch):
        return batch.decode, batch.prefill
    return (batch, None) if isinstance(batch, DecodeBatch) else (None, batch)


def _chunks(batch: PrefillBatch) -> Iterator[tuple[Sequence, int, int]]:
    """(row, first token, end) of each chunk."""
    for seq, start, length in zip(batch.seqs, batch.starts, batch.lengths, strict=True):
        assert start + length <= seq.num_tokens
        # Only of a resumed row can all be in the cache.
        assert length > 0 or (seq.num_generated and start == seq.num_prefill_tokens)
        yield seq, start, start + length


@dataclass(eq=False)
class DeviceRow:
    """A decoding row as StepInputs knows it: the tokens so far and copies of its block tables."""

    row: Row
    token_ids: list[int]
    tables: list[list[int]]


class Device:
    """Runs batches in the order of their launch on a cache whose cells say what was written.

    A cell holds the digest of a token and all before it, so that a forward which would read
    another row's KV, or KV not yet written or overwritten, is noticed. There are cells of layers
    without a window and, if the manager has one, of layers with it. Those of one kind that are
    written to a page destroy those of the other kind there.
    """

    def __init__(self, manager: BlockManager, max_rows: int, drafting: bool, seed: int) -> None:
        self.rows: list[DeviceRow] = []
        self._block_size = manager.block_size
        self._windows: list[int | None] = [None]
        self._layout = layout = manager.needs.layout
        sizes = [layout.num_blocks]
        if manager.window is not None:
            self._windows.append(manager.window.window)
            sizes.append(layout.num_window_blocks)
        self._cells = [[0] * (blocks * self._block_size) for blocks in sizes]
        self._kinds = [0] * layout.num_pages
        self._max_rows = max_rows
        self._drafting = drafting
        self._rng = random.Random(seed)

    def launch(
        self, batch: ScheduledBatch, rows: dict[Sequence, Row]
    ) -> list[tuple[Part, HostOutput]]:
        """One forward: every layer writes all the KV before it reads any."""
        decode, prefill = parts_of(batch)
        if decode is not None:
            self._reindex(decode)
        if prefill is not None:
            for seq, start, end in _chunks(prefill):
                self._write(seq.token_ids[:end], start, _tables(seq))
        if decode is not None:
            for device_row in self.rows:
                self._write_drafts(device_row, decode.width)
            for device_row in self.rows:
                tokens, limit = device_row.token_ids, device_row.row.seq.max_tokens
                self._read(tokens[:limit], len(tokens) - 1, device_row.tables)
        if prefill is not None:
            for seq, start, end in _chunks(prefill):
                if start < end:
                    self._read(seq.token_ids[:end], start, _tables(seq))
        outputs: list[tuple[Part, HostOutput]] = []
        if decode is not None:
            outputs.append((decode, self._generate(self.rows, decode.width)))
        if prefill is not None and prefill.completing:
            joined = self._join(prefill, rows)
            if joined:
                outputs.append((prefill, self._generate(joined, 1)))
        return outputs

    def _reindex(self, batch: DecodeBatch) -> None:
        if batch.keep is not None:
            assert (np.diff(batch.keep) > 0).all() and len(batch.keep) < len(self.rows)
            self.rows = [self.rows[i] for i in batch.keep]
        assert len(self.rows) == batch.num_rows == len(batch.epochs) > 0
        for group, new in enumerate((batch.new_blocks, batch.new_window_blocks)):
            for i, place, block in new:
                # Blocks that were reserved for drafts may have been taken back.
                blocks = self.rows[i].tables[group]
                assert place == len(blocks) or (self._drafting and place < len(blocks))
                blocks[place:] = [block]

    def _write_drafts(self, device_row: DeviceRow, width: int) -> None:
        tokens, limit = device_row.token_ids, device_row.row.seq.max_tokens
        assert self._drafting or len(tokens) < limit, "a step after the last token"
        draft = [*tokens, *[-1] * (width - 1)]
        self._write(draft[:limit], len(tokens) - 1, device_row.tables)

    def _join(self, batch: PrefillBatch, rows: dict[Sequence, Row]) -> list[DeviceRow]:
        """Those of the rows that yield a token: a resumed row has its newest."""
        if batch.keep is not None:
            self.rows = [self.rows[i] for i in batch.keep]
        done = [batch.seqs[i] for i in batch.completing]
        for i in batch.completing:
            assert batch.starts[i] + batch.lengths[i] == batch.seqs[i].num_prefill_tokens
        joined = [DeviceRow(rows[seq], list(seq.token_ids), _tables(seq)) for seq in done]
        self.rows += joined
        assert len(self.rows) <= self._max_rows, "rows that ended are never dropped"
        return [row for row, seq in zip(joined, done, strict=True) if not seq.num_generated]

    def _generate(self, rows: list[DeviceRow], width: int) -> HostOutput:
        counts = np.array([self._rng.randint(1, width) for _ in rows], np.int32)
        token_ids = np.full((len(rows), width), -1, np.int64)
        for i, (device_row, count) in enumerate(zip(rows, counts.tolist(), strict=True)):
            tokens, seq = device_row.token_ids, device_row.row.seq
            for j in range(count):
                token_ids[i, j] = device_row.row.token(len(tokens) - seq.num_prompt_tokens)
                tokens.append(int(token_ids[i, j]))
            # All of them but the newest were drafts, and their KV is that of the drafts.
            accepted = tokens[:-1][: seq.max_tokens]
            self._write(accepted, len(tokens) - count, device_row.tables)
        return HostOutput(counts, token_ids, np.zeros(len(rows), np.bool_), {})

    def _digests(self, token_ids: list[int]) -> list[int]:
        digests, digest = [], 1
        for token_id in token_ids:
            digest = hash((digest, token_id))
            digests.append(digest)
        return digests

    def _cell(self, position: int, blocks: list[int]) -> int:
        assert position < len(blocks) * self._block_size, "no block reserved for a token"
        block = blocks[position // self._block_size]
        assert block, "the scratch block holds no row's tokens"
        return block * self._block_size + position % self._block_size

    def _write(self, token_ids: list[int], start: int, tables: list[list[int]]) -> None:
        for kind, table in enumerate(tables[: len(self._cells)]):
            for position, digest in list(enumerate(self._digests(token_ids)))[start:]:
                cell = self._cell(position, table)
                self._use(kind, cell // self._block_size)
                self._cells[kind][cell] = digest

    def _use(self, kind: int, block: int) -> None:
        """Destroy what the other kind has in the page of a block that is written."""
        layout, size = self._layout, self._block_size
        page = (layout.page_of_window if kind else layout.page_of_full)(block)[0]
        if self._kinds[page] == kind:
            return
        self._kinds[page] = kind
        first = page * layout.window_blocks
        windows = range(first, first + layout.window_blocks)
        for lost in (
            [layout.full_block(page, i) for i in range(layout.full_blocks)] if kind else windows
        ):
            self._cells[1 - kind][lost * size : (lost + 1) * size] = [0] * size

    def _read(self, token_ids: list[int], first: int, tables: list[list[int]]) -> None:
        """What the queries from `first` on see."""
        for cells, window, table in zip(self._cells, self._windows, tables, strict=False):
            start = 0 if window is None else max(first - (window - 1), 0)
            for position, digest in list(enumerate(self._digests(token_ids)))[start:]:
                assert cells[self._cell(position, table)] == digest, "another token's KV"


def _tables(seq: Sequence) -> list[list[int]]:
    return [list(seq.block_table), list(seq.window_table)]
