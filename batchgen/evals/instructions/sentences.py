"""Splits English text into words and sentences by rules, without models or downloads, for the
checks of IFEval and IFBench.

    "Dr. Smith paid $3.50. He left!"  →  ["Dr. Smith paid $3.50.", "He left!"]
"""

from __future__ import annotations

import re

_WORD = re.compile(r"\w+")
# Abbreviations before names, and others.
_TITLES = "mr mrs ms dr prof st rev gen col lt sgt capt hon gov sen rep pres messrs mme mlle"
_OTHERS = (
    "sr jr etc al ed eds vol no nos pp fig figs dept univ assn inc ltd co corp bros mt ft "
    "ave blvd rd jan feb mar apr jun jul aug sep sept oct nov dec mon tue tues wed thu thurs fri "
    "approx est min max tel ext dist op cit"
)
_BEFORE_NAMES = frozenset(_TITLES.split())
_ABBREVIATIONS = frozenset(_OTHERS.split())
"""Abbreviations that end a sentence if a capital letter follows."""
_STARTERS = frozenset(
    "the this that these those it he she they we you i a an in on at for from by with as if when "
    "while where what who how why there here his her its their our your my but and or so then "
    "also however after before since although because during let now to no not all some many most "
    "both each one two please".split()
)
"""Words that often begin sentences and are seldom names."""
_GOING_ON = _BEFORE_NAMES | {"e.g", "i.e", "eg", "ie", "vs", "cf"}
"""Abbreviations that never end a sentence."""
_END = re.compile(
    r"(?<![.?!])[.?!]++"
    r"(?:[\"'”’)\]}]+(?:\s+|(?=--)|\Z)|(?P<space>\s+)|(?=[\"')\]};:*@({\[]))"
)
"""Marks, followed by a closing quote or bracket, by white space, or by an opening sign."""
# An abbreviation of letters with points: `U.S`.
_DOTTED = re.compile(r"(?:[A-Za-z]\.)+[A-Za-z]")
_LAST_WORD = re.compile(r"[\w.&-]*\Z")
_LONGEST = 40
"""The most characters of a word that are checked for an abbreviation."""


def count_words(text: str) -> int:
    """The number of runs of letters, digits and underscores."""
    return len(_WORD.findall(text))


def count_sentences(text: str) -> int:
    """The number of `sentences`."""
    return len(sentences(text))


def sentences(text: str) -> list[str]:
    """Split a text into sentences, at full stops, question marks and exclamation marks.

    A full stop after an abbreviation or an initial does not end a sentence, and dots ("...") do not
    before a small letter. Line breaks do not end one either, so a list without full stops is one
    sentence, as in the sentence tokenizer that defines IFEval (Kiss and Strunk 2006).
    """
    result, start = [], 0
    for match in _END.finditer(text):
        if match.end() < len(text) and _ends(text, match):
            result.append(text[start : match.end()].strip())
            start = match.end()
    result.append(text[start:].strip())
    return [sentence for sentence in result if sentence]


def _ends(text: str, match: re.Match[str]) -> bool:
    """Whether a sentence ends at these marks."""
    marks = re.match(r"[.?!]+", match.group())
    assert marks is not None
    follows = text[match.end() : match.end() + _LONGEST].lstrip("\"'“‘(*")
    if marks.group() != ".":
        return not (marks.group().startswith("..") and not follows[:1].isupper())
    word, is_first = _word_before(text, match.start())
    if not word or word.isdigit():
        return not follows[:1].islower() or text[match.start() - 1] in "\"'”’)]}"
    new_line = "\n" in (match["space"] or "")
    if len(word) == 1 and word.isupper() and is_first:
        return True  # the letter of an item in a list
    is_initial = (len(word) == 1 and word.isupper() and word != "I") or _DOTTED.fullmatch(word)
    if is_initial or word.lower() in _GOING_ON:
        starts = word.lower() not in _GOING_ON and _starts(follows)
        return starts or (new_line and not follows[:1].islower())
    if word.lower() in _ABBREVIATIONS:
        return follows[:1].isupper() or (new_line and follows[:1].isdigit())
    return True


def _starts(follows: str) -> bool:
    """Whether a text begins with a capitalised word that often begins sentences."""
    word = re.match(r"[A-Z][a-z']*", follows)
    return word is not None and word.group().lower() in _STARTERS


def _word_before(text: str, end: int) -> tuple[str, bool]:
    """The word before an index, and whether it is the first of its line."""
    start = max(0, end - _LONGEST)
    match = _LAST_WORD.search(text, start, end)
    word = "" if match is None else match.group()
    before = text[max(0, end - len(word) - 20) : end - len(word)].rstrip(" \t")
    return word, not before or before.endswith("\n")
