"""Compiles constraints in the background into grammars for rows.

The library xgrammar does the compiling. A job has one `GrammarCompiler`. `CompileQueue` asks it for
the grammar of each constrained row, and the checks before a job ask it whether a constraint can be
enforced.

A constraint may begin only after a *marker*, such as "</think>" (`Constraint.start_after`). Between
the marker and the constrained text there may be a little whitespace, the *gap*.
"""

from __future__ import annotations

import re
import time
from collections import OrderedDict
from concurrent.futures import Future
from functools import lru_cache, partial
from threading import Lock
from typing import TYPE_CHECKING, Any

import numpy as np

from batchgen.engine.constraint.compile_pool import DaemonPool
from batchgen.engine.constraint.constraint import MARKER_GAP, Constraint
from batchgen.engine.constraint.final_channel import FinalChannel
from batchgen.engine.constraint.matcher import Grammar
from batchgen.engine.constraint.printed_grammar import check_print, keep_literals
from batchgen.engine.constraint.vocabulary import Marker, Vocabulary
from batchgen.engine.constraint.xgrammar_input import (
    gap_argument,
    structural_tag_argument,
    to_grammar,
)
from batchgen.engine.device.host_limits import usable_cores
from batchgen.engine.interface.constraint_error import ConstraintError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_COMPILE_AT_ONCE = 2
"""The number of constraints that are compiled at the same time."""
_COMPILE_THREADS = 8
"""The number of threads on which xgrammar compiles one constraint."""
_FILL_THREADS = 16
"""The number of threads on which xgrammar fills the masks of a batch."""
_MARKERS = 16
"""The most markers whose search tables are cached."""
_CACHE_ENTRIES = 4096
_CACHE_BYTES = 512 * 2**20
_XGRAMMAR_CACHE_BYTES = 256 * 2**20
_PROBED_TOKENS = 16
"""The number of tokens for which a new grammar is tried out."""
_PROBE_STRIDE = 7919
"""A prime, so that each probed token comes from another part of the vocabulary."""
_MOST_MASK_SECONDS = 1.0
"""The most CPU seconds of one mask. Most take 1 to 100 µs; ambiguous repetitions take up to
minutes."""


