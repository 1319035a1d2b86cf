"""The position of a parser in the tokens of an answer, with a limit on nesting. `Answers` and
`Expressions` read tokens through one `Cursor`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from batchgen.evals.math.reading.nodes import NotRead
from batchgen.evals.math.reading.tokens import Token

_MOST_DEPTH = 40  # levels of nesting; deeper answers are not read
_END = Token("end of text", "")


class Cursor:
    """Reads tokens from left to right.

    Attributes:
        tokens: the tokens of the answer.
        at: the index of the next token.
    """

    def __init__(self, tokens: Sequence[Token]) -> None:
        self.tokens = list(tokens)
        self.at = 0
        self._depth = 0

    @property
    def next(self) -> Token:
        """The token that is read next; after the last token, one of the kind `end of text`."""
        return self.peek()

    def peek(self, ahead: int = 0) -> Token:
        """The token `ahead` places after the next one."""
        index = self.at + ahead
        return self.tokens[index] if index < len(self.tokens) else _END

    @property
    def done(self) -> bool:
        """Whether all tokens were read."""
        return self.at >= len(self.tokens)

    def take(self) -> Token:
        """Read the next token.

        Raises:
            NotRead: there is none.
        """
        token = self.next
        if token is _END:
            raise NotRead
        self.at += 1
        return token

    def is_sign(self, *texts: str) -> bool:
        """Whether the next token is one of these signs."""
        return self.next.kind == "sign" and self.next.text in texts

    def accept(self, *texts: str) -> str | None:
        """Read the next token and return its text, if it is one of these signs; otherwise None."""
        return self.take().text if self.is_sign(*texts) else None

    def expect(self, *texts: str) -> str:
        """Read the next token, which must be one of these signs, and return its text."""
        text = self.accept(*texts)
        if text is None:
            raise NotRead
        return text

    def braced_text(self) -> str:
        """Read a group in braces, or a single token, and return the joined texts of its tokens."""
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
        """Count a level of nesting within the context.

        Raises:
            NotRead: there are too many levels.
        """
        if self._depth >= _MOST_DEPTH:
            raise NotRead
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
