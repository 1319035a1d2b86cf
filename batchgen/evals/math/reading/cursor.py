"""The position of a parser in the tokens of an answer, with a limit on nesting."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from batchgen.evals.math.reading.nodes import NotRead
from batchgen.evals.math.reading.tokens import Token

_MOST_DEPTH = 40
_END = Token("end of text", "")


class Cursor:
    """Reads tokens from left to right."""

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.at = 0
        self._depth = 0

    @property
    def next(self) -> Token:
        """The token that is read next; one of the kind `end of text` behind the last."""
        return self.peek()

    def peek(self, ahead: int = 0) -> Token:
        """The token that many behind the next one."""
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else _END

    @property
    def done(self) -> bool:
        """Whether all tokens were read."""
        return self.at >= len(self.tokens)

    def take(self) -> Token:
        """The next token, which is read."""
        token = self.next
        if token is _END:
            raise NotRead
        self.at += 1
        return token

    def is_sign(self, *texts: str) -> bool:
        """Whether the next token is one of these signs."""
        return self.next.kind == "sign" and self.next.text in texts

    def accept(self, *texts: str) -> str | None:
        """The next token's text, read, if it is one of these signs."""
        return self.take().text if self.is_sign(*texts) else None

    def expect(self, *texts: str) -> str:
        """The next token's text, which must be one of these signs."""
        text = self.accept(*texts)
        if text is None:
            raise NotRead
        return text

    def braced_text(self) -> str:
        """The texts of the tokens of a group in braces, or of one token, joined and read."""
        if not self.accept("{"):
            return self.take().text
        parts: list[str] = []
        depth = 1
        while True:
            token = self.take()
            depth += {"{": 1, "}": -1}.get(token.text, 0) if token.kind == "sign" else 0
            if depth == 0:
                return "".join(parts)
            parts.append(token.text)

    @contextmanager
    def deeper(self) -> Iterator[None]:
        """Count a level of nesting. Raises NotRead if there are too many."""
        if self._depth >= _MOST_DEPTH:
            raise NotRead
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
