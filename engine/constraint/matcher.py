"""Where one row stands in its grammar, over xgrammar's matcher."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from batchgen.engine.constraint.constraint import ConstraintError
from batchgen.engine.constraint.vocabulary import Marker, Vocabulary, Words


class Grammar:
    """A compiled constraint. Immutable; every matcher of it keeps it alive.

    Attributes:
        compiled: xgrammar's CompiledGrammar, of what stands behind the marker.
        batch: xgrammar's BatchGrammarMatcher, which fills many rows on several threads.
        marker: what ends the free text before the constraint; None: there is none.
        search_masks: state of the marker's search → what may follow it, stop ids included.
        num_bytes: memory that `compiled` takes, by xgrammar's own count.
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
        """Any id that spells something, less those that put illegal text behind the marker."""
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
    if not state.accept_string(text):
        return False
    state.rollback(1)
    return True


class _Step(NamedTuple):
    """What taking a token changed, for taking it back."""

    token_id: int
    searched: int | None
    moved: bool


class Matcher:
    """Where one row stands in its grammar: committed tokens, then tentative ones.

    Stop ids are legal where the grammar is complete and nowhere else, even an id that is text that
    the grammar could go on with: the engine ends a row at any stop id.

    With `start_after` any token that spells something is legal before the marker, special tokens
    too, but no stop id. The token that completes the marker may have text behind it, which must
    already be legal; up to four whitespace characters may stand before what is constrained.

    Attributes:
        grammar: what the row follows.
        num_committed: accepted tokens that are final.
        satisfied: what was committed is complete: it ended in a stop id, or one would be legal.
    """

    def __init__(self, grammar: Grammar, stop_ids: Collection[int]) -> None:
        """stop_ids end the row: EOS and its own.

        Raises:
            ConstraintError: no id can end the row, so that its text could never be complete.
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
        self._searched: int | None = None if grammar.marker is None else 0
        """State of the marker's search; None where there is no marker, and behind it."""
        self._tentative: list[_Step] = []
        self.num_committed = 0
        self.satisfied = self._complete()

    @property
    def num_tokens(self) -> int:
        """Accepted tokens, tentative ones included."""
        return self.num_committed + len(self._tentative)

    @property
    def terminated(self) -> bool:
        """A stop id was accepted, tentatively or not: nothing may follow."""
        return bool(self._state.is_terminated())

    def commit(self, token_ids: Sequence[int]) -> None:
        """Final tokens that follow the committed ones.

        Those that were taken tentatively are kept, other tentative ones are taken back.
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

    def walk(self, token_ids: Sequence[int]) -> int:
        """Takes tokens tentatively while they are legal, a stop id last; returns how many."""
        return next((n for n, i in enumerate(token_ids) if not self._take(i)), len(token_ids))

    def rewind(self, num_tokens: int) -> None:
        """Back to so many accepted tokens; committed ones stay."""
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
        """Writes what may come next to bitmask[index].

        Args:
            bitmask: int32 [N, ceil(V / 32)] on the CPU, bit i of word w is id 32w + i. Every bit of
                the row is written; those of ids that the tokenizer does not have, but for stop ids
                of the row, and those beyond V, are 0.
        """
        rows = bitmask.numpy()
        if self._searched is None:
            self.constraining().fill_next_token_bitmask(rows, index)
        else:
            self.fill_search(rows, index)

    def forced_text(self) -> str:
        """The text that must come next, as far as it is whole characters."""
        text = self._forced_bytes()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            return text[: error.start].decode()

    def forced(self, most: int) -> list[int]:
        """Takes tentatively tokens that spell `forced_text`, at most so many.

        They are those into which the tokenizer cuts that text alone. Others may be legal too: what
        a schema forces can nearly always be cut in several ways.
        """
        text = self.forced_text()
        token_ids = self.grammar.vocabulary.cut(text)[:most] if text else ()
        return list(token_ids[: self.walk(token_ids)])

    @property
    def searching(self) -> bool:
        """The marker was not found yet: the text is free."""
        return self._searched is not None

    def constraining(self) -> Any:
        """xgrammar's matcher, for a mask of it."""
        assert not self.searching and not self.terminated, "nothing follows a stop id"
        return self._state

    def fill_search(self, rows: Words, index: int) -> None:
        """`fill` before the marker is complete; rows [N, ceil(V / 32)]."""
        assert self._searched is not None
        rows[index] = self.grammar.search_masks[self._searched]
        bits = rows.view(np.uint32)
        for token_id in self._stops:
            bits[index, token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))

    def _take(self, token_id: int) -> bool:
        """One more token, tentatively; False: it is not legal here, and nothing changed."""
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
        if self.searching or self.terminated:
            return b""
        try:
            return str(self._state.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # it is not cut at characters
            return error.object

    def _complete(self) -> bool:
        return self._searched is None and bool(self._state.is_completed())


def fill_all(matchers: Sequence[Matcher], bitmask: Tensor, indices: Sequence[int]) -> None:
    """`matchers[i].fill(bitmask, indices[i])` for all, on several threads.

    All of one compiler; the indices differ.
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
