r"""Reads the text after the `=` of an argument as a value of the key's declared type.

The declared type of a key decides how its text is read:

    text          as it is typed; or in quotes: "…" with escapes, '…' without
    a list        [a, "b"]; or without brackets, divided by commas
    a mapping     {key: value, "key": value}; JSON is one
    a number, …   12, 0.5, 1e-3, true, false

An unquoted `null` is no value. Escapes are \n \t \r \" \\ \uXXXX \xXX; any other backslash stays as
it is, so that regular expressions need no second one. An escape in single quotes is refused,
because YAML and shells do not read it as one.
"""

from __future__ import annotations

import re
import types
from collections import abc
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin

# An escape in double quotes; its groups are hex digits of \u, hex digits of \x, or a letter.
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|x([0-9a-fA-F]{2})|([ntr"\\/]))')
_MEANINGS = {"n": "\n", "t": "\t", "r": "\r"}
_NAMES = {"n": "the end of a line", "t": "a tab", "r": "a carriage return"}
_INTEGER = re.compile(r"[+-]?\d(_?\d)*")
_NUMBER = re.compile(
    r"[+-]?((\d(_?\d)*\.?(\d(_?\d)*)?|\.\d(_?\d)*)(e[+-]?\d+)?|inf|nan)", re.IGNORECASE
)
# Words without quotes that are values.
_WORDS = {"true": True, "false": False, "null": None}
# A reference to another key: ${KEY}.
_REFERENCE = re.compile(r"\$\{[^{}]*\}")
_QUOTED = re.compile(r'"(?:[^"\\]|\\.)*"|\'(?:[^\'\\]|\\.)*\'', re.DOTALL)
_BARE = {
    "]": re.compile(r"(?:\$\{[^{}]*\}|[^,\]])*"),
    "}": re.compile(r"(?:\$\{[^{}]*\}|[^,}])*"),
    ":": re.compile(r"[^,:{}\[\]]*"),
}
"""The text that may come without quotes before a comma, or before this character."""


class Unreadable(Exception):
    """The text is not a value of its key. The message says why, and what to do."""


class UnclearEscape(Unreadable):
    r"""An escape without quotes is ambiguous: `\theta` may be a tab before "heta", or a command of
    LaTeX."""


@dataclass(frozen=True, slots=True)
class _Bare:
    """A text without quotes inside brackets."""

    text: str


_Form = Literal["text", "list", "mapping", "scalar", "any"]


def read_value(text: str, hint: Any, *, escapes: bool = False) -> Any:
    r"""Read the text after the `=` as a plain value for a key of the declared type `hint`.

    `convert` then checks the type: a word where a number is expected stays text here. With
    `escapes`, escapes such as `\n` are also read without quotes, as in texts for the model.

    Raises:
        Unreadable: brackets or quotes do not match, or an escape is ambiguous.
    """
    short = text.strip()
    if short.lower() == "null":
        return None
    if _REFERENCE.fullmatch(short):  # the value of another key, of any type
        return short
    form, item = type_form(hint)
    if form == "list":
        return _list(text, item, escapes)
    brackets = {"mapping": "{", "any": "{["}.get(form, "")
    if short and short[0] in brackets:
        return _finish(_Brackets(short).whole(), "any", escapes)
    if _QUOTED.fullmatch(short):
        return _unquoted(short)
    if form in ("scalar", "any"):
        value = _scalar(short)
        return text if value == short else value
    return decode_escapes(text) if escapes else text


def type_form(hint: Any) -> tuple[_Form, Any]:
    """The form in which values of a declared type are written, and for lists the type of an
    item."""
    if get_origin(hint) in (Union, types.UnionType):
        kinds = [kind for kind in get_args(hint) if kind is not type(None)]
    else:
        kinds = [hint]
    if len(kinds) != 1:
        return "any", None
    origin, args = get_origin(kinds[0]) or kinds[0], get_args(kinds[0])
    if origin in (tuple, list, abc.Sequence):
        return "list", args[0] if args else Any
    if origin in (dict, abc.Mapping):
        return "mapping", None
    if origin is str or (origin is Literal and all(isinstance(choice, str) for choice in args)):
        return "text", None
    return ("scalar", None) if origin in (int, float, bool) else ("any", None)


def decode_escapes(text: str, *, quoted: bool = False) -> str:
    r"""Replace the escapes in a text.

    Raises:
        UnclearEscape: `\theta` without quotes; in double quotes it is a tab before "heta".
        Unreadable: half of a pair \uXXXX\uXXXX.
    """

    def meaning(match: re.Match[str]) -> str:
        if match[1] or match[2]:
            return chr(int(match[1] or match[2], 16))
        next_character = text[match.end() : match.end() + 1]
        if (
            not quoted
            and match[3] in _MEANINGS
            and next_character.isascii()
            and next_character.islower()
        ):
            word = re.match(r"\\[a-z]+", text[match.start() :])
            assert word is not None
            raise UnclearEscape(
                f"{match[0]} in {word[0]} may be {_NAMES[match[3]]} or a backslash and a letter"
            )
        if not quoted and match[3] == "/":
            return match[0]
        return _MEANINGS.get(match[3], match[3])

    decoded = _ESCAPE.sub(meaning, text)
    if "\\u" not in text:
        return decoded
    try:  # \ud83d\ude00 is one character in JSON
        return decoded.encode("utf-16", "surrogatepass").decode("utf-16")
    except UnicodeDecodeError:
        raise Unreadable(
            "it has one half of a pair \\uXXXX\\uXXXX, which only together is a character"
        ) from None


def _list(text: str, item: Any, escapes: bool) -> Any:
    """Read a list whose items have the type `item`: `[a, "b"]`, `a,b`, or one text."""
    short, form = text.strip(), type_form(item)[0]
    if short.startswith("["):
        return _finish(_Brackets(short).whole(), form, escapes)
    if _QUOTED.fullmatch(short):
        return [_unquoted(short)]
    if form == "text" and "," not in text:
        return [decode_escapes(text) if escapes else text] if text else []
    items = [part.strip() for part in short.split(",")] if short else []
    if any(part.startswith(("'", '"')) for part in items):  # quotes may hold commas
        return _finish(_Brackets(f"[{short}]").whole(), form, escapes)
    if "" in items:
        raise Unreadable(
            'there is nothing on one side of a comma: a text with commas is written ["a,b"]'
        )
    return [_finish(_Bare(part), form, escapes) for part in items]


def _unquoted(text: str) -> str:
    """The text between quotes, with its escapes replaced."""
    content = text[1:-1]
    if text[0] == '"':
        return decode_escapes(content, quoted=True)
    content = content.replace("\\'", "'")
    if (escape := _ESCAPE.search(content)) is not None:
        meaning = decode_escapes(escape[0], quoted=True)
        described = _NAMES.get(
            escape[3], "a backslash" if meaning == "\\" else f"the text {meaning}"
        )
        raise Unreadable(
            f"{escape[0]} in single quotes may be {described} or {len(escape[0])} characters: use "
            f"double quotes, with {escape[0]} for the former and {_escaped(escape[0])} for the "
            "latter"
        )
    return content


def _escaped(text: str) -> str:
    """The escapes that stand for the text in double quotes."""
    return text.replace("\\", "\\\\").replace('"', '\\"')


def _scalar(text: str) -> Any:
    """A number, true, false or null; any other text stays as it is."""
    if text.lower() in _WORDS:
        return _WORDS[text.lower()]
    if _INTEGER.fullmatch(text):
        return int(text)
    return float(text) if _NUMBER.fullmatch(text) else text


def _finish(node: Any, form: _Form, escapes: bool) -> Any:
    """The value of a parsed node, whose unquoted texts have the form `form`."""
    if isinstance(node, list):
        return [_finish(item, form, escapes) for item in node]
    if isinstance(node, dict):
        return {key: _finish(item, "any", escapes) for key, item in node.items()}
    if not isinstance(node, _Bare):
        return node
    if form != "text" or node.text.lower() == "null":
        value = _scalar(node.text)
        if value != node.text:
            return value
    return decode_escapes(node.text) if escapes else node.text


class _Brackets:
    """A parser of lists and mappings, in JSON or with unquoted texts."""

    def __init__(self, text: str) -> None:
        self._text, self._at = text, 0

    def whole(self) -> Any:
        value = self._value("]")
        if rest := self._rest():
            raise Unreadable(f"{rest} follows the closing bracket")
        return value

    def _rest(self) -> str:
        """The text that is not read yet, without leading space."""
        rest = self._text[self._at :].lstrip()
        self._at = len(self._text) - len(rest)
        return rest

    def _value(self, stop: str) -> Any:
        """Read a list, a mapping, or a text that ends before a comma or the sign `stop`."""
        rest = self._rest()
        if rest.startswith("["):
            return self._items("]")
        if rest.startswith("{"):
            return dict(self._items("}"))
        return self._text_before(stop)

    def _text_before(self, stop: str) -> str | _Bare:
        """Read a text, in quotes or up to a comma or the sign `stop`."""
        rest = self._rest()
        if quoted := _QUOTED.match(rest):
            self._at += quoted.end()
            return _unquoted(quoted[0])
        bare = _BARE[stop].match(rest)
        assert bare is not None
        text = bare[0].strip()
        if not text:
            missing = "a key" if stop == ":" else "a value"
            raise Unreadable(f"{missing} is missing before {rest[:1] or 'the end'}")
        if text[0] in "\"'":
            raise Unreadable(f"the quote in {text} is not closed")
        self._at += bare.end()
        return _Bare(text)

    def _items(self, end: str) -> list[Any]:
        """Read the items up to the closing bracket; those of a mapping are pairs."""
        self._at += 1
        items: list[Any] = []
        if self._rest().startswith(end):
            self._at += 1
            return items
        while True:
            items.append(self._pair(items) if end == "}" else self._value(end))
            rest = self._rest()
            self._at += 1
            if rest.startswith(end):
                return items
            if not rest:
                raise Unreadable(f"the closing {end} is missing: quote text that begins like this")
            if not rest.startswith(","):
                raise Unreadable(
                    f"{rest[:12]} is where , or {end} should be: put a text with special "
                    "characters into double quotes"
                )

    def _pair(self, before: list[Any]) -> tuple[str, Any]:
        """Read `key: value`. `before` are the pairs of the mapping that were read so far."""
        key_text = self._text_before(":")
        key = key_text.text if isinstance(key_text, _Bare) else key_text
        if not self._rest().startswith(":"):
            raise Unreadable(f"the key {key} has no value: a mapping is written {{key: value}}")
        if key in dict(before):
            raise Unreadable(f"the key {key} appears twice")
        self._at += 1
        return key, self._value("}")
