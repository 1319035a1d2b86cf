"""Markdown and formulas of strangers: what they become, and that it does nothing."""

from xml.etree import ElementTree

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from batchgen.pages.math.mathml import mathml
from batchgen.pages.math.rich_text import ELEMENTS, MOST_RENDERED, formulas, rich_text
from batchgen.util.text.safe_text import Span

MATH = {
    "math", "mrow", "mi", "mn", "mo", "mtext", "mspace", "mfrac", "msqrt", "mroot", "msub", "msup",
    "msubsup", "munder", "mover", "munderover", "mtable", "mtr", "mtd", "mphantom", "code",
}  # fmt: skip
ATTRIBUTES = {"display", "stretchy", "accent", "movablelimits", "linethickness", "width", "class",
              "title"}  # fmt: skip
CHILDREN = {"mfrac": 2, "mroot": 2, "msub": 2, "msup": 2, "mover": 2, "munder": 2, "msubsup": 3,
            "munderover": 3}  # fmt: skip
PIECES = st.sampled_from(
    [
        *r"\frac \sqrt[ \left \right \begin{ \end{ \begin{cases} \end{cases} \boxed \text{ \mathbb "
        r"\not \sin \hat \sum \color \substack{ \middle \pmod \foo \\ \, \{ { } ^ _ & ' [ ] ( ) 12 "
        r"x $ $$ \( \) \[ \] ` ``` ** * # - | < > <b> javascript: &amp;".split(),
        *(" ", "\n", "\n\n", "\ue0000\ue001", "\u202e", "\x00", "\ud800"),
    ]
)
HOSTILE = st.lists(PIECES, max_size=40).map("".join) | st.text(max_size=80)


def parsed(html: str) -> ElementTree.Element:
    """The elements of a piece of a page.

    Raises:
        AssertionError: there is one that may not be there, or an element of MathML has other than
            the children that it must have.
    """
    root = ElementTree.fromstring(
        f"<p>{html.replace('<br>', '<br/>').replace('<hr>', '<hr/>')}</p>"
    )
    for element in root.iter():
        assert element.tag in ELEMENTS | MATH
        assert set(element.attrib) <= ATTRIBUTES
        assert len(element) == CHILDREN.get(element.tag, len(element))
    return root


@pytest.mark.thorough
@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(HOSTILE)
@example("{" * 5000)
@example(r"\frac" * 900)
@example(r"\boldsymbol{+" * 400)
def test_any_formula_becomes_elements_that_do_nothing(source: str) -> None:
    parsed(mathml(source))


@settings(max_examples=settings().max_examples * 2, deadline=None)
@given(HOSTILE)
@example("> " * 20_000)
@example("$" + "{" * 100_000 + "$")
@example(r"\boxed{" * 9_000)
@example("|a" * 500 + "\n" + "|-" * 500 + "\n" + "x\n" * 500)
def test_any_text_becomes_elements_that_do_nothing(text: str) -> None:
    html = rich_text(text)
    if html is not None:
        parsed(html)


def test_links_images_and_html_are_shown_as_they_are_written() -> None:
    text = "**a** [x](javascript:alert(1)) ![y](http://z/i.png) <script>b</script> <http://c>"
    html = rich_text(text)
    assert html is not None
    assert "".join(parsed(html).itertext()) == text.replace("**", "")


def test_long_texts_are_not_rendered() -> None:
    assert rich_text("*a* " * MOST_RENDERED) is None
    short = rich_text("*a* " * MOST_RENDERED, 1000)
    assert short is not None and "characters left out" in short


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so $x^2$ and \(y\)", ["x^2", "y"]),
        (r"$$a$$ \[b\]", ["a", "b"]),
        ("it costs $5 and $10 today", []),
        ("`$x$` is code, $y$ is not", ["y"]),
        (r"\$x\$ $z$", ["z"]),
        ("$a\n\nb$", []),
        (r"\begin{align*}a\\[2pt]b\end{align*}", [r"\begin{align*}a\\[2pt]b\end{align*}"]),
        (r"cut off \[ x + 1", []),
        (r"so \boxed{\frac{1}{2}} and $\boxed{3}$", [r"\boxed{\frac{1}{2}}", r"\boxed{3}"]),
        (r"\boxed{$18$} $x$", [r"\boxed{$18$}", "x"]),
        (r"\boxed{\}} `\boxed{1}` \boxed{", [r"\boxed{\}}"]),
        (r"\boxed{in New York}", [r"\boxed{\text{in New York}}"]),
    ],
)
def test_formulas_are_found_by_their_delimiters(text: str, found: list[str]) -> None:
    assert [source for _, _, source, _ in formulas(text)] == found


@pytest.mark.parametrize(
    ("source", "html"),
    [
        (r"\frac12", "<mfrac><mn>1</mn><mn>2</mn></mfrac>"),
        ("x_1^2", "<msubsup><mi>x</mi><mn>1</mn><mn>2</mn></msubsup>"),
        (r"\sqrt[3]{x}", "<mroot><mi>x</mi><mn>3</mn></mroot>"),
        ("f''", "<msup><mi>f</mi><mo>′′</mo></msup>"),
        (r"\mathbb{R}", "<mi>ℝ</mi>"),
        (r"\mathbf{v}", "<mi>𝐯</mi>"),
        (r"\color{red}{5}", "<mn>5</mn>"),
        (r"\boxed{5}", '<mrow class="boxed"><mn>5</mn></mrow>'),
        (r"\text{if <b>}", "<mtext>if &lt;b&gt;</mtext>"),
        (r"\unheardof", r"<mtext>\unheardof</mtext>"),
        (r"\left.x\right|", "<mrow><mi>x</mi><mo>|</mo></mrow>"),
        (
            r"\begin{cases}1&x\\2&y\end{cases}",
            '<mrow><mo>{</mo><mtable class="cases"><mtr><mtd><mn>1</mn></mtd><mtd><mi>x</mi></mtd>'
            "</mtr><mtr><mtd><mn>2</mn></mtd><mtd><mi>y</mi></mtd></mtr></mtable></mrow>",
        ),
    ],
)
def test_formulas_become_mathml(source: str, html: str) -> None:
    assert mathml(source) == f"<math>{html}</math>"


def test_markdown_becomes_elements_and_plain_text_has_none() -> None:
    html = rich_text("# a\n- **b**\n\n```py\n$c$ <d>\n```\n|e|\n|-|\n|`f`|")
    assert html is not None
    assert html.startswith("<h5>a</h5><ul><li><strong>b</strong></li></ul>")
    assert "<pre>$c$ &lt;d&gt;\n</pre>" in html and "<td><code>f</code></td>" in html
    assert rich_text("just\na text for $5") is None


def test_the_box_of_an_answer_is_drawn_without_dollars_too() -> None:
    text = r"The answer is \boxed{72}."
    html = rich_text(text, None, [Span(21, 23, "answer")])
    assert html is not None
    assert html.startswith(
        '<p>The answer is <mark title="answer"><math><mrow class="boxed"><mn>72</mn></mrow></math>'
    )
    boxed = parsed(mathml(r"\boxed{$18$}"))
    assert "".join(boxed.itertext()) == "18"


def test_the_answer_stands_out_in_a_formula_and_in_a_text() -> None:
    text = r"so $\boxed{18}$ or *maybe* 19"
    spans = [Span(text.index("18"), text.index("18") + 2, "answer"), Span(27, 29, "other")]
    html = rich_text(text, None, spans)
    assert html is not None
    assert '<mark title="answer"><math>' in html and '<mark title="other">19</mark>' in html
