"""Harmony, the message format of gpt-oss, and the ids of its special tokens.

A message is `<|start|>role<|channel|>name<|message|>text`, ended by `<|end|>`, `<|return|>` or
`<|call|>`.
"""

from __future__ import annotations

from dataclasses import astuple, dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

FINAL = "final"
"""The name of the channel that contains the answer."""
WHITESPACE = " \t\r\n\f\v"
"""The characters that may precede the name of a channel."""
# In the order of the fields of HarmonyTokens.
_NAMES = ("start", "channel", "message", "constrain", "end", "return", "call")


@dataclass(frozen=True, slots=True)
class HarmonyTokens:
    """The ids of the special tokens of the format, each by its name in the tokenizer."""

    start: int
    channel: int
    message: int
    constrain: int
    end: int
    return_: int
    call: int

    @classmethod
    def of(cls, tokenizer: PreTrainedTokenizerBase) -> HarmonyTokens | None:
        """Return the ids in a tokenizer; None unless it has all of them as special tokens."""
        known, tokens = tokenizer.added_tokens_encoder, tokenizer.added_tokens_decoder
        token_ids = [known.get(f"<|{name}|>") for name in _NAMES]
        ids = [id for id in token_ids if id is not None and tokens[id].special]
        return cls(*ids) if len(ids) == len(_NAMES) else None

    @property
    def stops(self) -> tuple[int, int]:
        """The ids that end a generation: of an answer, or of a tool call."""
        return self.return_, self.call

    @property
    def all(self) -> frozenset[int]:
        """All ids of the format."""
        return frozenset(astuple(self))
