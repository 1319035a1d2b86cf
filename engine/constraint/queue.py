"""Rows that wait for their constraints to be compiled, beside those that run."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, wait

from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.compiler import GrammarCompiler
from batchgen.engine.constraint.constraint import ConstraintError
from batchgen.engine.constraint.matcher import Grammar, Matcher
from batchgen.engine.outputs import RequestError
from batchgen.engine.sequence import Sequence


class CompileQueue:
    """Gives rows their matchers once their constraints are compiled, in the order in which they
    came.

    Args:
        compiler: for this tokenizer and vocabulary; made when the first row comes if absent.
        tokenizer: of the model; rows with constraints need one.
    """

    def __init__(
        self,
        compiler: GrammarCompiler | None,
        tokenizer: PreTrainedTokenizerBase | None,
        vocab_size: int,
        eos_token_ids: tuple[int, ...],
    ) -> None:
        self._compiler = compiler
        self._tokenizer, self._vocab_size = tokenizer, vocab_size
        self._eos_token_ids = eos_token_ids
        self._waiting: dict[str, tuple[Sequence, Future[Grammar]]] = {}

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, seq: Sequence) -> None:
        assert seq.params.constraint is not None
        if self._compiler is None:
            assert self._tokenizer is not None, "constraints need one"
            self._compiler = GrammarCompiler(self._tokenizer, self._vocab_size, self._eos_token_ids)
        self._waiting[seq.request_id] = seq, self._compiler.prepare(seq.params.constraint)

    def remove(self, seq: Sequence) -> bool:
        """Forget a row; False if it does not wait here."""
        return self._waiting.pop(seq.request_id, None) is not None

    def take(self, *, block: bool) -> Iterator[Sequence]:
        """The rows that wait no more. Those whose constraint cannot be followed have failed.

        Args:
            block: until there is one.
        """
        if self._waiting and block:
            wait([future for _, future in self._waiting.values()], return_when=FIRST_COMPLETED)
        for seq, future in list(self._waiting.values()):
            if future.done():
                del self._waiting[seq.request_id]
                _start(seq, future)
                yield seq


def _start(seq: Sequence, compiled: Future[Grammar]) -> None:
    error = compiled.exception()
    if error is None:
        try:
            seq.matcher = Matcher(compiled.result(), seq.stop.stop_ids)
            return
        except ConstraintError as refused:
            error = refused
    if not isinstance(error, ConstraintError):
        raise error
    seq.fail(RequestError("bad_constraint", str(error)))
