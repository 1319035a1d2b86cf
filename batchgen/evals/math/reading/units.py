"""Units of measure and of money: their spellings, and their sizes in base units. `units_behind.py`
reads units with `unit_of`: ["km", "per", "hour"] is `m s^-1` with the size 5/18."""

from __future__ import annotations

import re
from collections.abc import Iterable
from fractions import Fraction

# Word before a unit → its letter.
_PREFIXES = {
    "": "", "kilo": "k", "centi": "c", "milli": "m", "micro": "µ", "nano": "n", "mega": "M",
    "giga": "G", "deci": "d", "hecto": "h", "tera": "T", "pico": "p",
}  # fmt: skip
# Symbol of a prefix → the power of ten.
_POWERS_OF_TEN = {
    "k": 3, "c": -2, "m": -3, "µ": -6, "n": -9, "M": 6, "G": 9, "d": -1, "h": 2, "T": 12, "p": -12,
}  # fmt: skip
# Name of a unit that takes prefixes → its symbol.
_PREFIXED = {
    "meter": "m", "metre": "m", "gram": "g", "gramme": "g", "liter": "L", "litre": "L",
    "second": "s", "joule": "J", "newton": "N", "watt": "W", "volt": "V", "ampere": "A", "amp": "A",
    "hertz": "Hz", "pascal": "Pa", "mole": "mol", "calorie": "cal", "ohm": "Ω", "byte": "B",
    "bit": "bit", "electronvolt": "eV",
}  # fmt: skip
# Short name of a unit → its other spellings; plurals with s are added.
_OTHERS = {
    "s": "sec secs", "min": "minute mins", "h": "hour hr hrs", "day": "", "week": "wk wks",
    "month": "", "year": "yr yrs", "decade": "", "century": "", "in": "inch inches",
    "ft": "foot feet",
    "yd": "yard yds", "mi": "mile", "mph": "", "kph": "", "kmh": "", "acre": "", "hectare": "ha",
    "degree": "deg", "rad": "radian", "K": "kelvin", "°C": "celsius", "°F": "fahrenheit",
    "lb": "pound lbs", "oz": "ounce", "ton": "tonne", "gallon": "gal", "quart": "qt", "pint": "pt",
    "cup": "", "teaspoon": "tsp", "tablespoon": "tbsp", "rpm": "", "knot": "",
    "$": "dollar USD buck",
    "cent": "", "€": "euro EUR", "£": "GBP", "yuan": "RMB CNY", "yen": "JPY", "₹": "rupee INR",
    "peso": "", "won": "", "franc": "", "unit": "", "square": "sq", "cubic": "",
}  # fmt: skip
# Symbols of units that are spelled so and in no other case.
_SYMBOLS = (
    "m km cm mm dm nm µm g kg mg µg L l mL ml dL dl cL cl kL kl s ms ns J kJ MJ N kN MN W kW MW mW"
    " GW V kV mV A mA Hz kHz MHz GHz Pa kPa MPa mol mmol cal kcal B kB KB MB GB TB"
    " eV keV MeV GeV bar"
)


# Chinese word → short name of a unit.
_CHINESE = {
    "米": "m", "厘米": "cm", "毫米": "mm", "分米": "dm", "千米": "km", "公里": "km", "克": "g",
    "千克": "kg", "公斤": "kg", "吨": "ton", "升": "L", "毫升": "mL", "秒": "s",
    "分钟": "min", "分": "min", "小时": "h", "时": "h", "天": "day", "年": "year", "元": "yuan",
    "度": "degree", "英寸": "in",
}  # fmt: skip
# Short name of a unit → the unit that it is measured in, and how many of these it has.
_OF_OTHERS = {
    "min": ("s", 60), "h": ("s", 3600), "day": ("s", 86400), "week": ("s", 604800),
    "year": ("month", 12), "decade": ("month", 120), "century": ("month", 1200),
    "ft": ("in", 12), "yd": ("in", 36), "mi": ("in", 63360), "lb": ("oz", 16),
    "gallon": ("cup", 16), "quart": ("cup", 4), "pint": ("cup", 2), "tablespoon": ("teaspoon", 3),
}  # fmt: skip


