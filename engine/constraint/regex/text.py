"""Regular expressions as trees: the length of a match, and the pattern that xgrammar reads."""

from batchgen.engine.constraint.regex.syntax import (
    JSON_ESCAPES,
    JSON_PLAIN,
    Chars,
    Concat,
    Either,
    Node,
    Ranges,
    Repeat,
    complement,
    intersect,
    only,
)


def width(node: Node) -> tuple[int, int | None]:
    """The least and the most characters of a match; None is without end."""
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
    """The matches of `low` to `high` characters, where counts can say so; None where not.

    They can if the pattern has at most one part of varying length, and that repeats one character.
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
    """Every text over the alphabet but these words."""
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
    """The pattern as xgrammar reads it; with `json`, of the characters between the quotes.

    Of a class that has characters which JSON writes as they are, the others (quotes, backslashes,
    line ends) are left out: masks of a class cost microseconds, of a choice between a class and
    escapes under a count 0.1 s each.

    xgrammar compiles an ASCII pattern of a JSON string into an automaton, which takes time
    quadratic in counts and leaves out every match with an escaped character. A pattern with
    either gets a mark beyond ASCII (none of it, `é{0}`), which selects the rules of a grammar.
    """
    text = _write(node, json)
    plain = text.isascii() and not _has_escapes(node) and _largest_count(node) <= 64
    return text if plain or not json else text + "é{0}"


def _has_escapes(node: Node) -> bool:
    match node:
        case Chars(ranges):
            return not intersect(list(ranges), JSON_PLAIN)
        case Repeat(body):
            return _has_escapes(body)
        case Concat(parts) | Either(parts):
            return any(map(_has_escapes, parts))


def _largest_count(node: Node) -> int:
    """The most copies of one character class that the written-out pattern has."""
    match node:
        case Chars():
            return 1
        case Repeat(body, low, high):
            return _largest_count(body) * max(1, low, high or 1)
        case Concat(parts) | Either(parts):
            return sum(map(_largest_count, parts))


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
    """Letters, digits and what is beyond ASCII stand for themselves; else four digits, since
    xgrammar reads `\\x` with every hexadecimal digit that follows."""
    char = chr(code)
    return char if code >= 0x80 or char.isalnum() else f"\\u{code:04x}"
