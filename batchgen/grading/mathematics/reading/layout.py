r"""An answer's text without what only lays it out: `\left`, thin spaces, dollar signs, a dot."""

from __future__ import annotations

import re
import unicodedata

from batchgen.grading.mathematics.reading.units import UNITS

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_PLAIN = re.compile(r"[A-Za-z0-9+/%()\[\]=<>,. -]*")
"""Texts with nothing that lays them out but spaces."""
_SPACES = re.compile(" +")
_RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile(r"[₀-₉]+")
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")
_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ",
    "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "π": r"\pi ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ",
    "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": r"\degree ", "ℝ": r"\mathbb{R}", "′": "'",
    "∠": r"\angle ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "’": "'", "∣": "|", "∶": ":", "⇒": r"\Rightarrow ",
    "¢": " cents ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
}  # fmt: skip
_CHARACTER = re.compile("|".join(map(re.escape, _CHARACTERS)))
_GONE = re.compile(
    r"\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|bf|rm|it|large"
    r"|Large|normalsize|nolimits|hfill|centering|notag|nonumber)(?![A-Za-z])|\\!|\\/"
)
_SPACE = re.compile(
    r"(?<!\\)\\[,;:> ]|\\(?:q?quad|enspace|thinspace|medspace|thickspace|space)(?![A-Za-z])|~|\s+"
    r"|\\[hv]space\*?\{[^{}]*\}|\\h?phantom\{[^{}]*\}|\\(?:tag|label)\{[^{}]*\}"
)
_FONTS = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|pmb|mathit|mathsf|mathtt|mathcal|underline|boxed|fbox|framebox|emph"
    r"|mathnormal|ensuremath|displaylines|cancel|symbf|mathbin|mathop|vec|hat|widehat|overrightarrow"
    r"|uline|bold)(?![A-Za-z])"
)
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\$")
_STARS = re.compile(r"(?<=[\w)])[ \t]*\*\*[ \t]*(?=[\w(-])")
_INTRODUCTION = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:(?:so|thus|therefore|hence)[ ,]*)?(?:the\s+)?"
    r"(?:final\s+|correct\s+)?answer(?:\s+is\b)?\s*:?(?:\s*\}\s*|\s+)(?=\S)"
    r"|\s*(?:\\(?:therefore|implies|Rightarrow|approx)(?![A-Za-z])|∴|=(?!=))",
    re.I,
)
_SYSTEM = re.compile(
    r"(?:\\\{\s*)?\\begin\{(cases|aligned|align\*?|gathered|array)\}(?:\{[lcr|]*\})?(.*?)\\end\{\1\}\s*\.?",
    re.S,
)
_DAYTIME = re.compile(r"(?<![A-Za-z])([AaPp])\.\s?([Mm])\b\.?")
_UNIT_FRACTION = re.compile(
    r"\\[dt]?frac\s*\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*([A-Za-z]+)\s*\}*\s*"
    r"\{\s*(?:\\(?:text|mathrm)\s*\{)?\s*([A-Za-z]+)\s*\}+"
)


def tidy(text: str) -> str:
    """The text of an answer with plain characters and without layout."""
    if _PLAIN.fullmatch(text):
        text = _SPACES.sub(" ", text)
    else:
        text = _without_layout(text)
    text = _DAYTIME.sub(r"\1\2", text).strip()
    text = _INTRODUCTION.sub("", text, count=1) if _INTRODUCTION.match(text) else text
    return text.strip().rstrip(".,;\\ ")


def _without_layout(text: str) -> str:
    text = _RAISED.sub(lambda found: f"^{{{found[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda found: f"_{{{found[0].translate(_SUBSCRIPTS)}}}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = _CHARACTER.sub(lambda found: _CHARACTERS[found[0]], text)
    text = unicodedata.normalize("NFKC", text)
    if "\\begin" not in text:
        text = _DOUBLED.sub(lambda _: "\\", text)
    text = _STARS.sub("^", text).replace("**", " ").replace("{,}", ",").replace("`", "")
    text = _GONE.sub("", text)
    text = _FONTS.sub(" ", text)
    text = _SYSTEM.sub(_system, _SPACE.sub(" ", text))
    text = text.replace(r"m\angle", r"\angle")
    text = _UNIT_FRACTION.sub(_unit_fraction, text)
    return _without_dollars(text)


def _unit_fraction(found: re.Match[str]) -> str:
    above, below = found.groups()
    known = above in UNITS and below in UNITS and found[0].count("{") == found[0].count("}")
    return rf" {above}/{below}" if known else found[0]


def _system(found: re.Match[str]) -> str:
    """The equations of a system, with commas between them; a matrix stays."""
    if found[1] == "array" and not found[0].startswith("\\{"):
        return found[0]
    rows = re.split(r"\\\\", found[2].replace("&", " "))
    return ", ".join(row.strip(" ,.") for row in rows if row.strip())


def _vulgar(found: re.Match[str]) -> str:
    above, _, below = unicodedata.normalize("NFKC", found[0]).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def _without_dollars(text: str) -> str:
    """The text without delimiters of formulas; a dollar sign that opens none stays, as money."""
    bare = len(re.findall(r"(?<!\\)\$", text))
    if bare % 2 == 1 and re.search(r"(?<!\\)\$\s*[\d.]", text):
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text, count=1)
    return _DELIMITERS.sub(" ", text)
