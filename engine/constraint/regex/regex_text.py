"""Operations on trees of regular expressions (`regex_syntax.py`).

`width` measures the lengths of matches: those of `[a-z]{1,3}x` have 2 to 4 characters. `bounded`
restricts the lengths, `other_than` makes a tree for all texts except some words, and `write` turns
a tree into a pattern for xgrammar. The rewriting of schemas and patterns uses them.
"""

from collections.abc import Sequence

from batchgen.engine.constraint.regex.characters import (
    JSON_ESCAPES,
    JSON_PLAIN,
    Ranges,
    complement,
    intersect,
    only,
)
from batchgen.engine.constraint.regex.regex_syntax import Chars, Concat, Either, Node, Repeat

_MOST_COPIES = 64
"""The most copies of character classes with which xgrammar may build an automaton from a
pattern."""


def width(node: Node) -> tuple[int, int | None]:
    """Return the minimum and maximum length of a match; the maximum is None if there is none."""
    match node:
        case Chars():
            return 1, 1
        case Repeat(body, low, high):
            shortest, longest = width(body)
            if longest == 0:  # an empty body stays empty, however often it is repeated
                return 0, 0
            if longest is None or high is None:
                return shortest * low, None
            return shortest * low, longest * high
        case Concat(parts):
            lows, highs = _widths(parts)
            return sum(lows), None if highs is None else sum(highs)
        case Either(branches):
            lows, highs = _widths(branches)
            return min(lows), None if highs is None else max(highs)


def _widths(nodes: Sequence[Node]) -> tuple[list[int], list[int] | None]:
    """Return the minimum and the maximum lengths of each node's matches; None instead of the
    maximum lengths if some node has none."""
    widths = [width(node) for node in nodes]
    highs = [longest for _, longest in widths if longest is not None]
    return [shortest for shortest, _ in widths], highs if len(highs) == len(widths) else None


def bounded(node: Node, low: int, high: int | None) -> Node | None:
    """Return a tree for only those matches that have `low` to `high` characters.

    This is possible if every match has such a length already, or if each outermost branch has at
    most one part of varying length, which repeats one character class. Otherwise the result is
    None.
    """
    shortest, longest = width(node)
    if shortest >= low and (high is None or (longest is not None and longest <= high)):
        return node
    match node:
        case Repeat(Chars() as body, fewest, times):
            low = max(low, fewest)
            high = times if high is None else high if times is None else min(high, times)
            return Repeat(body, low, high) if high is None or low <= high else None
        case Either(branches):
            fitting = [bounded(branch, low, high) for branch in branches]
            kept = tuple(branch for branch in fitting if branch is not None)
            return Either(kept) if len(kept) == len(branches) else None
        case Concat(parts):
            # The indices of the parts whose minimum and maximum length differ.
            varying = [i for i, part in enumerate(parts) if len(set(width(part))) > 1]
            if len(varying) != 1:
                return None
            [at] = varying
            fixed = shortest - width(parts[at])[0]
            rest = None if high is None else high - fixed
            if rest is not None and rest < 0:
                return None
            part = bounded(parts[at], max(0, low - fixed), rest)
            return None if part is None else Concat((*parts[:at], part, *parts[at + 1 :]))
        case _:
            return None


def other_than(words: list[str], alphabet: Ranges = JSON_PLAIN) -> Node:
    """Return a tree for all texts of characters of the alphabet except the given words.

    A text other than "ab" and "ac" is empty, or starts with another character than "a", or is "a"
    followed by a text other than "b" and "c".
    """
    heads = sorted({word[0] for word in words if word})
    anything = Repeat(Chars(tuple(alphabet)), 0, None)
    different = tuple(intersect(alphabet, complement(only("".join(heads)))))
    branches: list[Node] = [] if "" in words else [Concat(())]
    branches.append(Concat((Chars(different), anything)))
    for head in heads:
        if intersect(alphabet, only(head)):
            tails = [word[1:] for word in words if word.startswith(head)]
            branches.append(Concat((Chars(tuple(only(head))), other_than(tails, alphabet))))
    return Either(tuple(branches))


def write(node: Node, json: bool = False) -> str:
    """Write a tree as a pattern for xgrammar, with `json` for the inside of a JSON string.

    In JSON, a class that contains plain characters drops those that need an escape (quotes,
    backslashes, line ends): a mask takes microseconds for a class of plain characters, but 0.1 s
    for a repeated choice between escapes.
    """
    text = _write(node, json)
    if not json or (
        text.isascii() and not _has_escapes(node) and _num_copies(node) <= _MOST_COPIES
    ):
        return text
    # xgrammar compiles an ASCII pattern of a JSON string into an automaton, in time quadratic in
    # counts, and loses every match with an escaped character. A character beyond ASCII, here
    # repeated zero times, makes it write grammar rules instead.
    return text + "é{0}"


def _has_escapes(node: Node) -> bool:
    """Return whether the tree has a class whose characters JSON all writes with a backslash."""
    match node:
        case Chars(ranges):
            return not intersect(list(ranges), JSON_PLAIN)
        case Repeat(body):
            return _has_escapes(body)
        case Concat(parts) | Either(parts):
            return any(map(_has_escapes, parts))


def _num_copies(node: Node) -> int:
    """Return the number of character classes in the pattern with its counts written out."""
    match node:
        case Chars():
            return 1
        case Repeat(body, low, high):
            return _num_copies(body) * max(1, low, high or 1)
        case Concat(parts) | Either(parts):
            return sum(map(_num_copies, parts))


def _write(node: Node, json: bool) -> str:
    match node:
        case Chars(ranges):
            return _write_chars(list(ranges), json)
        case Repeat(body, low, high):
            if width(body)[1] == 0:
                return ""
            return f"({_write(body, json)}){{{low},{'' if high is None else high}}}"
        case Concat(parts):
            return "".join(_write(part, json) for part in parts)
        case Either(branches):
            return "(" + "|".join(_write(branch, json) or "()" for branch in branches) + ")"


def _write_chars(ranges: Ranges, json: bool) -> str:
    plain = intersect(ranges, JSON_PLAIN) if json else ranges
    if plain:
        pairs = (_literal(a) if a == b else f"{_literal(a)}-{_literal(b)}" for a, b in plain)
        return "[" + "".join(pairs) + "]"
    escaped = [code for char, code in JSON_ESCAPES.items() if intersect(ranges, only(char))]
    return "(" + "|".join(r"\u005c" + _literal(ord(code)) for code in escaped) + ")"


def _literal(code: int) -> str:
    r"""Write a character, special ones as \uhhhh, because xgrammar would read further digits after
    \xhh."""
    char = chr(code)
    return char if code >= 0x80 or char.isalnum() else f"\\u{code:04x}"
