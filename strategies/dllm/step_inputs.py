"""The state of block diffusion between steps: a block is denoised until all its tokens are known,
then a commit forward makes its KV final. `DLLMStrategy` owns it.

In this file, a block is a block of L positions that are decoded together, except in "block table",
which names the blocks of the paged cache. Methods without a docstring are those of `StepInputs`.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import Download, upload
from batchgen.engine.execution.model_inputs import ModelInputs
from batchgen.engine.interface.outputs import StepOutput
from batchgen.engine.models.model_config import Diffusion
from batchgen.engine.sampling.sampler import Drawn
from batchgen.engine.sampling.sampling_inputs import SamplingInputs
from batchgen.engine.step_inputs import JoiningRows, StepInputs
from batchgen.strategies.blocks import commit_inputs, widened
from batchgen.strategies.dllm.block_rows import BlockRows, KnownBlocks, Writes
from batchgen.strategies.dllm.edits import EDIT_LOG
from batchgen.strategies.dllm.joining_blocks import joining_blocks
from batchgen.strategies.dllm.replay import Replays
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.unmasking import RuleRows


class DLLMStepInputs(StepInputs):
    """The current block of each row, which the row's next forward reads.

    While the block is not complete, the forward is a denoise step. When it is complete, the forward
    is a commit forward, which writes the final KV of the block; then the next block begins. `fuse`
    merges a commit forward with the first denoise step of the row's next block. A denoise step that
    edits nothing in a block without masks is also a commit forward.

    In a step, `fuse` comes first, then the forward reads `model_inputs`, `edits` and `write` decide
    and hold what the forward yields, and `step_decode` advances to the next step.

    With shifted logits, those at a position are for the token after it, as in models that predict
    the next token. So the commit forward of a block also draws the first token of the next one, and
    cannot be fused with it.

    Attributes:
        mask_token_id: the id of masked tokens.
        rules: the unmasking rule of each row.
        columns: maps the name of an output column to [B, L, *tail], the values of the unmasked
            positions. Each value is from the last step that wrote its position.
    """

    def __init__(
        self,
        block_length: int,
        diffusion: Diffusion,
        rule: Rule,
        sub_block_length: int | None = None,
    ) -> None:
        super().__init__()
        self._sub_length = sub_block_length or block_length
        self._shifted = diffusion.shifted
        self.columns: dict[str, Tensor] = {}
        self._replays: Replays | None = None
        self._rule = rule
        self._rules: RuleRows | None = None
        self._length = block_length
        self.mask_token_id = diffusion.mask_token_id
        self._blocks: BlockRows | None = None
        # The next five belong to the current step.
        self._final: KnownBlocks | None = None  # the blocks that commit in it
        self._after: BlockRows | None = None  # the blocks after it
        self._commits: ModelInputs | None = None  # additional rows: the blocks that `fuse` added
        self._committed: Tensor | None = None  # [B] bool, the rows whose block's KV is final
        self._sent: Download | None = None  # the copy of the masked positions to the host
        self._repeated: SamplingInputs | None = None

    @property
    def blocks(self) -> BlockRows:
        """The current block of each row."""
        assert self._blocks is not None, "no row has joined yet"
        return self._blocks

    @property
    def rules(self) -> RuleRows:
        """The unmasking rule of each row."""
        assert self._rules is not None, "no row has joined yet"
        return self._rules

    @property
    def positions(self) -> Tensor:
        """The absolute positions of each row's block, [B, L] int64."""
        offsets = torch.arange(self._length, device=self.blocks.starts.device)
        return self.blocks.starts.unsqueeze(1) + offsets

    @property
    def repeated(self) -> SamplingInputs:
        """The sampler's inputs for the L positions of each row."""
        if self._repeated is None:
            self._repeated = self.sampling.repeat(self._length)
        return self._repeated

    @property
    def model_inputs(self) -> ModelInputs:
        """The block of each row, with mask tokens at masked positions; after all rows, the complete
        blocks that `fuse` lets commit in the same forward."""
        blocks = self.blocks
        inputs = replace(
            self.newest,
            input_ids=torch.where(blocks.masked, self.mask_token_id, blocks.token_ids).flatten(),
            positions=self.positions.flatten(),
            query_lens=np.full_like(self.newest.query_lens, self._length),
        )
        return inputs if self._commits is None else ModelInputs.concat([inputs, self._commits])

    @property
    def final(self) -> KnownBlocks:
        """The blocks whose KV the current forward makes final. `fuse` must be called first."""
        assert self._final is not None, "fuse comes first"
        return self._final

    @property
    def complete(self) -> Tensor:
        """The rows whose block is complete except for its final KV, [B] bool."""
        return self.blocks.complete

    @property
    def logs_edits(self) -> bool:
        """Whether any row asks for the column of its edits."""
        return any(EDIT_LOG.name in params.columns for params in self.sampling.params)

    def replayed(self) -> tuple[Replays, Tensor, Tensor] | None:
        """Return the trajectories of the rows, and the token ids and the steps [B, L] int64 of the
        current blocks in them. None if no row replays one."""
        if self._replays is None:
            return None
        starts = self.blocks.first_starts.unsqueeze(1)
        return self._replays, *self._replays.at(self.positions - starts)

    def send_masked(self) -> None:
        """Start to copy the masked positions of the next forward to the host, for
        `masked_on_host`."""
        self._sent = Download(self.blocks.masked)

    @property
    def masked_on_host(self) -> npt.NDArray[np.bool_]:
        """The masked positions in the current step, [B, L] bool. Waits for the copy, which
        `send_masked` must have started."""
        assert self._sent is not None, "nobody asked for it"
        return self._sent.wait()

    def fuse(self, room: int) -> None:
        """Let up to `room` complete blocks commit in the same forward as the first denoise step of
        their row's next block. Such a block becomes an additional row of the forward, with the same
        block table. The next block attends to its final keys and values, because a layer writes all
        of them before it reads any. With shifted logits `room` must be 0."""
        assert not (room and self._shifted), "a commit forward draws the next block's first token"
        self._commits = None
        blocks, newest = self.blocks, self.newest
        # A complete block always commits: as an additional row, or instead of its row's next block.
        self._final = KnownBlocks.of(blocks, self.complete, self.columns)
        if not room:
            return
        # A row whose last block is complete has no next block. It ends when the host reads the
        # step.
        waiting = self.complete & (blocks.starts < blocks.last_starts)
        rank = waiting.cumsum(0)
        fused = waiting & (rank <= room)
        rows = torch.where(fused, rank - 1, room)
        self._commits = commit_inputs(blocks.token_ids, self.positions, newest, rows, room)
        self._blocks = self._opened(blocks, fused)

    @property
    def candidates(self) -> Tensor:
        """The masked positions that the current step may unmask, [B, L] bool: those of the first
        sub-block with masked positions."""
        masked = self.blocks.masked
        if self._sub_length == self._length:
            return masked
        parts = torch.arange(self._length, device=masked.device) // self._sub_length
        first = masked.int().argmax(1) // self._sub_length
        return masked & (parts == first.unsqueeze(1))

    @property
    def drawn_positions(self) -> Tensor:
        """The absolute positions of the tokens that the current step's logits are for, [B, L]
        int64. With shifted logits, a row's first one is the position after its block."""
        positions = self.positions
        if self._shifted:
            positions = positions.clone()
            positions[:, 0] += self._length
        return positions

    @property
    def draws(self) -> Tensor:
        """How many draws each of these positions has had, [B, L] int64, which selects its random
        numbers. With shifted logits, the token that begins a block is drawn once."""
        draws = self.blocks.denoised.unsqueeze(1).repeat(1, self._length)
        if self._shifted:
            draws[:, 0] = 0
        return draws

    def edits(self, drawn: Drawn) -> tuple[Tensor, Tensor]:
        """Return the tokens [B, L] int64 that the rows' blocks have unmasked so far (elsewhere -1),
        and the positions [B, L] bool where the rules replace them by drawn tokens."""
        blocks = self.blocks
        indices = torch.arange(self._length, device=blocks.prompt_tokens.device)
        editable = (indices >= blocks.prompt_tokens.unsqueeze(1)) & ~blocks.complete.unsqueeze(1)
        known = torch.where(editable & ~blocks.masked, blocks.token_ids, -1)
        return known, self.rules.edited(known, drawn)

    def _opened(self, blocks: BlockRows, rows: Tensor) -> BlockRows:
        """Return the blocks after the rows `rows` [B] bool have begun their next block, in which
        all positions are masked. A row stays in the last block that it can have, which stays
        complete: the row ends when the host reads the step."""
        rows = rows & (blocks.starts < blocks.last_starts)
        masked = blocks.masked | rows.unsqueeze(1)
        if self._shifted:
            masked[:, 0] &= ~rows  # `write` has written this token in the commit forward's step
        return replace(
            blocks,
            starts=torch.where(rows, blocks.starts + self._length, blocks.starts),
            masked=masked,
            prompt_tokens=blocks.prompt_tokens.masked_fill(rows, 0),
            denoised=blocks.denoised.masked_fill(rows, 0),
            complete=blocks.complete & ~rows,
            edit_steps=blocks.edit_steps.masked_fill(rows, 0),
        )

    def prefilled_tokens(self, num_tokens: int) -> int:
        """Return how many of a row's known tokens its prefill reads: whole blocks. With shifted
        logits the last block is left out, because its commit forward draws the token after it."""
        return (num_tokens - self._shifted) // self._length * self._length

    def merge_prefill(self, rows: JoiningRows, newest: Tensor) -> None:
        """Add B rows whose prefill has read their whole blocks. Their remaining known tokens begin
        the first block to denoise. `newest` [B] are the rows' newest tokens, of which `_add_rows`
        makes the rows of `self.newest`."""
        length, count, device = self._length, len(rows.seqs), newest.device
        firsts = [self.prefilled_tokens(seq.num_prompt_tokens) for seq in rows.seqs]
        new = joining_blocks(rows, firsts, length, device)
        decodings = [seq.params.decoding for seq in rows.seqs]
        rules = [rule if isinstance(rule, Rule) else self._rule for rule in decodings]
        new_rules = RuleRows.build(rules, device)
        self._rules = (
            new_rules if self._rules is None else RuleRows.concat([self._rules, new_rules])
        )
        if self._replays is not None or any(seq.trajectory is not None for seq in rows.seqs):
            old = 0 if self._blocks is None else len(self._blocks.starts)
            replays = self._replays or Replays.none(old, device)
            joining = Replays.of(rows.seqs, length, self.mask_token_id, device)
            self._replays = replays.concat(joining)
        self._add_rows(rows, newest)
        self._blocks = new if self._blocks is None else BlockRows.concat([self._blocks, new])
        self._repeated = None
        for name, values in self.columns.items():
            self.columns[name] = torch.cat((values, values.new_zeros((count, *values.shape[1:]))))

    def keep_rows(self, keep: npt.NDArray[np.int64]) -> None:
        super().keep_rows(keep)
        self._blocks = self.blocks.index_select(keep) if len(keep) else None
        if self._replays is not None:
            replays = self._replays.index_select(keep)
            self._replays = replays if replays.replaying.any() else None
        self._rules = self.rules.index_select(keep) if len(keep) else None
        self._repeated = None
        if self.columns and len(keep):
            index = upload(keep, torch.int64, self.blocks.starts.device)
            self.columns = {name: values[index] for name, values in self.columns.items()}
        elif self.columns:
            self.columns = {}

    def write(
        self, writes: Writes, columns: dict[str, Tensor], *, last_commits: bool
    ) -> KnownBlocks:
        """Write tokens to the blocks, as a denoise step decided. `step_decode` continues from the
        result. Returns the blocks after this step, and which rows' blocks it completed.

        Args:
            columns: maps the name of an output column to [B, L, *tail], the values of the drawn
                tokens.
            last_commits: whether a step that completes a block and writes nothing is also its
                commit forward: it has read the final tokens, and so written their keys and values.
        """
        blocks, positions = self.blocks, writes.positions
        if self._shifted:  # a commit forward yields the token that begins the next block
            positions = positions.clone()
            positions[:, 0] |= blocks.complete
        for name, values in columns.items():
            old = self.columns.get(name)
            if old is None or old.shape != values.shape:
                old = widened(old, values)
            mask = positions.view(*positions.shape, *[1] * (values.dim() - 2))
            self.columns[name] = torch.where(mask, values, old)
        writes_any, masked = positions.any(1), blocks.masked & ~writes.unmasked
        complete, edit_steps = self._completed(writes, masked)
        after = self._after = replace(
            blocks,
            token_ids=torch.where(positions, writes.token_ids, blocks.token_ids),
            masked=masked,
            denoised=blocks.denoised + 1,
            steps=blocks.steps + writes_any.int(),
            complete=complete,
            edit_steps=edit_steps,
        )
        self._committed = blocks.complete
        if last_commits:  # a block that is complete without a write was read in its final form
            self._committed = blocks.complete | (complete & ~writes_any)
        return KnownBlocks.of(after, complete & ~blocks.complete, self.columns)

    @property
    def lacking_commit(self) -> Tensor:
        """The rows whose block is complete after this step, but not its KV, [B] bool. `write` must
        be called first."""
        assert self._after is not None and self._committed is not None, "write comes first"
        return self._after.complete & ~self._committed

    def _completed(self, writes: Writes, masked: Tensor) -> tuple[Tensor, Tensor]:
        """Return the rows whose block is complete after a step, [B] bool, and how many steps each
        block has then had without masks, [B] int64.

        A block is complete when nothing is masked. If the row's rule edits, the block continues
        until a step that began without masks edits nothing, or was the last that may edit.

        `masked` [B, L] bool are the positions still masked after the step.
        """
        blocks = self.blocks
        is_unmasked = ~masked.any(1)
        if writes.edited is None:
            return is_unmasked, blocks.edit_steps
        edit_steps = blocks.edit_steps + (~blocks.masked.any(1)).long()
        is_last = edit_steps >= self.rules.edit_steps
        is_settled = (edit_steps > 0) & ~writes.edited.any(1)
        return blocks.complete | (is_unmasked & (is_last | is_settled)), edit_steps

    def step_decode(self, step: StepOutput) -> None:
        """Advance to the blocks that `write` made. Rows whose block has committed begin their next
        block."""
        assert self._after is not None and self._committed is not None, "write comes first"
        self._blocks = self._opened(self._after, self._committed)
        self._final = self._after = self._commits = self._sent = self._committed = None
