"""Scores given answers for `LLM.score`: the log-probability of each token of an answer after its
prompt. `Score` is the result for one answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
from tqdm import tqdm

from batchgen.api.python.call_prompts import PromptIds, ReadPrompt, TokenizedPrompt, is_token_id
from batchgen.api.python.output import MOST_SHOWN
from batchgen.api.python.streams import StreamRequest, Streams
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.util.shorten import both_ends
from batchgen.util.text.text_table import counted

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Answer = str | Sequence[int]
"""An answer is a text, or token ids."""


@dataclass(frozen=True, slots=True, repr=False, kw_only=True)
class Score:
    """The score of one given answer of N tokens to one prompt.

    With an `error` there are no tokens: `error.type` is one word, such as "answer_too_long".
    """

    prompt: Any  # as it was given
    answer: Any  # as it was given
    prompt_token_ids: list[int]
    token_ids: list[int]  # the answer's
    logprobs: npt.NDArray[np.float32]  # [N], of each answer token given all tokens before it
    # [N, K] the log-probabilities of the K most likely tokens at each position, the most likely
    # first, and their ids; None if they were not asked for.
    top_logprobs: npt.NDArray[np.float32] | None = None
    top_logprob_ids: npt.NDArray[np.int32] | None = None
    rest_probs: npt.NDArray[np.float32] | None = None  # [N], the probability of all other tokens
    columns: Mapping[str, npt.NDArray[Any]]  # all columns by name, those of context scope included
    error: RequestError | None = None
    num_cached_tokens: int = 0  # the number of prompt tokens that came from the prefix cache

    def __repr__(self) -> str:
        answer = self.answer if isinstance(self.answer, str) else str(self.answer)
        text = repr(both_ends(answer, MOST_SHOWN))
        if self.error is not None:
            return f"Score({text}, error {self.error.type}: {self.error})"
        return f"Score({text}, {counted(len(self.token_ids), 'token')}, logprob={self.logprob:.4g})"

    @property
    def logprob(self) -> float:
        """The log-probability of the whole answer: the sum over its tokens."""
        return float(self.logprobs.sum(dtype=np.float64))

    @property
    def perplexity(self) -> float:
        """The perplexity of the answer; NaN with an error."""
        mean = self.logprob / len(self.logprobs) if len(self.logprobs) else np.nan
        return float(np.exp(-mean))

    @property
    def is_greedy(self) -> bool:
        """Whether each token of the answer is the most likely one. Raises ValueError if the request
        did not ask for `top_logprobs` of at least 1."""
        if self.top_logprob_ids is None:
            raise ValueError("is_greedy needs the most likely tokens: ask for top_logprobs=1")
        return bool((self.top_logprob_ids[:, 0] == self.token_ids).all())

    @classmethod
    def of(cls, finished: RequestOutput, prompt: Any, answer: Any) -> Score:
        """Make the score of a finished request."""
        columns = finished.columns
        return cls(
            prompt=prompt,
            answer=answer,
            prompt_token_ids=finished.prompt_token_ids,
            token_ids=finished.answer_token_ids or [],
            logprobs=columns.get("answer_logprobs", np.empty(0, np.float32)),
            top_logprobs=columns.get("answer_top_logprobs"),
            top_logprob_ids=columns.get("answer_top_logprob_ids"),
            rest_probs=columns.get("answer_rest_probs"),
            columns=columns,
            error=finished.error,
            num_cached_tokens=finished.num_cached_tokens,
        )


def read_answers(answers: Any) -> tuple[list[Any], bool]:
    """Return the answers that a user passed as a list, and whether it was a single answer. Raises
    ValueError if it is neither one answer nor a list of answers."""
    if isinstance(answers, str):
        return [answers], True
    items = None
    if isinstance(answers, Iterable) and not isinstance(answers, (bytes, Mapping)):
        items = list(answers)
    if items is None:
        raise ValueError(
            f"answers must be a text, a list of token ids, or a list of these, got {answers!r:.100}"
        )
    if items and all(map(is_token_id, items)):
        return [items], True
    return items, False


def pairs_of(
    prompts: tuple[list[ReadPrompt], bool], answers: tuple[list[Any], bool]
) -> list[tuple[ReadPrompt, Any]]:
    """Pair each answer with its prompt. A single prompt is paired with all answers; several prompts
    need one answer each.

    Args:
        prompts: the prompts, and whether the user passed a single one.
        answers: the answers, and whether the user passed a single one.

    Raises:
        ValueError: there is not one answer for each prompt.
    """
    (read, is_one), (texts, _) = prompts, answers
    if is_one:
        return [(read[0], answer) for answer in texts]
    if len(read) != len(texts) or answers[1]:
        raise ValueError(
            f"{len(texts)} answers for {len(read)} prompts: give one answer for each prompt, or "
            "one prompt for all answers"
        )
    return list(zip(read, texts, strict=True))


def score_answers(
    streams: Streams,
    ids: PromptIds,
    pairs: Sequence[tuple[ReadPrompt, Any]],
    params: RequestParams,
    progress: bool,
) -> list[Score]:
    """Score each answer after its prompt, and return the scores in order. A prompt with several
    answers is tokenized once."""
    tokenized_prompts: dict[int, TokenizedPrompt | RequestError] = {}
    requests = []
    for index, (prompt, answer) in enumerate(pairs):
        if id(prompt) not in tokenized_prompts:
            tokenized_prompts[id(prompt)] = _ids(ids, prompt)
        tokenized = tokenized_prompts[id(prompt)]
        tokens: list[int] = []
        try:
            tokens = _answer_ids(ids.tokenizer, answer)
        except RequestError as error:
            tokenized = error if not isinstance(tokenized, RequestError) else tokenized
        requests.append(StreamRequest(index, 0, tokenized, params, tokens))
    scores: dict[int, Score] = {}
    with (
        closing(streams.run(requests)) as stream,
        tqdm(total=len(pairs), unit="answer", disable=not progress, dynamic_ncols=True) as bar,
    ):
        for request, finished in stream:
            prompt, answer = pairs[request.prompt_index]
            scores[request.prompt_index] = Score.of(finished, prompt.raw, answer)
            bar.update()
    return [scores[index] for index in range(len(pairs))]


def _ids(ids: PromptIds, prompt: ReadPrompt) -> TokenizedPrompt | RequestError:
    """Tokenize a prompt, or return the error that prevents it."""
    try:
        return ids.of(prompt)
    except RequestError as error:
        return error


def _answer_ids(tokenizer: PreTrainedTokenizerBase | None, answer: Any) -> list[int]:
    """Return the token ids of one answer, without special tokens. Raises RequestError
    (`bad_answer`) if it is neither a text nor a list of token ids."""
    if isinstance(answer, str) and tokenizer is not None:
        return list(tokenizer.encode(answer, add_special_tokens=False, verbose=False))
    if isinstance(answer, Iterable) and not isinstance(answer, (str, bytes, Mapping)):
        items = list(answer)
        if all(map(is_token_id, items)):
            return [int(item) for item in items]
    what = "a list of token ids" if tokenizer is None else "a text or a list of token ids"
    raise RequestError("bad_answer", f"an answer must be {what}, got {answer!r:.100}")
