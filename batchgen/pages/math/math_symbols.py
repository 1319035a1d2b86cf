"""The characters that LaTeX commands stand for."""

from __future__ import annotations

import unicodedata
from html.entities import html5

FUNCTIONS = frozenset(
    "arccos arcsin arctan arg cos cosh cot coth csc deg dim exp hom ker lg ln log sec sin sinh tan "
    "tanh".split()
)
"""Names that stand upright."""
LIMITS = frozenset("lim max min sup inf limsup liminf gcd lcm det Pr argmax argmin".split())
"""Names that have their index below them."""
BIG = frozenset("∑∏∐⋃⋂⨁⨂⨆⋁⋀")
"""Operators that have their bounds below and above them."""
SPACES = {
    ",": 0.17, ":": 0.22, ">": 0.22, ";": 0.28, " ": 0.33, "~": 0.33, "!": -0.17, "quad": 1.0,
    "qquad": 2.0, "enspace": 0.5, "thinspace": 0.17, "space": 0.33, "hspace": 1.0, "\n": 0.33,
}  # fmt: skip
"""Widths in em."""
ACCENTS = {
    "hat": "^", "widehat": "^", "bar": "¯", "overline": "¯", "vec": "→", "overrightarrow": "→",
    "overleftarrow": "←", "tilde": "~", "widetilde": "~", "dot": "˙", "ddot": "¨", "check": "ˇ",
    "overbrace": "⏞", "acute": "´", "grave": "`", "breve": "˘", "mathring": "˚", "overparen": "⏜",
    "wideparen": "⏜",
}  # fmt: skip
"""Signs above."""
ACCENTS_BELOW = {"underline": "_", "underbrace": "⏟"}
IGNORED = frozenset(
    "displaystyle textstyle scriptstyle scriptscriptstyle limits nolimits nonumber notag hline "
    "centering rm it bf sf tt cal noindent allowbreak nobreak protect smallskip medskip "
    "bigskip".split()
)
"""Commands that change nothing that is shown here."""
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


def symbol(name: str) -> str | None:
    """The character of a command; None if it is not known. Most are called as in HTML."""
    return _SYMBOLS.get(name) or html5.get(f"{name};")


def shaped(alphabet: str, text: str) -> str:
    """Letters and digits in the shape that one of ALPHABETS gives them, where Unicode has it."""
    return "".join(_shaped(_ALPHABETS[alphabet], character) for character in text)


def _shaped(shape: str, character: str) -> str:
    kind = _KINDS.get(unicodedata.category(character))
    if kind is None:
        return character
    last = unicodedata.name(character, "").rpartition(" ")[2]
    # Letters that were encoded before the others have shorter names: ℝ, ℱ.
    for name in (f"MATHEMATICAL {shape} {kind} {last}", f"{shape} {kind} {last}"):
        try:
            return unicodedata.lookup(name)
        except KeyError:
            continue
    return character
