"""Decides what a denoise step draws at the positions of the rows' blocks, and which drawn tokens
are written. `DLLMStrategy.decide` calls `decide_writes`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from batchgen.engine.device.transfer import upload
from batchgen.engine.execution.model_runner import ModelOutput
from batchgen.engine.rows.guide import Guide
from batchgen.engine.sampling.sampler import Drawn, draw_tokens, take_tokens
from batchgen.kernels.sampling.token_mask import TokenMask
from batchgen.strategies.blocks import STEP_MAP
from batchgen.strategies.dllm.block_rows import Writes
from batchgen.strategies.dllm.edits import EDIT_LOG, edit_log
from batchgen.strategies.dllm.guided import denoise
from batchgen.strategies.dllm.replay import next_step
from batchgen.strategies.dllm.step_inputs import DLLMStepInputs

Draw = Callable[[TokenMask | None], Drawn]
"""Draws a token at each of the B · L positions of the blocks, under a mask if there is one."""


@dataclass(frozen=True)
class DenoiseStep:
    """The decisions of one step for the blocks of B rows with L positions each."""

    drawn: Drawn  # the tokens of the B · L positions; in rows that replay, the trajectory's
    writes: Writes  # the tokens to write
    guided: Tensor | None  # [B] bool, the rows with a constraint; None if no row has one
    conflicts: Tensor | None  # [B] bool, the rows that conflict with it; None if no row has one

    def columns(self, state: DLLMStepInputs) -> dict[str, Tensor]:
        """Return the output columns of the drawn tokens, [B, L, *tail] each, by name."""
        blocks = state.blocks
        rows, length = blocks.masked.shape
        columns = {
            name: values.view(rows, length, *values.shape[1:])
            for name, values in self.drawn.columns.items()
        }
        columns[STEP_MAP.name] = (blocks.steps + 1).unsqueeze(1).expand(-1, length).contiguous()
        if state.logs_edits:
            limit = length - 1 + state.rules.most_edit_steps
            old = state.columns.get(EDIT_LOG.name)
            columns[EDIT_LOG.name] = edit_log(old, blocks, self.writes, limit)
        return columns


def draw_blocks(state: DLLMStepInputs, output: ModelOutput, mask: TokenMask | None) -> Drawn:
    """Draw a token at each position of the rows' blocks, under the mask if there is one. The random
    numbers of a position differ between denoise steps."""
    return draw_tokens(
        output.logits,
        state.repeated,
        output.positions,
        state.draws.flatten(),
        confidence=state.rules.any_confidence,
        entropy=state.rules.any_entropy,
        mask=mask,
    )


def decide_writes(
    state: DLLMStepInputs, output: ModelOutput, guide: Guide | None, draw: Draw
) -> DenoiseStep:
    """Draw tokens, and decide where they are written: by the rows' rules, their constraints, or the
    trajectories that they replay."""
    rules, step_state = state.rules, (state.candidates, state.blocks.denoised)
    guided = conflicts = guided_edits = None
    if guide is None:
        drawn = draw(None)
        unmasked = rules.unmasked(*step_state, drawn)
    else:
        drawn, decisions = denoise(
            guide,
            state.masked_on_host,
            output.logits,
            draw,
            permit=lambda drawn: rules.permitted(*step_state, drawn),
            editing=[row for row, _ in guide.matchers if rules.rules[row].edits],
            edit=state.edits,
        )
        guided, guided_unmasked, guided_edits, conflicts = (
            upload(each, torch.bool, output.logits.device)
            for each in (
                decisions.rows,
                decisions.unmasks,
                decisions.edited,
                decisions.conflicts,
            )
        )
        unmasked = torch.where(
            guided.unsqueeze(1), guided_unmasked, rules.unmasked(*step_state, drawn)
        )
    drawn, unmasked = _replay(state, output, drawn, unmasked)
    edited: Tensor | None = None
    if rules.any_edits:
        _, edited = state.edits(drawn)
        if guided is not None and guided_edits is not None:
            edited = torch.where(guided.unsqueeze(1), guided_edits, edited)
    writes = Writes(unmasked, edited, drawn.token_ids.view(unmasked.shape))
    return DenoiseStep(drawn, writes, guided, conflicts)


def _replay(
    state: DLLMStepInputs, output: ModelOutput, drawn: Drawn, unmasked: Tensor
) -> tuple[Drawn, Tensor]:
    """Replace the drawn tokens of rows that replay by those of their trajectories, and add what the
    step unmasks in them to `unmasked` [B, L] bool."""
    if (replayed := state.replayed()) is None:
        return drawn, unmasked
    replays, token_ids, steps = replayed
    rows = replays.rows
    is_replayed = rows.repeat_interleave(unmasked.shape[1])
    scored = take_tokens(
        output.logits,
        state.repeated,
        output.positions,
        torch.where(is_replayed, token_ids.flatten(), drawn.token_ids),
    )
    columns = {
        name: torch.where(is_replayed.view(-1, *[1] * (v.dim() - 1)), scored.columns[name], v)
        for name, v in drawn.columns.items()
    }
    unmasked = torch.where(rows.unsqueeze(1), next_step(state.blocks.masked, steps), unmasked)
    return drawn._replace(token_ids=scored.token_ids, columns=columns), unmasked


def ordered(values: Tensor, order: Tensor) -> Tensor:
    """Reorder values [B, L, *tail] along the second axis: entry i of row b becomes the value at
    order[b, i]. `order` is [B, L] int64."""
    index = order.view(*order.shape, *[1] * (values.dim() - 2)).expand_as(values)
    return values.gather(1, index)
