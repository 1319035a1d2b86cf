"""The update cycle of block diffusion: denoise a block until it is known, then fix its KV."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.execution.batched import Batched, row
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.execution.transfer import Download, upload
from batchgen.engine.outputs import OutputColumn, StepOutput
from batchgen.engine.sampling.inputs import SamplingInputs
from batchgen.engine.sequence import Sequence
from batchgen.engine.strategy import JoiningRows
from batchgen.strategies.base.step_inputs import StepInputs

STEP_MAP = OutputColumn("step_map", np.dtype(np.int32))
"""Which of the row's denoise steps unmasked the token, from 1."""


@dataclass(frozen=True)
class BlockRows(Batched):
    """The block that each of B rows works on, of L positions. Mask and tokens are apart: a prompt
    may hold the mask token itself.

    Attributes:
        starts: [B] int64, position of the block's first token, a multiple of L.
        last_starts: [B] int64, that of the last block that the row can have.
        token_ids: [B, L] int64, what is known; undefined where masked.
        masked: [B, L] bool.
        given: [B] int64, tokens of the prompt at the block's beginning.
        denoised: [B] int64, denoise steps of the block so far.
        steps: [B] int32, steps of the row so far that unmasked something.
    """

    starts: Tensor = row()
    last_starts: Tensor = row()
    token_ids: Tensor = row()
    masked: Tensor = row()
    given: Tensor = row()
    denoised: Tensor = row()
    steps: Tensor = row()


