r"""Splits the text of an answer into tokens: numbers, letters, words, commands and signs.
`parser.py` calls `tokens_of`.

    `2\sqrt{x} \text{ cm}`  →  number 2, function sqrt, sign {, letter x, sign }, word cm
"""

from __future__ import annotations

import re
import unicodedata
from dataclasses import dataclass, replace

from batchgen.evals.math.reading.nodes import NotRead
from batchgen.evals.math.reading.units import UNITS

MOST_TOKENS = 2000

# Names of functions, with or without a backslash.
FUNCTIONS = {
    "sin", "cos", "tan", "cot", "sec", "csc", "sinh", "cosh", "tanh", "arcsin", "arccos", "arctan",
    "ln", "lg", "log", "exp", "sqrt", "max", "min", "gcd", "lcm", "floor", "ceil", "abs",
    "asin", "acos", "atan", "cbrt",
}  # fmt: skip
# Words that multiply the number before them.
SCALES = {
    "dozen": 12, "hundred": 10**2, "thousand": 10**3, "million": 10**6, "billion": 10**9,
    "trillion": 10**12, "万": 10**4, "亿": 10**8,
}  # fmt: skip
# Command → the command or sign with the same meaning.
_COMMANDS = {
    "dfrac": "frac", "tfrac": "frac", "cfrac": "frac", "leq": "le", "leqslant": "le", "geq": "ge",
    "geqslant": "ge", "neq": "ne", "lt": "<", "gt": ">", "times": "*", "cdot": "*", "ast": "*",
    "div": "/", "over": "/", "varnothing": "emptyset", "lbrace": "{set", "rbrace": "}set",
    "{": "{set", "}": "}set", "land": "and", "wedge": "and", "lor": "or", "vee": "or",
    "backslash": "setminus", "infin": "infty", "lvert": "|", "rvert": "|", "vert": "|",
    "colon": ":", "circ": "degree", "dbinom": "binom", "tbinom": "binom", "lbrack": "[",
    "rbrack": "]", "_": " ", "arccot": "acot", "prime": "'",
    "euro": "€", "pounds": "£", "approxeq": "approx", "simeq": "approx",
    "thickapprox": "approx", "R": "reals", "varphi": "phi", "varepsilon": "epsilon",
    "rightarrow": "to", "Rightarrow": "implies",
}  # fmt: skip
_STRUCTURE = set(
    "frac binom pi infty overline bar overrightarrow angle triangle lfloor rfloor lceil rceil "
    "langle rangle degree le ge ne approx in equiv to cong sim parallel perp notin subset "
    "subseteq implies iff mid cup cap setminus emptyset reals pm mp".split()
)
"""Commands that the grammar knows. Any other command is a letter, such as `\\alpha`."""
# A command whose argument is text.
_TEXT = re.compile(r"\\(?:text[a-z]*|mathrm|mbox|operatorname\*?|hbox)\s*(?=\{)")
# A number, one with commas (`1,000`), and one with spaces between thousands.
_NUMBER = r"(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,4}(?![0-9]))?"
_GROUPED = r"[0-9]{1,3}(?:,[0-9]{3})+(?![0-9,])(?:\.[0-9]+)?"
_SPACED = r"[0-9]{1,3}(?: [0-9]{3})+(?! ?[0-9])(?:\.[0-9]+)?"
_TOKEN = re.compile(
    rf"(?P<begin>\\begin\s*\{{(?P<kind>[a-z]*)\*?\}}(?:\s*\{{[clr|]*\}})?)|(?P<end>\\end\s*\{{[a-z]*\*?\}})"
    r"|(?P<row>\\\\(?:\[[^\]]*\])?)|(?P<blackboard>\\mathbb\s*\{?\s*([A-Z])\s*\}?)"
    r"|\\(?P<command>[A-Za-z]+|[^A-Za-z\s])"
    rf"|(?P<number>{_GROUPED}|{_SPACED}|{_NUMBER})|(?P<letters>[\u3400-\u9fff]+|[^\W\d_\u3400-\u9fff]+)"
    r"|(?P<sign><=|>=|!=|<>|==|[^\s\w]|_)|(?P<space>\s+)",
    re.S,
)
_PLAIN_NUMBER = re.compile(_NUMBER)
# Signs of two characters → the command with the same meaning.
_SIGNS = {"<=": "le", ">=": "ge", "!=": "ne", "<>": "ne", "==": "="}
# Words between answers.
_JOINING = frozenset(("and", "or", "und", "oder"))
_VOWEL = re.compile("[aeiouyAEIOUY]")


@dataclass(frozen=True, slots=True)
class Token:
    r"""A token of an answer.

    Attributes:
        kind: `number`, `letter` (a variable), `word`, `function`, `begin`, `end` or `sign`
            (everything else, with commands without their backslash).
        text: its text.
        spaced: whether there is white space before it.
        quoted: whether it is in `\text{…}` or the like.
    """

    kind: str
    text: str
    spaced: bool = False
    quoted: bool = False

    @property
    def joins(self) -> bool:
        """Whether it is a word between answers, such as `and`."""
        return self.kind == "word" and self.text.lower() in _JOINING


def tokens_of(text: str, thousands: bool = True) -> list[Token]:
    """The tokens of a tidy text.

    Raises:
        NotRead: there are too many, or a brace is not closed.
    """
    tokens = _tokens(text, thousands)
    if len(tokens) > MOST_TOKENS:
        raise NotRead
    return tokens


