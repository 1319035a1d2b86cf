"""The strategy `dllm`: block diffusion (SDAR, Cheng et al. 2025). Blocks of tokens are generated
one after another, and the tokens of a block in any order. The engine calls the methods of
`Strategy`, where those without a docstring here are described."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch

from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.interface.trajectory import Trajectory
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.rows.sequence import TAIL, Sequence
from batchgen.engine.sampling.logits import Logits
from batchgen.engine.sampling.sampler import Drawn
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.admission import Ints
from batchgen.engine.strategy import TARGET, ModelRole, Strategy
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.kernels.sampling.unmask import MAX_BLOCK_LENGTH
from batchgen.strategies.blocks import STEP_MAP
from batchgen.strategies.counts import NUM_FORWARDS
from batchgen.strategies.dllm.commit_room import CommitRoom
from batchgen.strategies.dllm.denoise_step import decide_writes, draw_blocks, ordered
from batchgen.strategies.dllm.edits import EDIT_LOG
from batchgen.strategies.dllm.option_checks import check_length, check_row, rule_of
from batchgen.strategies.dllm.replay import is_exact
from batchgen.strategies.dllm.rules.named_rules import named_rule, rule_of_row
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.step_counts import (
    ALONE,
    DENOISED,
    LACKING,
    NUM_COMMIT_FORWARDS,
    BlockSteps,
    count_forwards,
    summary_lines,
)
from batchgen.strategies.dllm.step_inputs import DLLMStepInputs

TAIL_COLUMNS = tuple(
    OutputColumn(TAIL + name, np.dtype(np.int32), scope="tail")
    for name in ("token_ids", STEP_MAP.name)
)
"""What is cut off after the end of a row in its last block, and is needed for a replay."""
_CONFIDENCE = 0.9
"""The default confidence threshold of the configuration."""


class DLLMStrategy(Strategy):
    """Denoises blocks of masked positions. Each denoise step draws a token at every masked position
    and keeps some of them.

    Args:
        block_length: L, the number of positions of a block. None: the length in the model's
            configuration.
        unmasking: which drawn tokens a step keeps; `strategies/dllm/rules` has a file for each
            rule. A row may have its own rule in `RequestParams.decoding`.
        confidence_threshold, min_tokens_per_step, denoising_steps, entropy_bound, edit_threshold,
            max_edit_steps: the options of rules, by their names there. None is the rule's default.
        sub_block_length: the number of positions of a sub-block; all positions of a sub-block are
            unmasked before those of the next. None: the whole block.
        fused_commit: whether the commit forward of a block may be merged with the first denoise
            step of the next block, which saves forwards. The tokens are the same.

    Raises:
        ValueError: an option is out of range, or conflicts with another.
    """

    name = "dllm"
    columns: tuple[OutputColumn, ...] = (STEP_MAP, EDIT_LOG, *TAIL_COLUMNS)
    counts: tuple[RowCount, ...] = (NUM_FORWARDS, NUM_COMMIT_FORWARDS)
    decoding = Rule

    @classmethod
    def decoding_of_row(cls, values: Mapping[str, Any]) -> object:
        return rule_of_row(values)

    def __init__(
        self,
        block_length: int | None = None,
        sub_block_length: int | None = None,
        unmasking: Literal[
            "low_confidence_dynamic",
            "low_confidence_static",
            "sequential",
            "entropy_bound",
            "joint_threshold",
        ] = "low_confidence_dynamic",
        confidence_threshold: float = _CONFIDENCE,
        min_tokens_per_step: int | None = None,
        denoising_steps: int | None = None,
        entropy_bound: float | None = None,
        edit_threshold: float | None = None,
        max_edit_steps: int | None = None,
        fused_commit: bool = True,
    ) -> None:
        if not (block_length is None or 2 <= block_length <= MAX_BLOCK_LENGTH):
            raise ValueError(f"block_length must be 2 to {MAX_BLOCK_LENGTH}, got {block_length!r}")
        self._rule = named_rule(
            unmasking,
            # The configuration sets this number whatever the rule, so it stands for "not set".
            confidence_threshold=None
            if confidence_threshold == _CONFIDENCE
            else confidence_threshold,
            denoising_steps=denoising_steps,
            min_tokens_per_step=min_tokens_per_step,
            entropy_bound=entropy_bound,
            edit_threshold=edit_threshold,
            max_edit_steps=max_edit_steps,
        )
        if sub_block_length is not None and sub_block_length < 1:
            raise ValueError(f"sub_block_length must be at least 1, got {sub_block_length!r}")
        self._block_length_option, self._sub_block_length = block_length, sub_block_length
        self._shifted = False
        self._fused = fused_commit
        self._commit_room: CommitRoom | None = None
        self._block_steps = BlockSteps()
        self._runner: ModelRunner | None = None
        # Columns of context scope are read when a row ends, so its last block must be final by
        # then.
        self._yields_final = False
        self._length = 0
        self._step_inputs: DLLMStepInputs | None = None

    @property
    def step_inputs(self) -> DLLMStepInputs:
        assert self._step_inputs is not None, "block_length comes first"
        return self._step_inputs

    def block_length(self, model: ModelConfig) -> int:
        """Return the option `block_length`, or else the length that the model was trained for."""
        length, diffusion = check_length(self._block_length_option, self._sub_block_length, model)
        if self._step_inputs is None:
            self._length, self._commit_room = length, CommitRoom(length)
            self._shifted = diffusion.shifted
            # The commit forward before a block draws the block's first token.
            self._fused = self._fused and not self._shifted
            self._step_inputs = DLLMStepInputs(
                length, diffusion, self._rule, self._sub_block_length
            )
        return length

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {TARGET: ModelRole((self._length,), forward_rows=2 if self._fused else 1)}

    def model_len(self, longest: int, model: ModelConfig) -> int:
        """Round the length down to whole blocks, because a row's last block is denoised as a whole
        even if the row ends within it."""
        length = self.block_length(model)
        if longest < length:
            raise ValueError(
                f"max_model_len is {longest}, less than one block of {length} tokens: raise it"
            )
        return longest - longest % length

    @property
    def prefill_multiple(self) -> int:
        return self._length

    @property
    def least_tokens(self) -> int:
        return 0

    def step_width(self, num_rows: int) -> int:
        return self._length

    def prefill_of(self, seq: Sequence) -> tuple[int, bool]:
        """Let the prefill read the row's whole blocks and yield no token. The remaining known
        tokens begin the first block to denoise."""
        return self.step_inputs.prefilled_tokens(seq.num_tokens), False

    def cache_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """Reserve room to the end of the current block, even if the row ends within it. If blocks
        are yielded one step late, the current block is one block further than the tokens say."""
        blocks = 2 if self._yields_final else 1
        end = (num_tokens + pending) // self._length * self._length + blocks * self._length
        tokens: Ints = np.minimum(end, self.most_cache_tokens(max_tokens))
        return tokens

    def most_cache_tokens(self, max_tokens: Ints) -> Ints:
        tokens: Ints = -(-max_tokens // self._length) * self._length
        return tokens

    def check(self, params: RequestParams, *, replays: bool = False) -> None:
        check_row(params, self._rule, shifted=self._shifted, replays=replays)

    def is_exact(
        self, trajectory: Trajectory, num_prompt_tokens: int, params: RequestParams
    ) -> bool:
        exact = is_exact(trajectory, num_prompt_tokens, self._length)
        return exact and not rule_of(params, self._rule).edits

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        self._runner = runners[TARGET]
        self._yields_final = bool(self._runner.caches.columns)
        if self._runner.states is not None:
            raise ValueError(
                "strategy dllm reads a block several times before its tokens are known, which "
                "the state of recurrent layers does not allow: use a model with attention only"
            )

    def propose(self, batch: DecodeBatch) -> None:
        # A matcher must have committed a block before it reads the next one.
        fused = self._fused and not (self._yields_final and batch.guide is not None)
        self.step_inputs.fuse(self._room(batch.num_rows) if fused else 0)
        if batch.guide is not None:
            self.step_inputs.send_masked()

    def _room(self, rows: int) -> int:
        """Return how many rows to add to the next forward of `rows` rows for complete blocks that
        commit."""
        assert self._runner is not None and self._commit_room is not None
        if self._runner.device.type == "cpu":
            return int(self.step_inputs.complete.sum())
        return self._commit_room.rows(rows, self._runner)

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Learn how many rows complete a block in a step, and count the denoise steps of completed
        blocks."""
        assert self._commit_room is not None
        self._commit_room.observe(step.observed[LACKING])
        self._block_steps.observe(step, current)

    def stats(self) -> Mapping[str, Any]:
        return self._block_steps.stats()

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        return summary_lines(counts, stats, num_tokens)

    def forward(
        self, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        """Run the forward, and compute logits only for the rows' current blocks, not for the blocks
        that commit. The mask token gets no probability: no text contains it, and a position that
        drew it would still be read as masked."""
        assert prefill is None, "prompts are read beside rows of one token only"
        inputs = self.step_inputs.model_inputs
        count = self.step_inputs.blocks.masked.numel()
        hidden = runner.hidden_states(inputs)[:count]
        if self._shifted:
            hidden = hidden.unflatten(0, (-1, self._length)).roll(1, 1).flatten(0, 1)
        slots = inputs.lora_slots_of_tokens
        logits = runner.compute_logits(hidden, None if slots is None else slots[:count])
        logits[:, self.step_inputs.mask_token_id] = -torch.inf
        whole = Logits(logits, logits.shape[1])
        return ModelOutput(whole, self.step_inputs.drawn_positions.flatten(), hidden), None

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """Unmask positions of the rows' blocks.

        The step yields the tokens of the blocks that it completes, without those of the prompt. A
        row that conflicts with its constraint yields the tokens known before the conflict. Other
        rows yield no token. If the model records columns of context scope, a block is yielded one
        step later, by the forward that makes its KV final.
        """
        state = self.step_inputs
        blocks, length = state.blocks, self._length
        decisions = decide_writes(state, output, guide, lambda mask: self._draw(output, mask))
        unmasked, guided, conflicts = (
            decisions.writes.unmasked,
            decisions.guided,
            decisions.conflicts,
        )
        failed = decisions.drawn.failed.view(-1, length)
        broken = (failed & blocks.masked).any(1)
        if self._shifted:
            broken |= failed[:, 0] & blocks.complete
        outcome = state.write(
            decisions.writes,
            decisions.columns(state),
            last_commits=self._fused and not self._yields_final,
        )
        if self._yields_final:
            yielded, outcome = state.final.rows, state.final
            # A forward has then read all known tokens of the block, and every later one reads them,
            # too.
            conflicts = None if conflicts is None else conflicts & ~unmasked.any(1)
        else:
            yielded = outcome.rows & ~broken
        # The tokens that a block yields begin after those of the prompt.
        offsets = torch.arange(length, device=outcome.prompt_tokens.device)
        order = (outcome.prompt_tokens.unsqueeze(1) + offsets).clamp(max=length - 1)
        num_tokens = torch.where(yielded, length - outcome.prompt_tokens, 0)
        if conflicts is not None:
            # A row with a conflict ends with the known tokens at the beginning of its block.
            first = (~blocks.masked | unmasked).cumprod(1).sum(1)
            conflicts = conflicts & ~broken
            num_tokens = torch.where(conflicts, first - blocks.prompt_tokens, num_tokens)
        step = StepOutput(
            num_tokens=num_tokens.int(),
            token_ids=outcome.token_ids.gather(1, order),
            failed=broken,
            columns={name: ordered(v, order) for name, v in outcome.columns.items()},
            observed={
                DENOISED: outcome.denoised,
                ALONE: state.complete,
                LACKING: state.lacking_commit,
            },
            unread_tokens=length,
            conflicts=conflicts,
        )
        ended = broken if conflicts is None else broken | conflicts
        return step.with_counts(
            **count_forwards(
                blocks, outcome, yielded, ended, guided, fused=self._fused, late=self._yields_final
            )
        )

    def _draw(self, output: ModelOutput, mask: TokenMask | None) -> Drawn:
        return draw_blocks(self.step_inputs, output, mask)