class DLLMStepInputs(StepInputs):
    """Each row's next forward reads its block: a denoise step while some of it is masked, else the
    one that writes its final KV, after which the next block begins. `fuse` lets that go along with
    the first denoise step of the next block.

    Attributes:
        columns: name → [B, L, *tail], written where and when a position is unmasked.
    """

    def __init__(self, block_length: int, mask_token_id: int) -> None:
        super().__init__()
        self.columns: dict[str, Tensor] = {}
        self._length = block_length
        self._mask_token_id = mask_token_id
        self._blocks: BlockRows | None = None
        self._after: BlockRows | None = None  # of the step under way
        self._commits: ModelInputs | None = None  # of the step under way
        self._sent: Download | None = None  # of the step under way
        self._repeated: SamplingInputs | None = None

    @property
    def blocks(self) -> BlockRows:
        assert self._blocks is not None, "no row has joined yet"
        return self._blocks

    @property
    def positions(self) -> Tensor:
        """[B, L], absolute."""
        offsets = torch.arange(self._length, device=self.blocks.starts.device)
        return self.blocks.starts.unsqueeze(1) + offsets

    @property
    def repeated(self) -> SamplingInputs:
        """The sampling rows of the blocks' positions."""
        if self._repeated is None:
            self._repeated = self.sampling.repeat(self._length)
        return self._repeated

    @property
    def model_inputs(self) -> ModelInputs:
        """The rows' blocks, and behind them those that `fuse` set aside."""
        blocks = self.blocks
        inputs = replace(
            self.newest,
            input_ids=torch.where(blocks.masked, self._mask_token_id, blocks.token_ids).flatten(),
            positions=self.positions.flatten(),
            query_lens=np.full_like(self.newest.query_lens, self._length),
        )
        return inputs if self._commits is None else ModelInputs.concat([inputs, self._commits])

    @property
    def complete(self) -> Tensor:
        """[B] bool, rows whose block is known and whose KV is not final."""
        return ~self.blocks.masked.any(1)

    def send_masked(self) -> None:
        """The host needs to know what is masked in the next forward, while that runs."""
        self._sent = Download(self.blocks.masked)

    @property
    def masked_on_host(self) -> npt.NDArray[np.bool_]:
        """[B, L], if it was sent."""
        assert self._sent is not None, "nobody asked for it"
        return self._sent.wait()

    def fuse(self, room: int) -> None:
        """Where a block is complete, let the forward write its final KV beside the first denoise
        step of the next block, as a row of its own with the same block table: a layer writes all
        keys and values before it reads any.

        Args:
            room: for so many rows, the first ones; the others need a forward for it. Room that is
                not needed is filled with rows on the scratch block.
        """
        self._commits = None
        if not room:
            return
        blocks, newest, length = self.blocks, self.newest, self._length
        count = newest.num_rows
        # A row that is complete to its end has no next block: the host ends it when it reads that.
        waiting = self.complete & (blocks.starts < blocks.last_starts)
        rank = waiting.cumsum(0)
        fused = waiting & (rank <= room)
        chosen = torch.full((room + 1,), count, device=fused.device)
        chosen.scatter_(
            0, torch.where(fused, rank - 1, room), torch.arange(count, device=fused.device)
        )
        rows = chosen[:room]
        none = (rows == count).unsqueeze(1)
        rows = rows.clamp(max=count - 1)
        self._commits = ModelInputs(
            input_ids=blocks.token_ids[rows].flatten(),
            positions=self.positions[rows].masked_fill(none, 0).flatten(),
            block_tables=newest.block_tables[rows].masked_fill(none, 0),
            query_lens=np.full(room, length),
            context_lens=np.full(room, newest.context_lens.max()),
        )
        self._blocks = self._opened(blocks, fused)

    def _opened(self, blocks: BlockRows, rows: Tensor) -> BlockRows:
        """With the next block of these rows [B] bool."""
        starts = torch.where(rows, blocks.starts + self._length, blocks.starts)
        return replace(
            blocks,
            starts=starts.minimum(blocks.last_starts),
            masked=blocks.masked | rows.unsqueeze(1),
            given=blocks.given.masked_fill(rows, 0),
            denoised=blocks.denoised.masked_fill(rows, 0),
        )

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        """Rows whose whole blocks are read; the rest of what they know begins their block."""
        length, count, device = self._length, len(rows.seqs), newest.device
        starts = rows.context_lens
        last_starts = np.array([(seq.max_tokens - 1) // length * length for seq in rows.seqs])
        given = np.array([seq.num_tokens for seq in rows.seqs]) - starts
        token_ids = np.zeros((count, length), np.int64)
        for ids, seq, start, known in zip(token_ids, rows.seqs, starts, given, strict=True):
            ids[:known] = seq.token_ids[start:]
        steps = np.array([_steps_so_far(seq) for seq in rows.seqs])
        there = upload(np.stack([starts, last_starts, given, steps]), torch.int64, device)
        places = torch.arange(length, device=device)
        new = BlockRows(
            starts=there[0],
            last_starts=there[1],
            token_ids=upload(token_ids, torch.int64, device),
            masked=places >= there[2].unsqueeze(1),
            given=there[2],
            denoised=torch.zeros_like(there[0]),
            steps=there[3].int(),
        )
        self._add_rows(rows, newest)
        self._blocks = new if self._blocks is None else BlockRows.concat([self._blocks, new])
        self._repeated = None
        for name, values in self.columns.items():
            self.columns[name] = torch.cat((values, values.new_zeros((count, *values.shape[1:]))))

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        super().keep_rows(keep)
        self._blocks = self.blocks.index_select(keep) if len(keep) else None
        self._repeated = None
        if self.columns and len(keep):
            index = upload(keep, torch.int64, self.blocks.starts.device)
            self.columns = {name: values[index] for name, values in self.columns.items()}
        elif self.columns:
            self.columns = {}

    def unmask(
        self, transfer: Tensor, token_ids: Tensor, columns: dict[str, Tensor]
    ) -> tuple[Tensor, Tensor]:
        """Write what a denoise step decided; `step_decode` goes on from it.

        Args:
            transfer: [B, L] bool, the masked positions that are known from now on.
            token_ids: [B, L] int64, what was drawn.
            columns: name → [B, L, *tail], what belongs to it.

        Returns:
            [B] bool, the rows whose block is complete by it; [B, L] int64, the blocks' tokens.
        """
        blocks = self.blocks
        for name, values in columns.items():
            old = self.columns.get(name)
            if old is None or old.shape != values.shape:
                old = _widened(old, values)
            chosen = transfer.view(*transfer.shape, *[1] * (values.dim() - 2))
            self.columns[name] = torch.where(chosen, values, old)
        some = transfer.any(1)
        after = self._after = replace(
            blocks,
            token_ids=torch.where(transfer, token_ids, blocks.token_ids),
            masked=blocks.masked & ~transfer,
            denoised=blocks.denoised + 1,
            steps=blocks.steps + some.int(),
        )
        return some & ~after.masked.any(1), after.token_ids

    def step_decode(self, step: StepOutput) -> None:
        """Where nothing was masked, the step has made the KV final, and the next block begins."""
        assert self._after is not None, "unmask comes first"
        self._blocks = self._opened(self._after, self.complete)
        self._after = self._commits = self._sent = None


def _steps_so_far(seq: Sequence) -> int:
    """Of a resumed row; where nobody asks for the steps, they need not go on."""
    column = seq.columns.get(STEP_MAP.name)
    values = None if column is None else column.array()
    return int(values.max()) if values is not None and len(values) else 0


def _widened(old: Tensor | None, values: Tensor) -> Tensor:
    """As wide as `values`, with the old ones in it."""
    out = torch.zeros_like(values)
    if old is not None:
        tail = tuple(slice(min(a, b)) for a, b in zip(old.shape, values.shape, strict=True))
        out[tail] = old[tail]
    return out
