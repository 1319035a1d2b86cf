"""Turns requests into the rows of the engine, and rows that have ended into finished requests."""

from __future__ import annotations

from collections import abc
from collections.abc import Hashable
from dataclasses import replace
from hashlib import blake2b
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from batchgen.engine.interface.hidden_columns import CLASS_SCORES
from batchgen.engine.interface.outputs import Begun, OutputColumn, RequestError, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer, Trajectory, answer_ids
from batchgen.engine.lora.layer_lora import LoRAState
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.rows.pooling import pooled_columns
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stopping import IncrementalDecoder, StopRule, decode
from batchgen.engine.sampling.sampler import ENTROPY, of_answer, requested_columns
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.engine.vision.image import Image
from batchgen.engine.vision.image_span import ImageRules, ImageSpan, find_spans

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def derive_seed(job_seed: int, row_id: str, sample_index: int) -> int:
    """The seed of one sample of one row, in [0, 2**64): different for each, equal everywhere. It
    depends on the row's id and not on its position, so that a row keeps its tokens when others are
    added or dropped."""
    digest = blake2b(digest_size=8, person=b"batchgen.seed")
    digest.update((job_seed % 2**64).to_bytes(8, "little"))
    digest.update(sample_index.to_bytes(8, "little"))
    digest.update(row_id.encode("utf-8", "surrogatepass"))
    return int.from_bytes(digest.digest(), "little")


def sample_params(
    params: RequestParams, row_id: str, sample_index: int, **changes: Any
) -> RequestParams:
    """The parameters of one sample of a row: those of all rows with the sample's own seed, and with
    what the row has of its own (`changes`), such as a constraint."""
    seed = derive_seed(params.seed, row_id, sample_index)
    return replace(params, seed=seed, **changes) if changes else params.with_seed(seed)