def _names() -> dict[str, str]:
    """Spelling of a unit → its short name."""
    names: dict[str, str] = {}
    for short, others in _OTHERS.items():
        for word in (short, *others.split()):
            names[word] = short
            if len(word) > 2 and word.islower():
                names[word + "s"] = short
    for name, symbol in _PREFIXED.items():
        for prefix, letter in _PREFIXES.items():
            for word in (prefix + name, prefix + name + "s"):
                names[word] = letter + symbol
    for symbol in _SYMBOLS.split():  # those of litres are also written with a small l
        names[symbol] = (
            symbol.replace("l", "L") if symbol[-1] == "l" and symbol[:-1] in "mdck" else symbol
        )
    names["centuries"] = "century"
    names["KB"] = "kB"
    return names | _CHINESE


def _sizes() -> dict[str, tuple[str, Fraction]]:
    """Short name of a unit → its base unit, and its size in base units."""
    sizes = {short: (short, Fraction(1)) for short in UNITS.values()}
    for symbol in _PREFIXED.values():
        for prefix, power in _POWERS_OF_TEN.items():
            sizes[prefix + symbol] = symbol, Fraction(10) ** power
    for short, (other, number) in _OF_OTHERS.items():
        sizes[short] = other, Fraction(number)
    sizes["cent"] = "$", Fraction(1, 100)
    return sizes


# Spelling of a unit → its short name; and short name → base unit and size.
UNITS = _names()
_SIZES = _sizes()
LETTERS = frozenset((*"mgLlsJNWVAhK", "Omega"))
"""Units of one letter, which may also be variables."""
_SHORTHANDS = {"mph": ["mi", "/", "h"], "kph": ["km", "/", "h"], "kmh": ["km", "/", "h"]}
# Signs between the words of a unit that change nothing.
_IGNORED = frozenset("{}()*.·")
_WORDS_FOR_POWERS = {"square": 2, "sq": 2, "squared": 2, "cubic": 3, "cubed": 3}

Unit = tuple[str, Fraction]
"""The product of base units, such as `m s^-1`, and the size of a unit in it."""


def unit_of(words: list[str]) -> Unit | None:
    """The unit that words name, such as `square cm`, `m / s`, `km per hour` or `cm ^ 2`, with its
    factors and their powers in order (`m s^-1`). Empty for `units`; None if a word is not a
    unit."""
    words = [part for word in words for part in _SHORTHANDS.get(word, _chinese(word))]
    factors: list[tuple[str, int]] = []
    sign = 1  # -1 after a `/`: the units below it have negative powers
    next_power = 1  # that of the next unit, after a word such as `square`
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in _IGNORED:
            continue
        power = _WORDS_FOR_POWERS.get(word.lower())
        if word in ("/", "per", "a", "an") and factors:
            sign = -1
        elif word == "^" and factors:
            match = re.match(r"\{*(-?[0-9])\}*", "".join(words[at : at + 4]))
            if match is None:
                return None
            factors[-1] = factors[-1][0], factors[-1][1] * int(match[1])
            while at < len(words) and words[at] in ("{", "}", "-", match[1].lstrip("-")):
                at += 1
        elif power is not None and word.lower().endswith("ed") and factors:
            factors[-1] = factors[-1][0], factors[-1][1] * power
        elif power is not None:
            next_power = power
        else:
            short = UNITS.get(word) or UNITS.get(word.lower() if len(word) > 3 else word)
            if short is None:
                return None
            factors.append((short, sign * next_power))
            next_power = 1
    return reduced(factors) if factors else None


def reduced(factors: Iterable[tuple[str, int]]) -> Unit:
    """The product of powers of units, as pairs of a short name and a power: for [("km", 1), ("h",
    -1)] the product `m s^-1` and the size 1000/3600."""
    powers: dict[str, int] = {}
    size = Fraction(1)
    for short, power in factors:
        base, number = _SIZES[short]
        powers[base] = powers.get(base, 0) + power
        size *= number**power
    if powers.get("unit") == 1:
        del powers["unit"]  # "18 units" means 18
    named = sorted((name, power) for name, power in powers.items() if power)
    return " ".join(name if power == 1 else f"{name}^{power}" for name, power in named), size


def _chinese(word: str) -> list[str]:
    """The word of a unit, divided into the word for its power, if it begins with one, and the
    rest."""
    for prefix, power in (("平方", "square"), ("立方", "cubic")):
        if word.startswith(prefix):
            return [power, word.removeprefix(prefix)]
    return [word]
