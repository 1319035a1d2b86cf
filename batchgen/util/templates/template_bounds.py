"""Limits on the rendering of a template, which a stranger may have written: the characters that it
makes, and its CPU seconds.

Python cannot be interrupted while it computes one value. Every operation that can make a larger
value therefore reports the size here first. `template_sandbox` and `template_guards` do so.
"""

from __future__ import annotations

import re
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence, Set, ValuesView
from string import Formatter
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

MOST_CHARACTERS = 2**26
"""The most characters that a render may make, including those of intermediate values. Each item of
a list or mapping counts as 16."""
MOST_SECONDS = 5.0
_MOST_BITS = 100_000
"""The longest integer that a template may compute."""
_MOST_SLOW = 100_000
"""The most characters for operations whose time is quadratic in them."""
_ITEM = 16  # characters that each item of a list or mapping counts as
SMALL = 64
"""Shorter texts are not counted one by one; each iteration of a loop counts them in advance."""
_MANY = (list, tuple, Set, deque, ValuesView)


class TemplateLimit(TemplateError):
    """Raised if a render would exceed a limit. The message says which."""


class _Budget(threading.local):
    """The remaining budget of the current render in this thread. Nothing is limited outside of
    renders.

    Attributes:
        left: the characters that may still be made.
        end: the wall-clock time (`time.monotonic`) from which on the CPU time is checked.
        cpu: the CPU time of the thread at which the render must end.
    """

    rendering = False
    left = MOST_CHARACTERS
    end = 0.0
    cpu = 0.0


_budget = _Budget()


class one_render:
    """A context that applies the limits to one render or compilation in this thread. A nested
    context has no effect."""

    __slots__ = ("_outermost",)

    def __enter__(self) -> None:
        self._outermost = not _budget.rendering
        if self._outermost:
            _budget.__dict__.update(
                rendering=True,
                left=MOST_CHARACTERS,
                end=time.monotonic() + MOST_SECONDS,
                cpu=time.thread_time() + MOST_SECONDS,
            )

    def __exit__(self, *_: object) -> None:
        if self._outermost:
            _budget.rendering = False


def tick() -> None:
    """Count a step of a render. Raises TemplateLimit if the CPU time is used up."""
    if time.monotonic() > _budget.end and _budget.rendering:
        if (late := time.thread_time() - _budget.cpu) > 0:
            raise TemplateLimit(f"rendering it takes longer than {MOST_SECONDS:g} s")
        _budget.end = time.monotonic() - late


def spend(characters: int) -> None:
    """Count characters that are about to be made. Raises TemplateLimit if there are too many."""
    if not _budget.rendering:  # Jinja also evaluates constants when it inspects a syntax tree
        if characters > MOST_CHARACTERS:
            raise _too_large()
        return
    _budget.left -= characters
    if _budget.left < 0:
        raise _too_large()


def _too_large() -> TemplateLimit:
    return TemplateLimit(f"rendering it produces more than {MOST_CHARACTERS:,} characters")


def printed_size(value: Any) -> int:
    """Return roughly how many characters a value prints, with a fixed cost for each item.

    Raises TemplateLimit above MOST_CHARACTERS: a list that contains the same list many times can
    print that much from little memory.
    """
    if isinstance(value, str):
        return len(value)
    total, stack = 0, [value]
    while stack:
        item = stack.pop()
        total += _ITEM
        if isinstance(item, str | bytes):
            total += len(item)
        elif isinstance(item, int):
            total += item.bit_length() // 3  # a decimal digit holds more than 3 bits
        elif isinstance(item, Namespace):
            stack.append(item._Namespace__attrs)
        elif isinstance(item, Mapping):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, _MANY):
            stack.extend(item)
        if total > MOST_CHARACTERS:
            raise _too_large()
    return total


def count_made(value: Any) -> Any:
    """Count a value that was just made, and return it."""
    kind = type(value)
    if kind is str:
        if len(value) >= SMALL:
            spend(len(value))
    elif kind is int:
        check_bits(value.bit_length())
    elif kind in (list, tuple, dict):
        spend(_ITEM * len(value))
    return value


def check_bits(bits: int) -> None:
    """Raise TemplateLimit for an integer of too many bits."""
    if bits > _MOST_BITS:
        raise TemplateLimit(f"it computes an integer of more than {_MOST_BITS:,} bits")


def before_operator(operator: str, left: Any, right: Any) -> None:
    """Count the result of `left operator right` before it is computed."""
    if isinstance(left, int) and isinstance(right, int):
        if operator == "*":
            check_bits(left.bit_length() + right.bit_length())
        elif operator == "**" and right > 1:
            check_bits(left.bit_length() * right)
    elif operator == "+":
        if isinstance(left, Sequence) and isinstance(right, Sequence):
            each = 1 if isinstance(left, str) else _ITEM
            spend(each * (len(left) + len(right)))
    elif operator == "*":
        for many, times in ((left, right), (right, left)):
            if isinstance(many, Sequence) and isinstance(times, int):
                spend((1 if isinstance(many, str | bytes) else _ITEM) * len(many) * max(times, 0))
    elif operator == "%" and isinstance(left, str | bytes):
        before_percent(left, right)


