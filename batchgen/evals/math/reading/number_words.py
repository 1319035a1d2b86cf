"""Whole numbers in English words, from zero to ninety-nine: `twenty one` is 21."""

from __future__ import annotations

_ONES = (
    "zero one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen "
    "sixteen seventeen eighteen nineteen"
).split()
_TENS = "twenty thirty forty fifty sixty seventy eighty ninety".split()
NUMBERS = {word: number for number, word in enumerate(_ONES)} | {
    word: 10 * number for number, word in enumerate(_TENS, 2)
}


def number_in_words(text: str) -> int | None:
    """The number that words in lower case state, such as `twenty one`; None if they state none."""
    match text.split():
        case [word] if word in NUMBERS:
            return NUMBERS[word]
        case [ten, one] if ten in _TENS and 0 < NUMBERS.get(one, 0) < 10:
            return NUMBERS[ten] + NUMBERS[one]
    return None
