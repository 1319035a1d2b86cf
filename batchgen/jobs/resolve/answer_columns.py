"""Checks the output columns and constraints of a job when it is opened, and makes the compiler of
constraints. `open_job.py` calls these functions."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Sequence
from contextlib import suppress

from transformers import PreTrainedTokenizerBase

from batchgen.config.compose.experiments import choices_with
from batchgen.config.groups.constraint_config import NoConstraintConfig
from batchgen.config.groups.job_config import COMMON_COLUMNS, PARSED, JobConfig
from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.hidden_columns import CLASS_SCORES, HIDDEN_STATES
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.rows.stopping import decode
from batchgen.engine.sampling.sampler_columns import ENTROPY
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.inputs.model.open_model import OpenedModel
from batchgen.util.errors import ConfigError, mistakes_in
from batchgen.util.text.text_table import size_text

_USUAL_TOKENS = 500
"""The tokens of a row, prompt included, that the estimate of a shard's size takes."""
_LARGE_SHARD = 2**31
"""The bytes from which on a shard counts as large."""


def select_columns(columns: Sequence[OutputColumn], names: Collection[str]) -> list[OutputColumn]:
    """The columns whose name is one of `names`."""
    return [column for column in columns if column.name in names]


def check_answer_columns(
    columns: tuple[str, ...],
    strategy: Strategy,
    of_model: Sequence[OutputColumn],
    architecture: str,
) -> None:
    """Check that the strategy or the model can produce each of the output columns.

    Args:
        columns: the names that the job asks for.
        of_model: the columns that the model declares.
        architecture: the model's class, for the message.

    Raises:
        ConfigError: neither of them produces a column.
    """
    declared = (ENTROPY, *strategy.columns, *of_model)
    known = [*COMMON_COLUMNS, *(column.name for column in declared)]
    for name in columns:
        if name == CLASS_SCORES and name not in known:
            raise ConfigError(
                f"output.columns: {name} comes from classifiers and reward models, and this model "
                f"({architecture}) is neither: use a checkpoint of the class "
                "…ForSequenceClassification, or constraint.scores for probabilities of choices"
            )
        if name == ROUTED_EXPERTS and name not in known:
            raise ConfigError(
                f"output.columns: {name} says which experts each token went through, and this "
                f"model ({architecture}) has no layers with experts: leave the column out"
            )
        if name not in known:
            others = ", ".join(f"strategy={other}" for other in choices_with(name))
            raise ConfigError(
                f"output.columns has no column {name!r} with strategy {strategy.name}: "
                + (f"it comes with {others}; " if others else "")
                + f"choose among {', '.join(known)}"
            )


def large_shards(config: JobConfig, columns: Sequence[OutputColumn]) -> str | None:
    """The warning that hidden states will make shards of more than 2 GiB; None if they will not."""
    hidden = [column for column in columns if column.name == HIDDEN_STATES]
    token_bytes = sum(column.dtype.itemsize * math.prod(column.tail_shape) for column in hidden)
    rows = config.output.rows_per_shard * config.sampling.most_samples
    shard_bytes = token_bytes * rows * _USUAL_TOKENS
    if shard_bytes <= _LARGE_SHARD:
        return None
    return (
        f"{HIDDEN_STATES} takes {size_text(token_bytes)} a token, so {rows:,} answers of "
        f"{_USUAL_TOKENS} tokens make a shard of {size_text(shard_bytes)}, which memory holds: "
        "lower output.rows_per_shard, or ask for fewer output.hidden_layers; batchgen plan shows "
        "the size"
    )


def check_parsed(config: JobConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that the column `parsed` can find `constraint.start_after` in the text of an answer.

    Raises:
        ConfigError: the marker has special tokens, which texts do not show.
    """
    if PARSED not in config.output.columns or isinstance(config.constraint, NoConstraintConfig):
        return
    marker = config.constraint.start_after
    if marker is None or tokenizer is None or config.output.reasoning_end is not None:
        return
    if marker not in decode(tokenizer, list(tokenizer.encode(marker, add_special_tokens=False))):
        raise ConfigError(
            f"output.columns: {PARSED} needs to find constraint.start_after in the text, and "
            f"{marker!r} has a special token of the model, which texts do not show: leave the "
            "column out, or choose a marker of ordinary text"
        )


def strictest_params(config: JobConfig, params: RequestParams) -> RequestParams:
    """The sampling parameters to check before the job starts.

    If rows can have constraints, these parameters have one, because strategies refuse more options
    for such rows.
    """
    if params.constraint is None and not isinstance(config.constraint, NoConstraintConfig):
        return dataclasses.replace(params, constraint=Constraint.make("json", None))
    return params


def constraint_compiler(
    config: JobConfig, constraint: Constraint | None, model: OpenedModel
) -> GrammarCompiler | None:
    """The compiler of the rows' constraints, which has already compiled the job's constraint.

    Returns:
        None if no row has a constraint, or if the model cannot have a compiler and only single rows
        might need it.

    Raises:
        ConfigError: the job's constraint cannot be enforced.
    """
    if isinstance(config.constraint, NoConstraintConfig):
        with suppress(ValueError):
            return None if config.sampling.column is None else model.grammar_compiler()
        return None
    with mistakes_in("constraint"):
        compiler = model.grammar_compiler()
        if constraint is not None:
            compiler.compile(constraint)
    return compiler
