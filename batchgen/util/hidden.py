"""Makes hidden characters in texts visible: characters that are invisible, reorder others, or
control a terminal. All output for people goes through `visible`."""

from __future__ import annotations

import re
from functools import lru_cache

HIDDEN = re.compile(
    "["
    "\x00-\x08\x0b-\x1f\x7f-\x9f"  # control characters except tab and newline
    "\xad\u061c\u180e\u200b\u200e\u200f\u2028-\u202e\u2060-\u206f\ufeff\ufff9-\ufffb"
    "\U000e0000-\U000e007f"  # tag characters
    "\ud800-\udfff"  # lone surrogates, which UTF-8 cannot encode
    "]"
)
"""Matches a hidden character. The joiners U+200C and U+200D are not matched, because emoji and
several scripts need them."""


def visible(text: str) -> str:
    """Return the text with each hidden character replaced by its code, such as `⟨U+202E⟩`."""
    return HIDDEN.sub(lambda match: code_of(match[0]), text)


@lru_cache(512)
def code_of(character: str) -> str:
    return f"⟨U+{ord(character):04X}⟩"
