"""Block diffusion (SDAR, Cheng et al. 2025): blocks of tokens are generated one after another, and
the tokens of a block in any order."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_runner import ModelOutput, ModelRunner, PrefillInputs
from batchgen.engine.interface.outputs import HostOutput, OutputColumn, RowCount, StepOutput
from batchgen.engine.interface.trajectory import Trajectory
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.guide import Guide
from batchgen.engine.rows.scheduled_batch import DecodeBatch
from batchgen.engine.rows.sequence import TAIL, Sequence
from batchgen.engine.sampling.logits import Logits
from batchgen.engine.sampling.sampler import Drawn, draw_tokens, take_tokens
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.scheduling.admission import Ints
from batchgen.engine.strategy import TARGET, ModelRole, Strategy
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.kernels.sampling.unmask import MAX_BLOCK_LENGTH
from batchgen.strategies.counts import NUM_FORWARDS, tokens_per_forward
from batchgen.strategies.dllm.block_rows import KnownBlocks, Writes
from batchgen.strategies.dllm.commit_room import CommitRoom
from batchgen.strategies.dllm.edits import EDIT_LOG, MOST_EDITS, edit_log
from batchgen.strategies.dllm.guided import Taken, denoise
from batchgen.strategies.dllm.replay import is_exact, next_step
from batchgen.strategies.dllm.rules.named_rules import named_rule, rule_of_row
from batchgen.strategies.dllm.rules.rule import Rule
from batchgen.strategies.dllm.step_inputs import STEP_MAP, DLLMStepInputs

TAIL_COLUMNS = tuple(
    OutputColumn(TAIL + name, np.dtype(np.int32), scope="tail")
    for name in ("token_ids", STEP_MAP.name)
)
"""What the end of the row cut off its last block, which a replay needs."""
NUM_COMMIT_FORWARDS = RowCount(
    "num_commit_forwards", "of those forwards, how many only made KV final"
)
"""Both counts are those of a row for which commits always find room beside denoise steps, if they
may be there at all. So they depend on the row alone."""

_DENOISED = "denoised"
"""The name in `StepOutput.observed` of how many denoise steps the block of each row has had."""
_ALONE = "alone"
"""The name there of which rows' blocks committed in a forward of their own."""
_LACKING = "lacking"
"""The name there of which rows' blocks a step completed without making their KV final."""
_CONFIDENCE = 0.9
"""The confidence threshold of a configuration that says nothing else."""
_COMMITS_ALONE = "commits_alone"
"""The name in `stats` of how often that happened."""
_STEPS_PER_BLOCK = "steps_per_block"
"""The name in `stats` of how often a block took each number of denoise steps."""


