"""Checks for options of the strategy, and of rows, that block diffusion cannot honour."""

from __future__ import annotations

from batchgen.engine.models.model_config import Diffusion, ModelConfig
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.sampling.unmask import MAX_BLOCK_LENGTH
from batchgen.strategies.dllm.edits import EDIT_LOG, MOST_EDITS
from batchgen.strategies.dllm.rules.rule import Rule


def check_length(
    block_length: int | None, sub_block_length: int | None, model: ModelConfig
) -> tuple[int, Diffusion]:
    """Return the block length, and the model's diffusion options. Raises ValueError if the model is
    not a diffusion model, if neither the option nor the model has a block length, or if sub-blocks
    do not divide it."""
    if model.diffusion is None:
        what, other = "predicts next tokens", "ar"
        if model.canvas_length is not None:
            what, other = "denoises canvases of random tokens", "canvas"
        raise ValueError(
            f"strategy dllm needs a diffusion model that fills in masks, and {model.architecture} "
            f"{what}: use strategy={other}"
        )
    length = block_length or model.diffusion.block_length
    if length is None:
        raise ValueError(
            "block_length is null, and the model does not say for which it was trained: set "
            "it (4 for SDAR-*-Chat, N for SDAR-*-Chat-bN)"
        )
    if sub_block_length is not None and length % sub_block_length:
        raise ValueError(
            f"sub_block_length is {sub_block_length}, and must divide block_length, {length}"
        )
    return length, model.diffusion


def rule_of(params: RequestParams, default: Rule) -> Rule:
    """Return the row's own unmasking rule, or else the default."""
    rule = params.decoding or default
    assert isinstance(rule, Rule)
    return rule


def check_row(params: RequestParams, default: Rule, *, shifted: bool, replays: bool) -> None:
    """Raise ValueError if a row asks for something that cannot be honoured.

    Args:
        default: the rule of rows that bring none.
        shifted: whether the model's logits are for the next token.
        replays: whether the row replays a trajectory.
    """
    rule = rule_of(params, default)
    if params.scores_answer and not replays:
        raise ValueError(
            "max_new_tokens is 0, and strategy dllm cannot score a given answer: a diffusion "
            "model's probability of a token depends on the order in which it unmasks the "
            "others; give that order (prompt.answer_step_map_column), or use a model that "
            "predicts next tokens, with strategy=ar"
        )
    if params.pooling is not None:
        raise ValueError(
            "embedding, class_scores and hidden_states need a model that reads from left to "
            "right, and the model of strategy dllm sees blocks in both directions: use a model "
            "that predicts next tokens, with strategy=ar"
        )
    if params.has_penalties:
        raise ValueError(
            "penalties count the tokens before a position, and strategy dllm draws tokens "
            "before those are known: set repetition_penalty to 1, presence_penalty and "
            "frequency_penalty to 0"
        )
    if EDIT_LOG.name in params.columns:
        _check_log(rule)
    if shifted and (rule.edits or params.constraint is not None or replays):
        what = f"unmasking {rule.name}" if rule.edits else "a constraint"
        raise ValueError(
            f"{'a replay' if replays else what} is not supported for a model whose logits are of "
            "the next token, because the first token of a block is then drawn with the block "
            "before it: generate with strategy.unmasking=low_confidence_dynamic and without a "
            "constraint"
        )


def _check_log(rule: Rule) -> None:
    """Raise ValueError if a row with this rule has no log of edits, or if the log could be too
    long."""
    if not rule.edits:
        raise ValueError(
            f"column {EDIT_LOG.name} needs a rule that replaces tokens, and unmasking "
            f"{rule.name} replaces none: leave it out, or use strategy.unmasking=joint_threshold"
        )
    if rule.cut().edit_steps > MOST_EDITS - MAX_BLOCK_LENGTH:
        raise ValueError(
            f"column {EDIT_LOG.name} has room for {MOST_EDITS} edits of a token: set "
            f"max_edit_steps to {MOST_EDITS - MAX_BLOCK_LENGTH} or less, or leave it out"
        )
