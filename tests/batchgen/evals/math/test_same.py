"""Whether answers are the same: families written by hand, and what holds for any texts."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from batchgen import same_math
from batchgen.evals.math.same import MOST_CHARACTERS, forms

FAMILIES = yaml.safe_load(Path(__file__).with_name("same.yaml").read_text())


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["family"])
def test_answers_that_are_the_same(family: dict[str, Any]) -> None:
    """The first of a list is the gold answer of the others, and the other way round."""
    wrong = [
        (gold, answer)
        for gold, *answers in family["same"]
        for answer in answers
        if not (same_math(gold, answer) and same_math(answer, gold))
    ]
    assert not wrong


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family["family"])
def test_answers_that_are_not(family: dict[str, Any]) -> None:
    wrong = [
        (gold, answer)
        for gold, answer in family["different"]
        if same_math(gold, answer) or same_math(answer, gold)
    ]
    assert not wrong


PIECES = (
    r"1 2 x y + - * / ^ { } ( ) [ ] \frac \sqrt \text{ cm , . = < \le \cup \pm | ! % \pi \sin \log"
    r" _ \{ \} \infty or \begin{pmatrix} \end{pmatrix} & \\ : $ ° \in \ne 10^9 e i \binom \mid"
    r" \mathbb{R} \setminus \overline \lfloor \rfloor \boxed{ million hours \circ ' ; and ² ½ 1,000"
)
TEXTS = st.text(max_size=60) | st.lists(st.sampled_from([*PIECES.split(), " "]), max_size=30).map(
    "".join
)


@given(TEXTS, TEXTS)
def test_any_texts_are_compared_and_the_order_does_not_matter(one: str, other: str) -> None:
    assert same_math(one, one)
    assert same_math(one, other) == same_math(other, one)


@given(TEXTS, TEXTS)
def test_answers_with_a_common_vote_have_forms_in_common(one: str, other: str) -> None:
    """A vote's text is one of the forms, and the same whenever it is asked for."""
    for text in (one, other):
        found = forms(text)
        assert found.shortest in {form for form, _ in found.all}
        forms.cache_clear()
        assert forms(text) == found


@pytest.mark.quick(8)
@pytest.mark.parametrize(
    "text",
    [
        "(" * 1900,
        "{" * 1900,
        r"\frac{" * 300,
        "-" * 1999,
        "9" * 2000,
        "9^" * 900 + "9",
        "5^{5^{5^{5^{5}}}}",
        r"\dfrac{5^{\left(5^{\left(5^{\left(5^5\right)}\right)} - 4\right)} - 5}{16}",
        r"10^{\left(5^{5^{5^{5^{5}}} \cdot \log_{10}(5)} - 4\right)}",
        "x^{x^{x^{x^x}}}",
        "1/" * 900 + "7",
        r"\sqrt" * 600 + "2",
        "|" * 1999,
        r"\pm 1," * 300,
        r"(1,2)\cup" * 180 + "(1,2)",
        "999!^999",
        "2^{2^{2^{20}}}",
        r"1.0000000001^{10000000000}",
        r"\binom{x}{50}" * 50,
        r"x^{1000}(x+1)^{1000}",
        "x=" * 900 + "2",
        r"\tan(10^{5000})",
        "1,234,567," * 150,
        r"\gcd(10^{3000},10^{2999})",
        "x\u0000\ud800",
        "x" * (MOST_CHARACTERS + 1),
    ],
    ids=lambda text: text[:12].encode("ascii", "replace").decode(),
)
def test_hostile_texts_end(text: str) -> None:
    assert same_math(text, text)
    assert not same_math(text, "12345")


GOLDS = {
    "whole number": st.integers(-(10**12), 10**12).map(str),
    "fraction": st.tuples(st.integers(-99, 99), st.integers(1, 99)).map(
        lambda pair: rf"\frac{{{pair[0]}}}{{{pair[1]}}}"
    ),
    "decimal": st.decimals(-1000, 1000, places=3).map(str),
    "root": st.tuples(st.integers(2, 9), st.integers(2, 50)).map(
        lambda pair: rf"{pair[0]}\sqrt{{{pair[1]}}}"
    ),
    "multiple of pi": st.integers(2, 99).map(lambda n: rf"{n}\pi"),
    "complex": st.tuples(st.integers(1, 9), st.integers(1, 9)).map(lambda p: f"{p[0]}+{p[1]}i"),
    "polynomial": st.lists(st.integers(1, 9), min_size=3, max_size=3).map(
        lambda c: f"{c[0]}x^2+{c[1]}x+{c[2]}"
    ),
    "equation": st.lists(st.integers(2, 9), min_size=3, max_size=3).map(
        lambda c: f"{c[0]}x+{c[1]}y={c[2]}"
    ),
    "inequality": st.integers(-99, 99).map(lambda n: rf"x \le {n}"),
    "interval": st.integers(-99, 99).map(lambda n: f"[{n},{n + 5})"),
    "union": st.integers(-99, 99).map(lambda n: rf"(-\infty,{n})\cup({n + 1},\infty)"),
    "point": st.tuples(st.integers(-99, 99), st.integers(-99, 99)).map(
        lambda p: f"({p[0]},{p[1]})"
    ),
    "set": st.sets(st.integers(-99, 99), min_size=2, max_size=4).map(
        lambda found: r"\{" + ",".join(map(str, found)) + r"\}"
    ),
    "quantity": st.integers(1, 999).map(lambda n: rf"{n}\text{{ cm}}^2"),
    "base": st.integers(1, 999).map(lambda n: f"{n:o}_8"),
    "words": st.sampled_from([r"\text{Evelyn}", r"\text{no solution}", r"\text{even}"]),
}
SPELLINGS = (
    lambda gold: f"${gold}$",
    lambda gold: rf"\boxed{{{gold}}}",
    lambda gold: f" {gold}. ",
    lambda gold: gold.replace(r"\frac", r"\dfrac").replace("(", r"\left(").replace(")", r"\right)"),
    lambda gold: re.sub(r"([,+=<])", r" \1\\, ", gold).replace(r"\le", r"\leq"),
    lambda gold: gold.replace(r"\text", r"\mbox").replace(r"\pi", "π").replace("-", "−"),
)


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", GOLDS)
@given(data=st.data())
def test_a_gold_answer_is_itself_in_other_spellings(kind: str, data: st.DataObject) -> None:
    """And it is none of another value of its kind."""
    gold = data.draw(GOLDS[kind])
    for spelled in SPELLINGS:
        assert same_math(gold, spelled(gold)), spelled(gold)
        assert same_math(spelled(gold), gold), spelled(gold)
    other = data.draw(GOLDS[kind].filter(lambda one: one != gold))
    if kind not in ("fraction", "equation", "root", "decimal"):  # two texts may say one value there
        assert not same_math(gold, other), other


def test_answers_that_say_the_same_are_counted_as_one_vote() -> None:
    for texts in (
        [r"3,\!250", "3250", "x = 3250", r"3250\text{ cm}", r"\$3,250", "3250.0"],
        [r"\frac12", "0.5", r"x=\frac{1}{2}", r"\dfrac{1}{2}\text{ m}"],
        ["2,-2", r"\pm 2", r"x=\pm 2", r"\{-2,2\}"],
        [r"x\le 3", r"(-\infty,3]", r"x \in (-\infty,3]", "3 >= x"],
    ):
        assert len({forms(text).shortest for text in texts}) == 1, texts