class DLLMStrategy(Strategy):
    """Starts with blocks of masked positions and denoises them. Each denoise step draws a token at
    every masked position and keeps some of them. Raises ValueError if an option is out of range or
    does not go with another.

    Args:
        block_length: L, the number of positions of a block. None takes what the model's
            configuration says.
        unmasking: which drawn tokens a step keeps; `strategies/dllm/rules` has a file for each
            rule. A row may have its own in `RequestParams.decoding`.
        confidence_threshold, min_tokens_per_step, denoising_steps, entropy_bound, edit_threshold,
            max_edit_steps: the options of rules, by their names there. None is the rule's default.
        sub_block_length: how many positions a sub-block has, all of which are unmasked before those
            of the next one. None: the whole block is one.
        fused_commit: whether the commit forward of a block may be joined with the first denoise
            step of the next block, which saves forwards. The tokens are the same.
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
            # The configuration has this number for every rule.
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
        self._asked_length, self._sub_block_length = block_length, sub_block_length
        self._shifted = False
        self._fused = fused_commit
        self._commit_room: CommitRoom | None = None
        self._steps_per_block: Counter[int] = Counter()
        self._commits_alone = 0
        self._runner: ModelRunner | None = None
        # Columns of context scope are read when a row ends, so its last block must be final then.
        self._yields_final = False
        self._length = 0
        self._step_inputs: DLLMStepInputs | None = None

    @property
    def step_inputs(self) -> DLLMStepInputs:
        assert self._step_inputs is not None, "block_length comes first"
        return self._step_inputs

    def block_length(self, model: ModelConfig) -> int:
        """The option `block_length`, or else the length that the model was trained for."""
        if model.diffusion is None:
            raise ValueError(
                f"strategy dllm needs a diffusion model, and {model.architecture} predicts next "
                "tokens: use strategy=ar"
            )
        length = self._asked_length or model.diffusion.block_length
        if length is None:
            raise ValueError(
                "block_length is null, and the model does not say for which it was trained: set "
                "it (4 for SDAR-*-Chat, N for SDAR-*-Chat-bN)"
            )
        if self._sub_block_length is not None and length % self._sub_block_length:
            raise ValueError(
                f"sub_block_length is {self._sub_block_length}, and must divide block_length, "
                f"{length}"
            )
        if self._step_inputs is None:
            self._length, self._commit_room = length, CommitRoom(length)
            self._shifted = model.diffusion.shifted
            # The token that begins a block is drawn in the commit forward before.
            self._fused = self._fused and not self._shifted
            self._step_inputs = DLLMStepInputs(
                length, model.diffusion, self._rule, self._sub_block_length
            )
        return length

    @property
    def models(self) -> Mapping[str, ModelRole]:
        return {TARGET: ModelRole((self._length,), forward_rows=2 if self._fused else 1)}

    def model_len(self, longest: int, model: ModelConfig) -> int:
        """The length is cut to whole blocks, because a row's last block is denoised as a whole even
        if the row ends within it."""
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
        """The prefill reads the row's whole blocks and yields no token. The remaining known tokens
        are the beginning of the first block to denoise."""
        return self.step_inputs.prefilled_tokens(seq.num_tokens), False

    def cache_tokens(self, num_tokens: Ints, pending: Ints, width: int, max_tokens: Ints) -> Ints:
        """A row needs room for its current block to the end, even if the row ends within it. If
        blocks are yielded one step late, the current one is one further than the tokens say."""
        blocks = 2 if self._yields_final else 1
        end = (num_tokens + pending) // self._length * self._length + blocks * self._length
        tokens: Ints = np.minimum(end, self.most_cache_tokens(max_tokens))
        return tokens

    def most_cache_tokens(self, max_tokens: Ints) -> Ints:
        tokens: Ints = -(-max_tokens // self._length) * self._length
        return tokens

    def check(self, params: RequestParams, *, replays: bool = False) -> None:
        if params.scores_answer and not replays:
            raise ValueError(
                "max_new_tokens is 0, and strategy dllm cannot score a given answer: a diffusion "
                "model's probability of a token depends on the order in which it unmasks the "
                "others; give that order (prompt.answer_step_map_column), or use a model that "
                "predicts next tokens, with strategy=ar"
            )
        if params.pooling is not None:
            raise ValueError(
                "embedding, class_scores and hidden_states are of a text that is read from left to "
                "right, and the model of strategy dllm sees blocks in both directions: use a model "
                "that predicts next tokens, with strategy=ar"
            )
        if params.has_penalties:
            raise ValueError(
                "penalties count the tokens before a position, and strategy dllm draws tokens "
                "before those are known: set repetition_penalty to 1, presence_penalty and "
                "frequency_penalty to 0"
            )
        rule = params.decoding or self._rule
        assert isinstance(rule, Rule)
        if EDIT_LOG.name in params.columns:
            self._check_log(rule)
        if self._shifted and (rule.edits or params.constraint is not None or replays):
            what = f"unmasking {rule.name}" if rule.edits else "a constraint"
            raise ValueError(
                f"{'a replay' if replays else what} is not supported for a model whose logits are "
                "of the next token, of which a block's first one is drawn with the block before: "
                "use strategy.unmasking=low_confidence_dynamic without a constraint, and generate"
            )

    def _check_log(self, rule: Rule) -> None:
        """Raise ValueError if a row with this rule has no log of edits, or may have too long a
        one."""
        if not rule.edits:
            raise ValueError(
                f"column {EDIT_LOG.name} is of rules that replace tokens, and unmasking "
                f"{rule.name} replaces none: leave it out, or use strategy.unmasking="
                "joint_threshold"
            )
        if rule.cut().edit_steps > MOST_EDITS - MAX_BLOCK_LENGTH:
            raise ValueError(
                f"column {EDIT_LOG.name} has room for {MOST_EDITS} edits of a token: set "
                f"max_edit_steps to {MOST_EDITS - MAX_BLOCK_LENGTH} or less, or leave it out"
            )

    def is_exact(
        self, trajectory: Trajectory, num_prompt_tokens: int, params: RequestParams
    ) -> bool:
        rule = params.decoding or self._rule
        assert isinstance(rule, Rule)
        return is_exact(trajectory, num_prompt_tokens, self._length) and not rule.edits

    def attach(self, runners: Mapping[str, ModelRunner]) -> None:
        self._runner = runners[TARGET]
        self._yields_final = bool(self._runner.caches.columns)
        if self._runner.states is not None:
            raise ValueError(
                "strategy dllm reads a block several times before its tokens are known, and the "
                "state of recurrent layers cannot follow that: use a model with attention only"
            )

    def propose(self, batch: DecodeBatch) -> None:
        # A matcher must have committed a block before it goes on to the next one.
        fused = self._fused and not (self._yields_final and batch.guide is not None)
        self.step_inputs.fuse(self._room(batch.num_rows) if fused else 0)
        if batch.guide is not None:
            self.step_inputs.send_masked()

    def _room(self, rows: int) -> int:
        """How many rows to add to the next forward of `rows` rows for complete blocks that
        commit."""
        assert self._runner is not None and self._commit_room is not None
        if self._runner.device.type == "cpu":
            return int(self.step_inputs.complete.sum())
        return self._commit_room.rows(rows, self._runner)

    def observe(self, step: HostOutput, current: npt.NDArray[np.bool_]) -> None:
        """Learn what share of the rows completes a block in a step, and count how many denoise
        steps the completed blocks took."""
        yielding = step.num_tokens > 0
        assert self._commit_room is not None
        self._commit_room.observe(step.observed[_LACKING])
        self._steps_per_block.update(step.observed[_DENOISED][yielding & current].tolist())
        self._commits_alone += int((step.observed[_ALONE] & current).sum())

    def stats(self) -> Mapping[str, Any]:
        """`steps_per_block`: the number of denoise steps → how many blocks took that many.
        `commits_alone`: how many blocks committed in a forward of their own."""
        return {
            _STEPS_PER_BLOCK: dict(sorted(self._steps_per_block.items())),
            _COMMITS_ALONE: self._commits_alone,
        }

    def summary(
        self, counts: Mapping[str, int], stats: Mapping[str, Any], num_tokens: int
    ) -> list[tuple[str, str]]:
        commits = counts[NUM_COMMIT_FORWARDS.name]
        denoising = counts[NUM_FORWARDS.name] - commits
        lines = tokens_per_forward(counts, num_tokens)
        lines.append(("forwards", f"{denoising:,} to denoise, {commits:,} to commit"))
        if stats:
            lines.append(("steps per block", _shares(stats[_STEPS_PER_BLOCK])))
        return lines

    def forward(
        self, runner: ModelRunner, prefill: PrefillInputs | None
    ) -> tuple[ModelOutput, ModelOutput | None]:
        """Run the forward, and compute logits only for the rows' own blocks and not for the blocks
        that commit beside them. The mask token has no probability: no text contains it, and a
        position that drew it would go on being read as masked."""
        assert prefill is None, "prompts are read beside rows of one token only"
        inputs = self.step_inputs.model_inputs
        count = self.step_inputs.blocks.masked.numel()
        hidden = runner.hidden_states(inputs)[:count]
        if self._shifted:
            hidden = hidden.unflatten(0, (-1, self._length)).roll(1, 1).flatten(0, 1)
        logits = runner.compute_logits(hidden)
        logits[:, self.step_inputs.mask_token_id] = -torch.inf
        whole = Logits(logits, logits.shape[1])
        return ModelOutput(whole, self.step_inputs.drawn_positions.flatten(), hidden), None

    def decide(self, output: ModelOutput, guide: Guide | None) -> StepOutput:
        """Unmask positions of the rows' blocks. The step yields the tokens of the blocks that it
        completes, without those of the prompt, and of rows that conflict with their constraint the
        tokens known before the conflict. Other rows yield no token. If the model records columns of
        context scope, a block's tokens are yielded one step later, by the forward that makes its KV
        final."""
        state = self.step_inputs
        blocks, length = state.blocks, self._length
        conflicts: Tensor | None = None
        guided: Tensor | None = None
        taken: Taken | None = None
        if guide is None:
            drawn = self._draw(output)
            transfer = state.rules.unmasked(state.candidates, blocks.denoised, drawn)
        else:
            drawn, transfer, guided, taken = self._decide_guided(output, guide)
            conflicts = upload(taken.conflicts, torch.bool, transfer.device)
        drawn, transfer = self._replay(output, drawn, transfer)
        failed = drawn.failed.view(-1, length)
        broken = (failed & blocks.masked).any(1)
        if self._shifted:
            broken |= failed[:, 0] & blocks.complete
        columns = {name: v.view(-1, length, *v.shape[1:]) for name, v in drawn.columns.items()}
        step_map = (blocks.steps + 1).unsqueeze(1).expand(-1, length).contiguous()
        columns[STEP_MAP.name] = step_map
        token_ids, edited = drawn.token_ids.view(-1, length), None
        if state.rules.any_edits:
            _, edited = state.edits(drawn)
            if guided is not None and taken is not None:
                own = upload(taken.edited, torch.bool, edited.device)
                edited = torch.where(guided.unsqueeze(1), own, edited)
        writes = Writes(transfer, edited, token_ids)
        if state.logs_edits:
            most = length - 1 + state.rules.most_edit_steps
            columns[EDIT_LOG.name] = edit_log(
                state.columns.get(EDIT_LOG.name), blocks, writes, most
            )
        known = state.write(
            writes,
            columns,
            last_commits=self._fused and not self._yields_final,
        )
        if self._yields_final:
            rows, known = state.final.rows, state.final
            # A forward has then read all that is known of the block, and every later one reads it.
            conflicts = None if conflicts is None else conflicts & ~transfer.any(1)
        else:
            rows = known.rows & ~broken
        # The tokens that a block yields begin behind those of the prompt.
        offsets = torch.arange(length, device=known.prompt_tokens.device)
        order = (known.prompt_tokens.unsqueeze(1) + offsets).clamp(max=length - 1)
        num_tokens = torch.where(rows, length - known.prompt_tokens, 0)
        if conflicts is not None:
            # A conflicting row ends with the known tokens at the beginning of its block.
            first = (~blocks.masked | transfer).cumprod(1).sum(1)
            conflicts = conflicts & ~broken
            num_tokens = torch.where(conflicts, first - blocks.prompt_tokens, num_tokens)
        step = StepOutput(
            num_tokens=num_tokens.int(),
            token_ids=known.token_ids.gather(1, order),
            failed=broken,
            columns={name: _ordered(v, order) for name, v in known.columns.items()},
            observed={
                _DENOISED: known.denoised,
                _ALONE: state.complete,
                _LACKING: state.lacking_commit,
            },
            unread_tokens=length,
            conflicts=conflicts,
        )
        ended = broken if conflicts is None else broken | conflicts
        return step.with_counts(**self._counts(known, rows, ended, guided))

    def _counts(
        self, decided: KnownBlocks, yielded: Tensor, ended: Tensor, guided: Tensor | None
    ) -> dict[str, Tensor]:
        """Count the forwards of the blocks that are `yielded` [B] bool, and of those in which rows
        have `ended` [B] bool. A block's denoise steps count once it is there, so that those which
        a preemption undid do not. `guided` [B] bool are the rows with a constraint."""
        blocks = self.step_inputs.blocks
        forwards = torch.where(yielded, decided.denoised, 0)
        forwards += torch.where(ended, blocks.denoised + 1, 0)
        if self._yields_final:
            # Its last block is final in the first denoise step of the next, or alone.
            first, last = (
                decided.starts == each for each in (blocks.first_starts, blocks.last_starts)
            )
            alone = torch.ones_like(yielded) if not self._fused else guided
            extra, commits = yielded & first, yielded & last
            if alone is not None:
                extra, commits = (torch.where(alone, yielded, each) for each in (extra, commits))
        elif self._fused:
            extra = commits = torch.zeros_like(yielded)
        else:
            # Its last block needs no final keys and values.
            extra = commits = (yielded | ended) & (blocks.starts > blocks.first_starts)
        return {
            NUM_FORWARDS.name: forwards.int() + extra,
            NUM_COMMIT_FORWARDS.name: commits.int(),
        }

    def _draw(self, output: ModelOutput, mask: TokenMask | None = None) -> Drawn:
        """Draw a token at each of the B · L positions of the blocks, under the mask if there is
        one. The random numbers of a position differ from one denoise step to the next."""
        state = self.step_inputs
        return draw_tokens(
            output.logits,
            state.repeated,
            output.positions,
            state.draws.flatten(),
            confidence=state.rules.any_confidence,
            entropy=state.rules.any_entropy,
            mask=mask,
        )

    def _replay(self, output: ModelOutput, drawn: Drawn, transfer: Tensor) -> tuple[Drawn, Tensor]:
        """Put the tokens of replayed rows into a draw, and what the step unmasks of them into
        `transfer` [B, L] bool."""
        state = self.step_inputs
        if (found := state.replayed()) is None:
            return drawn, transfer
        replays, token_ids, steps = found
        rows = replays.rows
        at = rows.repeat_interleave(self._length)
        taken = take_tokens(
            output.logits,
            state.repeated,
            output.positions,
            torch.where(at, token_ids.flatten(), drawn.token_ids),
        )
        columns = {
            name: torch.where(at.view(-1, *[1] * (v.dim() - 1)), taken.columns[name], v)
            for name, v in drawn.columns.items()
        }
        transfer = torch.where(rows.unsqueeze(1), next_step(state.blocks.masked, steps), transfer)
        return drawn._replace(token_ids=taken.token_ids, columns=columns), transfer

    def _decide_guided(
        self, output: ModelOutput, guide: Guide
    ) -> tuple[Drawn, Tensor, Tensor, Taken]:
        """Decide a denoise step of a batch with constrained rows. Returns the drawn tokens; [B, L]
        bool, the positions that are unmasked; [B] bool, the rows with constraints; and what is
        taken of them."""
        state, device = self.step_inputs, output.logits.device
        rules, of_step = state.rules, (state.candidates, state.blocks.denoised)
        drawn, taken = denoise(
            guide,
            state.masked_on_host,
            output.logits,
            lambda mask: self._draw(output, mask),
            lambda drawn: rules.permitted(*of_step, drawn),
            [row for row, _ in guide.matchers if rules.rules[row].edits],
            state.edits,
        )
        guided = upload(taken.rows, torch.bool, device)
        transfer = torch.where(
            guided.unsqueeze(1),
            upload(taken.places, torch.bool, device),
            rules.unmasked(*of_step, drawn),
        )
        return drawn, transfer, guided, taken


def _shares(numbers: Mapping[int, int]) -> str:
    """Write how often each number occurred as shares of all, such as "1: 25.0%, 2: 75.0%"."""
    total = sum(numbers.values())
    return ", ".join(f"{n}: {count / total:.1%}" for n, count in numbers.items()) or "none"


def _ordered(values: Tensor, order: Tensor) -> Tensor:
    """Reorder values [B, L, *tail] along the second axis: entry i of row b is the value at order[b,
    i], where order is [B, L] int64."""
    index = order.view(*order.shape, *[1] * (values.dim() - 2)).expand_as(values)
    return values.gather(1, index)
