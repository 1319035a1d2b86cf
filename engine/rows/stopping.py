"""The rules that end a row: its stop ids, its stop strings, which may begin and end within tokens,
and its length."""

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
"""How many tokens may be held back until their bytes make a whole character. A character has at
most four bytes, so what is not whole after this many tokens never will be."""


class IncrementalDecoder:
    """The text of a row whose tokens arrive one by one. Bytes are held back until they make a whole
    character.

    A token is decoded together with those just before it, because the text that it adds can depend
    on them (leading spaces, the bytes of one character).

    Attributes:
        text: the text so far, without what is held back.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self.clear()

    def clear(self) -> None:
        """Forget all tokens."""
        self._ids: list[int] = []
        self._context = 0  # the first token that is decoded again with each new one
        self._read = 0  # how many tokens have all their text in `text`
        self._emitted = 0  # characters of the text from _context on that are in `text`
        self.text = ""

    def push(self, token_id: int) -> None:
        """Take the next token and add its text, as far as its characters are whole."""
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
    """The text of generated token ids: special tokens are left out, and spaces stay as they are.
    Bytes that make no whole character are U+FFFD, and those beside them keep their characters."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    if _REPLACEMENT in text:
        return _with_whole_characters(tokenizer.backend_tokenizer, ids) or text
    return text


def _with_whole_characters(tokenizer: Tokenizer, ids: list[int]) -> str | None:
    """The text of token ids by a tokenizer with a token for each byte (<0xE6>); None for others.

    Its decoder makes U+FFFD of all neighbouring bytes if one of them belongs to no character.
    """
    if tokenizer.decoder is None or tokenizer.decoder.decode(["<0x41>"]) != "A":
        return None
    special = {id for id, token in tokenizer.get_added_tokens_decoder().items() if token.special}
    words = [tokenizer.id_to_token(id) for id in ids if id not in special]
    tokens: list[str] = []
    known = [word for word in words if word is not None]
    for is_byte, run in groupby(known, key=lambda word: bool(_BYTE.fullmatch(word))):
        part = list(run)
        tokens += _marked(part) if is_byte else part
    return str(tokenizer.decoder.decode(tokens))


def _marked(tokens: list[str]) -> list[str]:
    """Tokens of bytes, with U+FFFD for each that belongs to no whole character."""
    data, at = bytes(int(token[3:5], 16) for token in tokens), 0
    while True:
        try:
            data[at:].decode()
        except UnicodeDecodeError as error:
            torn = slice(at + error.start, at + error.end)
            tokens[torn] = [_REPLACEMENT] * (error.end - error.start)
            at += error.end
        else:
            return tokens


@dataclass
class StopRule:
    """What ends one row, and the text of the row so far if it has stop strings."""

    # The token ids that end the row; the value says what stopped it, for the output.
    stop_ids: Mapping[int, str]
    strings: tuple[str, ...]  # the stop strings. If there are any, `decoder` must not be None.
    # The row stops only when it has this many generated tokens, the last one included.
    min_new_tokens: int
    # The most tokens that the row can generate. The length of the model is already taken into
    # account.
    max_new_tokens: int
    # Makes the text that is searched for stop strings; None if there are none.
    decoder: IncrementalDecoder | None = None
    # The text before the stop string that ended the row; None until one has.
    text_before_stop: str | None = None

    @property
    def exact_length(self) -> bool:
        """Whether nothing but its length can stop the row, so that it generates exactly
        `max_new_tokens` tokens."""
        return not self.stop_ids and not self.strings

    def find_string(self, token_ids: Iterable[int], num_generated: int) -> tuple[int, str] | None:
        """Find the first stop string that is completed by one of the row's new tokens.

        Returns:
            how many of the new tokens are kept, the completing one included, and the string. If one
            token completes several strings, it is the one that starts first. None if no string is
            found.
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
                at = text.find(string, max(0, new_text_start - len(string) + 1))
                if at >= 0:
                    matches.append((at, string))
            if matches:
                at, string = min(matches)
                self.text_before_stop = text[:at]
                return count, string
        return None