class GrammarCompiler:
    """Compiles the constraints of one job, for one tokenizer. Any thread may call it.

    Equal constraints are compiled once. Up to 512 MiB of grammars are cached; the least recently
    used are dropped first. With a large vocabulary a grammar takes 0.1 to 8 MiB. `close`, dropping
    the last reference, or the interpreter's end stops the threads without waiting for queued
    constraints.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        special_ids: tuple[int, ...],
    ) -> None:
        """Check that xgrammar supports the tokenizer, and that its version prints grammars in the
        form that `keep_literals` repairs. Raises ConstraintError if not.

        Args:
            vocab_size: V, the number of logits. No grammar allows ids below V that the tokenizer
                lacks.
            special_ids: ids that end a row, or a diffusion model's mask token. Like special tokens,
                they are not part of a grammar's text.
        """
        check_print()
        work = _Work(Vocabulary(tokenizer, vocab_size, special_ids))
        self._pool = DaemonPool(work.run, _COMPILE_AT_ONCE, "grammar")
        self._lock = Lock()
        self._cache: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()

    def prepare(self, constraint: Constraint) -> Future[Grammar]:
        """Start to compile a constraint, and return the future of its grammar; equal constraints
        share one.

        The future's exception is a ConstraintError if the constraint cannot be enforced. The future
        is cancelled if the compiler is closed first. Raises RuntimeError if the compiler is closed
        already.
        """
        with self._lock:
            future = self._cache.get(constraint)
            if future is None:
                self._make_room()
                future = self._cache[constraint] = self._pool.submit(constraint)
            self._cache.move_to_end(constraint)
            return future

    def compile(self, constraint: Constraint) -> Grammar:
        """Compile a constraint, and wait for its grammar.

        Raises:
            ConstraintError: the constraint cannot be enforced; the message says why.
            CancelledError: another thread closed the compiler meanwhile.
            RuntimeError: the compiler is closed.
        """
        future = self.prepare(constraint)
        error = future.exception()
        if isinstance(error, ConstraintError):
            # A new error object, because the cached one would keep the caller's frames alive.
            raise ConstraintError(str(error))
        return future.result()

    def close(self) -> None:
        """Cancel queued constraints and end each thread after its current one, without waiting.
        Compiled grammars can still be used. May be called again."""
        with self._lock:
            self._pool.close()
            self._cache.clear()

    def _make_room(self) -> None:
        """Drop the least recently used grammars until there is space for another one. A grammar
        that is not compiled yet counts as 0 bytes."""
        done = [f for f in self._cache.values() if f.done() and f.exception() is None]
        num_bytes = sum(future.result().num_bytes for future in done)
        while self._cache and (num_bytes > _CACHE_BYTES or len(self._cache) >= _CACHE_ENTRIES):
            _, dropped = self._cache.popitem(last=False)
            if dropped in done:
                num_bytes -= dropped.result().num_bytes


class _Work:
    """The work of the threads, and what they need for it. It must not refer to a future: the error
    in a future holds stack frames, and these hold this object."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._vocabulary = vocabulary
        # xgrammar's own cache also shares the costly parts of grammars that differ elsewhere.
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary.info,
            max_threads=min(usable_cores(), _COMPILE_THREADS),
            cache_limit_bytes=_XGRAMMAR_CACHE_BYTES,
        )
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=min(usable_cores(), _FILL_THREADS))
        self._marker = lru_cache(_MARKERS)(partial(Marker, vocabulary))
        self._final = None if vocabulary.harmony is None else FinalChannel(vocabulary)

    def run(self, constraint: Constraint) -> Grammar:
        marked = constraint.start_after
        marker = self._marker(marked) if marked else self._final
        try:
            compiled = self._compile(constraint)
        except (RuntimeError, ValueError) as error:  # xgrammar's own are RuntimeErrors
            raise ConstraintError(f"{constraint.kind}: {_readable(error)}") from error
        grammar = Grammar(compiled, self._vocabulary, self._batch, marker)
        _probe(grammar)
        return grammar

    def _compile(self, constraint: Constraint) -> Any:
        """Return xgrammar's CompiledGrammar of a constraint. With a marker, it begins with the
        gap."""
        from xgrammar import Grammar

        if constraint.kind == "structural_tag" and not constraint.start_after:
            # Only the compiler knows the ids of tokens that a tag names.
            compiled = self._compiler.compile_structural_tag(structural_tag_argument(constraint))
            # Raises an error if xgrammar would misread a string of the tag, because tags cannot be
            # repaired.
            keep_literals(compiled.grammar)
            return compiled
        grammar = keep_literals(to_grammar(constraint))
        if constraint.start_after:
            grammar = Grammar.concat(Grammar.from_regex(gap_argument()), grammar)
        return self._compiler.compile_grammar(grammar)


def _probe(grammar: Grammar) -> None:
    """Follow a grammar for some tokens. Raises ConstraintError if no text matches it, or if
    computing the mask of allowed tokens takes too long."""
    import xgrammar

    state = xgrammar.GrammarMatcher(grammar.compiled)
    row = np.empty((1, grammar.vocabulary.num_words), dtype=np.int32)
    if grammar.marker is not None and grammar.marker.gap:
        state.accept_string(" " * MARKER_GAP)
    for count in range(_PROBED_TOKENS):
        begin = time.thread_time()
        state.fill_next_token_bitmask(row, 0)
        seconds = time.thread_time() - begin
        if seconds > _MOST_MASK_SECONDS:
            raise ConstraintError(
                f"finding the tokens that may come next takes {seconds:.1f} s: too many ways to "
                "read the same text; avoid repeats with a count of what itself repeats or may be "
                "empty, such as (a+ ?){1,50}: use * or +, or separators that must be there"
            )
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed):
            if count == 0 and not state.is_completed():
                raise ConstraintError("no text that this tokenizer can spell matches it")
            return
        state.accept_token(int(allowed[count * _PROBE_STRIDE % len(allowed)]))


def _readable(error: Exception) -> str:
    """Return the reason in an error of xgrammar, without its source line and failed check."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
