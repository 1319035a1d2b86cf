"""Shows how two texts A and B differ, word by word, as HTML that is readable without colours. The
viewer and reports use `word_difference`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from difflib import SequenceMatcher

from markupsafe import Markup

from batchgen.util.text.safe_text import GAP, marked

MOST_WORDS = 1_500
"""The words of each text that are compared, from the first difference on. The limit is needed
because difflib takes quadratic time."""
MOST_CHARACTERS = 200_000
"""The characters of each text that are read."""
_WORD = re.compile(r"\s*(?:\w+|[^\w\s])")
_AROUND = 40
"""The shared words that are shown before and after a difference. Other shared words are left
out."""
_LEAST_SHARED = 2
"""Fewer consecutive shared words between two differences are shown as part of the difference."""
_ONLY_A = Markup('<del title="only in A">{}</del>')
_ONLY_B = Markup('<ins title="only in B">{}</ins>')


@dataclass(frozen=True)
class WordDifference:
    """How B differs from A."""

    html: Markup  # words only in A are in `del`, words only in B are in `ins`
    only_a: int  # the number of words only in A
    only_b: int  # the number of words only in B
    left_out: tuple[int, int] = (0, 0)  # the numbers of words of A and of B that were not compared


@dataclass(frozen=True)
class _Run:
    """Consecutive words of A and of B, which are equal if `same` is true."""

    same: bool
    a: Sequence[str]
    b: Sequence[str]


def word_difference(a: str, b: str) -> WordDifference:
    """Compare two texts up to MOST_WORDS and MOST_CHARACTERS, ignoring white space."""
    left, right = (_WORD.findall(text[:MOST_CHARACTERS].rstrip()) for text in (a, b))
    runs = _joined(list(_runs(left, right)))
    only_a, only_b = _words(run for run in runs if not run.same)
    compared_a, compared_b = _words(runs)
    # The words that were not read, of about five characters each.
    cut_a, cut_b = (max(len(text) - MOST_CHARACTERS, 0) // 5 for text in (a, b))
    left_out = len(left) - compared_a + cut_a, len(right) - compared_b + cut_b
    return WordDifference(_html(runs), only_a, only_b, left_out)


def _words(runs: Iterable[_Run]) -> tuple[int, int]:
    """Count the words of A and of B in some runs."""
    sizes = [(len(run.a), len(run.b)) for run in runs]
    return sum(a for a, _ in sizes), sum(b for _, b in sizes)


def _runs(left: list[str], right: list[str]) -> Iterator[_Run]:
    """Yield the runs of two lists of words in order, up to MOST_WORDS."""
    keys_a, keys_b = ([word.strip() for word in words] for words in (left, right))
    start = _shared(keys_a, keys_b)
    end = _shared(keys_a[start:][::-1], keys_b[start:][::-1])
    stop_a, stop_b = len(left) - end, len(right) - end
    is_cut = max(stop_a, stop_b) - start > MOST_WORDS
    if is_cut:
        stop_a, stop_b = (min(stop, start + MOST_WORDS) for stop in (stop_a, stop_b))
    yield _Run(same=True, a=left[:start], b=right[:start])
    matcher = SequenceMatcher(None, keys_a[start:stop_a], keys_b[start:stop_b])
    for kind, a0, a1, b0, b1 in matcher.get_opcodes():
        words_a, words_b = left[start + a0 : start + a1], right[start + b0 : start + b1]
        yield _Run(same=kind == "equal", a=words_a, b=words_b)
    if not is_cut:
        yield _Run(same=True, a=left[stop_a:], b=right[stop_b:])


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """Return the number of words with which both lists begin."""
    pairs = zip(a, b, strict=False)
    return next((i for i, (x, y) in enumerate(pairs) if x != y), min(len(a), len(b)))


def _joined(runs: Sequence[_Run]) -> list[_Run]:
    """Merge runs: a shared run that is too short becomes part of the differences around it. Single
    words that are shared by chance would make a difference hard to read."""
    joined: list[_Run] = []
    for index, run in enumerate(runs):
        inside = 0 < index < len(runs) - 1 and not runs[index - 1].same and not runs[index + 1].same
        differs = not run.same or (inside and len(run.a) < _LEAST_SHARED)
        if not run.a and not run.b:
            continue
        if joined and joined[-1].same != differs:
            last = joined.pop()
            joined.append(_Run(not differs, [*last.a, *run.a], [*last.b, *run.b]))
        else:
            joined.append(_Run(not differs, run.a, run.b))
    return joined


def _html(runs: Sequence[_Run]) -> Markup:
    parts: list[Markup] = []
    for index, run in enumerate(runs):
        if not run.same:
            a, b = "".join(run.a), "".join(run.b)
            # Leading white space is not compared, so it is shown once, outside of the marks.
            first = b or a
            parts.append(marked(first[: len(first) - len(first.lstrip())]))
            parts += [_ONLY_A.format(marked(a.lstrip()))] * bool(a)
            parts += [_ONLY_B.format(marked(b.lstrip()))] * bool(b)
            continue
        before_words, after_words = _AROUND * (index > 0), _AROUND * (index < len(runs) - 1)
        if len(run.a) <= before_words + after_words or len(runs) == 1:
            parts.append(_text(run.a))
        else:
            tail = run.a[len(run.a) - after_words :]
            characters = sum(map(len, run.a[before_words : len(run.a) - after_words]))
            parts += [_text(run.a[:before_words]), GAP.format(f"{characters:,}"), _text(tail)]
    return Markup("").join(parts)


def _text(words: Sequence[str]) -> Markup:
    return marked("".join(words))
