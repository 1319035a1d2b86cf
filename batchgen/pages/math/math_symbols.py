"""The characters and the shapes that LaTeX commands stand for. The parser of formulas looks them
up."""

from __future__ import annotations

import unicodedata
from html.entities import html5

FUNCTIONS = frozenset(
    "arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan "
    "tanh".split()
)
"""Function names, which are set upright."""
LIMITS = frozenset("lim max min sup inf limsup liminf gcd lcm det Pr argmax argmin".split())
"""Function names whose subscript is set below them."""
BIG = frozenset("∑∏∐⋃⋂⨁⨂⨆⋁⋀")
"""Operators whose bounds are set below and above them."""
SPACES = {
    ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, " ": 0.33, "~": 0.33, "!": -0.17, "quad": 1.0,
    "qquad": 2.0, "enspace": 0.5, "thinspace": 0.17, "space": 0.33, "hspace": 1.0, "\n": 0.33,
}  # fmt: skip
"""The widths of spaces, in em."""
ACCENTS = {
    "hat": "^", "widehat": "^", "bar": "¯", "overline": "¯", "vec": "→", "overrightarrow": "→",
    "overleftarrow": "←", "tilde": "~", "widetilde": "~", "dot": "˙", "ddot": "¨", "check": "ˇ",
    "overbrace": "⏞", "acute": "´", "grave": "`", "breve": "˘", "mathring": "˚", "overparen": "⏜",
    "wideparen": "⏜",
}  # fmt: skip
"""The sign that a command sets above its argument."""
ACCENTS_BELOW = {"underline": "_", "underbrace": "⏟"}
"""The sign that a command sets below its argument."""
IGNORED = frozenset(
    "displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits nonumber notag hline "
    "centering rm it bf sf tt cal noindent allowbreak nobreak protect smallskip medskip "
    "bigskip".split()
)
"""Commands that have no effect here."""
_SYMBOLS = {
    "cdot": "⋅", "circ": "∘", "to": "→", "gets": "←", "neq": "≠", "infty": "∞", "ldots": "…",
    "dots": "…", "dotsc": "…", "dotsb": "⋯", "cdots": "⋯", "vdots": "⋮", "ddots": "⋱",
    "implies": "⟹", "impliedby": "⟸", "iff": "⟺", "neg": "¬", "lnot": "¬", "land": "∧",
    "lor": "∨", "iint": "∬", "iiint": "∭", "lvert": "|", "rvert": "|", "vert": "|", "lVert": "‖",
    "rVert": "‖", "Vert": "‖", "|": "‖", "lbrace": "{", "rbrace": "}", "lbrack": "[",
    "rbrack": "]", "lt": "<", "gt": ">", "bigcup": "⋃", "bigcap": "⋂", "exists": "∃", "star": "⋆",
    "varepsilon": "ε", "epsilon": "ϵ", "varphi": "φ", "phi": "ϕ", "degree": "°", "dag": "†",
    "triangle": "△", "surd": "√", "backslash": "\\", "ell": "ℓ", "partial": "∂", "nabla": "∇",
    "longrightarrow": "⟶", "Longrightarrow": "⟹", "longleftarrow": "⟵", "mapsto": "↦",
    "pounds": "£", "owns": "∋", "And": "&", "colon": ":", "Box": "□", "qed": "∎", "bot": "⊥",
}  # fmt: skip
_ALPHABETS = {
    "mathbb": "DOUBLE-STRUCK", "mathbf": "BOLD", "boldsymbol": "BOLD", "bm": "BOLD",
    "pmb": "BOLD", "mathcal": "SCRIPT", "mathscr": "SCRIPT", "mathfrak": "FRAKTUR",
}  # fmt: skip
ALPHABETS = frozenset(_ALPHABETS)
"""Commands that change the shape of letters."""
_KINDS = {"Lu": "CAPITAL", "Ll": "SMALL", "Nd": "DIGIT"}
"""The word in Unicode names for each general category of characters."""


def symbol(name: str) -> str | None:
    """Return the character of a command; None if it is unknown. Most commands have the name of an
    HTML entity."""
    return _SYMBOLS.get(name) or html5.get(f"{name};")


def shaped(alphabet: str, text: str) -> str:
    """Return letters and digits in the shape of one of ALPHABETS, where Unicode has such
    characters."""
    return "".join(_shaped(_ALPHABETS[alphabet], character) for character in text)


def _shaped(shape: str, character: str) -> str:
    """Return a character in a shape, such as BOLD."""
    kind = _KINDS.get(unicodedata.category(character))
    if kind is None:
        return character
    last = unicodedata.name(character, "").rpartition(" ")[2]
    # Letters that Unicode had before the mathematical alphabets have shorter names: ℝ, ℱ.
    for name in (f"MATHEMATICAL {shape} {kind} {last}", f"{shape} {kind} {last}"):
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return character
