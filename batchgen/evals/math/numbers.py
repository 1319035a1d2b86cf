"""Arithmetic of values: exact if they are rational, otherwise complex floats of 50 digits.

Every operation takes bounded time, whatever its operands are. `evaluate.py` computes expressions
with these functions.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

from mpmath import MPContext
from mpmath.libmp import NoConvergence

Value = Any
"""A Fraction, or an `mpf` or `mpc` of `CONTEXT`."""

# The decimal digits of floats.
DIGITS = 50
CONTEXT = MPContext()
CONTEXT.dps = DIGITS

_MOST_BITS = 1 << 14  # of an exact numerator or denominator; larger ones become floats
_MOST_EXPONENT = 1 << 20  # of a float, as a power of two
_CANCELLED = CONTEXT.mpf(10) ** (8 - DIGITS)  # a sum that is smaller, relative to its terms, is 0
_SNAP = CONTEXT.mpf(10) ** (14 - DIGITS)  # the relative error within which two floats are equal
_MOST_DENOMINATOR = 10**6  # of a simple fraction
_SMALLEST, _LARGEST = CONTEXT.mpf("1e-9"), CONTEXT.mpf("1e15")  # bounds of simple fractions


class Undefined(Exception):
    """There is no such value, as for a division by zero, or it is too large to be computed."""


def as_float(value: Value) -> Any:
    """The value as a float of 50 digits."""
    if isinstance(value, Fraction):
        return CONTEXT.mpf(value.numerator) / value.denominator
    return value


def _bounded(value: Fraction) -> Value:
    """The fraction, as a float if it is very long."""
    bits = max(value.numerator.bit_length(), value.denominator.bit_length())
    return value if bits <= _MOST_BITS else as_float(value)


def _checked(value: Any) -> Value:
    """The float, which must be finite and not too large.

    Raises:
        Undefined: it is not.
    """
    if not CONTEXT.isfinite(value):
        raise Undefined
    if value and CONTEXT.mag(value) > _MOST_EXPONENT:
        raise Undefined
    return value


def add(left: Value, right: Value) -> Value:
    """The sum; exactly zero if all digits cancel."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _bounded(left + right)
    left, right = as_float(left), as_float(right)
    total = left + right
    if abs(total) <= _CANCELLED * max(abs(left), abs(right)):
        return Fraction(0)
    return _checked(total)


def multiply(left: Value, right: Value) -> Value:
    """The product."""
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _bounded(left * right)
    if left == 0 or right == 0:
        return Fraction(0)
    return _checked(as_float(left) * as_float(right))


def divide(left: Value, right: Value) -> Value:
    """The quotient."""
    if right == 0:
        raise Undefined
    if isinstance(left, Fraction) and isinstance(right, Fraction):
        return _bounded(left / right)
    return _checked(as_float(left) / as_float(right))


def power(base: Value, exponent: Value) -> Value:
    """The power. An odd root of a negative number is the real one (`(-8)^{1/3}` is -2)."""
    base, exponent = snapped(base), snapped(exponent)
    if base == 0:
        if not isinstance(exponent, Fraction) or exponent < 0:
            raise Undefined
        return Fraction(int(exponent == 0))
    if isinstance(exponent, Fraction):
        if exponent.denominator == 1:
            return _integer_power(base, int(exponent))
        if isinstance(base, Fraction | CONTEXT.mpf) and exponent.denominator < 100:
            return _integer_power(_root(base, exponent.denominator), exponent.numerator)
    # The power is e^(exponent · log(base)); the bits of that product bound its size.
    size = CONTEXT.mag(as_float(exponent)) + CONTEXT.mag(abs(CONTEXT.log(as_float(base))) + 1)
    if size > _MOST_EXPONENT.bit_length() + 1:
        raise Undefined
    return _checked(CONTEXT.power(as_float(base), as_float(exponent)))


def _integer_power(base: Value, exponent: int) -> Value:
    """The power, exact if it is not too long. Raises Undefined if it is too large."""
    if isinstance(base, Fraction):
        bits = max(base.numerator.bit_length(), base.denominator.bit_length())
        if bits * abs(exponent) <= _MOST_BITS:
            return base**exponent
    number = as_float(base)
    size = abs(CONTEXT.mag(number)) + 1
    if size * abs(exponent) > _MOST_EXPONENT:
        raise Undefined
    return _checked(number**exponent)


def _root(value: Value, degree: int) -> Value:
    """The root of a real number: the real one if there is one, otherwise the principal one."""
    negative = value < 0
    if negative and degree % 2 == 0:
        if degree == 2:
            return multiply(_root(-value, 2), CONTEXT.j)
        return _checked(CONTEXT.power(as_float(value), CONTEXT.mpf(1) / degree))
    if isinstance(value, Fraction):
        above, below = (_exact_root(abs(n), degree) for n in (value.numerator, value.denominator))
        if above is not None and below is not None:
            return Fraction(-above if negative else above, below)
    root = CONTEXT.root(abs(as_float(value)), degree)
    return _checked(-root if negative else root)


def _exact_root(number: int, degree: int) -> int | None:
    """The root of an integer, if it is an integer; None if not, or if it would take long."""
    if degree == 2:
        root = math.isqrt(number)
    elif number.bit_length() > 1000:
        return None
    else:
        root = int(CONTEXT.nint(CONTEXT.root(number, degree)))
    return root if root**degree == number else None


