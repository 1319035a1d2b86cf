"""Tokenises the texts of prompts, and refuses texts that are too long to tokenise. All prompts that
are made of text use `TextTokens`."""

from __future__ import annotations

from functools import cached_property

from transformers import PreTrainedTokenizerBase

from batchgen.engine.constraint.json_schema.json_text import has_lone_surrogate
from batchgen.engine.interface.outputs import RequestError

_ALWAYS_BYTES = 2**21
"""Texts up to this size are always tokenised. Tokenising takes about 250 times the memory of the
text."""


class TextTokens:
    """Tokenises the texts of prompts.

    A text that could not fit even if each token were the tokenizer's longest is refused before it
    is tokenised, because tokenising it would take seconds and gigabytes.

    Args:
        room: the maximum number of tokens of a prompt; None for no limit.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, room: int | None) -> None:
        self._tokenizer, self._room = tokenizer, room

    def of(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Return the token ids of a text.

        Raises:
            RequestError: prompt_too_long: the text is far too long; see `TextTokens`. empty_prompt:
                it has no tokens. bad_text: it has a lone UTF-16 surrogate.
        """
        self.refuse_long(text)
        if not text.isascii() and has_lone_surrogate(text):
            raise RequestError(
                "bad_text",
                "the prompt has half of a UTF-16 pair (such as \\ud83d), which is not a "
                "character: cut texts between characters, not between units of UTF-16",
            )
        # Without `verbose=False` the tokenizer warns of long texts, which fit_prompt deals with.
        ids = self._tokenizer.encode(text, add_special_tokens=add_special_tokens, verbose=False)
        return not_empty(list(ids))

    def refuse_long(self, text: str) -> None:
        """Raise RequestError (prompt_too_long) if a text, or a part of one, cannot fit into the
        room."""
        # UTF-8 has at most 4 bytes for a character, so most texts need not be encoded to know.
        if self._room is None or len(text) * 4 <= _ALWAYS_BYTES:
            return
        size = text_bytes(text)
        if size <= (limit := max(self._room * self._longest_token, _ALWAYS_BYTES)):
            return
        raise RequestError(
            "prompt_too_long",
            f"the prompt has {size:,} bytes, which cannot fit into the {self._room} tokens that "
            f"are left for it (more than {limit:,} bytes are not even tokenised): shorten the "
            "row, use another column, or raise engine.max_model_len",
        )

    @cached_property
    def _longest_token(self) -> int:
        """An upper bound of the bytes of the longest token. It is no exact number, because a
        vocabulary may write one byte as a character of two bytes."""
        return max(map(text_bytes, self._tokenizer.get_vocab()))


def text_bytes(text: str) -> int:
    """Return the number of bytes of a text in UTF-8."""
    return len(text) if text.isascii() else len(text.encode("utf-8", "surrogatepass"))


def not_empty(ids: list[int]) -> list[int]:
    """Return the token ids of a prompt. Raises RequestError (empty_prompt) if there are none."""
    if not ids:
        raise RequestError("empty_prompt", "the prompt has no tokens")
    return ids
