"""Requests of evaluation harnesses, and how an engine in this process answers them.
`lm_eval_model.py` uses this."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.api.python.llm import LLM


@dataclass(frozen=True, slots=True)
class ScoreRequest:
    """A request for the log-probability of a continuation after its context.

    Attributes:
        name: the request's name in error messages.
        prompt: the token ids of the context.
        answer: the token ids of the continuation.
    """

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def key(self) -> object:
        """The key under which equal requests share one result."""
        return self.prompt, self.answer


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A request for text that continues a prompt.

    Attributes:
        name: the request's name in error messages.
        prompt: the token ids of the prompt.
        options: arguments of `SamplingParams`.
    """

    name: str
    prompt: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> object:
        """The key under which equal requests share one result; sampled requests share none."""
        if self.options.get("temperature", 0.0) > 0:
            return object()
        return self.prompt, repr(sorted(self.options.items()))


R = TypeVar("R", ScoreRequest, TextRequest)
T = TypeVar("T")


class EngineAnswers:
    """Answers requests with an engine in this process. Each call gives the engine all requests at
    once."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def score(self, requests: Sequence[ScoreRequest]) -> list[tuple[float, bool]]:
        """Return, for each request, the log-probability of its continuation, and whether greedy
        decoding would generate it. Raises ConfigError, with the request's name, if one cannot be
        scored."""
        prompts = [request.prompt for request in requests]
        answers = [request.answer for request in requests]
        scores = self._llm.score(prompts, answers, top_logprobs=1)
        for request, score in zip(requests, scores, strict=True):
            if score.error is not None:
                raise ConfigError(f"{request.name}: {score.error}")
        return [(score.logprob, score.is_greedy) for score in scores]

    def generate(self, requests: Sequence[TextRequest]) -> list[str]:
        """Return the generated text of each request, cut before its stop strings. Raises
        ConfigError, with the request's name, if one cannot be served."""
        from batchgen.api.python.params import SamplingParams

        params = [SamplingParams(**request.options) for request in requests]
        outputs = self._llm.generate([request.prompt for request in requests], params)
        for request, (output,) in zip(requests, outputs, strict=True):
            if output.error is not None:
                raise ConfigError(f"{request.name}: {output.error}")
        return [output.text for (output,) in outputs]


def each_once(requests: Sequence[R], answer: Callable[[Sequence[R]], list[T]]) -> list[T]:
    """Return the results of requests in order, computing equal requests only once.

    Args:
        answer: computes the results of the distinct requests.
    """
    keys = [request.key for request in requests]
    firsts: dict[object, R] = {}
    for key, request in zip(keys, requests, strict=True):
        firsts.setdefault(key, request)
    results = dict(zip(firsts, answer(list(firsts.values())), strict=True))
    return [results[key] for key in keys]


def cut_left(prompt: Sequence[int], answer: Sequence[int], limit: int, name: str) -> ScoreRequest:
    """Make a scoring request, dropping the first tokens of the prompt so that prompt and answer
    have at most `limit` tokens together.

    Raises:
        ConfigError: the prompt or the answer is empty, or the answer leaves no room for a prompt.
    """
    if not answer or not prompt:
        raise ConfigError(f"{name}: the {'prompt' if answer else 'continuation'} has no tokens")
    if len(answer) >= limit:
        raise ConfigError(
            f"{name}: the continuation has {len(answer)} tokens, and a context and its "
            f"continuation may have {limit} together: raise max_length"
        )
    return ScoreRequest(name, tuple(prompt[-(limit - len(answer)) :]), tuple(answer))


def rolling_windows(
    ids: Sequence[int], prefix: int, limit: int
) -> list[tuple[list[int], list[int]]]:
    """Split a text into pairs of a context and a continuation, such that the continuations make up
    the text.

    The windows are those of lm-eval. A continuation has at most `limit` tokens, and its context
    starts at most `limit` tokens before the continuation's end. With ids [1, 2, 3, 4, 5], prefix 0
    and limit 3 the pairs are ([0], [1, 2, 3]) and ([2, 3], [4, 5]).

    Args:
        ids: the token ids of the text.
        prefix: the token id before the first token.
    """
    tokens = [prefix, *ids]
    windows = []
    for first in range(0, len(ids), limit):
        end = min(first + limit, len(ids))
        start = max(0, end - limit)
        windows.append((tokens[start : first + 1], tokens[first + 1 : end + 1]))
    return windows
