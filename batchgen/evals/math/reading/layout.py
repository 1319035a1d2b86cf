r"""Removes markup from an answer's text that only affects the layout: `\left`, thin spaces, dollar
signs. `tidy` is called before an answer is parsed."""

from __future__ import annotations

import re
import unicodedata

from batchgen.evals.math.reading.spellings import usual

_SUPERSCRIPTS = str.maketrans("⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ", "0123456789-+n")
_SUBSCRIPTS = str.maketrans("₀₁₂₃₄₅₆₇₈₉", "0123456789")
_PLAIN = re.compile(r"[A-Za-z0-9+/%()\[\]=<>,. -]*")
"""Texts without markup; spaces are allowed."""
_SPACES = re.compile(" +")
_RAISED = re.compile(r"[⁰¹²³⁴⁵⁶⁷⁸⁹⁻⁺ⁿ]+")
_LOWERED = re.compile(r"[₀-₉]+")
# Characters that are fractions: ½.
_VULGAR = re.compile(r"[¼-¾⅐-⅞]")
_CHARACTERS = {
    "−": "-", "–": "-", "—": "-", "‐": "-", "×": r"\times ", "·": r"\cdot ", "⋅": r"\cdot ",
    "∙": r"\cdot ", "∗": "*", "÷": "/", "⁄": "/", "≤": r"\le ", "≥": r"\ge ", "⩽": r"\le ",
    "⩾": r"\ge ", "≠": r"\ne ", "≈": r"\approx ", "√": r"\sqrt ", "∛": r"\sqrt[3]", "π": r"\pi ",
    "∞": r"\infty ", "∪": r"\cup ", "∩": r"\cap ", "∖": r"\setminus ", "∅": r"\emptyset ",
    "∈": r"\in ", "±": r"\pm ", "∓": r"\mp ", "°": r"\degree ", "ℝ": r"\mathbb{R}", "′": "'",
    "∠": r"\angle ", "⟨": r"\langle ", "⟩": r"\rangle ", "⌊": r"\lfloor ", "⌋": r"\rfloor ",
    "⌈": r"\lceil ", "⌉": r"\rceil ", "’": "'", "∣": "|", "∶": ":", "⇒": r"\Rightarrow ",
    "或": " or ", "和": " and ", "与": " and ", "且": " and ", "及": " and ", "、": ", ", "。": ".",
    "¢": " cents ", "\u00a0": " ", "\u2009": " ", "\u202f": " ",
}  # fmt: skip
_CHARACTER = re.compile("|".join(map(re.escape, _CHARACTERS)))
"""Characters → what they mean in LaTeX or ASCII."""
_GONE = re.compile(
    r"\\(?:left|right)\s*\.|\\(?:left|right|middle|[bB]igg?[lrm]?|displaystyle|textstyle|scriptstyle|limits|bf|rm|it|large"
    r"|Large|normalsize|nolimits|hfill|centering|notag|nonumber)(?![A-Za-z])|\\!|\\/"
)
"""Commands of size and position that are removed: `\\left`, `\\displaystyle`."""
_SPACE = re.compile(
    r"(?<!\\)\\[,;:> ]|\\(?:q?quad|enspace|thinspace|medspace|thickspace|space)(?![A-Za-z])|~|\s+"
    r"|\\[hv]space\*?\{[^{}]*\}|\\h?phantom\{[^{}]*\}|\\(?:tag|label)\{[^{}]*\}"
)
"""What becomes a space: `\\quad`, `~`, `\\hspace{1cm}`, `\\tag{1}`."""
_FONTS = re.compile(
    r"\\(?:mathbf|boldsymbol|bm|pmb|mathit|mathsf|mathtt|mathcal|underline|boxed|fbox|framebox|emph"
    r"|mathnormal|ensuremath|displaylines|cancel|symbf|mathbin|mathop|vec|hat|widehat"
    r"|uline|bold)(?![A-Za-z])"
)
"""Commands that are removed, with their argument kept: `\\mathbf{x}`, `\\boxed{5}`."""
# A backslash that was doubled before a command: `\\frac`.
_DOUBLED = re.compile(r"\\\\(?=[A-Za-z])")
_DELIMITERS = re.compile(r"(?<!\\)\\[()\[\]]|(?<!\\)\$")
"""`\\(`, `\\[` and dollar signs around formulas."""
_STARS = re.compile(r"(?<=[\w)])[ \t]*\*\*[ \t]*(?=[\w(-])")
"""`**` between operands, which is a power as in Python."""
_INTRODUCTION = re.compile(
    r"\s*(?:\\text\s*\{\s*)?(?:(?:so|thus|therefore|hence)[ ,]+)?(?:the\s+)?"
    r"(?:final\s+|correct\s+)?answer(?:\s+is\b)?\s*[:=]?(?:\s*\}\s*|\s+)(?=\S)"
    r"|\s*(?:option|choice|[正确]*答案|选项?)\s*[是为选]?\s*:?\s*(?=\(?[A-Z]\)?(?![A-Za-z]))"
    r"|\s*(?:so|thus|therefore|hence)[ ,]+"
    r"|\s*[正确]*答案\s*[是为]?\s*:?\s*(?=\S)"
    r"|\s*(?:\\(?:therefore|implies|Rightarrow|approx)(?![A-Za-z])|∴|=(?!=))",
    re.I,
)
"""Words before the answer: "So the final answer is", "Option", "Therefore"."""
_FOR_ALL = re.compile(r"[\s,(]{0,4}(?:\\text\s*\{\s*)?\bfor (?:all|any|every|each)\b.*\Z", re.S)
"""The rest of an answer from "for all" on."""
# a.m. and p.m.
_DAYTIME = re.compile(r"(?<![A-Za-z])([AaPp])\.\s?([Mm])\b\.?")