def check_params(
    params: RequestParams,
    strategy: Strategy,
    config: ModelConfig,
    tokenizer: PreTrainedTokenizerBase | None,
    context_columns: abc.Sequence[OutputColumn] = (),
    *,
    replays: bool = False,
) -> None:
    """Check that the engine can honour sampling parameters, without any weights. Raises ValueError
    if the parameters cannot be honoured; the message names the option. If an answer is scored,
    `replays` says whether it is a trajectory."""
    own = strategy.decoding
    if params.decoding is not None and not (own and isinstance(params.decoding, own)):
        raise ValueError(
            f"decoding is a {type(params.decoding).__name__}, and strategy {strategy.name} "
            f"takes {'none' if own is None else f'a {own.__name__}'} for a row: leave it None"
        )
    strategy.check(params, replays=replays)
    _check_columns(params, strategy, config, context_columns)
    if not config.has_logits and params.pooling is None:
        what = "an embedding model" if config.labels is None else "a classifier"
        has = " or ".join(column.name for column in pooled_columns(config))
        raise ValueError(
            f"max_new_tokens is {params.max_new_tokens}, and the model is {what}, which has no "
            f"layer for logits of tokens: ask for the column {has}, with max_new_tokens=0 and no "
            "answer"
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
    """Raise ValueError for a column that nothing computes, or not with these parameters."""
    pooled = pooled_columns(config)
    declared = (ENTROPY, *strategy.columns, *context_columns, *pooled)
    known = [column.name for column in declared]
    if missing := [name for name in params.columns if name not in known]:
        if missing[0] == CLASS_SCORES:
            raise ValueError(
                f"column {missing[0]} is of a classifier, and the model is {config.architecture}: "
                "choose a checkpoint of the class …ForSequenceClassification"
            )
        raise ValueError(
            f"strategy {strategy.name} has no column {missing[0]!r}; it has {known or 'none'}"
        )
    generated = [c.name for c in strategy.columns if c.name in params.columns]
    if generated and not params.max_new_tokens:
        raise ValueError(
            f"column {generated[0]} is of generated tokens, and max_new_tokens is 0: remove it"
        )
    read = [c.name for c in pooled if c.name in params.columns]
    if read and params.pooling is None:
        raise ValueError(
            f"column {read[0]} is of a row that is only read: set max_new_tokens to 0, give no "
            "answer and say the pooling"
        )
    of_tokens = params.logprobs or params.top_logprobs or ENTROPY.name in params.columns
    if params.pooling is not None and of_tokens:
        raise ValueError(
            "logprobs and entropy are of tokens that are generated or given as an answer, and a "
            "row with pooling has neither: remove them"
        )


def output_columns(
    params: RequestParams,
    strategy: Strategy,
    config: ModelConfig,
    context_columns: abc.Sequence[OutputColumn] = (),
) -> tuple[OutputColumn, ...]:
    """Return the columns that a request with these parameters returns: from the sampler, from the
    strategy, from the model's layers (`context_columns`), and what is pooled of them."""
    declared = (*strategy.columns, *context_columns, *pooled_columns(config))
    own = (column for column in declared if column.name in params.columns)
    return (*requested_columns(params), *own)


_ANSWER_OR_TOKENS = (
    "an answer was given, and max_new_tokens is not 0 or the row is only read: a row does one of "
    "the three, so set max_new_tokens to 0 without pooling, or leave the answer out",
    "max_new_tokens is 0, and no answer was given that could be scored: give an answer (in "
    "Python with LLM.score), or set max_new_tokens to 1 or more",
)


class ImageLimits(NamedTuple):
    """How prompts hold images, and the most tokens that one may take."""

    rules: ImageRules
    image_tokens: int


class Requests:
    """Checks requests and makes rows of them, and makes finished requests of rows.

    Args:
        tokenizer: decodes the output to text; None leaves texts empty and refuses stop strings and
            constraints.
        images: how prompts hold images; None if the model reads none.
        lora: the adapters that requests may ask for; None for a model without any.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: tuple[int, ...],
        strategy: Strategy,
        *,
        config: ModelConfig,
        max_model_len: int,
        cache_capacity: int,
        context_columns: abc.Sequence[OutputColumn] = (),
        images: ImageLimits | None = None,
        lora: LoRAState | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._strategy = strategy
        self._config, self._vocab_size = config, config.vocab_size
        self._max_model_len = max_model_len
        self._cache_capacity = cache_capacity
        self._images = images
        numbers: dict[str | None, int] = {} if lora is None else lora.numbers
        self._adapters = {None: 0, **numbers}
        self._context_columns = tuple(context_columns)
        self._eos = {token_id: self._token_text(token_id) for token_id in eos_token_ids}

    def sequence(
        self,
        request_id: Hashable,
        prompt: list[int],
        params: RequestParams,
        to_score: GivenAnswer | None = None,
        images: abc.Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> Sequence:
        """Make the row of a request, whose answer is scored if one is `to_score`, and whose prompt
        has these `images`. It goes on from what was `begun`, if it can.

        Raises:
            RequestError: the request can never be served; its `type` says why.
            ValueError: the parameters cannot be honoured.
        """
        trajectory = to_score if isinstance(to_score, Trajectory) else None
        check_params(
            params,
            self._strategy,
            self._config,
            self._tokenizer,
            self._context_columns,
            replays=trajectory is not None,
        )
        answer = None if to_score is None else answer_ids(to_score)
        if (answer is not None) != params.scores_answer:
            raise ValueError(_ANSWER_OR_TOKENS[answer is None])
        adapter = self._adapter(params.lora)
        self._check_prompt(prompt, answer, params)
        spans = self._spans(prompt, images, answer)
        rule = self._stop_rule(prompt, params)
        if params.constraint is not None and not rule.stop_ids:
            raise ValueError(
                "a constrained row ends with EOS or a stop id, and this one has neither: set "
                "ignore_eos to false, or give stop_token_ids"
            )
        known = answer or []
        if trajectory is not None:
            # The row yields its tokens step by step, and `output` makes an answer of them.
            self._check_trajectory(trajectory, len(prompt), params)
            params = replace(params, max_new_tokens=len(trajectory))
            rule, known = StopRule({}, (), 0, len(trajectory)), []
        columns = output_columns(params, self._strategy, self._config, self._context_columns)
        never = () if self._images is None else self._images.rules.never_sampled
        seq = Sequence(
            request_id, prompt + known, params, rule, columns, len(known), spans, never, adapter,
            trajectory,
        )  # fmt: skip
        if params.pooling is not None:
            seq.num_pooled_tokens = 1 if params.pooling == "last" else len(prompt)
        if begun is not None and self._can_go_on(seq, begun):
            seq.go_on_from(begun)
        return seq

    def _check_trajectory(
        self, trajectory: Trajectory, num_prompt_tokens: int, params: RequestParams
    ) -> None:
        """Raise RequestError if no row can have had this trajectory."""
        bad = [i for i in trajectory.all_token_ids if not 0 <= i < self._vocab_size]
        if bad:
            raise RequestError("bad_token_ids", _not_in_vocabulary("tail", bad, self._vocab_size))
        self._strategy.is_exact(trajectory, num_prompt_tokens, params)

    def _can_go_on(self, seq: Sequence, begun: Begun) -> bool:
        """Whether a new row can have these tokens and go on behind them, with all its columns. Its
        text is then known to its stop rule."""
        ids, rule = begun.token_ids, seq.stop
        if not 0 < len(ids) < rule.max_new_tokens:
            return False
        if min(ids) < 0 or max(ids) >= self._vocab_size:
            return False
        if not rule.stop_ids.keys().isdisjoint(ids[max(rule.min_new_tokens - 1, 0) :]):
            return False
        for column in seq.requested_columns:
            if column.scope == "tail":
                continue
            values, known = begun.columns.get(column.name), len(ids)
            if column.scope == "context":
                known += seq.num_prompt_tokens - 1
            if values is None or values.shape != (known, *column.tail_shape):
                return False
        if rule.strings and rule.find_string(ids, 0) is not None:
            seq.stop = self._stop_rule(seq.token_ids, seq.params)
            return False
        return True

    def _adapter(self, name: str | None) -> int:
        """Return the number of an adapter. Raises RequestError if there is none of this name."""
        if name not in self._adapters:
            known = ", ".join(repr(known) for known in self._adapters if known is not None)
            raise RequestError(
                "unknown_adapter",
                f"there is no adapter {name!r}: "
                + (f"choose among {known}" if known else "the engine was made without adapters"),
            )
        return self._adapters[name]

    def _spans(
        self, prompt: list[int], images: abc.Sequence[Image], answer: list[int] | None
    ) -> tuple[ImageSpan, ...]:
        """Find a prompt's images. Raises RequestError if they do not fit the prompt or engine."""
        if self._images is None:
            if images:
                raise RequestError(
                    "images_unsupported",
                    "the prompt has images, and the model reads none: choose a model that does",
                )
            return ()
        rules, most = self._images
        try:
            spans = find_spans(prompt, images, rules)
        except ValueError as error:
            raise RequestError("image_mismatch", str(error)) from error
        if rules.image_token_id in (answer or ()):
            raise RequestError("image_mismatch", "the answer has image tokens, which have no image")
        for number, span in enumerate(spans, 1):
            if span.num_tokens > most:
                raise RequestError(
                    "image_too_large",
                    f"image {number} takes {span.num_tokens:,} tokens, and image_tokens is "
                    f"{most:,}: scale it down, or raise image_tokens",
                )
        return spans

    def output(self, seq: Sequence) -> RequestOutput:
        """Make the finished request of a row that has ended."""
        assert seq.finish_reason is not None
        token_ids = seq.token_ids[seq.num_prompt_tokens :]
        if seq.trajectory is not None:
            return self._replayed(seq)
        if seq.stop.text_before_stop is not None:
            text = seq.stop.text_before_stop
        elif self._tokenizer is None:
            text = ""
        else:
            # A stop id ends the row and is not part of its text.
            shown = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
            text = decode(self._tokenizer, shown)
        return RequestOutput(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.answer_start],
            token_ids=token_ids,
            text=text,
            finish_reason=seq.finish_reason,
            stop=seq.stop_text,
            error=seq.error,
            columns=_columns(seq),
            counts={count.name: seq.counts.get(count.name, 0) for count in self._strategy.counts},
            num_cached_tokens=seq.num_cached_tokens,
            num_preemptions=seq.num_preemptions,
            constraint_satisfied=(
                None if seq.params.constraint is None else seq.constraint_satisfied
            ),
            answer_token_ids=(seq.token_ids[seq.answer_start :] if seq.num_answer_tokens else None),
        )

    def _replayed(self, seq: Sequence) -> RequestOutput:
        """Make the finished request of a row that has replayed a trajectory."""
        assert seq.trajectory is not None and seq.finish_reason in ("length", "error")
        num_prompt = seq.num_prompt_tokens
        is_exact = self._strategy.is_exact(seq.trajectory, num_prompt, seq.params)
        return RequestOutput(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=[],
            text="",
            finish_reason="scored" if seq.error is None else "error",
            error=seq.error,
            columns=_columns(seq),
            counts={count.name: seq.counts.get(count.name, 0) for count in self._strategy.counts},
            num_cached_tokens=seq.num_cached_tokens,
            num_preemptions=seq.num_preemptions,
            answer_token_ids=list(seq.trajectory.token_ids),
            replay_exact=is_exact and seq.trajectory.same_distribution,
        )

    def _check_prompt(
        self, prompt: list[int], answer: list[int] | None, params: RequestParams
    ) -> None:
        """Raise a RequestError if a prompt, or the answer behind it, can never be served."""
        if not prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        if answer is not None and not answer:
            raise RequestError("empty_answer", "the answer has no tokens")
        known = [*prompt, *(answer or ())]
        bad = [i for i in known if not 0 <= i < self._vocab_size]
        if bad:
            whose = "prompt" if answer is None else "prompt or answer"
            raise RequestError("bad_token_ids", _not_in_vocabulary(whose, bad, self._vocab_size))
        if answer is not None and len(known) > self._max_model_len:
            raise RequestError(
                "answer_too_long",
                f"prompt and answer have {len(prompt)} and {len(answer)} tokens, and max_model_len "
                f"is {self._max_model_len}: shorten them, or raise max_model_len if the model "
                "allows it",
            )
        if answer is None and len(prompt) + bool(params.max_new_tokens) > self._max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens, and max_model_len is {self._max_model_len}: "
                "shorten it, or raise max_model_len if the model allows it",
            )
        longest = min(len(known) + params.max_new_tokens, self._max_model_len)
        needed = int(self._strategy.most_cache_tokens(np.array([longest]))[0])
        if needed > self._cache_capacity:
            raise RequestError(
                "kv_cache_too_small",
                f"the row may need {needed} tokens of KV cache, and the whole cache has "
                f"{self._cache_capacity}: raise kv_cache_gib or lower max_new_tokens",
            )

    def _stop_rule(self, prompt: list[int], params: RequestParams) -> StopRule:
        if not params.max_new_tokens:
            return StopRule({}, (), 0, 0)
        stop_ids = {} if params.ignore_eos else dict(self._eos)
        stop_ids |= {token_id: self._token_text(token_id) for token_id in params.stop_token_ids}
        strings = []
        for string in params.stop:
            # Decoded text leaves out special tokens, so a stop string that is one is found by id.
            special = self._special_token_id(string)
            if special is None:
                strings.append(string)
            else:
                stop_ids[special] = string
        decoder = None
        if strings:
            assert self._tokenizer is not None
            decoder = IncrementalDecoder(self._tokenizer)
        return StopRule(
            stop_ids,
            tuple(strings),
            params.min_new_tokens,
            min(params.max_new_tokens, self._max_model_len - len(prompt)),
            decoder,
        )

    def _special_token_id(self, text: str) -> int | None:
        """Return the id of the special token that is written like this; None if there is none."""
        assert self._tokenizer is not None
        token_id = self._tokenizer.added_tokens_encoder.get(text)
        if token_id is None or not self._tokenizer.added_tokens_decoder[token_id].special:
            return None
        return int(token_id)

    def _token_text(self, token_id: int) -> str:
        """Return the text of a token, or its id as text without a tokenizer."""
        if self._tokenizer is None:
            return str(token_id)
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))


def _not_in_vocabulary(whose: str, bad: list[int], size: int) -> str:
    return f"{whose} token ids {bad[:5]} are not in the vocabulary of {size} ids"


def _columns(seq: Sequence) -> dict[str, npt.NDArray[Any]]:
    """Return the columns that a row asked for, by name. Those of context scope have one value less
    than the row has tokens, because no forward has read the last token, unless it was only read."""
    columns = {name: buffer.array() for name, buffer in seq.columns.items()}
    if seq.trajectory is not None:
        columns = of_answer(columns)
    columns |= seq.tail
    for column in seq.requested_columns:
        if column.scope == "context":
            columns[column.name] = values = seq.context.array(column)
            ran = seq.error is None or seq.num_computed_tokens
            assert len(values) == seq.num_tokens - (not seq.num_pooled_tokens) or not ran
    return columns
