"""Turns requests into rows of the engine, and rows that have ended into finished requests.

`LLMEngine` calls `Requests.sequence` for each new request and `Requests.output` for each row that
has ended. A request that can never be served is refused here, before its row reaches the scheduler.
"""

from __future__ import annotations

from collections import abc
from collections.abc import Hashable
from dataclasses import replace
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from batchgen.engine.caches.page_needs import PageNeeds
from batchgen.engine.interface.outputs import Begun, OutputColumn, RequestError, RequestOutput
from batchgen.engine.interface.trajectory import GivenAnswer, Trajectory, answer_ids
from batchgen.engine.lora.layer_lora import LoRAState
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.request_outputs import request_output
from batchgen.engine.request_params import check_params, output_columns
from batchgen.engine.rows.sequence import Sequence
from batchgen.engine.rows.stop_rules import StopRules
from batchgen.engine.rows.stopping import StopRule
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.engine.vision.image import Image
from batchgen.engine.vision.image_span import ImageRules, ImageSpan, find_spans, runs_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


_ANSWER_AND_TOKENS = (
    "a request has an answer to score, and also generates tokens or pools hidden states: a "
    "request can do only one of the three, so set max_new_tokens to 0 without pooling, or leave "
    "the answer out"
)
_NO_ANSWER = (
    "max_new_tokens is 0, and the request has no answer to score: give an answer (in Python with "
    "LLM.score), or set max_new_tokens to 1 or more"
)


class ImageLimits(NamedTuple):
    """How prompts contain images, the most tokens of one image, and what limits the tokens of one
    `ImageRun`: those of a step, and the paged cache."""

    rules: ImageRules
    image_tokens: int
    step_tokens: int
    pages: PageNeeds


