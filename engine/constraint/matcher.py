"""Where one row stands in its grammar. The grammar itself is followed by xgrammar's matcher."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from batchgen.engine.base.constraint_error import ConstraintError
from batchgen.engine.constraint.vocabulary import Marker, Vocabulary, Words


class Grammar:
    """A compiled constraint. It does not change, and every matcher of it keeps it alive.

    Attributes:
        compiled: xgrammar's CompiledGrammar of the text behind the marker, or of the whole text if
            there is no marker.
        vocabulary: what the tokens spell.
        batch: xgrammar's BatchGrammarMatcher, which fills the masks of many rows on several
            threads. All grammars of one compiler share it.
        marker: finds the marker that ends the free text before the constraint; None if the
            constraint applies from the start.
        search_masks: for each state of the search for the marker, the ids that may come next. Stop
            ids are among them; the matcher takes those of its row out.
        num_bytes: the memory of `compiled`, as xgrammar counts it.
    """

    def __init__(
        self, compiled: Any, vocabulary: Vocabulary, batch: Any, marker: Marker | None
    ) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary
        self.batch = batch
        self.marker = marker
        self.num_bytes: int = compiled.memory_size_bytes
        self.search_masks = [] if marker is None else self._search_masks(marker)

    def _search_masks(self, marker: Marker) -> list[Words]:
        """Each mask allows any id that spells something, except for ids that complete the marker
        and put text behind it that the constraint does not allow."""
        import xgrammar

        start = xgrammar.GrammarMatcher(self.compiled)
        anything = np.zeros(self.vocabulary.num_words * 32, dtype=np.bool_)
        anything[: self.vocabulary.size] = [bool(text) for text in self.vocabulary.texts]
        shared: dict[tuple[int, ...], Words] = {}
        masks = []
        for endings in marker.endings:
            illegal = tuple(end.token_id for end in endings if not _may_follow(start, end.rest))
            if illegal not in shared:
                allowed = anything.copy()
                allowed[list(illegal)] = False
                shared[illegal] = np.packbits(allowed, bitorder="little").view(np.int32)
            masks.append(shared[illegal])
        return masks


def _may_follow(state: Any, text: bytes) -> bool:
    """Whether xgrammar's matcher accepts some bytes. It is left as it was."""
    if not state.accept_string(text):
        return False
    state.rollback(1)
    return True


class _Step(NamedTuple):
    """One tentative token, and what is needed to take it back.

    Attributes:
        token_id: the token.
        searched: the state of the search for the marker before the token; None if the search was
            over.
        moved: whether xgrammar's matcher went on by a step.
    """

    token_id: int
    searched: int | None
    moved: bool


