"""The regular expressions that a grammar can enforce, read once and written in one plain form.

A grammar matches the whole text, character by character. So a pattern may have literals, classes,
groups, alternatives and counts; what looks around (assertions, references back, word boundaries)
is refused. Where dialects differ (`\\d` is ASCII in ECMAScript, any Unicode digit in Python), the
text allowed is in both, so that whoever checks the output afterwards agrees.
"""

import re
from dataclasses import dataclass

Ranges = list[tuple[int, int]]  # inclusive ranges of code points, sorted, disjoint


class RegexError(ValueError):
    """Says which part of a pattern cannot be enforced, and what to write instead."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Concat:
    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Either:
    branches: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`body` between `low` and `high` times; None is without end."""

    body: "Node"
    low: int
    high: int | None


Node = Chars | Concat | Either | Repeat


def union(*sets: Ranges) -> Ranges:
    merged: Ranges = []
    for low, high in sorted(pair for ranges in sets for pair in ranges):
        if merged and low <= merged[-1][1] + 1:
            merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
        else:
            merged.append((low, high))
    return merged


def complement(ranges: Ranges) -> Ranges:
    edges = [-1, *(edge for pair in union(ranges) for edge in pair), 0x110000]
    gaps = zip(edges[::2], edges[1::2], strict=True)
    return [(low + 1, high - 1) for low, high in gaps if high - low > 1]


def intersect(a: Ranges, b: Ranges) -> Ranges:
    return complement(union(complement(a), complement(b)))


def only(text: str) -> Ranges:
    return union([(ord(char), ord(char)) for char in text])


# NUL ends a pattern in xgrammar; a surrogate alone is not text.
TEXT = complement([(0, 0), (0xD800, 0xDFFF)])
# What a JSON string may hold, and of that what must be escaped; longer escapes (\u....) are not
# used, so that a character has one spelling and a count of characters is a count of matches.
JSON_ESCAPES = {'"': '"', "\\": "\\", "\b": "b", "\f": "f", "\n": "n", "\r": "r", "\t": "t"}
JSON_PLAIN = complement(union([(0, 0x1F), (0xD800, 0xDFFF)], only('"\\')))
JSON_TEXT = union(JSON_PLAIN, only("".join(JSON_ESCAPES)))

_BEYOND_ASCII: Ranges = [(0x80, 0x10FFFF)]
_SPACE = union(only("\t\n\v\f\r \u00a0\u1680\u2028\u2029\u202f\u205f\u3000"), [(0x2000, 0x200A)])
_DIGIT: Ranges = [(0x30, 0x39)]
_WORD = union(_DIGIT, [(0x41, 0x5A), (0x61, 0x7A)], only("_"))
# Per class: what every dialect has in it, and what some dialect has.
_CLASSES: dict[str, tuple[Ranges, Ranges]] = {
    "d": (_DIGIT, union(_DIGIT, _BEYOND_ASCII)),
    "w": (_WORD, union(_WORD, _BEYOND_ASCII)),
    "s": (_SPACE, union(_SPACE, only("\x1c\x1d\x1e\x1f\x85\ufeff"))),
}
_CLASSES |= {
    name.upper(): (complement(outer), complement(inner))
    for name, (inner, outer) in _CLASSES.items()
}
_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_LINE_ENDS = only("\n\r\u2028\u2029")


def parse(pattern: str, alphabet: Ranges = TEXT) -> Node:
    """The tree of a pattern over an alphabet; the anchors `^` and `$` at its ends are implied.

    Raises:
        RegexError: not a pattern, or one that a grammar cannot enforce.
    """
    try:
        re.compile(pattern)  # whoever validates the output in Python must be able to read it
    except (re.error, OverflowError) as error:
        raise RegexError(f"{pattern!r} is not a regular expression: {error}") from None
    return _Parser(pattern, alphabet).parse()


