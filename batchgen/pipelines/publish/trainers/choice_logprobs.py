"""Converts log-probabilities into the form of OpenAI's API."""

from __future__ import annotations

from codecs import getincrementaldecoder
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from batchgen.engine.constraint.vocabulary import Vocabulary

_BYTES = "bytes:"
_COLUMNS = ("token_ids", "logprobs", "top_logprobs", "top_logprob_ids")


class ChoiceLogprobs:
    """Makes `logprobs` of a choice for rows whose body asked for them.

    A token that is a part of characters has no text; it is written as its bytes, `\\xe6\\x97` in
    chats and `bytes:\\xe6\\x97` in completions, as OpenAI does.

    Args:
        names: the columns of the job, among which is `logprobs`.
        vocabulary: the bytes of each token.
        request_of: returns, for the columns of a row, how many likeliest tokens the row asked for;
            None if it asked for no log-probabilities.
        read: the columns that `request_of` reads.
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
        """The entry `logprobs` of a completion with this text, or of a chat if `text` is None. None
        if the row did not ask for log-probabilities."""
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
        if not number:
            return []
        ids, values = row["top_logprob_ids"][at][:number], row["top_logprobs"][at][:number]
        return list(zip(ids, values, strict=True))

    def _by_name(self, likely: Sequence[tuple[int, float]]) -> dict[str, float]:
        """Log-probabilities by the texts of tokens, the likeliest first. If several tokens have one
        text, those after the first are named `token_id:ID`."""
        by_name: dict[str, float] = {}
        for token, value in likely:
            name = self._name(token)
            by_name[f"token_id:{token}" if name in by_name else name] = value
        return by_name

    def _offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """The number of characters of the text that are complete before each token. Tokens that the
        text does not show, such as special ones, count none."""
        spells = [self._bytes(token) * (token in self._vocabulary.plain) for token in ids]
        # Tokenizers like SentencePiece leave out the space before the first word.
        left_out = b"".join(spells).startswith(b" ") and not text.startswith(" ")
        decoder, offset, offsets = getincrementaldecoder("utf-8")("replace"), 0, []
        for spelled in spells:
            offsets.append(max(0, offset - left_out))
            offset += len(decoder.decode(spelled))
        return offsets

    def _entry(self, token: int, value: float) -> dict[str, Any]:
        spelled = self._bytes(token)
        name = self._name(token).removeprefix("" if _is_text(spelled) else _BYTES)
        return {"token": name, "logprob": value, "bytes": list(spelled)}

    def _name(self, token: int) -> str:
        spelled = self._bytes(token)
        if _is_text(spelled):
            return spelled.decode()
        return _BYTES + spelled.decode(errors="backslashreplace")

    def _bytes(self, token: int) -> bytes:
        """The bytes of a token; none for an id that the tokenizer lacks."""
        texts = self._vocabulary.texts
        return texts[token] if token < len(texts) else b""


def _is_text(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True
