"""What of two texts is shown as different, and that strangers' texts cost little and do nothing."""

import re
import time
from html import unescape

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.util.text.word_difference import MOST_WORDS, word_difference

_WORDS = st.sampled_from(["a", "b ", " c", "<d>", "\n", "&amp;", "é", "12"])
_SHORT = st.lists(_WORDS, max_size=12).map("".join)
"""Texts of which all words are shown."""


def sides(html: str) -> tuple[str, str]:
    """The words of A and those of B, as a reader finds them."""
    a = re.sub(r"<ins[^>]*>.*?</ins>", "", html, flags=re.DOTALL)
    b = re.sub(r"<del[^>]*>.*?</del>", "", html, flags=re.DOTALL)
    words = ["".join(unescape(re.sub("<[^>]+>", "", text)).split()) for text in (a, b)]
    return words[0], words[1]


@pytest.mark.parametrize(
    ("a", "b", "html"),
    [
        ("the same", "the  same", "the same"),
        ("so it is 18.", "so it is 19.", "so it is <del>18</del><ins>19</ins>."),
        ("a b c", "a c", "a <del>b</del> c"),
        ("", "new", "<ins>new</ins>"),
        ("", "", ""),
        ("x.\n\nOld", "x. New one", "x. <del>Old</del><ins>New one</ins>"),
        ("one x two", "1 x 2", "<del>one x two</del><ins>1 x 2</ins>"),
        ("<b>\u202e", "<i>", "&lt;<del>b&gt;⟨U+202E⟩</del><ins>i&gt;</ins>"),
    ],
)
def test_words_that_one_text_has_alone_are_marked(a: str, b: str, html: str) -> None:
    found = re.sub(r' title="[^"]+"|<span class="code">|</span>', "", word_difference(a, b).html)
    assert found == html


@given(_SHORT, _SHORT)
def test_both_texts_can_be_read_out_of_their_difference(a: str, b: str) -> None:
    found = word_difference(a, b)
    assert sides(found.html) == ("".join(a.split()), "".join(b.split()))
    assert (found.only_a == found.only_b == 0) == (not re.search("<(del|ins)", found.html))


def test_long_texts_are_compared_from_their_first_difference_on() -> None:
    same = "word " * 5000
    found = word_difference(same + "left " + same, same + "right " + same)
    assert (found.only_a, found.only_b, found.left_out) == (1, 1, (0, 0))
    assert "characters left out" in found.html and len(found.html) < 2000
    a = " ".join(f"a{i}" for i in range(5000))
    b = " ".join(f"b{i}" for i in range(3000))
    assert word_difference(same + a, same + b).left_out == (5000 - MOST_WORDS, 3000 - MOST_WORDS)


@pytest.mark.parametrize(
    ("a", "b"),
    [
        ("a " * 10_000 + "x", "b " + "a " * 9_000 + "y"),
        ("a b " * 5_000, "b a a " * 5_000),
        (
            " ".join(str(i % 99) for i in range(9_000)),
            " ".join(str(i * 7 % 99) for i in range(9_000)),
        ),
        (" " * 1_000_000, "\n" * 1_000_000),
        ("x" * 10_000_000, "y" * 10_000_000),
    ],
)
def test_hostile_texts_take_little_time(a: str, b: str) -> None:
    began = time.process_time()
    found = word_difference(a, b)
    assert time.process_time() - began < 5 and len(found.html) < 1_000_000