def before_percent(text: str | bytes, values: Any) -> None:
    """Count the result of `text % values` before it is computed."""
    form = text if isinstance(text, str) else text.decode("latin-1")
    if re.search(r"%[^%a-zA-Z]*\*", form):
        raise TemplateLimit(
            "it takes a format's width from a value (%*): write the width as a number"
        )
    spend(len(form) + form.count("%") * (printed_size(values) + _most_digits(form)))


def before_format(text: str, values: Any) -> None:
    """Count the result of `text.format(…)` before it is computed."""
    specs = [spec or "" for _, _, spec, _ in Formatter().parse(text)]
    if any("{" in spec for spec in specs):
        raise TemplateLimit(
            "it takes a format's width from a value ({:{}}): write the width as a number"
        )
    spend(
        len(text) + len(specs) * (printed_size(values) + max(map(_most_digits, specs), default=0))
    )


def _most_digits(text: str) -> int:
    """Return the largest number that occurs in a text."""
    return max((int(digits[-12:]) for digits in re.findall(r"[0-9]+", text)), default=0)


GROWING = frozenset(
    "center expandtabs join ljust replace rjust rsplit split splitlines to_bytes translate zfill "
    "count index".split()
)
"""Methods whose result can be several times as large as their input, or that compare values."""


def before_method(owner: Any, name: str, arguments: list[Any]) -> None:
    """Count the result of a method of a built-in type before it is computed."""
    sizes = sum(map(printed_size, arguments))
    number = max((abs(item) for item in arguments if isinstance(item, int)), default=0)
    if not isinstance(owner, str | bytes):
        if name in ("index", "count"):
            printed_size(owner)
        elif name == "to_bytes":
            spend(number)
        return
    match name:
        case "replace":
            _replaced(owner, arguments)
        case "join":
            spend(
                sizes
                + len(owner) * sum(len(item) for item in arguments if hasattr(item, "__len__"))
            )
        case "translate":
            table = arguments[0] if arguments and isinstance(arguments[0], Mapping) else {}
            longest = max((len(v) for v in table.values() if isinstance(v, str)), default=1)
            spend(len(owner) * longest)
        case "expandtabs":
            spend(len(owner) * (number + 1) if number > 8 else 8 * len(owner))  # 8: the default
        case "split" | "rsplit" | "splitlines":
            marks = [item for item in arguments if isinstance(item, str | bytes) and item]
            pieces = _times(owner, marks[0]) if marks else len(owner) // 2
            spend(len(owner) + _ITEM * pieces)
        case "center" | "ljust" | "rjust" | "zfill":
            spend(len(owner) + number)
        case _:
            spend(len(owner) + sizes)


def _times(text: Any, part: Any) -> int:
    """Return how often a part occurs in a text; an upper bound if their types differ."""
    return int(text.count(part)) if type(text) is type(part) else len(text)


def _replaced(text: Any, arguments: list[Any]) -> None:
    """Count the result of replacing a part of a text."""
    old, new = [*arguments, "", ""][:2]
    if type(old) is type(new) and isinstance(text, type(old)) and isinstance(old, str | bytes):
        times = _times(text, old) if old else len(text) + 1
        spend(len(text) + times * len(new))
    else:
        spend((printed_size(text) + 1) * (printed_size(new) + 1))


FREE = frozenset(
    "attr count d default first float last length map random reject rejectattr safe select "
    "selectattr".split()
)
"""Filters that need no counting: they inspect no items and make nothing large."""
_SLOW = frozenset("pprint striptags title urlize wordwrap xmlattr".split())


def before_filter(name: str, value: Any, arguments: list[Any]) -> None:
    """Count the result of a filter before it is computed."""
    number = max((abs(item) for item in arguments if isinstance(item, int)), default=0)
    match name:
        case "replace":
            _replaced(value, arguments)
        case "join":
            spend(printed_size(value) + _count(value) * sum(map(printed_size, arguments)))
        case "format":
            before_percent(value if isinstance(value, str) else str(printed_size(value)), arguments)
        case "int" | "abs" | "items":
            pass
        case "list":
            spend(_ITEM * _count(value))
        case "indent":
            lines = value.count("\n") + 1 if isinstance(value, str) else printed_size(value)
            spend(printed_size(value) + lines * (number + sum(map(printed_size, arguments))))
        case "tojson":
            spend(printed_size(value) * (1 + number // _ITEM))
        case "round":
            check_bits(4 * number)  # it computes a power of 10, which has less than 4 bits a digit
        case "sum":
            spend(printed_size(value) * (1 if _of_numbers(value) else _count(value)))
        case "batch" | "slice" | "center":
            spend(_ITEM * number + printed_size(value))
        case _:
            length = sum(map(printed_size, arguments)) + printed_size(value)
            if name in _SLOW and length > _MOST_SLOW:
                raise TemplateLimit(
                    f"its filter {name} is applied to more than {_MOST_SLOW:,} characters"
                )
            spend(length)


def _count(value: Any) -> int:
    return len(value) if hasattr(value, "__len__") else 0


def _of_numbers(value: Any) -> bool:
    return isinstance(value, _MANY) and all(isinstance(item, int | float) for item in value)