def snapped(value: Value) -> Value:
    """The value, as an exact fraction if a simple one is within the precision of floats."""
    if isinstance(value, Fraction):
        return value
    scale = abs(value)
    if isinstance(value, CONTEXT.mpc):
        if abs(value.imag) > _SNAP * scale:
            return value
        value = value.real
    if not _SMALLEST < scale < _LARGEST:
        return value
    grid = 10 ** (DIGITS - 5)  # fractions of this denominator are as fine as floats are exact
    near = Fraction(int(CONTEXT.nint(value * grid)), grid).limit_denominator(_MOST_DENOMINATOR)
    return near if abs(as_float(near) - value) <= _SNAP * scale else value


def real(value: Value) -> Value:
    """The value, if it is a real number.

    Raises:
        Undefined: it is not.
    """
    value = snapped(value)
    if isinstance(value, CONTEXT.mpc):
        raise Undefined
    return value


def value_text(value: Value, exact: bool = True) -> str:
    """The shortest text of a value: `1/2`, or 20 digits if it is not a simple fraction.

    Two values of one number have the same text, however each was computed. With `exact`, this holds
    for fractions with denominators above a million only if both were computed exactly.
    """
    value = snapped(value)
    if isinstance(value, Fraction):
        if max(value.numerator.bit_length(), value.denominator.bit_length()) > 10_000:
            return f"{value.numerator:x}/{value.denominator:x}h"  # decimals would take long
        if exact or value.denominator <= _MOST_DENOMINATOR:
            return str(value)
        value = as_float(value)
    if isinstance(value, CONTEXT.mpc):
        scale = abs(value) * _SNAP
        parts = (Fraction(0) if abs(part) < scale else part for part in (value.real, value.imag))
        return "{}+{}i".format(*(value_text(part) for part in parts))
    return str(CONTEXT.nstr(value, 20))


def factorial(value: Value) -> Value:
    """The factorial; for other than whole numbers, as the points of `n!` are, by the gamma
    function."""
    number = snapped(value)
    if abs(number) > 10**5:
        raise Undefined
    if isinstance(number, Fraction) and number.denominator == 1 and number <= 1000:
        if number < 0:
            raise Undefined
        return _bounded(Fraction(math.factorial(int(number))))
    return _checked(CONTEXT.gamma(as_float(number) + 1))


def binomial(above: Value, below: Value) -> Value:
    """The binomial coefficient, for any upper number and a small whole lower number."""
    n, k = snapped(above), snapped(below)
    if not isinstance(k, Fraction) or k.denominator != 1 or not 0 <= k <= 2000:
        others = multiply(factorial(k), factorial(add(n, multiply(Fraction(-1), k))))
        return divide(factorial(n), others)
    if isinstance(n, Fraction) and n.denominator == 1 and 0 <= n <= 2000:
        return _bounded(Fraction(math.comb(int(n), int(k))))
    if k > 50:
        raise Undefined
    result: Value = Fraction(1)
    for step in range(int(k)):
        result = divide(multiply(result, add(n, Fraction(-step))), Fraction(step + 1))
    return result


def _log(value: Value, base: Value | None = None) -> Value:
    """The logarithm to a base; None is e."""
    number = snapped(value)
    if number == 0:
        raise Undefined
    logarithm = CONTEXT.log(as_float(number))
    if base is None:
        return logarithm
    below = CONTEXT.log(as_float(base)) if base else 0
    if below == 0:
        raise Undefined
    return logarithm / below


_SAME_IN_MPMATH = (
    *("sin", "cos", "sinh", "cosh", "tanh", "asin", "acos", "atan", "asinh", "acosh", "atanh"),
)
# Functions of one number, by their names in `Call`.
_FLOATS: dict[str, Any] = {
    **{name: getattr(CONTEXT, name) for name in _SAME_IN_MPMATH},
    "tan": lambda value: divide(CONTEXT.sin(value), _nonzero(CONTEXT.cos(value))),
    "cot": lambda value: divide(CONTEXT.cos(value), _nonzero(CONTEXT.sin(value))),
    "sec": lambda value: divide(Fraction(1), _nonzero(CONTEXT.cos(value))),
    "csc": lambda value: divide(Fraction(1), _nonzero(CONTEXT.sin(value))),
}


def _nonzero(value: Any) -> Any:
    """A divisor. Raises Undefined if it is zero within the precision of floats."""
    if abs(value) < _SNAP:
        raise Undefined
    return value


# Functions of real numbers, and of whole numbers.
_REALS = {"floor": math.floor, "ceil": math.ceil}
_WHOLES = {"gcd": math.gcd, "lcm": math.lcm}


def call(name: str, values: tuple[Value, ...]) -> Value:
    """The value of a function.

    Raises:
        Undefined: it has no value there, or is not known.
    """
    try:
        return _call(name, values)
    except (ArithmeticError, NoConvergence, TypeError, ValueError):
        raise Undefined from None


def _call(name: str, values: tuple[Value, ...]) -> Value:
    if name in _FLOATS:
        number = as_float(values[0])
        if number and CONTEXT.mag(number) > 1000:
            raise Undefined
        result = _checked(_FLOATS[name](number))
        return Fraction(0) if abs(result) < _SNAP and abs(number) > _SNAP else result
    if name == "exp":
        return power(+CONTEXT.e, values[0])
    if name == "log":
        return _checked(_log(*values))
    if name == "abs":
        number = snapped(values[0])
        return abs(number)
    if name in _REALS:
        number = real(values[0])
        if abs(number) > 10**40:
            raise Undefined
        return Fraction(_REALS[name](number))
    if name in ("max", "min"):
        return (max if name == "max" else min)((real(value) for value in values), key=as_float)
    if name in _WHOLES:
        numbers = [snapped(value) for value in values]
        if all(isinstance(number, Fraction) and number.denominator == 1 for number in numbers):
            return Fraction(_WHOLES[name](*(int(number) for number in numbers)))
    raise Undefined
