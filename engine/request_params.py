"""The parameters of a request: derives the seed of each sample, and checks before any weights load
that the engine can honour the parameters and columns asked for."""

from __future__ import annotations

from collections import abc
from hashlib import blake2b
from struct import Struct
from typing import TYPE_CHECKING

from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.engine.interface.outputs import OutputColumn
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.pooling import pooled_columns
from batchgen.engine.sampling.sampler_columns import ENTROPY, requested_columns
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_JOB_AND_SAMPLE = Struct("<QQ")
"""The format in which `derive_seed` digests the job's seed and the sample's index: 64 bits each."""


def derive_seed(job_seed: int, row_id: str, sample_index: int) -> int:
    """Return the seed of one sample of one row, in [0, 2**64). It depends on the row's id and not
    on the row's position, so that a row keeps its tokens when other rows are added or dropped."""
    numbers = _JOB_AND_SAMPLE.pack(job_seed % 2**64, sample_index)
    text = row_id.encode("utf-8", "surrogatepass")
    digest = blake2b(numbers + text, digest_size=8, person=b"batchgen.seed").digest()
    return int.from_bytes(digest, "little")


def sample_params(params: RequestParams, row_id: str, sample_index: int) -> RequestParams:
    """Return the parameters of one sample of a row: `params` with the sample's seed."""
    return params.with_seed(derive_seed(params.seed, row_id, sample_index))


def check_params(
    params: RequestParams,
    strategy: Strategy,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    context_columns: abc.Sequence[OutputColumn] = (),
    *,
    replays: bool = False,
) -> None:
    """Check that the engine can honour the parameters of a request. No weights are needed.

    Args:
        context_columns: the columns of context scope that the engine computes.
        replays: whether the request scores a trajectory.

    Raises:
        ValueError: the parameters cannot be honoured; the message names the option.
    """
    options = strategy.decoding
    if params.decoding is not None and not (options and isinstance(params.decoding, options)):
        raise ValueError(
            f"decoding is a {type(params.decoding).__name__}, and strategy {strategy.name} "
            f"takes {'none' if options is None else f'a {options.__name__}'} for a row: leave "
            "it None"
        )
    strategy.check(params, replays=replays)
    _check_columns(params, strategy, config, context_columns)
    if not config.has_logits and params.pooling is None:
        what = "an embedding model" if config.labels is None else "a classifier"
        has = " or ".join(column.name for column in pooled_columns(config))
        raise ValueError(
            f"max_new_tokens is {params.max_new_tokens}, and the model is {what}, which has no "
            f"head for the logits of tokens: ask for the column {has}, with max_new_tokens=0 and "
            "no answer"
        )
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none: remove stop")
    if params.constraint is not None and tokenizer is None:
        raise ValueError("a constraint needs a tokenizer, and the model has none: remove it")
    vocab_size = config.vocab_size
    if params.top_logprobs > vocab_size:
        raise ValueError(
            f"top_logprobs is {params.top_logprobs}, but the vocabulary has {vocab_size}"
        )
    unknown = [i for i in params.stop_token_ids if i >= vocab_size]
    if unknown:
        raise ValueError(f"stop_token_ids {unknown} are not in the vocabulary of {vocab_size} ids")


def _check_columns(
    params: RequestParams,
    strategy: Strategy,
    config: ModelConfig,
    context_columns: abc.Sequence[OutputColumn],
) -> None:
    """Raise ValueError for a column that nothing computes, or that cannot be computed with these
    parameters."""
    pooled = pooled_columns(config)
    declared = (ENTROPY, *strategy.columns, *context_columns, *pooled)
    known = [column.name for column in declared]
    if missing := [name for name in params.columns if name not in known]:
        if missing[0] == CLASS_SCORES:
            raise ValueError(
                f"column {missing[0]} needs a classifier, and the model is "
                f"{config.architecture}: choose a checkpoint of the class "
                "…ForSequenceClassification"
            )
        raise ValueError(
            f"strategy {strategy.name} has no column {missing[0]!r}; it has {known or 'none'}"
        )
    generated = [c.name for c in strategy.columns if c.name in params.columns]
    if generated and not params.max_new_tokens:
        raise ValueError(
            f"column {generated[0]} describes generated tokens, and max_new_tokens is 0: remove it"
        )
    requested_pooled = [c.name for c in pooled if c.name in params.columns]
    if requested_pooled and params.pooling is None:
        raise ValueError(
            f"column {requested_pooled[0]} needs a row that is only read: set max_new_tokens to 0, "
            "leave out the answer and set the pooling"
        )
    describes_tokens = params.logprobs or params.top_logprobs or ENTROPY.name in params.columns
    if params.pooling is not None and describes_tokens:
        raise ValueError(
            "logprobs and entropy describe tokens that are generated or scored, and a row with "
            "pooling has neither: remove them"
        )


def output_columns(
    params: RequestParams,
    strategy: Strategy,
    config: ModelConfig,
    context_columns: abc.Sequence[OutputColumn] = (),
) -> tuple[OutputColumn, ...]:
    """Return the columns that a request with these parameters returns: those of the sampler, of the
    strategy, of the model's layers (`context_columns`) and the pooled ones."""
    declared = (*strategy.columns, *context_columns, *pooled_columns(config))
    requested = (column for column in declared if column.name in params.columns)
    return (*requested_columns(params), *requested)
