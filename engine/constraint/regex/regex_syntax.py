r"""Parses the regular expressions that a grammar can enforce into trees.

A grammar matches the whole text, character by character. So a pattern may have literals, classes,
groups, alternatives and counts; assertions, backreferences and word boundaries are refused. Where
dialects differ, only what all of them allow is allowed: `\d` means ASCII digits, as in ECMAScript,
so that any later check of the output agrees.
"""

import re
from dataclasses import dataclass

from batchgen.engine.constraint.regex.characters import (
    CLASSES,
    LINE_ENDS,
    TEXT,
    Ranges,
    complement,
    intersect,
    only,
    union,
)
from batchgen.engine.interface.constraint_error import ConstraintError

_CONTROLS = {"n": "\n", "r": "\r", "t": "\t", "f": "\f", "v": "\v"}
_MOST_COUNT = 1_000_000
_MOST_GROUPS = 100
"""The greatest depth of nested groups, because each takes some of Python's 1000 nested calls."""
_GROUPS = re.compile(r"\\.|\[\^?(?:\\.|[^\]\\])*\]|[()]", re.DOTALL)
"""The parts of a pattern that matter for nesting: escapes, classes, and parentheses."""


@dataclass(frozen=True, slots=True)
class Chars:
    """One character of a set, which is given by its ranges of code points."""

    ranges: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Concat:
    """All parts, one after the other. Without parts it matches the empty text."""

    parts: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Either:
    """Any one of the branches."""

    branches: "tuple[Node, ...]"


@dataclass(frozen=True, slots=True)
class Repeat:
    """`body` at least `low` and at most `high` times. If `high` is None, there is no limit."""

    body: "Node"
    low: int
    high: int | None


Node = Chars | Concat | Either | Repeat


def parse(pattern: str, alphabet: Ranges = TEXT) -> Node:
    """Parse a pattern into a tree whose character sets are within `alphabet`, the characters of the
    output.

    The whole text must match, so `^` at the beginning and `$` at the end change nothing. Raises
    ConstraintError, saying which part cannot be enforced and what to write instead.
    """
    if (depth := _depth(pattern)) > _MOST_GROUPS:
        raise ConstraintError(
            f"{pattern!r:.100} nests {depth} groups, and at most {_MOST_GROUPS} are supported: "
            "write them one after another"
        )
    try:
        re.compile(pattern)  # validators of the output in Python must be able to read it
    except (re.error, OverflowError) as error:
        raise ConstraintError(f"{pattern!r} is not a regular expression: {error}") from None
    return _Parser(pattern, alphabet).parse()


def _depth(pattern: str) -> int:
    """Return the greatest number of open `(`, ignoring those in classes and after backslashes."""
    depth = deepest = 0
    for part in _GROUPS.findall(pattern):
        depth += (part == "(") - (part == ")")
        deepest = max(deepest, depth)
    return deepest


class _Parser:
    """Parses one pattern from left to right. `at` is the index of the next character."""

    def __init__(self, pattern: str, alphabet: Ranges) -> None:
        self.pattern, self.alphabet, self.at = pattern, alphabet, 0

    def refuse(self, what: str, instead: str) -> ConstraintError:
        return ConstraintError(f"{what} at character {self.at} of {self.pattern!r}: {instead}")

    def peek(self, text: str) -> bool:
        return self.pattern.startswith(text, self.at)

    def take(self, text: str) -> bool:
        is_next = self.peek(text)
        self.at += len(text) if is_next else 0
        return is_next

    def parse(self) -> Node:
        # Parentheses are balanced, or `re.compile` would have refused the pattern.
        return self.alternatives(top=True)

    def alternatives(self, top: bool) -> Node:
        """Parse branches separated by `|`. `top` says whether they are the outermost, which may
        have anchors."""
        branches = [self.branch(top)]
        while self.take("|"):
            branches.append(self.branch(top))
        return Either(tuple(branches)) if len(branches) > 1 else branches[0]

    def branch(self, top: bool) -> Node:
        """Parse everything up to the next `|`, the `)` of this group, or the end."""
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
            if max(low, high or 0) > _MOST_COUNT:
                raise self.refuse(f"a count above {_MOST_COUNT}", "write a smaller one")
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
            return self.chars(complement(LINE_ENDS))
        return self.chars(self.member()[0])

    def group_start(self) -> None:
        """Parse nothing, `?:` or a name after the `(` of a group; refuse anything else."""
        if not self.peek("?") or self.take("?:"):
            return
        if not self.peek("?P<"):
            raise self.refuse(
                f"the group ({self.pattern[self.at : self.at + 3]}...",
                "lookaround, flags and comments cannot be enforced; use (...) or (?:...)",
            )
        self.at = self.pattern.index(">", self.at) + 1

    def chars(self, ranges: Ranges) -> Chars:
        """Return the node of those characters that the alphabet contains."""
        allowed = intersect(ranges, self.alphabet)
        if not allowed:
            raise self.refuse("a character that the output cannot have", "no text can match it")
        return Chars(tuple(allowed))

    def bracketed(self) -> Ranges:
        """Parse a class. A negated class excludes the characters that it has in any dialect."""
        self.take("[")
        negated = self.take("^")
        if self.peek("]"):
            raise self.refuse("an empty class", r"write \] for the character")
        in_every: Ranges = []
        in_some: Ranges = []
        while not self.take("]"):
            if self.peek("[:"):
                raise self.refuse("a POSIX class", r"write the range, such as a-z, or \[ for [")
            every, some = self.member()
            if self.peek("-") and not self.peek("-]"):
                self.take("-")
                last, _ = self.member()
                # Both ends of a range are single characters, or Python would have refused it.
                every = some = [(every[0][0], last[0][0])]
            in_every, in_some = union(in_every, every), union(in_some, some)
        return complement(in_some) if negated else in_every

    def member(self) -> tuple[Ranges, Ranges]:
        """Parse a literal or escape. Returns its characters in every dialect, and in at least
        one."""
        char = self.pattern[self.at]
        self.at += 1
        if char != "\\":
            return only(char), only(char)
        code = self.pattern[self.at]
        self.at += 1
        if code in CLASSES:
            return CLASSES[code]
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
                "backreferences, word boundaries and other escapes that look around cannot be "
                r"enforced; there are \d \w \s \D \W \S \n \r \t \f \v \xhh \uhhhh",
            )
        else:
            char = code
        return only(char), only(char)
