r"""Finds the letter of the choice that a text decides for; `Extract` uses it.

There are several kinds of statements. A kind counts only if the text has no statement of a clearer
kind, so a discussion of the other choices after a final answer does not replace it. From the
clearest on:

1. stated: "Answer: C", "Final answer - C", "the best answer would be C", "option B is correct";
2. boxed: `\boxed{C}`;
3. alone: the first or the last line is only the letter;
4. decided: "it must be C", "I choose option C", "故选C";
5. first: the text begins with "C." or "C)", and no other line begins so with another letter;
6. labelled: "option C", "answer C", unless the text rejects it ("option C is wrong").
"""

from __future__ import annotations

import re
from functools import lru_cache
from typing import NamedTuple

from batchgen.evals.graders.latex import FONT, Span, boxes

# Each pattern for a search begins with a set of characters, which `re` finds many times faster than
# words. Quantifiers over overlapping characters are bounded, so that no text takes quadratic time.
# Before each pattern are examples of what it matches.
# Behind one character: it begins a word.
_START = r"(?<![A-Za-z0-9_].)"
# A label: Answer, ans, CHOICE, option, 答案, 正确选项, 选.
_NOUN = (
    rf"[AaCcOo答正选]{_START}"
    r"(?:(?:nswer|NSWER|ns|NS|hoice|HOICE|ption|PTION)\b|案|确选项|项|(?<=选)择?)"
)
# Marks between a word and its letter: `: **(`, `\boxed{`.
_FILL = rf"(?:\\boxed\{{|{FONT}|[\s*_:`\"'$({{\[]){{0,12}}"
# "here", "to this question".
_ABOUT = r"(?:(?:here|(?:to|for|among|of|in)\s[^.,;:?!\n]{1,80}?)\s{1,2})?"
# "would be", "has to be".
_BE = r"(?:(?:would|must|should|will|could|can|has\sto|have\sto)\s(?:only\s)?be)\b"
# "is", "'s", "must be", ":", "应该是".
_IS = rf"(?:\b(?:is|IS|was)\b|['’]s\b|{_BE}|[:：=]|(?:应该|应当|应)?[是为选])"
# " definitely", " most likely".
_SURELY = (
    r"(?:\s{1,2}(?:definitely|clearly|therefore|thus|then|(?:most\s)?likely|probably|indeed|"
    r"actually|still|obviously|simply))?"
)
# " the option", " letter".
_NAMED = r"(?:[\s*_:]{0,6}(?:the\s)?(?:[Oo]ption|[Cc]hoice|[Ll]etter|[Aa]nswer)\b)?"
# A decision: "must be", "choose option", "go with", 选择.
_CHOSEN = (
    rf"[mwschgpo选]{_START}(?:(?:ust|ould|hould|ill|an|as\sto|ave\sto)\s(?:only\s)?be\b"
    r"|(?:hoose|hose|ick|icked|elect|elected|(?:o|oing|ent)\swith|pt\sfor)\b|(?<=选)择?[:：]?)"
    + _NAMED
)
# "final ", "correct **" at the end of the searched text.
_FINAL = re.compile(r"\b(?:final|correct|best|right)[\s*_]{1,4}\Z", re.I)
# Marks behind a letter: `)**`.
_AFTER = r"[)\]}*_.\s$`\"']{0,6}"
# "is correct", "is the best", 正确.
_RIGHT = (
    r"(?:(?:is|IS)\s(?:(?:indeed|clearly|therefore|thus)\s)?(?:the\s)?(?:only\s|most\s)?"
    r"(?:correct|right|best|accurate|true)\b|是?(?:正确|对))"
)
# "is the correct answer".
_THE_RIGHT = (
    r"(?:is|IS)\s(?:(?:indeed|clearly|therefore|thus)\s)?the\s(?:only\s|most\s)?"
    r"(?:correct|right|best|accurate)\s(?:answer|option|choice|one)\b"
)
# "is wrong", "too long", "fails", 不对.
_WRONG = (
    r"(?:(?:is|was|seems|looks)\s)?(?:(?:clearly|also|therefore|thus|simply)\s)?"
    r"(?:not\b|wrong|incorrect|false\b|invalid|too\b|fails?\b|failed|ignores?\b|contradicts?\b|"
    r"misses\b|cannot|can['’]t|does\snot|doesn['’]t|isn['’]t|is\sout\b|错|不对|不正确|不符)"
)
# "not ", "eliminate option (" at the end of the searched text.
_REJECTING = re.compile(
    r"(?:\b(?:not|never|neither|nor|without|unlike|eliminat\w{1,4}|rul(?:e|es|ed|ing)\sout|"
    r"exclud\w{1,4}|reject\w{0,4}|discard\w{0,4})|n['’]t|排除|不)\s?(?:[\w()*]{1,12}\s){0,3}[*_(]*\Z"
)
# "if the answer", "suppose" at the end of the searched text.
_SUPPOSING = re.compile(
    r"(?:\b(?:if|whether|suppos\w{1,4}|assum\w{1,4})\b|如果|假设)[^.,;:!?\n]{0,30}\Z", re.I
)
_BEFORE = 60
"""The number of characters before a letter in which a rejection or a supposition is looked for."""


