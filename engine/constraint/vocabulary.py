"""What the ids of a vocabulary spell, as bytes, and the search for a marker in what they spell.

Grammars are about text and models about token ids, so the compiler and the matchers of rows read
here which bytes each id stands for. A *marker* is a text such as "</think>" behind which a
constraint begins to hold.
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
"""A row of a bitmask: bit i % 32 of word i // 32 stands for the token id i. Bit 0 is the lowest."""

_TEXTS = 4096
"""How many texts are kept with their tokens. Constraints force the same texts again and again."""


class Vocabulary:
    """The bytes that each id of the logits spells.

    In `info` special tokens and EOS spell nothing: a row's text does not show them, so no grammar
    may count on them, while xgrammar would take their names for text. It has an id for each bit of
    the last word, so that the bits beyond V are always 0. `plain` ids spell something and are
    neither special nor EOS. `texts` [V] has special tokens too; ids that the tokenizer lacks spell
    nothing. `cut` cuts a text as the tokenizer does; `num_words` is ceil(V / 32), the int32 words
    of a bitmask row. `harmony` has the tokens of that format, if the tokenizer knows it.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, size: int, special_ids: Collection[int]
    ) -> None:
        """Read what tokens spell, for logits of width `size`; `special_ids` count as special in any
        case.

        Raises ConstraintError if xgrammar cannot tell what the tokens of this tokenizer spell.
        """
        import xgrammar

        self.size = size
        self.num_words = -(-size // 32)
        self.harmony = HarmonyTokens.of(tokenizer)
        try:
            # Without a stop id xgrammar warns that it guesses one. This info is not kept.
            info = xgrammar.TokenizerInfo.from_huggingface(
                tokenizer, vocab_size=size, stop_token_ids=[0]
            )
        except ValueError as error:
            raise ConstraintError(f"constraints need another tokenizer: {error}") from error
        self.texts: list[bytes] = info.decoded_vocab
        special = {*tokenizer.all_special_ids, *special_ids}
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < size:
                # Added tokens are plain text, even where the tokenizer writes the others in an
                # alphabet of its own.
                self.texts[token_id] = token.content.encode()
                if token.special:
                    special.add(token_id)
        spelled = [b"" if i in special else text for i, text in enumerate(self.texts)]
        spelled += [b""] * (self.num_words * 32 - size)
        self.plain = frozenset(i for i, text in enumerate(spelled) if text)

        def cut(text: str) -> tuple[int, ...]:
            return tuple(tokenizer.encode(text, add_special_tokens=False))

        self.cut: Callable[[str], tuple[int, ...]] = lru_cache(_TEXTS)(cut)
        # The info names no stop ids, because xgrammar would allow one that spells nothing as a part
        # of any text. Every matcher brings those of its row.
        self.info: Any = xgrammar.TokenizerInfo(
            spelled, xgrammar.VocabType.RAW, vocab_size=len(spelled), stop_token_ids=[]
        )

    def spells(self, token_id: int) -> bool:
        """Whether the id is one of the logits and spells at least one byte."""
        return 0 <= token_id < self.size and bool(self.texts[token_id])


@dataclass(frozen=True, slots=True)
class Ending:
    """A token that completes a marker and goes on with the bytes `rest` behind it, at least one."""

    token_id: int
    rest: bytes


class Marker:
    """Finds where a marker first occurs in the text that tokens spell, special ones too.

    The search's state is the number of the marker's bytes that the text so far ends with, at first
    0. `endings` has, for each state, the tokens that complete the marker and go on behind it.
    `gap` says whether whitespace may follow, and `never_ends` has the stop ids that may not end a
    row behind it.
    """

    gap = True
    never_ends: frozenset[int] = frozenset()

    def __init__(self, vocabulary: Vocabulary, text: str) -> None:
        """Raise ConstraintError if no tokens spell the marker."""
        self._texts = vocabulary.texts
        self._bytes = text.encode()
        size = len(self._bytes)
        suffixes = tuple(self._bytes[start:] for start in range(1, size))
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
        spelled, reached = set(self._texts), {0}
        for end in range(1, len(self._bytes) + 1):
            if any(self._bytes[start:end] in spelled for start in reached):
                reached.add(end)
        return len(self._bytes) in reached or any(self.endings[start] for start in reached)

    def begin(self, prompt: Collection[int]) -> int:
        """The state behind a prompt, which does not count."""
        return 0

    def advance(self, state: int, token_id: int) -> tuple[int | None, bytes]:
        """Return the state after one more token and b"", or None and what follows the marker."""
        before, marker, after = (self._bytes[:state] + self._texts[token_id]).partition(self._bytes)
        if marker:
            return None, after
        longest = min(len(self._bytes) - 1, len(before))
        return next(n for n in range(longest, -1, -1) if before.endswith(self._bytes[:n])), b""
