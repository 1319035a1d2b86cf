"""The units of measure and money that may stand behind a number, each under one short name."""

from __future__ import annotations

import re

_PREFIXES = {
    "": "", "kilo": "k", "centi": "c", "milli": "m", "micro": "µ", "nano": "n", "mega": "M",
    "giga": "G", "deci": "d", "hecto": "h", "tera": "T", "pico": "p",
}  # fmt: skip
_PREFIXED = {
    "meter": "m", "metre": "m", "gram": "g", "gramme": "g", "liter": "L", "litre": "L",
    "second": "s", "joule": "J", "newton": "N", "watt": "W", "volt": "V", "ampere": "A", "amp": "A",
    "hertz": "Hz", "pascal": "Pa", "mole": "mol", "calorie": "cal", "ohm": "Ω", "byte": "B",
    "bit": "bit",
}  # fmt: skip
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
    "peso": "", "won": "", "franc": "", "unit": "", "square": "", "cubic": "",
}  # fmt: skip
_SYMBOLS = (
    "m km cm mm dm nm µm g kg mg µg L l mL ml dL dl cL cl kL kl s ms ns J kJ MJ N kN MN W kW MW mW"
    " GW V kV mV A mA Hz kHz MHz GHz Pa kPa MPa mol mmol cal kcal B kB KB MB GB TB"
    " eV keV MeV GeV bar"
)


def _names() -> dict[str, str]:
    """The short name of each unit as people write it."""
    found: dict[str, str] = {}
    for short, others in _OTHERS.items():
        for word in (short, *others.split()):
            found[word] = short
            if len(word) > 2 and word.islower():
                found[word + "s"] = short
    for name, symbol in _PREFIXED.items():
        for prefix, letter in _PREFIXES.items():
            for word in (prefix + name, prefix + name + "s"):
                found[word] = letter + symbol
    found["hertz"] = "Hz"
    for symbol in _SYMBOLS.split():
        found[symbol] = (
            symbol.replace("l", "L") if symbol[-1] == "l" and symbol[:-1] in "mdck" else symbol
        )
    found["centuries"] = "century"
    return found


UNITS = _names()
LETTERS = frozenset("mgLlsJNWVAhK")
"""Units of one letter: bare, they may as well be variables."""
_SHORTHANDS = {"mph": ["mi", "/", "h"], "kph": ["km", "/", "h"], "kmh": ["km", "/", "h"]}
_PLAIN = {"unit", "units"}  # "18 units" says no more than 18
_WORD = re.compile(r"[^\W\d_]+|[$€£₹°]|\^|\d+|[-/*().{}]")


def unit_name(words: list[str]) -> str | None:
    """The short name of a unit such as `square cm`, `m/s`, `km per hour` or `cm ^ 2`.

    Returns:
        Factors with their powers, in order (`m s^-1`), empty for `square units`; None if a word is
        no unit.
    """
    words = [part for word in words for part in _SHORTHANDS.get(word, [word])]
    powers: dict[str, int] = {}
    sign, coming = 1, 1
    last: str | None = None
    at = 0
    while at < len(words):
        word = words[at]
        at += 1
        if word in ("{", "}", "(", ")", "*", ".", "·"):
            continue
        if word in ("/", "per", "a", "an") and last is not None:
            sign = -1
        elif word == "^" and last is not None:
            power = "".join(part for part in words[at : at + 4] if part not in "{}")
            match = re.match(r"-?\d", power)
            if match is None:
                return None
            powers[last] += (int(match[0]) - 1) * (1 if powers[last] > 0 else -1)
            at += sum(1 for _ in match[0]) + 2 * (words[at] == "{")
        elif word.lower() in ("square", "sq", "squared"):
            if word.lower() == "squared" and last is not None:
                powers[last] *= 2
            else:
                coming = 2
        elif word.lower() in ("cubic", "cubed"):
            if word.lower() == "cubed" and last is not None:
                powers[last] *= 3
            else:
                coming = 3
        else:
            short = UNITS.get(word) or UNITS.get(word.lower() if len(word) > 3 else word)
            if short is None:
                return None
            last = short
            powers[short] = powers.get(short, 0) + sign * coming
            coming = 1
    if last is None:
        return None
    named = {name: power for name, power in powers.items() if name not in _PLAIN and power}
    return " ".join(
        name if power == 1 else f"{name}^{power}" for name, power in sorted(named.items())
    )