class _Patterns(NamedTuple):
    """The patterns for some letters. Group 1 is the letter, except in `labelled`.

    Attributes:
        labelled: a label and a letter. Groups: `noun`, the label; and either `stated`, the letter
            after a verb ("answer is C"), or `letter`, the letter directly after the label, with
            `dash` ("answer - C") and what is said about it, `right` or `wrong` ("option C is
            wrong").
        affirmed: "C is the correct answer".
        decided: "it must be C".
        first: a letter at the start of a text: "C.", "(C)".
        line: a line with nothing but the letter.
    """

    labelled: re.Pattern[str]
    affirmed: re.Pattern[str]
    decided: re.Pattern[str]
    first: re.Pattern[str]
    line: re.Pattern[str]


def letter_spans(text: str, letters: str) -> list[Span]:
    """The spans of the clearest statements of one of `letters` (A to Z), in order; empty if there
    are none. Two letters ("A, B") do not count."""
    patterns = _patterns(letters)
    stated, decided, labelled = _labelled(text, patterns)
    if stated:
        return sorted(stated)
    boxed = (patterns.first.match(text, *box) for box in boxes(text))
    if spans := [match.span(1) for match in boxed if match]:
        return spans
    lines = (patterns.line.fullmatch(text, *line) for line in _outer_lines(text))
    if spans := [match.span(1) for match in lines if match]:
        return spans
    choices = patterns.decided.finditer(text)
    decided += [match.span(1) for match in choices if not _is_rejected(text, match.start())]
    if decided:
        return sorted(decided)
    if (match := patterns.first.match(text)) and not _lists_choices(text, match, patterns):
        return [match.span(1)]
    return labelled


def _labelled(text: str, patterns: _Patterns) -> tuple[list[Span], list[Span], list[Span]]:
    """Spans of letters after labels, in three lists: stated, decided, and bare labels."""
    stated = [match.span(1) for match in patterns.affirmed.finditer(text)]
    decided: list[Span] = []
    bare: list[Span] = []
    for match in patterns.labelled.finditer(text):
        at, noun = match.start(), match["noun"]
        if _SUPPOSING.search(text, max(0, at - _BEFORE), at):
            continue
        if match["stated"]:
            stated.append(match.span("stated"))
            continue
        span = match.span("letter")
        is_final = _FINAL.search(text, max(0, at - _BEFORE), at) is not None
        is_stated = noun[0] in "答正" or match["right"] or (match["dash"] and noun[0] in "Aa")
        if is_final or is_stated:
            stated.append(span)
        elif not (match["wrong"] or _REJECTING.search(text, max(0, at - _BEFORE), at)):
            (decided if noun in ("选", "选择") else bare).append(span)
    return stated, decided, bare


