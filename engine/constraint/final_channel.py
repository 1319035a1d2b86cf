"""Finds where the final channel of a row begins in Harmony, the message format of gpt-oss.

A model with that format writes its reasoning in one channel and its answer in another, named
"final". A constraint applies only to the answer, so the row's `Matcher` uses `FinalChannel` to find
its beginning.
"""

from __future__ import annotations

from collections.abc import Sequence

from batchgen.engine.constraint.harmony import FINAL, WHITESPACE
from batchgen.engine.constraint.vocabulary import Ending, Vocabulary

_OUTSIDE, _NAMED, _OTHER = 0, 1, 7
"""States of the search: outside a header; in a header whose name has begun (from 1 on, by the
number of matching letters of FINAL); and in the header of another channel."""
_IN_FINAL = _NAMED + len(FINAL)


class FinalChannel:
    """Finds where the final channel begins in token ids: after `<|channel|>`, a name that begins
    with FINAL, anything else that a header may contain, and `<|message|>`. It has the interface of
    `Marker`.

    A prompt may have begun the message. A prompt that is not in the format has no channels, and the
    row is answer from its first token on.

    Attributes:
        gap: whether whitespace may follow.
        never_ends: the stop ids that must not end an answer.
    """

    gap = False

    def __init__(self, vocabulary: Vocabulary) -> None:
        """Prepare the search. The vocabulary must have the tokens of the format."""
        assert vocabulary.harmony is not None
        self._tokens, self._vocabulary = vocabulary.harmony, vocabulary
        self._format = vocabulary.harmony.all
        self.endings: list[list[Ending]] = [[] for _ in range(_OTHER + 1)]
        self.never_ends = frozenset([self._tokens.call])

    def begin(self, prompt: Sequence[int]) -> int | None:
        """Return the state after a prompt; None if the row is in the final channel from its first
        token on."""
        if self._tokens.start not in prompt:
            return None
        last = len(prompt) - 1 - prompt[::-1].index(self._tokens.start)
        state: int | None = _OUTSIDE
        for token_id in prompt[last:]:
            if state is not None or token_id in self._format:
                state, _ = self.advance(_OUTSIDE if state is None else state, token_id)
        return state

    def advance(self, state: int, token_id: int) -> tuple[int | None, bytes]:
        """Return the state after one more token (None in the final channel), and b""."""
        tokens = self._tokens
        if token_id == tokens.message:
            return None if state == _IN_FINAL else _OUTSIDE, b""
        if token_id == tokens.channel:
            return _NAMED, b""
        if token_id == tokens.constrain:
            return state if state in (_OUTSIDE, _IN_FINAL) else _OTHER, b""
        if token_id in self._format:
            return _OUTSIDE, b""
        if _NAMED <= state < _IN_FINAL and token_id in self._vocabulary.plain:
            for letter in self._vocabulary.texts[token_id].decode("latin-1").lower():
                state = _behind(state, letter)
        return state, b""


def _behind(state: int, letter: str) -> int:
    """Return the state after one more letter of a header."""
    if state in (_IN_FINAL, _OTHER):
        return state
    if state == _NAMED and letter in WHITESPACE:
        return state
    return state + 1 if letter == FINAL[state - _NAMED] else _OTHER