class Matcher:
    """Where one row stands in its grammar: behind committed tokens, which are final, and tentative
    ones after them, which can be taken back.

    A stop id is legal where the text so far is complete and nowhere else. That holds for a stop id
    that is ordinary text, too, even where the grammar could go on with that text: the engine ends
    a row at any stop id.

    If the constraint has a marker (`start_after`), every token that spells something is legal
    before it, special tokens too, but no stop id. The token that completes the marker may go on
    behind it with text that the constraint allows there. Up to `MARKER_GAP` whitespace characters
    may come between the marker and the constrained text.

    Attributes:
        grammar: what the row follows.
        num_committed: the number of committed tokens.
        satisfied: whether the committed text is complete, so that it ended with a stop id or could
            end with one now.
    """

    def __init__(self, grammar: Grammar, stop_ids: Collection[int]) -> None:
        """
        Args:
            grammar: what the row follows.
            stop_ids: the ids that end the row, EOS and its own.

        Raises:
            ConstraintError: no id of the vocabulary ends the row, so it could never be complete.
        """
        import xgrammar

        self.grammar = grammar
        self._stops = frozenset(i for i in stop_ids if 0 <= i < grammar.vocabulary.size)
        if not self._stops:
            raise ConstraintError(
                "a constrained row must be able to end: it needs EOS (ignore_eos=false, and a model"
                " that has one) or stop_token_ids"
            )
        self._state = xgrammar.GrammarMatcher(
            grammar.compiled, override_stop_tokens=sorted(self._stops)
        )
        # The state of the search for the marker; None if there is no marker or it was found.
        self._searched: int | None = None if grammar.marker is None else 0
        self._tentative: list[_Step] = []
        self.num_committed = 0
        self.satisfied = self._complete()

    @property
    def num_tokens(self) -> int:
        """The number of accepted tokens, committed and tentative ones."""
        return self.num_committed + len(self._tentative)

    @property
    def terminated(self) -> bool:
        """Whether a stop id was accepted, tentatively or not. Nothing may follow it."""
        return bool(self._state.is_terminated())

    @property
    def searching(self) -> bool:
        """Whether the text is still free, because the marker was not found yet."""
        return self._searched is not None

    def commit(self, token_ids: list[int]) -> None:
        """Make tokens final that follow the committed ones and are legal there.

        Tentative tokens that begin with the same ids become committed without being checked again.
        All other tentative tokens are taken back.
        """
        kept = 0
        for step, token_id in zip(self._tentative, token_ids, strict=False):
            if step.token_id != token_id:
                break
            kept += 1
        self.rewind(self.num_committed + kept)
        for token_id in token_ids[kept:]:
            taken = self._take(token_id)
            assert taken, f"the grammar refuses token {token_id} behind {self.num_tokens} others"
        self._tentative.clear()
        self.num_committed += len(token_ids)
        self.satisfied = self._complete()

    def walk(self, token_ids: Collection[int]) -> int:
        """Take tokens tentatively up to the first that is not legal. A stop id is the last that can
        be taken.

        Returns:
            how many were taken.
        """
        return next((n for n, i in enumerate(token_ids) if not self._take(i)), len(token_ids))

    def rewind(self, num_tokens: int) -> None:
        """Take tentative tokens back until `num_tokens` accepted ones are left. This must not be
        fewer than were committed."""
        assert self.num_committed <= num_tokens <= self.num_tokens, (
            f"cannot rewind from {self.num_tokens} tokens to {num_tokens}: "
            f"{self.num_committed} are final"
        )
        undone = self._tentative[num_tokens - self.num_committed :]
        if not undone:
            return
        del self._tentative[-len(undone) :]
        self._searched = undone[0].searched
        moved = sum(step.moved for step in undone)
        if moved:
            self._state.rollback(moved)

    def fill(self, bitmask: Tensor, index: int) -> None:
        """Write the ids that may come next to `bitmask[index]`.

        Args:
            bitmask: int32 [N, ceil(V / 32)] on the CPU. Bit i of word w stands for the id
                32 · w + i. All bits of the row are written. Ids that the tokenizer does not have
                are 0 unless they are stop ids of the row, and so are the bits beyond V.
            index: the row of `bitmask` to write.
        """
        rows = bitmask.numpy()
        if self._searched is None:
            self.constraining().fill_next_token_bitmask(rows, index)
        else:
            self.fill_search(rows, index)

    def forced_text(self) -> str:
        """The text that must come next, up to its last whole character. It is empty if there is a
        choice."""
        text = self._forced_bytes()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            return text[: error.start].decode()

    def forced(self, most: int) -> list[int]:
        """Take tokens tentatively that spell `forced_text`, at most `most` of them.

        They are the tokens into which the tokenizer cuts that text by itself. Other tokens may be
        legal, too, because the same text can nearly always be cut in several ways.

        Returns:
            the tokens that were taken.
        """
        text = self.forced_text()
        token_ids = self.grammar.vocabulary.cut(text)[:most] if text else ()
        return list(token_ids[: self.walk(token_ids)])

    def constraining(self) -> Any:
        """xgrammar's matcher, which fills this row's mask once the marker was found and until a
        stop id was accepted."""
        assert not self.searching and not self.terminated, "nothing follows a stop id"
        return self._state

    def fill_search(self, rows: Words, index: int) -> None:
        """As `fill`, while the marker is not found. `rows` are the words of the bitmask,
        [N, ceil(V / 32)]."""
        assert self._searched is not None
        rows[index] = self.grammar.search_masks[self._searched]
        bits = rows.view(np.uint32)
        for token_id in self._stops:
            bits[index, token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))

    def _take(self, token_id: int) -> bool:
        """Take one more token tentatively. False if it is not legal here; then nothing changed."""
        vocabulary, searched = self.grammar.vocabulary, self._searched
        if searched is None:
            # Asked first, because xgrammar prints a warning for each of these.
            spells = token_id in vocabulary.plain or token_id in self._stops
            if self.terminated or not spells or not self._state.accept_token(token_id):
                return False
            self._tentative.append(_Step(token_id, None, True))
            return True
        if token_id in self._stops or not vocabulary.spells(token_id):
            return False
        assert self.grammar.marker is not None
        state, rest = self.grammar.marker.advance(searched, token_id)
        if rest and not self._state.accept_string(rest):
            return False
        self._searched = state
        self._tentative.append(_Step(token_id, searched, bool(rest)))
        return True

    def _forced_bytes(self) -> bytes:
        """The bytes that must come next, as far as xgrammar tells."""
        if self.searching or self.terminated:
            return b""
        try:
            return str(self._state.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # the bytes end inside of a character
            return error.object

    def _complete(self) -> bool:
        return self._searched is None and bool(self._state.is_completed())


def fill_all(matchers: list[Matcher], bitmask: Tensor, indices: Iterable[int]) -> None:
    """Call `matchers[i].fill(bitmask, indices[i])` for all matchers, on several threads.

    The grammars of all of them must come from one compiler, and the indices must differ.
    """
    rows = bitmask.numpy()
    states, where = [], []
    for matcher, index in zip(matchers, indices, strict=True):
        if matcher.searching:
            matcher.fill_search(rows, index)
        else:
            states.append(matcher.constraining())
            where.append(index)
    if states:
        matchers[0].grammar.batch.batch_fill_next_token_bitmask(states, rows, where)
