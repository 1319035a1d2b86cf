"""Finds hidden characters in texts: those that are not seen, reorder others, or control a
terminal."""

from __future__ import annotations

import re
from functools import lru_cache

HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # controls, but tab and newline
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"  # tags
    "\ud800-\udfff"  # halves of pairs, which no file can hold
    "]"
)
"""Characters that are not seen, or change the order in which others are seen, or that a terminal
obeys. Joiners (U+200C and U+200D) are not among them: emoji and several scripts need them."""


def visible(text: str) -> str:
    """The text with its code in place of each hidden character, as in `⟨U+202E⟩`."""
    return HIDDEN.sub(lambda match: code_of(match[0]), text)


@lru_cache(512)
def code_of(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩"
