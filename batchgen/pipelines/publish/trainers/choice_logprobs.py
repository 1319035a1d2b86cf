"""Log-probabilities in the form of OpenAI's choices."""

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
        vocabulary: what tokens spell.
        asked: how many likeliest tokens a row asked for, by its columns; None if it asked for no
            log-probabilities.
        read: the columns that `asked` reads.
    """

    def __init__(
        self,
        names: Collection[str],
        vocabulary: Vocabulary,
        request_of: Callable[[Mapping[str, Any]], int | None],
        read: Sequence[str],
    ) -> None:
        self.columns = (*(name for name in _COLUMNS if name in names), *read)
        self._vocabulary, self._asked = vocabulary, request_of

    def of(self, row: Mapping[str, Any], text: str | None) -> dict[str, Any] | None:
        """The entry of a completion with this text, or that of a chat (None); None if the row did
        not ask."""
        number = self._asked(row)
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
        """Log-probabilities by the names of tokens; of several with one name, the likelier keeps
        it, and the others are `token_id:ID`."""
        found: dict[str, float] = {}
        for token, value in likely:
            name = self._name(token)
            found[f"token_id:{token}" if name in found else name] = value
        return found

    def _offsets(self, ids: Sequence[int], text: str) -> list[int]:
        """How many characters of the text are whole before each token; what the text does not show,
        such as special tokens, takes no room."""
        spells = [self._bytes(token) * (token in self._vocabulary.plain) for token in ids]
        # Tokenizers like SentencePiece leave out the space before the first word.
        left_out = b"".join(spells).startswith(b" ") and not text.startswith(" ")
        decoder, offset, found = getincrementaldecoder("utf-8")("replace"), 0, []
        for spelled in spells:
            found.append(max(0, offset - left_out))
            offset += len(decoder.decode(spelled))
        return found

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
        """What a token spells; nothing for an id that the tokenizer lacks."""
        texts = self._vocabulary.texts
        return texts[token] if token < len(texts) else b""


def _is_text(spelled: bytes) -> bool:
    try:
        spelled.decode()
    except UnicodeDecodeError:
        return False
    return True
