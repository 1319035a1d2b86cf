"""Sets of characters as ranges of code points, and the named sets of patterns and JSON, such as
digits and the characters that a JSON string must escape."""

Ranges = list[tuple[int, int]]
"""A set of characters: inclusive ranges of code points, sorted and disjoint."""


def union(*sets: Ranges) -> Ranges:
    """Return the characters in any of the ranges, which may overlap and be in any order."""
    merged: Ranges = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def complement(ranges: Ranges) -> Ranges:
    """Return all code points of Unicode (up to U+10FFFF) that are not in a set."""
    # A gap lies between the end of one range and the start of the next.
    edges = [-1, *(edge for pair in union(ranges) for edge in pair), 0x110000]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [(low + 1, high - 1) for low, high in gaps if high - low > 1]


def intersect(a: Ranges, b: Ranges) -> Ranges:
    return complement(union(complement(a), complement(b)))


def only(text: str) -> Ranges:
    return union([(ord(char), ord(char)) for char in text])


_SURROGATES = (0xD800, 0xDFFF)
"""The halves of UTF-16 pairs, which are not text on their own."""

TEXT = complement([(0, 0), _SURROGATES])
"""The characters that any text may contain. NUL is excluded, because it ends a pattern in
xgrammar."""

# A JSON string could also write any character as \uhhhh. That is not used, so that a character has
# only one spelling, and a count of characters is a count of matches.
JSON_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
"""The characters that a JSON string writes with a backslash, each with what follows the
backslash."""
JSON_PLAIN = complement(union([(0, 0x1F), _SURROGATES], only('"\\')))
"""The characters that a JSON string writes unescaped."""
JSON_TEXT = union(JSON_PLAIN, only("".join(JSON_ESCAPES)))
"""All characters that the text of a JSON string may contain."""

LINE_ENDS = only("\n\r\u2028\u2029")
"""The characters that `.` does not match in at least one dialect."""

_BEYOND_ASCII: Ranges = [(0x80, 0x10FFFF)]
_SPACE = union(only("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000"), [(0x2000, 0x200A)])
_DIGIT: Ranges = [(0x30, 0x39)]
_WORD = union(_DIGIT, [(0x41, 0x5A), (0x61, 0x7A)], only("_"))

CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGIT, union(_DIGIT, _BEYOND_ASCII)),
    "w": (_WORD, union(_WORD, _BEYOND_ASCII)),
    "s": (_SPACE, union(_SPACE, only("\x1c\x1d\x1e\x1f\x85\ufeff"))),
}
r"""Maps the letter of a class such as `\d` to its characters in every dialect, and in at least
one."""
# `\D` has in every dialect what `\d` has in none, and the other way round.
CLASSES |= {
    name.upper(): (complement(some), complement(every)) for name, (every, some) in CLASSES.items()
}
