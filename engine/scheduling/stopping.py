"""When a row ends: stop ids, stop strings across token boundaries, length."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase

_REPLACEMENT = "\ufffd"
_MOST_HELD = 8
"""A character has at most four bytes: what is not whole by now never will be."""


class IncrementalDecoder:
    """Text of a growing token list. Holds bytes back until they are a whole character.

    A token is decoded together with the tokens since the last emitted text, because what a token
    adds can depend on the one before it (leading spaces, bytes of one character).
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = 0
        self._read = 0
        self._emitted = 0  # characters of the text since _context
        self.text = ""

    def push(self, token_id: int) -> None:
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
    """The text of generated ids, without special tokens, exactly as the ids spell it."""
    text = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    assert isinstance(text, str)
    return text


@dataclass
class StopRule:
    """The stops of one row, and the text seen so far if it has stop strings.

    Attributes:
        stop_ids: ids that end the row → what `RequestOutput.stop` then says.
        strings: stop strings; they need a decoder.
        min_new_tokens: no stop before this many generated tokens.
        max_new_tokens: generated tokens at most, the model's length already considered.
        decoder: follows the text; None if there are no stop strings.
        text_before_stop: set when a stop string ended the row.
    """

    stop_ids: Mapping[int, str]
    strings: tuple[str, ...]
    min_new_tokens: int
    max_new_tokens: int
    decoder: IncrementalDecoder | None = None
    text_before_stop: str | None = None

    @property
    def exact_length(self) -> bool:
        """The row ends after max_new_tokens and never before."""
        return not self.stop_ids and not self.strings

    def find_string(self, token_ids: Iterable[int], num_generated: int) -> tuple[int, str] | None:
        """The first stop string that ends within tokens which follow `num_generated` others.

        Returns:
            How many of the tokens are kept, and the string; of several strings that one token
            ends, the one that starts first.
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