class _Parser:
    def __init__(self, pattern: str, alphabet: Ranges) -> None:
        self.pattern, self.alphabet, self.at = pattern, alphabet, 0

    def refuse(self, what: str, instead: str) -> RegexError:
        return RegexError(f"{what} at character {self.at} of {self.pattern!r}: {instead}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        found = self.peek(text)
        self.at += len(text) if found else 0
        return found

    def parse(self) -> Node:
        return self.alternatives(top=True)  # re.compile has found unbalanced parentheses

    def alternatives(self, top: bool) -> Node:
        branches = [self.sequence(top)]
        while self.take("|"):
            branches.append(self.sequence(top))
        return Either(tuple(branches)) if len(branches) > 1 else branches[0]

    def sequence(self, top: bool) -> Node:
        parts: list[Node] = []
        if top:
            self.take("^")
        while self.at < len(self.pattern) and not self.peek("|") and not self.peek(")"):
            if self.peek("^") or self.peek("$"):
                end = self.at + 1
                if top and self.peek("$") and self.pattern[end : end + 1] in ("", "|"):
                    self.at = end
                    break
                raise self.refuse(
                    f"the anchor {self.pattern[self.at]!r}",
                    "the whole text must match, so anchors may stand only at the ends of the "
                    "pattern or of its outermost alternatives; remove it",
                )
            parts.append(self.counted(self.atom()))
        return parts[0] if len(parts) == 1 else Concat(tuple(parts))

    def counted(self, node: Node) -> Node:
        counts: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}
        braces = re.compile(r"\{(\d+)(,?)(\d*)\}").match(self.pattern, self.at)
        if braces:
            low = int(braces[1])
            high = int(braces[3]) if braces[3] else (None if braces[2] else low)
            self.at = braces.end()
            if max(low, high or 0) > 1_000_000:
                raise self.refuse("a count above 1000000", "write a smaller one")
        elif self.pattern[self.at : self.at + 1] in counts and self.at < len(self.pattern):
            low, high = counts[self.pattern[self.at]]
            self.at += 1
        else:
            return node
        self.take("?")  # lazy or greedy: the same texts match
        if self.peek("+"):
            raise self.refuse("a possessive count", "remove the +")
        return Repeat(node, low, high)

    def atom(self) -> Node:
        char = self.pattern[self.at]
        if self.take("("):
            self.group_start()
            node = self.alternatives(top=False)
            self.take(")")
            return node
        if char == "[":
            return self.chars(self.bracketed())
        if char == "{":
            raise self.refuse("a bare {", r"write \{ for the character, {0,n} for a count up to n")
        if self.take("."):
            return self.chars(complement(_LINE_ENDS))
        return self.chars(self.member()[0])

    def group_start(self) -> None:
        """What follows `(`: nothing, `?:`, or a name; else the group is more than a group."""
        if not self.peek("?") or self.take("?:"):
            return
        if not self.peek("?P<"):
            raise self.refuse(
                f"the group ({self.pattern[self.at : self.at + 3]}...",
                "lookaround, flags and comments cannot be enforced; use (...) or (?:...)",
            )
        self.at = self.pattern.index(">", self.at) + 1

    def chars(self, ranges: Ranges) -> Chars:
        allowed = intersect(ranges, self.alphabet)
        if not allowed:
            raise self.refuse("a character that the output cannot have", "no text can match it")
        return Chars(tuple(allowed))

    def bracketed(self) -> Ranges:
        self.take("[")
        negated = self.take("^")
        if self.peek("]"):
            raise self.refuse("an empty class", r"write \] for the character")
        sure: Ranges = []
        possible: Ranges = []
        while not self.take("]"):
            if self.peek("[:"):
                raise self.refuse("a POSIX class", r"write the range, such as a-z, or \[ for [")
            inner, outer = self.member()
            if self.peek("-") and not self.peek("-]"):
                self.take("-")
                last, _ = self.member()
                inner = outer = [(inner[0][0], last[0][0])]
            sure, possible = union(sure, inner), union(possible, outer)
        return complement(possible) if negated else sure

    def member(self) -> tuple[Ranges, Ranges]:
        """One literal or escape: what is surely in it, and what some dialect has in it."""
        char = self.pattern[self.at]
        self.at += 1
        if char != "\\":
            return only(char), only(char)
        code = self.pattern[self.at]
        self.at += 1
        if code in _CLASSES:
            return _CLASSES[code]
        if code in _CONTROLS:
            char = _CONTROLS[code]
        elif code in "xu":
            digits = 2 if code == "x" else 4
            char = chr(int(self.pattern[self.at : self.at + digits], 16))
            self.at += digits
        elif code.isalnum():
            self.at -= 2
            raise self.refuse(
                f"\\{code}",
                "references back, word boundaries and other escapes that look around cannot be "
                r"enforced; there are \d \w \s \D \W \S \n \r \t \f \v \xhh \uhhhh",
            )
        else:
            char = code
        return only(char), only(char)
