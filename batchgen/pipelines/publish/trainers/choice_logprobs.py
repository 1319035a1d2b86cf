"""Log-probabilities in the form of OpenAI's choices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import accumulate
from typing import Any

_COLUMNS = ("token_ids", "logprobs", "top_logprobs", "top_logprob_ids")


class ChoiceLogprobs:
    """Makes `logprobs` of a choice for rows whose body asked for them.

    Args:
        names: the columns of the job, among which is `logprobs`.
        decode: the text of token ids, with special tokens.
        asked: how many likeliest tokens a row asked for, by its columns; None if it asked for no
            log-probabilities.
        read: the columns that `asked` reads.
    """

    def __init__(
        self,
        names: Collection[str],
        decode: Callable[[list[int]], str],
        asked: Callable[[Mapping[str, Any]], int | None],
        read: Sequence[str],
    ) -> None:
        self.columns = (*(name for name in _COLUMNS if name in names), *read)
        self._decode, self._asked = decode, asked

    def of(self, row: Mapping[str, Any], is_chat: bool) -> dict[str, Any] | None:
        """The entry of a chat, or that of a completion; None if the row did not ask."""
        number = self._asked(row)
        if number is None:
            return None
        tokens = [self._decode([token]) for token in row["token_ids"]]
        top = [self._top(row, at, number) for at in range(len(tokens))]
        if is_chat:
            pairs = zip(tokens, row["logprobs"], top, strict=True)
            return {
                "content": [
                    {**_entry(token, value), "top_logprobs": [_entry(*pair) for pair in likely]}
                    for token, value, likely in pairs
                ]
            }
        starts = list(accumulate((len(token) for token in tokens), initial=0))
        return {
            "tokens": tokens,
            "token_logprobs": row["logprobs"],
            "top_logprobs": [dict(likely) for likely in top] if number else None,
            "text_offset": starts[: len(tokens)],
        }

    def _top(self, row: Mapping[str, Any], at: int, number: int) -> list[tuple[str, float]]:
        if not number:
            return []
        ids, values = row["top_logprob_ids"][at][:number], row["top_logprobs"][at][:number]
        return [(self._decode([token]), value) for token, value in zip(ids, values, strict=True)]


def _entry(token: str, value: float) -> dict[str, Any]:
    return {"token": token, "logprob": value, "bytes": list(token.encode("utf-8", "replace"))}
