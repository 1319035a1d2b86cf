"""The row step `Chunk` cuts long texts into pieces of a number of tokens."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from batchgen.inputs.steps.table_step import (
    BadRow,
    Dropped,
    Pass,
    SplittingStep,
    StepRow,
    Taken,
    Tools,
)
from batchgen.inputs.steps.values import feature_of, field_of
from batchgen.util.errors import ConfigError

if TYPE_CHECKING:
    from datasets import Features
    from transformers import PreTrainedTokenizerBase

_BREAKS = (
    re.compile(r"\n[^\S\n]*\n\s*"),
    re.compile(r"\n\s*"),
    re.compile(r"(?<=[.!?])[\"')\]]*\s+|(?<=[。！？])"),
    re.compile(r"\s+"),
)
"""Where a text may be cut, in order of preference: between paragraphs, lines, sentences (also after
CJK punctuation, without a space), words."""


@dataclass(frozen=True, kw_only=True)
class Chunk(SplittingStep):
    """Cuts a text into pieces of at most `tokens` tokens, and makes a row of each piece. The new
    rows have the id of the old one with `#0`, `#1` … at its end.

    Tokens are those of the job's tokenizer. A piece ends at the end of a paragraph if one ends in
    the second half of the piece; otherwise at the end of a line, a sentence or a word. The output
    does not contain the whole text any more, but prompts can still use it, unless `as` is null.

    Attributes:
        column: the column with the text.
        tokens: the maximum number of tokens of a piece.
        overlap: about how many tokens at the end of a piece are repeated at the beginning of the
            next one; at most half of `tokens`.
        as_: the name of the column with the piece; null for the name of the text's column.
    """

    column: str
    tokens: int
    overlap: int = 0
    as_: str | None = None

    def __post_init__(self) -> None:
        if self.tokens < 1:
            raise ConfigError(f"tokens must be at least 1, got {self.tokens!r}")
        if not 0 <= self.overlap <= self.tokens // 2:
            raise ConfigError(
                f"overlap must be from 0 to half of tokens ({self.tokens // 2}), got "
                f"{self.overlap!r}"
            )

    def made(self, features: Features) -> Features:
        """Return the piece's column. Raises ConfigError if the column does not hold text."""
        from datasets import Features, Value
        from datasets.features import Json

        feature = feature_of(features, self.column)
        if feature not in (Value("string"), Value("large_string"), Json()):
            kind = getattr(feature, "dtype", type(feature).__name__)
            raise ConfigError(f"column {self.column!r} holds {kind}, and Chunk takes text")
        return Features({self.name: Value("string")})

    def stored(self, features: Features) -> Features:
        """Return the columns of the piece's start and end in the text, in characters."""
        from datasets import Features, Value

        return Features({self._start: Value("int64"), self._end: Value("int64")})

    def start(self, tools: Tools) -> Pass:
        """Start a pass at the first row. Raises ConfigError for a tokenizer without offsets."""
        if tools.tokenizer is None or not tools.tokenizer.is_fast:
            raise ConfigError(
                "Chunk needs a model whose tokenizer says where tokens lie in the text (a "
                "tokenizer.json): choose another model, or cut the texts before"
            )
        return _Chunks(self, tools.tokenizer)

    def restored(self, fields: Mapping[str, Any], k: int, stored: Mapping[str, Any]) -> Any:
        """Return the piece, cut out of the text again."""
        return {self.name: field_of(fields, self.column)[stored[self._start] : stored[self._end]]}

    @property
    def _start(self) -> str:
        return f"{self.name}_start"

    @property
    def _end(self) -> str:
        return f"{self.name}_end"

    def spans(self, text: str, tokenizer: PreTrainedTokenizerBase) -> Iterator[tuple[int, int]]:
        """Yield the start and end of each piece of a text, in characters, without surrounding white
        space."""
        starts, ends = token_offsets(text, tokenizer)
        first, count = 0, len(starts)
        while first < count:
            # A piece consists of the tokens from `first` on and before `stop`, and of the
            # characters from `begin` on and before `end`.
            stop = min(first + self.tokens, count)
            begin, end = starts[first], ends[stop - 1]
            if stop < count:  # more text follows: cut in the second half of the piece
                end = _cut(text, starts[first + (stop - first) // 2], starts[stop])
                stop = max(first + 1, _before(starts, end, stop))
            piece = text[begin:end]
            left, right = len(piece) - len(piece.lstrip()), len(piece.rstrip())
            if right:
                yield begin + left, begin + right
            first = self._next(text, starts, first, stop, count)

    def _next(self, text: str, starts: Sequence[int], first: int, stop: int, count: int) -> int:
        """Return the index of the token at which the next piece begins: the first token of the
        overlap that begins a word, or else `stop`.

        Args:
            starts: the first character of each token.
            first, stop: the tokens of the piece before, `stop` excluded.
            count: the number of tokens of the text.
        """
        if stop >= count or not self.overlap:
            return stop
        for at in range(max(first + 1, stop - self.overlap), stop):
            index = starts[at]
            if index == 0 or text[index].isspace() or text[index - 1].isspace():
                return at
        return stop


class _Chunks:
    """A pass of `Chunk`."""

    full = False

    def __init__(self, step: Chunk, tokenizer: PreTrainedTokenizerBase) -> None:
        self._step, self._tokenizer = step, tokenizer

    def take(self, row: StepRow) -> Taken:
        step = self._step
        text = field_of(row.fields, step.column)
        if not isinstance(text, str):
            what = "null" if text is None else f"{type(text).__name__} {text!r:.40}"
            raise BadRow(f"column {step.column!r} must hold text, got {what}")
        pieces = [
            {step.name: text[start:end], f"{step.name}_start": start, f"{step.name}_end": end}
            for start, end in step.spans(text, self._tokenizer)
        ]
        return pieces or Dropped("the text is empty")

    def close(self) -> None:
        pass


def token_offsets(text: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return two lists: the index of the first character of each token of a text, and the index
    after its last character."""
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    offsets = encoding["offset_mapping"]
    return [start for start, _ in offsets], [end for _, end in offsets]


def _cut(text: str, minimum: int, limit: int) -> int:
    """Return the best index for a cut after `minimum` and at most at `limit`: the last break of the
    preferred kind that occurs there."""
    for kind in _BREAKS:
        # A break must end after `minimum`, though it may begin before.
        ends = [
            match.end() for match in kind.finditer(text, minimum, limit) if match.end() > minimum
        ]
        if ends:
            return ends[-1]
    return limit


def _before(starts: Sequence[int], end: int, stop: int) -> int:
    """Return the index of the first token that begins at `end` or later, at most `stop`."""
    while stop > 1 and starts[stop - 1] >= end:
        stop -= 1
    return stop
