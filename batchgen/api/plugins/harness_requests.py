"""Requests of evaluation harnesses, and their answers from an engine in this process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from batchgen.api.python.llm import LLM


@dataclass(frozen=True, slots=True)
class Scored:
    """A continuation whose log-probability is asked for, behind its context, as token ids. Two are
    equal if their tokens are; `name` is for messages."""

    name: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @property
    def key(self) -> object:
        """The key under which equal requests share one result."""
        return self.prompt, self.answer


@dataclass(frozen=True, slots=True)
class TextRequest:
    """A prompt to which text is generated, with options of `SamplingParams`."""

    name: str
    prompt: tuple[int, ...]
    options: Mapping[str, Any]

    @property
    def key(self) -> object:
        """The key under which equal requests share one result; sampled requests share none."""
        if self.options.get("temperature", 0.0) > 0:
            return object()
        return self.prompt, repr(sorted(self.options.items()))


R = TypeVar("R", Scored, TextRequest)
T = TypeVar("T")


class EngineAnswers:
    """Answers of an engine in this process, which gets all requests at once."""

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def score(self, requests: Sequence[Scored]) -> list[tuple[float, bool]]:
        """The log-probability of each answer, and whether greedy decoding would write it;
        ConfigError names a request that cannot be scored."""
        prompts, answers = [one.prompt for one in requests], [one.answer for one in requests]
        scores = self._llm.score(prompts, answers, top_logprobs=1)
        for one, score in zip(requests, scores, strict=True):
            if score.error is not None:
                raise ConfigError(f"{one.name}: {score.error}")
        return [(score.logprob, score.is_greedy) for score in scores]

    def generate(self, requests: Sequence[TextRequest]) -> list[str]:
        """The text of each request, cut before its stop strings; ConfigError names a request that
        cannot be served."""
        from batchgen.api.python.params import SamplingParams

        params = [SamplingParams(**one.options) for one in requests]
        outputs = self._llm.generate([one.prompt for one in requests], params)
        for one, (output,) in zip(requests, outputs, strict=True):
            if output.error is not None:
                raise ConfigError(f"{one.name}: {output.error}")
        return [output.text for (output,) in outputs]


def each_once(requests: Sequence[R], answer: Callable[[Sequence[R]], list[T]]) -> list[T]:
    """The results of requests in order, of which equal ones are asked once."""
    keys = [one.key for one in requests]
    firsts: dict[object, R] = {}
    for key, one in zip(keys, requests, strict=True):
        firsts.setdefault(key, one)
    results = dict(zip(firsts, answer(list(firsts.values())), strict=True))
    return [results[key] for key in keys]


def cut_left(prompt: Sequence[int], answer: Sequence[int], limit: int, name: str) -> Scored:
    """A request to score whose prompt has lost its first tokens, so that prompt and answer have
    `limit`. Raises ConfigError if the answer alone has more than leaves room for a prompt."""
    if not answer or not prompt:
        raise ConfigError(f"{name}: the {'prompt' if answer else 'continuation'} has no tokens")
    if len(answer) >= limit:
        raise ConfigError(
            f"{name}: the continuation has {len(answer)} tokens, and a context and its "
            f"continuation may have {limit} together: raise max_length"
        )
    return Scored(name, tuple(prompt[-(limit - len(answer)) :]), tuple(answer))


def rolling_windows(
    ids: Sequence[int], prefix: int, limit: int
) -> list[tuple[list[int], list[int]]]:
    """A text as pairs of a context and a continuation, which predict each of its tokens once.

    At most `limit` tokens are read for a pair, and later ones have as much context as goes with
    that. `prefix` stands before the first token. The windows are those of lm-eval.
    """
    known = [prefix, *ids]
    windows = []
    for first in range(0, len(ids), limit):
        end = min(first + limit, len(ids))
        start = max(0, end - limit)
        windows.append((known[start : first + 1], known[first + 1 : end + 1]))
    return windows