class Requests:
    """Checks requests and turns them into rows; turns ended rows into finished requests.

    Args:
        tokenizer: decodes the output to text. With None, texts are empty, and stop strings and
            constraints are refused.
        cache_capacity: the number of tokens that the whole paged cache holds.
        images: how prompts contain images; None if the model reads none.
        lora: the adapters that requests may name; None for a model without adapters.
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
        self._stop_rules = StopRules(tokenizer, eos_token_ids, max_model_len)

    def sequence(
        self,
        request_id: Hashable,
        prompt: list[int],
        params: RequestParams,
        to_score: GivenAnswer | None = None,
        images: abc.Sequence[Image] = (),
        begun: Begun | None = None,
    ) -> Sequence:
        """Check a request and return its row. The row scores the answer `to_score` if there is one,
        and continues from what was already generated, `begun`, if possible.

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
            raise ValueError(_NO_ANSWER if answer is None else _ANSWER_AND_TOKENS)
        adapter = self._adapter(params.lora)
        needed = self._check_prompt(prompt, answer, params)
        spans = self._spans(prompt, images, answer, needed)
        rule = self._stop_rules.rule(len(prompt), params)
        if params.constraint is not None and not rule.stop_ids:
            raise ValueError(
                "a constrained row ends with EOS or a stop id, and this one has neither: set "
                "ignore_eos to false, or give stop_token_ids"
            )
        scored = answer or []
        if trajectory is not None:
            # The row yields the trajectory's tokens step by step, and `output` returns them as the
            # answer.
            self._check_trajectory(trajectory, len(prompt), params)
            params = replace(params, max_new_tokens=len(trajectory))
            rule, scored = StopRule({}, (), 0, max_new_tokens=len(trajectory)), []
        columns = output_columns(params, self._strategy, self._config, self._context_columns)
        never = () if self._images is None else self._images.rules.never_sampled
        # A long row reads rotary angles this many entries later (`ModelConfig.rope_border`).
        border = self._config.rope_border or 0
        rope_offset = border if len(prompt) + len(scored) > border else 0
        seq = Sequence(
            request_id, prompt + scored, params, rule, columns, len(scored), spans, never, adapter,
            trajectory, rope_offset=rope_offset,
        )  # fmt: skip
        if params.pooling is not None:
            seq.num_pooled_tokens = 1 if params.pooling == "last" else len(prompt)
        if begun is not None and self._can_go_on(seq, begun):
            seq.go_on_from(begun)
        return seq

    def _check_trajectory(
        self, trajectory: Trajectory, num_prompt_tokens: int, params: RequestParams
    ) -> None:
        """Raise RequestError if no row can have produced this trajectory."""
        bad = [i for i in trajectory.all_token_ids if not 0 <= i < self._vocab_size]
        if bad:
            raise RequestError("bad_token_ids", _not_in_vocabulary("tail", bad, self._vocab_size))
        self._strategy.is_exact(trajectory, num_prompt_tokens, params)  # raises RequestError

    def _can_go_on(self, seq: Sequence, begun: Begun) -> bool:
        """Return whether a new row can continue after the tokens of `begun`, with all its columns.
        If so, its stop rule has seen the text of these tokens."""
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
            values, length = begun.columns.get(column.name), len(ids)
            if column.scope == "context":
                length += seq.num_prompt_tokens - 1
            if values is None or values.shape != (length, *column.tail_shape):
                return False
        if rule.strings and rule.find_string(ids, 0) is not None:
            seq.stop = self._stop_rules.rule(len(seq.token_ids), seq.params)
            return False
        return True

    def _adapter(self, name: str | None) -> int:
        """Return the number of the adapter of this name; 0 for None. Raises RequestError if there
        is no such adapter."""
        if name not in self._adapters:
            known = ", ".join(repr(known) for known in self._adapters if known is not None)
            raise RequestError(
                "unknown_adapter",
                f"there is no adapter {name!r}: "
                + (f"choose among {known}" if known else "the engine was made without adapters"),
            )
        return self._adapters[name]

    def _spans(
        self,
        prompt: list[int],
        images: abc.Sequence[Image],
        answer: list[int] | None,
        needed: int,
    ) -> tuple[ImageSpan, ...]:
        """Find where the images are in the prompt of a row that may need the paged cache for
        `needed` tokens. Raises RequestError if they do not fit the prompt or the engine."""
        if self._images is None:
            if images:
                raise RequestError(
                    "images_unsupported",
                    "the prompt has images, and the model reads none: choose a model that does",
                )
            return ()
        rules, max_tokens, step_tokens, pages = self._images
        try:
            spans = find_spans(prompt, images, rules)
        except ValueError as error:
            raise RequestError("image_mismatch", str(error)) from error
        if rules.image_token_id in (answer or ()):
            raise RequestError("image_mismatch", "the answer has image tokens, which have no image")
        for number, span in enumerate(spans, 1):
            if span.num_tokens > max_tokens:
                raise RequestError(
                    "image_too_large",
                    f"image {number} takes {span.num_tokens:,} tokens, and image_tokens is "
                    f"{max_tokens:,}: scale it down, or raise image_tokens",
                )
        max_run = min(step_tokens, pages.most_chunk(needed))
        if (longest := max((run.end - run.start for run in runs_of(spans)), default=0)) > max_run:
            raise RequestError(
                "image_too_large",
                f"an image, or images beside each other, take {longest:,} tokens, which this model "
                f"reads in one step, and a step has room for {max_run:,}: raise max_batched_tokens "
                "or kv_cache_gib, or scale the image down",
            )
        return spans

    def output(self, seq: Sequence) -> RequestOutput:
        """Return the finished request of a row that has ended."""
        return request_output(seq, self._strategy, self._tokenizer)

    def _check_prompt(
        self, prompt: list[int], answer: list[int] | None, params: RequestParams
    ) -> int:
        """Return for how many tokens the row may need the paged cache. Raises RequestError if a
        prompt, or a prompt with its answer, can never be served."""
        if not prompt:
            raise RequestError("empty_prompt", "the prompt has no tokens")
        if answer is not None and not answer:
            raise RequestError("empty_answer", "the answer has no tokens")
        token_ids = [*prompt, *(answer or ())]
        bad = [i for i in token_ids if not 0 <= i < self._vocab_size]
        if bad:
            whose = "prompt" if answer is None else "prompt or answer"
            raise RequestError("bad_token_ids", _not_in_vocabulary(whose, bad, self._vocab_size))
        if answer is not None and len(token_ids) > self._max_model_len:
            raise RequestError(
                "answer_too_long",
                f"prompt and answer have {len(prompt)} and {len(answer)} tokens, and max_model_len "
                f"is {self._max_model_len}: shorten them, or raise max_model_len if the model "
                "allows it",
            )
        # A row that generates needs room for at least one token.
        if answer is None and len(prompt) + bool(params.max_new_tokens) > self._max_model_len:
            raise RequestError(
                "prompt_too_long",
                f"the prompt has {len(prompt)} tokens, and max_model_len is {self._max_model_len}: "
                "shorten it, or raise max_model_len if the model allows it",
            )
        longest = min(len(token_ids) + params.max_new_tokens, self._max_model_len)
        border = self._config.rope_border
        # No forward reads the last token of a row.
        if border is not None and len(token_ids) <= border < longest - 1:
            raise RequestError(
                "crosses_longrope",
                f"the prompt has {len(token_ids)} tokens, and with "
                f"max_new_tokens={params.max_new_tokens} the row may pass {border:,} tokens, "
                "where LongRoPE rotates all its tokens by other angles and the row would have to "
                f"be computed again: lower max_new_tokens to {border + 1 - len(token_ids)}, or "
                f"max_model_len to {border + 1}",
            )
        needed = int(self._strategy.most_cache_tokens(np.array([longest]))[0])
        if needed > self._cache_capacity:
            raise RequestError(
                "kv_cache_too_small",
                f"the row may need {needed} tokens of KV cache, and the whole cache has "
                f"{self._cache_capacity}: raise kv_cache_gib or lower max_new_tokens",
            )
        return needed


def _not_in_vocabulary(whose: str, bad: list[int], size: int) -> str:
    return f"{whose} token ids {bad[:5]} are not in the vocabulary of {size} ids"
