"""The bytes that the ids of a vocabulary stand for, and the search for a marker in them.

Grammars describe text and models yield token ids, so the compiler and the matchers look up the
bytes of each id here. A *marker* is a text such as "</think>" after which a constraint begins to
apply.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from batchgen.engine.constraint.harmony import HarmonyTokens
from batchgen.engine.interface.constraint_error import ConstraintError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Words = npt.NDArray[np.int32]
"""A row of a bitmask: bit i % 32 of word i // 32 stands for token id i. Bit 0 is the lowest."""

_TEXTS = 4096
"""How many texts are cached with their tokens. Constraints force the same texts again and again."""


class Vocabulary:
    """The bytes of each token id.

    Attributes:
        size: V, the number of logits.
        num_words: ceil(V / 32), the number of int32 words in a bitmask row.
        info: xgrammar's TokenizerInfo. Special tokens and EOS have no text in it: a row's text does
            not show them, so no grammar may use them, while xgrammar would use their names as text.
            It has an id for each bit of the last word, so that bits beyond V are always 0.
        plain: the ids that have text and are neither special nor EOS.
        texts: [V], the bytes of each id, including special tokens; empty for ids that the tokenizer
            lacks.
        cut: returns the token ids of a text, without special tokens around it.
        harmony: the tokens of the Harmony format, if the tokenizer has them.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, size: int, special_ids: Collection[int]
    ) -> None:
        """Read the bytes of all tokens. Raises ConstraintError if xgrammar does not support the
        tokenizer.

        Args:
            size: V, the number of logits.
            special_ids: ids that count as special in any case.
        """
        import xgrammar

        self.size = size
        self.num_words = -(-size // 32)
        self.harmony = HarmonyTokens.of(tokenizer)
        try:
            # Without a stop id, xgrammar would warn that it guesses one. This info is not kept.
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=size, stop_token_ids=[0]
            )
        except ValueError as error:
            raise ConstraintError(f"constraints need another tokenizer: {error}") from error
        self.texts: list[bytes] = info.decoded_vocab
        special = {*tokenizer.all_special_ids, *special_ids}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < size:
                # Added tokens are plain text, even if the tokenizer writes all others in a separate
                # alphabet.
                self.texts[token_id] = token.content.encode()
                if token.special:
                    special.add(token_id)
        spelled = [b"" if i in special else text for i, text in enumerate(self.texts)]
        spelled += [b""] * (self.num_words * 32 - size)
        self.plain = frozenset(i for i, text in enumerate(spelled) if text)

        def cut(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self.cut: Callable[[str], tuple[int, ...]] = lru_cache(_TEXTS)(cut)
        # The info has no stop ids, because xgrammar would allow a stop id without bytes inside any
        # text. Every matcher adds those of its row.
        self.info: Any = xgrammar.TokenizerInfo(
            spelled, xgrammar.VocabType.RAW, vocab_size=len(spelled), stop_token_ids=[]
        )

    def spells(self, token_id: int) -> bool:
        """Return whether the id is one of the logits and has at least one byte."""
        return 0 <= token_id < self.size and bool(self.texts[token_id])


@dataclass(frozen=True, slots=True)
class Ending:
    """A token that completes a marker and continues with at least one byte, `rest`."""

    token_id: int
    rest: bytes


class Marker:
    """Finds the first occurrence of a marker in the text of tokens, including special tokens.

    The state of the search is the number of the marker's bytes with which the text so far ends,
    initially 0.

    Attributes:
        endings: for each state, the tokens that complete the marker and continue after it.
        gap: whether whitespace may follow the marker.
        never_ends: the stop ids that must not end a row after the marker.
    """

    gap = True
    never_ends: frozenset[int] = frozenset()

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """Prepare the search. Raises ConstraintError if no sequence of tokens contains the
        marker."""
        self._texts = vocabulary.texts
        self._bytes = text.encode()
        size = len(self._bytes)
        suffixes = tuple(self._bytes[start:] for start in range(1, size))
        # Only these tokens can complete the marker: they start with its last bytes or contain it.
        candidates = [
            token_id
            for token_id, spelled in enumerate(self._texts)
            if spelled.startswith(suffixes) or self._bytes in spelled
        ]
        self.endings: list[list[Ending]] = []
        for state in range(size):
            steps = ((token_id, self.advance(state, token_id)) for token_id in candidates)
            self.endings.append([Ending(token_id, rest) for token_id, (_, rest) in steps if rest])
        if not self._can_be_spelled():
            raise ConstraintError(
                f"start_after {text!r} would never be found: this tokenizer cannot spell it"
            )

    def _can_be_spelled(self) -> bool:
        """Return whether some sequence of tokens contains the marker."""
        # `reached`: the numbers of the marker's first bytes that some sequence of tokens spells.
        spelled, reached = set(self._texts), {0}
        for end in range(1, len(self._bytes) + 1):
            if any(self._bytes[start:end] in spelled for start in reached):
                reached.add(end)
        return len(self._bytes) in reached or any(self.endings[start] for start in reached)

    def begin(self, prompt: Collection[int]) -> int:
        """Return the initial state. The prompt is not searched."""
        return 0

    def advance(self, state: int, token_id: int) -> tuple[int | None, bytes]:
        """Return the state after one more token and b"", or None and the bytes after the marker."""
        before, marker, after = (self._bytes[:state] + self._texts[token_id]).partition(self._bytes)
        if marker:
            return None, after
        longest = min(len(self._bytes) - 1, len(before))
        return next(n for n in range(longest, -1, -1) if before.endswith(self._bytes[:n])), b""
