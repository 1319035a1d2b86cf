"""Checks and prepares what the answers of a job consist of: output columns and constraints."""

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
"""The tokens of a row, prompt included, for which shard sizes are estimated in a warning."""
_LARGE_SHARD = 2**31
"""The bytes from which a shard counts as large."""


def select_columns(columns: Sequence[OutputColumn], names: Collection[str]) -> list[OutputColumn]:
    """The columns with one of these names."""
    return [column for column in columns if column.name in names]


def check_answer_columns(
    columns: tuple[str, ...],
    strategy: Strategy,
    of_model: Sequence[OutputColumn],
    architecture: str,
) -> None:
    """Raise ConfigError for columns that neither the strategy nor the model can produce."""
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
    """The warning that hidden states will make the shards huge; None if they will not,
    with rows of a few hundred tokens."""
    hidden = [column for column in columns if column.name == HIDDEN_STATES]
    of_token = sum(column.dtype.itemsize * math.prod(column.tail_shape) for column in hidden)
    rows = config.output.rows_per_shard * config.sampling.most_samples
    whole = of_token * rows * _USUAL_TOKENS
    if whole <= _LARGE_SHARD:
        return None
    return (
        f"{HIDDEN_STATES} takes {size_text(of_token)} a token, so {rows:,} answers of "
        f"{_USUAL_TOKENS} tokens make a shard of {size_text(whole)}, which memory holds: lower "
        "output.rows_per_shard, or ask for fewer output.hidden_layers; batchgen plan tells the size"
    )


def check_parsed(config: JobConfig, tokenizer: PreTrainedTokenizerBase | None) -> None:
    """Check that `parsed` can find `start_after`, which texts do not show if it has special
    tokens."""
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
    """The parameters to check before the job starts: with a constraint if rows can have one of
    their own, since strategies refuse more options for such rows."""
    if params.constraint is None and not isinstance(config.constraint, NoConstraintConfig):
        return dataclasses.replace(params, constraint=Constraint.make("json", None))
    return params


def constraint_compiler(
    config: JobConfig, constraint: Constraint | None, model: OpenedModel
) -> GrammarCompiler | None:
    """The compiler for the rows' constraints, which has compiled that of the job; None if there are
    none, or if only single rows would need one that the model cannot have."""
    if isinstance(config.constraint, NoConstraintConfig):
        with suppress(ValueError):
            return None if config.sampling.column is None else model.grammar_compiler()
        return None
    with mistakes_in("constraint"):
        compiler = model.grammar_compiler()
        if constraint is not None:
            compiler.compile(constraint)
    return compiler