def _tokens(
    text: str, thousands: bool, before: Token | None = None, quoted: bool = False
) -> list[Token]:
    r"""The tokens of a part of an answer: of the whole, or of the content of a `\text{…}`
    (`quoted`). `before` is the token before the part."""
    tokens: list[Token] = []
    at, spaced = 0, False
    while at < len(text):
        if not quoted and (match := _TEXT.match(text, at)):
            end = _closing(text, match.end())
            last = tokens[-1] if tokens else None
            inner = _tokens(text[match.end() + 1 : end], thousands, last, quoted=True)
            if inner:
                inner[0] = replace(inner[0], spaced=True)
            tokens += inner
            at, spaced = end + 1, True
            continue
        match = _TOKEN.match(text, at)
        if match is None:
            raise NotRead
        at = match.end()
        if match["space"]:
            spaced = True
            continue
        if match["number"] and not thousands and "," in match["number"]:
            match = _PLAIN_NUMBER.match(text, match.start())
            assert match is not None
            at = match.end()
            tokens.append(Token("number", match[0], spaced, quoted))
        else:
            tokens += _read(match, spaced, quoted, tokens[-1] if tokens else before)
        spaced = False
    return tokens


def _closing(text: str, start: int) -> int:
    """The index of the brace that closes the one at `start`."""
    depth = 0
    for at in range(start, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    raise NotRead


def _read(match: re.Match[str], spaced: bool, quoted: bool, previous: Token | None) -> list[Token]:
    """The tokens of one match of `_TOKEN`; several only for letters. `previous` is the token before
    it."""
    if match["number"]:
        number = match["number"].replace(",", "").replace(" ", "")
        return [Token("number", number, spaced, quoted)]
    if match["letters"]:
        letters = match["letters"]
        if quoted and len(letters) == 1 and letters in UNITS and _is_value(previous, letters):
            return [Token("word", letters, spaced, quoted)]
        if (
            previous is None and not quoted and len(letters) == 2 and letters in UNITS
        ):  # no value comes before it
            return [Token("letter", letter, spaced) for letter in letters]
        return _letters(letters, spaced, quoted)
    if match["begin"]:
        return [Token("begin", match["kind"], spaced)]
    if match["end"]:
        return [Token("end", "", spaced)]
    if match["row"]:
        return [Token("sign", "row", spaced)]
    if match["blackboard"]:
        letter = match["blackboard"].strip("} ")[-1]
        return [Token("sign", {"R": "reals"}.get(letter, f"set {letter}"), spaced)]
    if (command := match["command"]) is not None:
        command = _COMMANDS.get(command, command)
        if command in FUNCTIONS:
            return [Token("function", command, spaced)]
        if command in _JOINING:
            return [Token("word", command, spaced)]
        if len(command) > 1 and command.isalpha() and command not in _STRUCTURE:
            return [Token("letter", command, spaced, quoted=True)]
        return [Token("sign", command, spaced)]
    sign = match["sign"]
    return [Token("sign", _SIGNS.get(sign, sign), spaced, quoted)]


def _letters(letters: str, spaced: bool, quoted: bool) -> list[Token]:
    """Letters without a backslash: a function, a word, or variables one after another (`xy`)."""
    # Without a backslash, `min` means minutes and, in \text, `sec` means seconds.
    is_time = letters == "min" or (quoted and letters == "sec")
    if letters in FUNCTIONS and not is_time:
        return [Token("function", letters, spaced, quoted)]
    if letters in ("pi", "infty", "infinity", "inf", "cup", "oo"):
        name = {"infinity": "infty", "inf": "infty", "oo": "infty"}.get(letters, letters)
        return [Token("sign", name, spaced, quoted)]
    if letters >= "\u3400":
        return _chinese(letters, spaced, quoted)
    if len(letters) == 1:
        return [Token("letter", _letter(letters), spaced, quoted)]
    if quoted or letters.lower() in _JOINING or _is_word(letters):
        return [Token("word", letters, spaced, quoted)]
    return [
        Token("letter", _letter(letter), spaced and at == 0) for at, letter in enumerate(letters)
    ]


def _is_value(token: Token | None, letter: str) -> bool:
    r"""Whether a token ends a value, so that a letter after it, in `\text`, is a unit."""
    if token is None:
        return False
    return token.kind == "number" or (letter.islower() and token.text in ("}", ")", "pi"))


def _chinese(letters: str, spaced: bool, quoted: bool) -> list[Token]:
    """A Chinese word. A number such as ten thousand, at its start, is another word."""
    if letters[0] in SCALES and len(letters) > 1:
        first = Token("word", letters[0], spaced, quoted)
        return [first, Token("word", letters[1:], quoted=quoted)]
    return [Token("word", letters, spaced, quoted)]


def _letter(letter: str) -> str:
    """The name of a variable: `alpha` for the Greek letter, otherwise the letter."""
    kind, _, name = unicodedata.name(letter, "").rpartition(" LETTER ")
    return {"GREEK SMALL": name.lower(), "GREEK CAPITAL": name.capitalize()}.get(kind, letter)


def _is_word(letters: str) -> bool:
    """Whether letters without a backslash are a word rather than a product of variables."""
    if (
        letters in UNITS
        or letters.lower() in SCALES
        or letters
        in ("per", "pct", "not", "mod", "at", "is", "if", "on", "by", "of", "AM", "PM", "am", "pm")
    ):
        return True
    return len(letters) >= 4 and bool(_VOWEL.search(letters)) and not letters.isupper()
