"""What the ids of a vocabulary spell, and the search for a marker in them."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.constraint import ConstraintError

Words = npt.NDArray[np.int32]
"""One bit per id, the lowest bit of a word first; as many words as a row of a bitmask."""

_TEXTS = 4096
"""Whose tokens are remembered: constraints force the same texts again and again."""


class Vocabulary:
    """The bytes that every id of the logits spells.

    Attributes:
        size: width of the logits.
        num_words: int32 words of a bitmask row, ceil(size / 32).
        texts: id → its bytes, special tokens included; empty where the tokenizer has no such id.
        cut: text → the tokens that the tokenizer cuts it into.
        plain: ids that a grammar may use: those that spell something and are no special token.
        info: the same for xgrammar, with nothing for special tokens. They are no part of a row's
            text, so no grammar may count on them, though xgrammar would take their names for text.
            It covers all bits of the last word, so that those beyond `size` are always 0.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, size: int, eos_token_ids: Collection[int]
    ) -> None:
        """EOS ids are no text either, whatever the tokenizer calls them.

        Raises:
            ConstraintError: xgrammar cannot tell what the tokens of this tokenizer spell.
        """
        import xgrammar

        self.size = size
        self.num_words = -(-size // 32)
        try:
            # A stop id must be named here, or xgrammar warns that it guesses one. Not kept.
            found = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=size, stop_token_ids=[0]
            )
        except ValueError as error:
            raise ConstraintError(f"constraints need another tokenizer: {error}") from error
        self.texts: list[bytes] = found.decoded_vocab
        special = {*tokenizer.all_special_ids, *eos_token_ids}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < size:
                # Plain text also where the tokenizer writes its other tokens in an alphabet.
                self.texts[token_id] = token.content.encode()
                if token.special:
                    special.add(token_id)
        spelled = [b"" if i in special else text for i, text in enumerate(self.texts)]
        spelled += [b""] * (self.num_words * 32 - size)
        self.plain = frozenset(i for i, text in enumerate(spelled) if text)

        # No stop ids either: xgrammar would allow one that spells nothing as a part of any text.
        # Every matcher brings those of its row.
        def cut(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self.cut: Callable[[str], tuple[int, ...]] = lru_cache(_TEXTS)(cut)
        self.info: Any = xgrammar.TokenizerInfo(
            spelled, xgrammar.VocabType.RAW, vocab_size=len(spelled), stop_token_ids=[]
        )

    def spells(self, token_id: int) -> bool:
        return 0 <= token_id < self.size and bool(self.texts[token_id])


@dataclass(frozen=True, slots=True)
class Found:
    """A token after which the marker is complete, and the text that the token has behind it."""

    token_id: int
    rest: bytes


class Marker:
    """Finds the first occurrence of a marker in the text that tokens spell.

    The state of a search is the number of bytes of the marker that the text ends with; 0 at first.
    Whatever tokens spell the marker, special ones too, it counts as found.
    """

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """Raises ConstraintError: the tokens cannot spell the marker."""
        self._texts = vocabulary.texts
        self._bytes = text.encode()
        size = len(self._bytes)
        suffixes = tuple(self._bytes[start:] for start in range(1, size))
        ending = [
            (token_id, spelled)
            for token_id, spelled in enumerate(self._texts)
            if spelled.startswith(suffixes) or self._bytes in spelled
        ]
        self.endings: list[list[Found]] = []
        """State → the tokens that complete the marker there and have more text behind it."""
        for state in range(size):
            steps = ((token_id, self.advance(state, token_id)) for token_id, _ in ending)
            self.endings.append([Found(i, rest) for i, (_, rest) in steps if rest])
        if not self._can_be_spelled():
            raise ConstraintError(
                f"start_after {text!r} would never be found: this tokenizer cannot spell it"
            )

    def _can_be_spelled(self) -> bool:
        spelled, reached = set(self._texts), {0}
        for end in range(1, len(self._bytes) + 1):
            if any(self._bytes[start:end] in spelled for start in reached):
                reached.add(end)
        return len(self._bytes) in reached or any(self.endings[start] for start in reached)

    def advance(self, state: int, token_id: int) -> tuple[int | None, bytes]:
        """The state behind a token, None if the marker is complete; then also what follows it."""
        before, marker, after = (self._bytes[:state] + self._texts[token_id]).partition(self._bytes)
        if marker:
            return None, after
        longest = min(len(self._bytes) - 1, len(before))
        return next(n for n in range(longest, -1, -1) if before.endswith(self._bytes[:n])), b""