def tidy(text: str) -> str:
    r"""The text of an answer with plain characters and without layout: `$\left(x\right)$.` becomes
    `(x)`."""
    if _PLAIN.fullmatch(text):
        text = usual(_SPACES.sub(" ", text))
    else:
        text = _without_layout(text)
    text = _DAYTIME.sub(r"\1\2", text).strip()
    text = _INTRODUCTION.sub("", text, count=1) if _INTRODUCTION.match(text) else text
    text = _FOR_ALL.sub("", text)
    return text.strip().rstrip(".,;\\ ")


def _without_layout(text: str) -> str:
    """The text with usual characters and spellings, and without commands of layout."""
    text = _RAISED.sub(lambda match: f"^{{{match[0].translate(_SUPERSCRIPTS)}}}", text)
    text = _LOWERED.sub(lambda match: f"_{{{match[0].translate(_SUBSCRIPTS)}}}", text)
    text = _VULGAR.sub(_vulgar, text)
    text = _CHARACTER.sub(lambda match: _CHARACTERS[match[0]], text)
    text = unicodedata.normalize("NFKC", text)
    if "\\begin" not in text:
        text = _DOUBLED.sub(lambda _: "\\", text)
    text = _STARS.sub("^", text).replace("**", " ").replace("{,}", ",").replace("`", "")
    text = _GONE.sub("", text)
    text = _FONTS.sub(" ", text)
    return usual(_without_dollars(_SPACE.sub(" ", text)))


def _vulgar(match: re.Match[str]) -> str:
    """A fraction that is one character (½) as LaTeX."""
    above, _, below = unicodedata.normalize("NFKC", match[0]).partition("⁄")
    return rf"\frac{{{above}}}{{{below}}}"


def _without_dollars(text: str) -> str:
    """The text without delimiters of formulas. A dollar sign that opens no formula stays, as
    money."""
    bare = len(re.findall(r"(?<!\\)\$", text))
    if bare % 2 == 1 and re.search(r"(?<!\\)\$\s*[\d.]", text):
        text = re.sub(r"(?<!\\)\$(?=\s*[\d.])", r"\\$", text, count=1)
    return _DELIMITERS.sub(" ", text)
