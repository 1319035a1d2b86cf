"""From a constraint to a grammar that rows can follow: compiled by xgrammar, in the background."""

from __future__ import annotations

import json
import os
import re
import time
from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from functools import lru_cache, partial
from threading import Lock
from typing import Any

import numpy as np
from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.constraint import (
    Constraint,
    ConstraintError,
    regex_argument,
    schema_arguments,
    structural_tag_argument,
)
from batchgen.engine.constraint.matcher import Grammar, Matcher, fill_all
from batchgen.engine.constraint.vocabulary import Marker, Vocabulary

__all__ = ["Grammar", "GrammarCompiler", "Matcher", "fill_all"]

_COMPILE_AT_ONCE = 2
_COMPILE_THREADS = 8
_FILL_THREADS = 16
_MARKERS = 16
_CACHE_ENTRIES = 4096
_CACHE_BYTES = 512 * 2**20
_XGRAMMAR_CACHE_BYTES = 256 * 2**20
_MOST_TEXT = 2**17
"""Characters of a constraint. A million in one string compile for 18 s and take 200 MB."""
_PROBED_TOKENS = 16
_PROBE_STRIDE = 7919  # a prime: from token to token, another part of the vocabulary
_MOST_MASK_SECONDS = 1.0
"""Of CPU time. Masks usually take 1 to 100 µs, those of ambiguous repeats up to minutes."""
_GAP = 4
"""Whitespace that may follow a marker: models write two newlines behind "</think>"."""

_STRING_OR_CLASS = re.compile(r'"(?:[^"\\]|\\.)*"|\[(?:[^\]\\]|\\.)*\]')
_ESCAPE = re.compile(r"(\\x[0-9a-f]{2}(?=[0-9a-fA-F]))|\\.")


class GrammarCompiler:
    """Compiles the constraints of one job. Thread-safe.

    What it compiled is kept for equal constraints up to 512 MiB, the longest unused dropped first.
    One of a large vocabulary takes 0.1 to 8 MiB.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        """No grammar allows ids beyond the tokenizer, special tokens or EOS as a part of its text.

        Args:
            vocab_size: width of the logits.

        Raises:
            ConstraintError: xgrammar does not know this kind of tokenizer.
        """
        self._work = _Work(Vocabulary(tokenizer, vocab_size, eos_token_ids))
        self._pool = ThreadPoolExecutor(_COMPILE_AT_ONCE, thread_name_prefix="grammar")
        self._lock = Lock()
        self._cache: OrderedDict[Constraint, Future[Grammar]] = OrderedDict()

    def prepare(self, constraint: Constraint) -> Future[Grammar]:
        """Compiles in the background. The same future for equal constraints.

        Its exception is a ConstraintError.
        """
        with self._lock:
            future = self._cache.get(constraint)
            if future is None:
                self._make_room()
                future = self._cache[constraint] = self._pool.submit(self._work.run, constraint)
            self._cache.move_to_end(constraint)
            return future

    def compile(self, constraint: Constraint) -> Grammar:
        """Waits for `prepare`. Raises ConstraintError: the constraint cannot be enforced, why."""
        future = self.prepare(constraint)
        error = future.exception()
        if isinstance(error, ConstraintError):
            # A new one: the cached one would keep the caller's frames alive.
            raise ConstraintError(str(error))
        return future.result()

    def _make_room(self) -> None:
        """What is still compiling counts from the next call on."""
        done = [f for f in self._cache.values() if f.done() and f.exception() is None]
        num_bytes = sum(future.result().num_bytes for future in done)
        while self._cache and (num_bytes > _CACHE_BYTES or len(self._cache) >= _CACHE_ENTRIES):
            _, dropped = self._cache.popitem(last=False)
            if dropped in done:
                num_bytes -= dropped.result().num_bytes


class _Work:
    """What compiling takes. Knows no futures: an exception in one of them keeps this alive."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        import xgrammar

        self._vocabulary = vocabulary
        # Its own cache also shares the costly parts of grammars that differ elsewhere.
        self._compiler = xgrammar.GrammarCompiler(
            vocabulary.info,
            max_threads=min(_num_cores(), _COMPILE_THREADS),
            cache_limit_bytes=_XGRAMMAR_CACHE_BYTES,
        )
        self._batch = xgrammar.BatchGrammarMatcher(max_threads=min(_num_cores(), _FILL_THREADS))
        self._marker = lru_cache(_MARKERS)(partial(Marker, vocabulary))

    def run(self, constraint: Constraint) -> Grammar:
        if len(constraint.text) > _MOST_TEXT:
            raise ConstraintError(
                f"the {constraint.kind} constraint has {len(constraint.text):,} characters, and "
                f"at most {_MOST_TEXT:,} compile in seconds: split or shorten it"
            )
        marker = self._marker(constraint.start_after) if constraint.start_after else None
        try:
            compiled = self._compile(constraint)
        except (RuntimeError, ValueError) as error:  # xgrammar's own are RuntimeErrors
            raise ConstraintError(f"{constraint.kind}: {_readable(error)}") from error
        grammar = Grammar(compiled, self._vocabulary, self._batch, marker)
        _probe(grammar)
        return grammar

    def _compile(self, constraint: Constraint) -> Any:
        from xgrammar import Grammar

        if constraint.kind == "structural_tag" and not constraint.start_after:
            # Only the compiler knows the ids of tokens that a tag names.
            compiled = self._compiler.compile_structural_tag(structural_tag_argument(constraint))
            _keep_literals(compiled.grammar)
            return compiled
        grammar = _keep_literals(_to_grammar(constraint))
        if constraint.start_after:
            grammar = Grammar.concat(Grammar.from_regex(f"[ \\n\\r\\t]{{0,{_GAP}}}"), grammar)
        return self._compiler.compile_grammar(grammar)


