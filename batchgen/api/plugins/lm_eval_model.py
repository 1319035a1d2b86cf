"""The model `batchgen` for lm-eval (lm-evaluation-harness), which runs lm-eval's requests in
batchgen's engine. `lm_eval.py` registers it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text

from batchgen.api.plugins.harness_requests import (
    EngineAnswers,
    TextRequest,
    cut_left,
    each_once,
    rolling_windows,
)
from batchgen.util.errors import ConfigError

MOST_GENERATED = 256
"""The maximum number of generated tokens if a task sets none, as in lm-eval's own models."""
HONOURED = (
    *("top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
    "seed",
)
"""Generation options of tasks that are passed on under their own names."""
IDLE = {"num_beams": 1, "best_of": 1}
"""Generation options that are accepted only with this value, which has no effect."""

Encoded = tuple[Any, list[int], list[int]]
"""A request as lm-eval encodes it: its texts (the key of the cache; None for a window of a longer
text), and the token ids of context and continuation."""


class TokenLM(TemplateLM):  # type: ignore[misc]
    """Tokenizes lm-eval's requests as its `hf` model does, and gets the results from `answers`.

    Args:
        max_length: the maximum number of tokens that the model reads for a continuation. The
            continuation's last token is not read.
        add_bos_token: whether texts get the tokenizer's special tokens; None is the tokenizer's
            default.
        prefix_token_id: the token before a text without context; None is BOS, or EOS without BOS.
        think_end_token: if set, only the generated text after this text counts.
        chat_template_args: options of the chat template.
        enable_thinking: the value of the template's option of this name.
    """

    def __init__(
        self,
        answers: EngineAnswers,
        tokenizer: Any,
        max_length: int,
        name: str,
        *,
        seed: int = 0,
        add_bos_token: bool | None = None,
        prefix_token_id: int | None = None,
        think_end_token: str | None = None,
        enable_thinking: bool | None = None,
        chat_template_args: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if tokenizer is None:
            raise ConfigError(f"{name} comes without a tokenizer, and lm-eval asks for texts")
        self.answers, self.tokenizer, self.max_length = answers, tokenizer, max_length
        self._name, self._seed, self._add_bos = name, seed, add_bos_token
        self._prefix, self._think_end = prefix_token_id, think_end_token
        self._template_args = dict(chat_template_args or {})
        if enable_thinking is not None:
            self._template_args["enable_thinking"] = enable_thinking
        # The names, for messages, of the requests that `_loglikelihood_tokens` gets next: lm-eval
        # calls it with token ids only.
        self._names: list[str] = []

    @property
    def eot_token_id(self) -> int:
        """The id of the token that ends a text."""
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The id of the token before a text without context."""
        bos = self.tokenizer.bos_token_id
        candidates = [self._prefix, bos, self.tokenizer.eos_token_id]
        return int(next(i for i in candidates if i is not None))

    @property
    def tokenizer_name(self) -> str:
        """The name under which lm-eval caches requests that were written with the chat template."""
        return self._name.replace("/", "__")

    def tok_encode(
        self, string: str, add_special_tokens: bool | None = None, **_: object
    ) -> list[int]:
        """Return the token ids of a text. A text that already begins with BOS gets no second
        one."""
        if add_special_tokens is None:
            starts = string.startswith(self.tokenizer.decode(self.prefix_token_id))
            add_special_tokens = False if starts else self._add_bos
        options = {} if add_special_tokens is None else {"add_special_tokens": add_special_tokens}
        return list(self.tokenizer.encode(string, verbose=False, **options))

    def apply_chat_template(
        self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True
    ) -> str:
        """Return a conversation as text. Without a generation prompt, the last message is left
        open, so that the model continues it."""
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                **self._template_args,
            )
        )

    def loglikelihood(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[tuple[float, bool]]:
        """Return the log-probability of each continuation, and whether greedy decoding would
        generate it."""
        self._names = [_name(request) for request in requests]
        scores: list[tuple[float, bool]] = super().loglikelihood(requests, disable_tqdm)
        return scores

    def loglikelihood_rolling(
        self, requests: list[Instance], disable_tqdm: bool = False
    ) -> list[float]:
        """Return the log-probability of each text, read in windows of `max_length` tokens."""
        windows: list[Encoded] = []
        owners = []
        for number, request in enumerate(requests):
            (text,) = request.args
            ids = self.tok_encode(text)
            pairs = rolling_windows(ids, self.prefix_token_id, self.max_length)
            windows += [(None, *pair) for pair in pairs]
            owners += [number] * len(pairs)
        self._names = [_name(requests[number]) for number in owners]
        sums = [0.0] * len(requests)
        for number, (logprob, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            sums[number] += logprob
        for request, total in zip(requests, sums, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return sums

    def _loglikelihood_tokens(
        self, requests: Sequence[Encoded], **_: object
    ) -> list[tuple[float, bool]]:
        """Score encoded requests; lm-eval's `loglikelihood` calls this."""
        limit = self.max_length + 1  # lm-eval does not count the last token, which is not read
        texts = [
            cut_left(context, continuation, limit, name)
            for name, (_, context, continuation) in zip(self._names, requests, strict=True)
        ]
        results = each_once(texts, self.answers.score)
        for (texts_key, *_ids), result in zip(requests, results, strict=True):
            if texts_key is not None:  # not a window: texts in windows are cached as a whole
                self.cache_hook.add_partial("loglikelihood", texts_key, result)
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the text that follows each context, cut before its first stop string (`until`)."""
        text_requests = [self._text_request(request) for request in requests]
        texts = each_once(text_requests, self.answers.generate)
        results = []
        for request, text in zip(requests, texts, strict=True):
            until = _until(request.args[1])
            results.append(postprocess_generated_text(text, until, self._think_end))
            self.cache_hook.add_partial("generate_until", request.args, results[-1])
        return results

    def _text_request(self, request: Instance) -> TextRequest:
        """Make a request of a context and its generation options. The context's first tokens are
        dropped if there is no room for them. Raises ConfigError for an option that cannot be
        honoured."""
        context, arguments = request.args
        name = _name(request)
        kwargs = dict(normalize_gen_kwargs(arguments, MOST_GENERATED))
        del kwargs["until"]
        max_new_tokens, do_sample = kwargs.pop("max_gen_toks"), kwargs.pop("do_sample")
        temperature = float(kwargs.pop("temperature", 0.0))
        if (room := self.max_length - max_new_tokens) < 1:
            raise ConfigError(
                f"{name}: max_gen_toks is {max_new_tokens}, and max_length is {self.max_length}: "
                "lower max_gen_toks with --gen_kwargs, or raise max_length"
            )
        options: dict[str, Any] = {"max_new_tokens": max_new_tokens, "seed": self._seed}
        options["temperature"] = temperature if do_sample else 0.0
        for key, value in kwargs.items():
            if key in HONOURED:
                options[key] = value
            elif IDLE.get(key) != value:
                raise ConfigError(
                    f"{name}: generation option {key}={value!r} cannot be honoured: a task may "
                    f"have until, max_gen_toks, do_sample, temperature, {', '.join(HONOURED)}"
                )
        if stop := _until(arguments):
            options["stop"] = stop
        return TextRequest(name, tuple(self.tok_encode(context)[-room:]), options)


TOKEN_OPTIONS = (
    *("seed", "add_bos_token", "prefix_token_id", "think_end_token", "enable_thinking"),
    "chat_template_args",
)
"""The arguments of a model that `TokenLM` takes; all others are those of `LLM`."""


class BatchgenLM(TokenLM):
    """The model `batchgen` of lm-eval. All requests of a call go to the engine at once.

    Args:
        pretrained: the model, as `LLM` takes it.
        max_length: as for `TokenLM`; None is one less than the engine's `max_model_len`.
        **others: further arguments of `TokenLM` and `LLM`, and those that lm-eval passes to every
            model.
    """

    def __init__(self, pretrained: str, max_length: int | None = None, **others: Any) -> None:
        from batchgen.api.python.llm import LLM

        token_options, llm_options = split_arguments(max_length, others)
        llm = LLM(pretrained, **llm_options)
        limit = llm.engine.max_model_len - 1
        super().__init__(EngineAnswers(llm), llm.tokenizer, limit, pretrained, **token_options)


def split_arguments(
    max_length: int | None, others: dict[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Split the arguments of a model into those of `TokenLM` and those of `LLM`. Raises ConfigError
    for a batch size, because the engine chooses its batches."""
    named = {name: value for name, value in others.items() if value is not None}
    size = str(named.pop("batch_size", 1))
    named.pop("max_batch_size", None)
    if size.partition(":")[0] not in ("1", "auto"):
        raise ConfigError(
            f"batch_size={size}: the engine makes its batches itself: leave it out, or set "
            "max_num_seqs in --model_args"
        )
    if named.get("device") == "cuda:0":  # lm-eval's default, also where there is no GPU
        named["device"] = "auto"
    if max_length is not None:
        named["max_model_len"] = int(max_length) + 1
    return {name: named.pop(name) for name in TOKEN_OPTIONS if name in named}, named


def _until(values: Mapping[str, Any]) -> list[str]:
    """Return the stop strings of generation options."""
    until = values.get("until") or []
    return [text for text in ([until] if isinstance(until, str) else until) if text]


def _name(request: Instance) -> str:
    """Return the name of a request in messages: the task, the document, and the request's number
    among those of the document."""
    return f"{request.task_name}/{request.doc_id}/{request.idx}"
