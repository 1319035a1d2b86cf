"""Follows the text of one row in its grammar, token by token, and says which tokens may come next.

xgrammar's matcher follows the grammar itself. This module adds the free text before a marker, stop
ids, and *tentative* tokens, such as drafts, which can be taken back. A `Guide` calls the matchers
of a batch's rows for masks.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np
from torch import Tensor

from batchgen.engine.constraint.final_channel import FinalChannel
from batchgen.engine.constraint.vocabulary import Marker, Vocabulary, Words
from batchgen.engine.interface.constraint_error import ConstraintError


class Grammar:
    """A compiled constraint. It is immutable, and every matcher keeps its grammar alive.

    Attributes:
        compiled: xgrammar's CompiledGrammar of the text after the marker.
        num_bytes: its size, as counted by xgrammar.
        batch: fills masks on several threads; shared by all grammars of a compiler.
        marker: ends the free text before the constraint; None without a marker.
        search_masks: for each state of the search for the marker, the mask of ids that may come
            next, including stop ids, which a row's matcher removes.
    """

    def __init__(
        self,
        compiled: Any,
        vocabulary: Vocabulary,
        batch: Any,
        marker: Marker | FinalChannel | None,
    ) -> None:
        self.compiled = compiled
        self.vocabulary = vocabulary
        self.batch = batch
        self.marker = marker
        self.num_bytes: int = compiled.memory_size_bytes
        self.search_masks = [] if marker is None else self._search_masks(marker)

    def _search_masks(self, marker: Marker | FinalChannel) -> list[Words]:
        """Make the masks for the search. They exclude ids that complete the marker and continue
        with illegal text."""
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
    """Return whether xgrammar's matcher accepts some bytes. The matcher is left unchanged."""
    if not state.accept_string(text):
        return False
    state.rollback(1)
    return True


class _Step(NamedTuple):
    """A tentative token, and what is needed to take it back."""

    token_id: int
    searched: int | None  # the state of the marker search before the token; None if it was over
    moved: bool  # whether xgrammar's matcher advanced by a step