def _is_rejected(text: str, at: int) -> bool:
    """Whether the words before a letter reject it or only suppose it."""
    start = max(0, at - _BEFORE)
    return any(pattern.search(text, start, at) for pattern in (_REJECTING, _SUPPOSING))


def _outer_lines(text: str) -> list[Span]:
    """The spans of the first and the last line that are not empty."""
    start, end = len(text) - len(text.lstrip()), len(text.rstrip())
    first, last = text.find("\n", start, end), text.rfind("\n", start, end)
    return [(start, end)] if first < 0 else [(start, first), (last + 1, end)]


def _lists_choices(text: str, first: re.Match[str], patterns: _Patterns) -> bool:
    """Whether another line begins with another letter in the way of the first line."""
    at = text.find("\n", first.end())
    while at >= 0:
        match = patterns.first.match(text, at + 1)
        if match and match[1].upper() != first[1].upper():
            return True
        at = text.find("\n", at + 1)
    return False


@lru_cache(maxsize=64)
def _patterns(letters: str) -> _Patterns:
    """The patterns for letters such as "ABCD"."""
    small = letters.lower()
    # `joined`, a letter and `listed` are a second letter ("A, B"), with which neither counts.
    joined = r"\s{0,4}(?:\)?\s{0,4}(?:[,;/&、和或]|and\b|or\b)\s{0,4}\(?)"
    listed = r"(?=[\s.,;)*\]}$]{0,4}(?:\n|and\b|or\b|\Z|[,;)]))"
    # A capital letter that is a word, but not the I of "I think".
    large = rf"[{letters}](?![A-Za-z0-9'])(?<!I(?=\s[a-z]))(?!{joined}[{letters}]{listed})"
    # A small letter can be an article or a variable. It counts at the end of a line or clause, and
    # if it is not a or i also before other words.
    line_end = r"(?=\)|[*.\]}$]{0,4}\s{0,4}(?:\n|\Z))"
    clear = "".join(letter for letter in small if letter not in "ai")
    small_word = rf"[{small}](?:{line_end}|(?=[.,;:!]\s))(?!{joined}[{small}]{listed})"
    if clear:
        no_term = r"(?![A-Za-z0-9'’])(?!\s?[-+*/^=<>(])"
        small_word += rf"|[{clear}]{no_term}(?!{joined}[{small}]{listed})"
    any_letter = rf"(?P<stated>{large}|{small_word})"
    label_letter = rf"(?P<letter>{large}|[{small}]{line_end})"
    clause_end = r"(?=[\s*_)\]}$`\"']{0,6}(?:[.,;:!?\n]|\Z|because\b|since\b|as\b|for\b))"
    dash = r"(?P<dash>-{1,2}>?|[–—→])?"
    judged = rf"(?:{_AFTER}(?:(?P<right>{_RIGHT})|(?P<wrong>{_WRONG})))?"
    head = rf"[\s*_$`({{\[]{{0,8}}(?:{FONT})?[\s(]{{0,4}}"
    tail = r"(?=[\s*_$`)}\].:,]*\Z|}?[)\].:])"
    return _Patterns(
        re.compile(
            rf"(?P<noun>{_NOUN})[\s*_]{{0,4}}"
            rf"(?:{_ABOUT}{_IS}{_SURELY}{_NAMED}{_FILL}{any_letter}|"
            rf"{dash}{_FILL}{label_letter}{judged})"
        ),
        re.compile(rf"([{letters}])(?<![A-Za-z0-9'].)(?![A-Za-z0-9']){_AFTER}{_THE_RIGHT}"),
        re.compile(rf"{_CHOSEN}{_FILL}({large}){clause_end}"),
        re.compile(rf"{head}({large}|[{small}](?:{line_end}|(?=[.:]\s))){tail}"),
        re.compile(rf"[\s#]{{0,8}}{head}([{letters}{small}])[\s*_$`)}}\].:]{{0,8}}"),
    )
