"""Keeps new rows whose constraints are still being compiled.

Background threads compile a constraint (a JSON Schema, a regular expression, a grammar;
`constraint/compiler.py`), which may take seconds. Meanwhile the row waits in a `CompileQueue`,
outside the scheduler, while other rows run. `LLMEngine` adds rows, and passes those that are ready
to the scheduler.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait
from typing import TYPE_CHECKING

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.matcher import Grammar, Matcher
from batchgen.engine.interface.constraint_error import ConstraintError
from batchgen.engine.interface.outputs import RequestError
from batchgen.engine.rows.sequence import Sequence

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class CompileQueue:
    """Keeps rows until their constraints are compiled, and then gives each its matcher.

    Args:
        compiler: compiles for this tokenizer and vocabulary. If None, the queue makes a compiler
            for the first row, and closes it in `close`.
        tokenizer: the tokenizer of the model; may be None only if no row has a constraint.
        special_ids: as for `GrammarCompiler`.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        special_ids: tuple[int, ...],
    ) -> None:
        self._compiler = compiler
        self._owns_compiler = compiler is None
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._special_ids = special_ids
        self._waiting: dict[Hashable, tuple[Sequence, Future[Grammar]]] = {}

    def __len__(self) -> int:
        """The number of rows that wait."""
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        """Start to compile the constraint of a row, which must have one. Raises ConstraintError,
        without adding the row, if the tokenizer or the installed xgrammar does not support
        constraints."""
        assert seq.params.constraint is not None
        if self._compiler is None:
            assert self._tokenizer is not None, "constraints need a tokenizer"
            self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._special_ids)
        self._waiting[seq.request_id] = seq, self._compiler.prepare(seq.params.constraint)

    def remove(self, seq: Sequence) -> bool:
        """Remove a row without waiting. Returns False if the row is not in the queue."""
        return self._waiting.pop(seq.request_id, None) is not None

    def take(self, *, block: bool) -> Iterator[Sequence]:
        """Remove the rows whose compilation has ended, and yield them in order of arrival.

        A yielded row has its matcher, or has failed with the error `bad_constraint` if its
        constraint cannot be enforced. With `block`, wait until at least one row is ready, if any
        row waits.
        """
        if self._waiting and block:
            wait([future for _, future in self._waiting.values()], return_when=FIRST_COMPLETED)
        for seq, future in list(self._waiting.values()):
            if future.done():
                del self._waiting[seq.request_id]
                _set_matcher(seq, future)
                yield seq

    def take_one(self, request_id: Hashable, error: str | None) -> Sequence:
        """On ranks other than 0: remove a row that rank 0 has taken from its queue. Wait until the
        row's constraint is compiled on this rank as well, and give the row its matcher.

        Args:
            error: the error with which the row failed on rank 0, and so fails here; or None.

        Raises:
            RuntimeError: this rank cannot compile a constraint that rank 0 has compiled.
        """
        seq, future = self._waiting.pop(request_id)
        if error is not None:
            seq.fail(RequestError("bad_constraint", error))
            return seq
        _set_matcher(seq, future)
        if seq.error is not None:
            raise RuntimeError(f"only rank 0 could compile a constraint; here: {seq.error}")
        return seq

    def close(self) -> None:
        """Remove all rows, and close the compiler if the queue made it. Does not wait, and may be
        called again."""
        self._waiting.clear()
        if self._owns_compiler and self._compiler is not None:
            self._compiler.close()


def _set_matcher(seq: Sequence, compiled: Future[Grammar]) -> None:
    """Give a row the matcher of its compiled constraint. If the constraint cannot be enforced, let
    the row fail with `bad_constraint`."""
    error = compiled.exception()
    if error is None:
        try:
            seq.matcher = _matcher(seq, compiled.result())
            return
        except ConstraintError as refused:
            error = refused
    if not isinstance(error, ConstraintError):
        raise error
    seq.fail(RequestError("bad_constraint", str(error)))


def _matcher(seq: Sequence, grammar: Grammar) -> Matcher:
    """Make a row's matcher and advance it by the tokens that an earlier engine has generated. If
    the grammar does not allow these tokens (as may happen with another version of xgrammar), the
    row starts again."""
    count = seq.num_prompt_tokens
    prompt, generated = seq.token_ids[:count], seq.token_ids[count:]
    matcher = Matcher(grammar, seq.stop.stop_ids, prompt)
    if generated and matcher.walk(generated) < len(generated):
        seq.begin_again()
        return Matcher(grammar, seq.stop.stop_ids, prompt)
    matcher.commit(generated)
    return matcher
