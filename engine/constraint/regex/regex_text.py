"""Lengths of a regular expression's matches, its restriction to some, and its pattern."""

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
"""The most copies of character classes in a pattern for which xgrammar builds an automaton."""


def width(node: Node) -> tuple[int, int | None]:
    """Return the least and the greatest length of a match; None without a limit."""
    match node:
        case Chars():
            return 1, 1
        case Repeat(body, low, high):
            least, most = width(body)
            return (
                least * low,
                0 if most == 0 else most * high if most and high is not None else None,
            )
        case Concat(parts):
            widths = [width(part) for part in parts]
            highs = [most for _, most in widths if most is not None]
            return sum(w[0] for w in widths), sum(highs) if len(highs) == len(widths) else None
        case Either(branches):
            widths = [width(branch) for branch in branches]
            highs = [most for _, most in widths if most is not None]
            return min(w[0] for w in widths), max(highs) if len(highs) == len(widths) else None


def bounded(node: Node, low: int, high: int | None) -> Node | None:
    """Return a tree for the matches of `low` to `high` characters; None where counts cannot say it.

    They can if all matches have such a length, or if each outermost branch has at most one part of
    varying length, which must repeat one character.
    """
    least, most = width(node)
    if least >= low and (high is None or (most is not None and most <= high)):
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
            varying = [i for i, part in enumerate(parts) if len(set(width(part))) > 1]
            if len(varying) != 1:
                return None
            [at] = varying
            fixed = least - width(parts[at])[0]
            rest = None if high is None else high - fixed
            if rest is not None and rest < 0:
                return None
            part = bounded(parts[at], max(0, low - fixed), rest)
            return None if part is None else Concat((*parts[:at], part, *parts[at + 1 :]))
        case _:
            return None


def other_than(words: list[str], alphabet: Ranges = JSON_PLAIN) -> Node:
    """A tree for every text of characters of the alphabet, except for the given words."""
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
    """Write the pattern of a tree as xgrammar reads it, with `json` for between a string's quotes.

    Then a class with characters that JSON writes as they are loses its others (quotes, backslashes,
    line ends): a mask takes microseconds for a class, and 0.1 s for a choice of escapes under a
    count.
    """
    text = _write(node, json)
    if not json or (
        text.isascii() and not _has_escapes(node) and _num_copies(node) <= _MOST_COPIES
    ):
        return text
    # xgrammar compiles an ASCII pattern of a JSON string into an automaton. That takes time
    # quadratic in counts and leaves out every match with an escaped character. The character
    # beyond ASCII, which is to occur zero times, makes it write rules of a grammar instead.
    return text + "é{0}"


def _has_escapes(node: Node) -> bool:
    """Whether the tree has a class of which JSON writes every character with a backslash."""
    match node:
        case Chars(ranges):
            return not intersect(list(ranges), JSON_PLAIN)
        case Repeat(body):
            return _has_escapes(body)
        case Concat(parts) | Either(parts):
            return any(map(_has_escapes, parts))


def _num_copies(node: Node) -> int:
    """The number of character classes in the pattern if its counts are written out."""
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
    r"""Write a character; special ones as \uhhhh, because xgrammar reads on behind \xhh."""
    char = chr(code)
    return char if code >= 0x80 or char.isalnum() else f"\\u{code:04x}"
