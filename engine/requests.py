"""Requests in, as sequences that can be served; sequences out, as finished requests."""

from __future__ import annotations

from transformers import PreTrainedTokenizerBase

from batchgen.engine.outputs import OutputColumn, RequestError, RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.engine.sampling.sampler import requested_columns
from batchgen.engine.scheduling.stopping import IncrementalDecoder, StopRule, decode
from batchgen.engine.sequence import Sequence
from batchgen.engine.strategy import Strategy


def check_params(
    params: SamplingParams,
    strategy: Strategy,
    vocab_size: int,
    tokenizer: PreTrainedTokenizerBase | None,
) -> None:
    """Raises ValueError if no request could be served with these parameters; needs no weights."""
    strategy.check(params)
    known = [column.name for column in strategy.columns]
    if missing := [name for name in params.columns if name not in known]:
        raise ValueError(
            f"strategy {strategy.name} has no column {missing[0]!r}; it has {known or 'none'}"
        )
    if params.stop and tokenizer is None:
        raise ValueError("stop strings need a tokenizer, and the model has none: remove stop")
    if params.constraint is not None and tokenizer is None:
        raise ValueError("a constraint needs a tokenizer, and the model has none: remove it")
    if params.top_logprobs > vocab_size:
        raise ValueError(
            f"top_logprobs is {params.top_logprobs}, but the vocabulary has {vocab_size}"
        )
    unknown = [i for i in params.stop_token_ids if i >= vocab_size]
    if unknown:
        raise ValueError(f"stop_token_ids {unknown} are not in the vocabulary of {vocab_size} ids")


def output_columns(params: SamplingParams, strategy: Strategy) -> tuple[OutputColumn, ...]:
    """The columns that a request with these parameters returns: the sampler's, the strategy's."""
    own = (column for column in strategy.columns if column.name in params.columns)
    return (*requested_columns(params), *own)


class Requests:
    """Between what a user asks for and the rows of the engine.

    Args:
        tokenizer: makes texts of the output; None leaves them empty and refuses stop strings.
        eos_token_ids: end a row unless it ignores EOS.
        strategy: the decoding paradigm.
        max_model_len: prompt and output tokens of a row at most.
        kv_capacity: tokens that the whole KV cache holds.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase | None,
        eos_token_ids: tuple[int, ...],
        strategy: Strategy,
        *,
        vocab_size: int,
        max_model_len: int,
        kv_capacity: int,
    ) -> None:
        self._tokenizer = tokenizer
        self._strategy = strategy
        self._vocab_size = vocab_size
        self._max_model_len = max_model_len
        self._kv_capacity = kv_capacity
        self._eos = {token_id: self._token_text(token_id) for token_id in eos_token_ids}

    def sequence(self, request_id: str, prompt: list[int], params: SamplingParams) -> Sequence:
        """The row of a request.

        Raises:
            RequestError: it can never be served; its `type` says why.
            ValueError: the parameters cannot be honoured.
        """
        check_params(params, self._strategy, self._vocab_size, self._tokenizer)
        self._check_prompt(prompt, params)
        rule = self._stop_rule(prompt, params)
        if params.constraint is not None and not rule.stop_ids:
            raise ValueError(
                "a constrained row ends with EOS or a stop id, and this one has neither: set "
                "ignore_eos to false, or give stop_token_ids"
            )
        return Sequence(request_id, prompt, params, rule, output_columns(params, self._strategy))

    def output(self, seq: Sequence) -> RequestOutput:
        """Of a row that finished."""
        assert seq.finish_reason is not None
        token_ids = seq.token_ids[seq.num_prompt_tokens :]
        if seq.stop.text_before_stop is not None:
            text = seq.stop.text_before_stop
        elif self._tokenizer is None:
            text = ""
        else:
            # A stop id is the end of the row, not part of its text.
            shown = token_ids[:-1] if seq.finish_reason == "stop" else token_ids
            text = decode(self._tokenizer, shown)
        return RequestOutput(
            request_id=seq.request_id,
            prompt_token_ids=seq.token_ids[: seq.num_prompt_tokens],
            token_ids=token_ids,
            text=text,
            finish_reason=seq.finish_reason,
            stop=seq.stop_text,
            error=seq.error,
            columns={name: buffer.array() for name, buffer in seq.columns.items()},
            num_cached_tokens=seq.num_cached_tokens,
            num_preemptions=seq.num_preemptions,
            constraint_satisfied=(
                None if seq.params.constraint is None else seq.constraint_satisfied
            ),
            num_forwards=seq.num_forwards,
            num_commit_forwards=seq.num_commit_forwards,
            num_draft_tokens=seq.num_draft_tokens,
            num_accepted_tokens=seq.num_accepted_tokens,
        )

    def _check_prompt(self, prompt: list[int], params: SamplingParams) -> None:
        if not prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        bad = [i for i in prompt if not 0 <= i < self._vocab_size]
        if bad:
            raise RequestError(
                "bad_token_ids",
                f"prompt token ids {bad[:5]} are not in the vocabulary of {self._vocab_size} ids",
            )
        if len(prompt) >= self._max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens, and max_model_len is {self._max_model_len}: "
                "shorten it, or raise max_model_len if the model allows it",
            )
        needed = min(len(prompt) + params.max_new_tokens, self._max_model_len)
        if needed > self._kv_capacity:
            raise RequestError(
                "kv_cache_too_small",
                f"the row may need {needed} tokens of KV cache, and the whole cache has "
                f"{self._kv_capacity}: raise kv_cache_gib or lower max_new_tokens",
            )

    def _stop_rule(self, prompt: list[int], params: SamplingParams) -> StopRule:
        stop_ids = {} if params.ignore_eos else dict(self._eos)
        stop_ids |= {token_id: self._token_text(token_id) for token_id in params.stop_token_ids}
        strings = []
        for string in params.stop:
            # Text never shows special tokens, so a stop string that is one is found by its id.
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
        assert self._tokenizer is not None
        token_id = self._tokenizer.added_tokens_encoder.get(text)
        if token_id is None or not self._tokenizer.added_tokens_decoder[token_id].special:
            return None
        return int(token_id)

    def _token_text(self, token_id: int) -> str:
        if self._tokenizer is None:
            return str(token_id)
        return str(self._tokenizer.decode([token_id], clean_up_tokenization_spaces=False))
