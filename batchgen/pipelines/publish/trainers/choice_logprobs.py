"""Converts log-probabilities to the format of OpenAI's API, for `OpenAILines`."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.constraint.vocabulary import Vocabulary

_BYTES = "bytes:"  # the prefix of a token that has no text
_COLUMNS = ("token_ids", "logprobs", "top_logprobs", "top_logprob_ids")


class ChoiceLogprobs:
    """Makes the entry `logprobs` of a choice, for rows whose request body asked for it.

    A token that is only a part of a character has no text. As in OpenAI's API, it is written as its
    bytes: `\\xe6\\x97` in chats and `bytes:\\xe6\\x97` in completions.

    Args:
        names: the columns of the job, among them `logprobs`.
        vocabulary: the bytes of each token.
        request_of: returns, for the columns of a row, how many likeliest tokens the request asked
            for; None if it asked for no log-probabilities.
        read: the columns that `request_of` reads.

    Attributes:
        columns: the columns that `of` reads.
    """

    def __init__(
        self,
        names: Collection[str],
        vocabulary: Vocabulary,
        request_of: Callable[[Mapping[str, Any]], int | None],
        read: Sequence[str],
    ) -> None:
        self.columns = (*(name for name in _COLUMNS if name in names), *read)
        self._vocabulary, self._request_of = vocabulary, request_of

    def of(self, row: Mapping[str, Any], text: str | None) -> dict[str, Any] | None:
        """Return the entry `logprobs` of a row; None if the row did not ask for it.

        Args:
            text: the text of a completion; None for a chat, whose entry has another form.
        """
        number = self._request_of(row)
        if number is None:
            return None
        ids = row["token_ids"]
        top = [self._top(row, at, number) for at in range(len(ids))]
        if text is None:
            pairs = zip(ids, row["logprobs"], top, strict=True)
            return {
                "content": [
                    {
                        **self._entry(token, value),
                        "top_logprobs": [self._entry(*pair) for pair in likely],
                    }
                    for token, value, likely in pairs
                ]
            }
        return {
            "tokens": [self._name(token) for token in ids],
            "token_logprobs": row["logprobs"],
            "top_logprobs": [self._by_name(likely) for likely in top] if number else None,
            "text_offset": self._offsets(ids, text),
        }

    def _top(self, row: Mapping[str, Any], at: int, number: int) -> list[tuple[int, float]]:
        """Return the likeliest tokens at a position, as (token id, log-probability)."""
        if not number:
            return []
        ids, values = row["top_logprob_ids"][at][:number], row["top_logprobs"][at][:number]
        return list(zip(ids, values, strict=True))

    def _by_name(self, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Map the texts of tokens to log-probabilities, the likeliest first. If several tokens have
        the same text, those after the first are named `token_id:ID`."""
        by_name: dict[str, float] = {}
        for token, value in likely:
            name = self._name(token)
            by_name[f"token_id:{token}" if name in by_name else name] = value
        return by_name

    def _offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """Return, for each token, the number of complete characters of the text before it. Tokens
        that the text does not show, such as special ones, add no characters."""
        plain = self._vocabulary.plain
        spellings = [self._bytes(token) if token in plain else b"" for token in ids]
        # Tokenizers like SentencePiece leave out the space before the first word.
        drops_space = b"".join(spellings).startswith(b" ") and not text.startswith(" ")
        decoder, offset, offsets = getincrementaldecoder("utf-8")("replace"), 0, []
        for spelled in spellings:
            offsets.append(max(0, offset - drops_space))
            offset += len(decoder.decode(spelled))
        return offsets

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        """Return a token's entry for a chat."""
        spelled = self._bytes(token)
        name = self._name(token).removeprefix("" if _is_text(spelled) else _BYTES)
        return {"token": name, "logprob": value, "bytes": list(spelled)}

    def _name(self, token: int) -> str:
        """Return the text of a token, or its bytes after `bytes:`."""
        spelled = self._bytes(token)
        if _is_text(spelled):
            return spelled.decode()
        return _BYTES + spelled.decode(errors="backslashreplace")

    def _bytes(self, token: int) -> bytes:
        """Return the bytes of a token; none for an id that the tokenizer lacks."""
        texts = self._vocabulary.texts
        return texts[token] if token < len(texts) else b""


def _is_text(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True