class Matcher:
    """The state of one row in its grammar: after its committed tokens, and tentative tokens after
    these.

    A stop id is legal exactly where the text so far is complete, even if it is ordinary text with
    which the grammar could continue: the engine ends a row at any stop id. Before a marker
    (`start_after`, or the final channel of Harmony), every token with text is legal, including
    special tokens, but no stop id. The token that completes the marker may continue with text that
    the constraint allows. Up to `MARKER_GAP` whitespace characters may come between `start_after`
    and the constrained text.

    Attributes:
        satisfied: whether the committed text is complete: it ended with a stop id, or could end
            now.
    """

    def __init__(
        self, grammar: Grammar, stop_ids: Collection[int], prompt: Sequence[int] = ()
    ) -> None:
        """Start after a prompt.

        Args:
            stop_ids: the ids that end the row: EOS and the row's own.

        Raises:
            ConstraintError: no id of the vocabulary ends the row, so it could never be complete.
        """
        import xgrammar

        self.grammar = grammar
        marker = grammar.marker
        self._stops = frozenset(i for i in stop_ids if 0 <= i < grammar.vocabulary.size)
        # The stop ids that may end the row after the marker.
        self._ends = self._stops - (marker.never_ends if marker is not None else frozenset())
        if not self._ends:
            raise ConstraintError(
                "a constrained row must be able to end: it needs EOS (ignore_eos=false, and a model"
                " that has one) or stop_token_ids"
            )
        self._state = xgrammar.GrammarMatcher(
            grammar.compiled, override_stop_tokens=sorted(self._ends)
        )
        # The state of the search for the marker; None without a marker, or once it was found.
        self._searched: int | None = None if marker is None else marker.begin(prompt)
        self._tentative: list[_Step] = []
        self.num_committed = 0
        self.satisfied = self._complete()

    @property
    def num_tokens(self) -> int:
        """The number of accepted tokens, committed and tentative."""
        return self.num_committed + len(self._tentative)

    @property
    def terminated(self) -> bool:
        """Whether a stop id was accepted, tentatively or not."""
        return bool(self._state.is_terminated())

    @property
    def searching(self) -> bool:
        """Whether the text is still free, because the marker was not found yet."""
        return self._searched is not None

    def commit(self, token_ids: list[int]) -> None:
        """Make tokens final. They must follow the committed tokens and be legal there.

        Tentative tokens that agree with these ids are not checked again; others are taken back.
        """
        kept = 0
        for step, token_id in zip(self._tentative, token_ids, strict=False):
            if step.token_id != token_id:
                break
            kept += 1
        self.rewind(self.num_committed + kept)
        for token_id in token_ids[kept:]:
            accepted = self._take(token_id)
            assert accepted, f"the grammar refuses token {token_id} after {self.num_tokens} others"
        self._tentative.clear()
        self.num_committed += len(token_ids)
        self.satisfied = self._complete()

    def walk(self, token_ids: Collection[int]) -> int:
        """Accept tokens tentatively up to the first illegal one or a stop id. Returns how many were
        accepted."""
        return next((n for n, i in enumerate(token_ids) if not self._take(i)), len(token_ids))

    def rewind(self, num_tokens: int) -> None:
        """Take back tentative tokens until `num_tokens` are left, which must include all committed
        tokens."""
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
        """Write the ids that may come next to row `index` of a bitmask.

        All bits are written. Bits are 0 for ids beyond V, and for ids that the tokenizer lacks
        unless they are stop ids.

        Args:
            bitmask: int32 [N, ceil(V / 32)] on the CPU; bit i of word w stands for id 32 · w + i.
        """
        rows = bitmask.numpy()
        if self._searched is None:
            self.constraining().fill_next_token_bitmask(rows, index)
        else:
            self.fill_search(rows, index)

    def forced_text(self) -> str:
        """Return the text that must come next, in whole characters; empty if there is a choice."""
        text = self._forced_bytes()
        try:
            return text.decode()
        except UnicodeDecodeError as error:
            return text[: error.start].decode()

    def forced(self, limit: int) -> list[int]:
        """Tokenize `forced_text`, accept up to `limit` of its tokens tentatively, and return these.
        Other tokens may be legal, too, because text can usually be tokenized in several ways."""
        text = self.forced_text()
        token_ids = self.grammar.vocabulary.cut(text)[:limit] if text else ()
        return list(token_ids[: self.walk(token_ids)])

    def constraining(self) -> Any:
        """Return xgrammar's matcher for filling a mask. Only after the marker, and before a stop
        id."""
        assert not self.searching and not self.terminated, "nothing follows a stop id"
        return self._state

    def fill_search(self, rows: Words, index: int) -> None:
        """Fill the mask as `fill` does while the marker is not found, in words [N, ceil(V /
        32)]."""
        assert self._searched is not None
        rows[index] = self.grammar.search_masks[self._searched]
        bits = rows.view(np.uint32)
        for token_id in self._stops:
            bits[index, token_id // 32] &= np.uint32(0xFFFFFFFF ^ (1 << token_id % 32))

    def _take(self, token_id: int) -> bool:
        """Accept one more token tentatively. Returns False, with nothing changed, if it is not
        legal."""
        vocabulary, searched = self.grammar.vocabulary, self._searched
        if searched is None:
            # Checked first, because xgrammar prints a warning for each of these tokens.
            spells = token_id in vocabulary.plain or token_id in self._ends
            if self.terminated or not spells or not self._state.accept_token(token_id):
                return False
            self._tentative.append(_Step(token_id, searched=None, moved=True))
            return True
        if token_id in self._stops or not vocabulary.spells(token_id):
            return False
        assert self.grammar.marker is not None
        state, rest = self.grammar.marker.advance(searched, token_id)
        if rest and not self._state.accept_string(rest):
            return False
        self._searched = state
        self._tentative.append(_Step(token_id, searched, moved=bool(rest)))
        return True

    def _forced_bytes(self) -> bytes:
        """Return the bytes that must come next, as far as xgrammar knows."""
        if self.searching or self.terminated:
            return b""
        try:
            return str(self._state.find_jump_forward_string()).encode()
        except UnicodeDecodeError as error:  # the bytes end inside a character
            return error.object

    def _complete(self) -> bool:
        return self._searched is None and bool(self._state.is_completed())


def fill_all(matchers: list[Matcher], bitmask: Tensor, indices: Iterable[int]) -> None:
    """Call `matchers[i].fill(bitmask, indices[i])` for all matchers, on several threads. All
    grammars must come from one compiler, and the indices must differ."""
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