def _probe(grammar: Grammar) -> None:
    """Follows some legal text.

    Raises:
        ConstraintError: there is none, or a mask took so long that one row would stop its batch.
    """
    import xgrammar

    state = xgrammar.GrammarMatcher(grammar.compiled)
    row = np.empty((1, grammar.vocabulary.num_words), dtype=np.int32)
    if grammar.marker:
        state.accept_string(" " * _GAP)
    for count in range(_PROBED_TOKENS):
        begin = time.thread_time()
        state.fill_next_token_bitmask(row, 0)
        seconds = time.thread_time() - begin
        if seconds > _MOST_MASK_SECONDS:
            raise ConstraintError(
                f"to find the tokens that may come next takes {seconds:.1f} s: too many ways to"
                " read the same text; avoid repeats with a count of what itself repeats or may be"
                " empty, such as (a+ ?){1,50}: use * or +, or separators that must be there"
            )
        allowed = np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))
        if not len(allowed):
            if count == 0 and not state.is_completed():
                raise ConstraintError("no text that this tokenizer can spell matches it")
            return
        state.accept_token(int(allowed[count * _PROBE_STRIDE % len(allowed)]))


def _num_cores() -> int:
    """Those that this process may use, where the system tells."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _to_grammar(constraint: Constraint) -> Any:
    from xgrammar import Grammar

    match constraint.kind:
        case "json_schema" | "json":
            return Grammar.from_json_schema(**schema_arguments(constraint))
        case "regex":
            return Grammar.from_regex(regex_argument(constraint))
        case "grammar":
            return Grammar.from_ebnf(constraint.text)
        case "structural_tag":
            return Grammar.from_structural_tag(structural_tag_argument(constraint))
        case "choice":
            choices = json.loads(constraint.text)
            # A string of EBNF has the escapes of JSON.
            literals = (json.dumps(choice, ensure_ascii=False) for choice in choices)
            return Grammar.from_ebnf("root ::= " + " | ".join(literals))


def _keep_literals(grammar: Any) -> Any:
    """The grammar, with its strings cut where xgrammar 0.2.8 would read another character.

    xgrammar writes control characters and U+0080 to U+00FF as \\xNN, and then takes hex digits
    behind that for a part of the number: the "née" of a schema would become "n" and U+0E9E.

    Raises:
        ConstraintError: such a string stands in a structural tag, where it cannot be cut.
    """
    from xgrammar import Grammar

    text = str(grammar)
    cut = _STRING_OR_CLASS.sub(_cut_literal, text)
    if cut == text:
        return grammar
    if "TagDispatch(" in text:
        raise ConstraintError(
            "a structural tag has a string with a character from U+0080 to U+00FF before a digit or"
            " a letter from a to f, which xgrammar misreads: write its tags in ASCII"
        )
    return Grammar.from_ebnf(cut)


def _cut_literal(found: re.Match[str]) -> str:
    if found[0].startswith("["):
        return found[0]
    return _ESCAPE.sub(lambda e: e[0] + '" "' if e[1] else e[0], found[0])


def _readable(error: Exception) -> str:
    """xgrammar's reason without the line of its source and the check that failed there."""
    text = re.sub(r"^\[[\d:]+\] \S+:\d+: ", "", str(error).strip())
    return re.sub(r"^Check failed: \(.*?\) is false: ", "", text)
