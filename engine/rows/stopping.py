"""The rules that end a row: stop ids, stop strings (which may begin and end within tokens) and the
maximum length.

`StopRules` makes a `StopRule` for each row; `RunningBatch` applies it. `decode` turns token ids
into text, for stop strings and for the output.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from itertools import groupby
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_BYTE = re.compile("<0x[0-9A-Fa-f]{2}>")
_MOST_HELD = 8
"""The most tokens that are held back to wait for a whole character. A character has at most four
bytes, so bytes that form no character after this many tokens never will."""


class IncrementalDecoder:
    """Decodes the tokens of a row one by one. Bytes are held back until they form a whole
    character.

    A token is decoded together with the tokens just before it, because the text that it adds can
    depend on them (leading spaces, the bytes of one character).

    Attributes:
        text: the text so far, without held-back bytes.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self._ids: list[int] = []
        self._context = 0  # the index of the first token that is decoded again with each new one
        self._read = 0  # the number of tokens whose text is completely in `text`
        self._emitted = 0  # how many characters from token `_context` on are in `text`
        self.text = ""

    def push(self, token_id: int) -> None:
        """Append a token and the text that it completes."""
        self._ids.append(token_id)
        text = self._decode(self._ids[self._context :])
        whole = not text.endswith(_REPLACEMENT) or len(self._ids) - self._read > _MOST_HELD
        # A token may end one character and begin the next.
        ready = text if whole else text.rstrip(_REPLACEMENT)
        if len(ready) > self._emitted:
            self.text += ready[self._emitted :]
            self._emitted = len(ready)
            if whole:
                self._context, self._read = self._read, len(self._ids)
                self._emitted = len(self._decode(self._ids[self._context : self._read]))

    def _decode(self, ids: list[int]) -> str:
        return decode(self._tokenizer, ids)


def decode(tokenizer: PreTrainedTokenizerBase, ids: list[int]) -> str:
    """Decode generated token ids. Special tokens are left out, and spaces are kept. Bytes that form
    no character become U+FFFD; adjacent characters are kept."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if _REPLACEMENT in text:
        return _with_whole_characters(tokenizer.backend_tokenizer, ids) or text
    return text


def _with_whole_characters(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """Decode token ids with a tokenizer that has a token for each byte (<0xE6>); None for other
    tokenizers. Its own decoder would replace a whole run of byte tokens by U+FFFD if one of them
    belongs to no character."""
    if tokenizer.decoder is None or tokenizer.decoder.decode(["<0x41>"]) != "A":
        return None
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    words = [tokenizer.id_to_token(id) for id in ids if id not in special]
    tokens: list[str] = []
    valid = [word for word in words if word is not None]
    for is_byte, run in groupby(valid, key=lambda word: bool(_BYTE.fullmatch(word))):
        part = list(run)
        tokens += _marked(part) if is_byte else part
    return str(tokenizer.decoder.decode(tokens))


def _marked(tokens: list[str]) -> list[str]:
    """Replace each byte token that belongs to no whole character by U+FFFD."""
    data, start = bytes(int(token[3:5], 16) for token in tokens), 0
    while True:
        try:
            data[start:].decode()
        except UnicodeDecodeError as error:
            invalid = slice(start + error.start, start + error.end)
            tokens[invalid] = [_REPLACEMENT] * (error.end - error.start)
            start += error.end
        else:
            return tokens


@dataclass
class StopRule:
    """The rule that ends one row, and the row's text so far if it has stop strings."""

    # The token ids that end the row, each with its text for the output.
    stop_ids: Mapping[int, str]
    strings: tuple[str, ...]  # the stop strings. If there are any, `decoder` must not be None.
    # Stops count only from this many generated tokens on, including the stop itself.
    min_new_tokens: int
    # The most tokens that the row can generate, within the model's maximum length.
    max_new_tokens: int
    # Decodes the text that is searched for stop strings; None without stop strings.
    decoder: IncrementalDecoder | None = None
    # The text before the stop string that ended the row; None unless one did.
    text_before_stop: str | None = None

    @property
    def exact_length(self) -> bool:
        """Whether only the maximum length can stop the row, so that it generates exactly
        `max_new_tokens` tokens."""
        return not self.stop_ids and not self.strings

    def find_string(self, token_ids: Iterable[int], num_generated: int) -> tuple[int, str] | None:
        """Find the first stop string that one of the row's new tokens completes.

        Args:
            num_generated: the number of tokens generated before these.

        Returns:
            The number of new tokens to keep, including the completing one, and the string. If a
                token completes several strings, the one that starts first wins. None if no string
                is completed.
        """
        assert self.decoder is not None
        for count, token_id in enumerate(token_ids, start=1):
            new_text_start = len(self.decoder.text)
            self.decoder.push(token_id)
            if num_generated + count < self.min_new_tokens:
                continue
            text = self.decoder.text
            matches = []
            for string in self.strings:
                # It may begin in earlier text, and must end in the text of this token.
                at = text.find(string, max(0, new_text_start - len(string) + 1))
                if at >= 0:
                    matches.append((at, string))
            if matches:
                at, string = min(matches)
                self.text_before_stop = text[:at]
                return count, string
        return None
