"""The HTML of one row: what is escaped, what stands out, what is left out."""

import re
from html.parser import HTMLParser
from typing import Any

import pyarrow as pa
import pytest

from batchgen.pages.rows.row_facts import RowFacts
from batchgen.pages.rows.row_page import WHOLE, PageLimits, RowPage
from batchgen.util.hidden import visible
from batchgen.util.text.safe_text import Span, marked, shortened

EVIL = "<script>alert(1)</script>\"><img src=x onerror=alert(1)></style>]]>\u202e&amp;'\x00"
LAYERS = {"moe_layers": "[1, 3]"}
SCHEMA = pa.schema(
    [
        ("row_id", pa.string()),
        ("row_index", pa.int64()),
        ("sample_index", pa.int32()),
        pa.field("question", pa.string(), metadata={"meaning": "as in the input"}),
        ("text", pa.string()),
        ("token_ids", pa.list_(pa.int32())),
        ("finish_reason", pa.string()),
        ("stop", pa.string()),
        ("error", pa.struct([("type", pa.string()), ("message", pa.string())])),
        ("num_prompt_tokens", pa.int32()),
        ("num_generated_tokens", pa.int32()),
        ("num_forwards", pa.int32()),
        pa.field("logprobs", pa.list_(pa.float32()), metadata={"scope": "output"}),
        pa.field("step_map", pa.list_(pa.int32()), metadata={"scope": "output"}),
        pa.field("draft_accepted", pa.list_(pa.bool_()), metadata={"scope": "output"}),
        pa.field(
            "routed_experts",
            pa.list_(pa.list_(pa.list_(pa.uint8(), 2), 2)),
            metadata={"scope": "context", **LAYERS},
        ),
    ]
)
CONFIG = {
    "prompt": {"kind": "chat", "user": "Q: {{ question }}"},
    "output": {"text_column": "text"},
    "strategy": {"_target_": "batchgen.strategies.ar_spec.strategy.ARSpecStrategy"},
}
ROW: dict[str, Any] = {
    "row_id": "r1",
    "row_index": 3,
    "sample_index": 0,
    "question": "What is 6·7?",
    "text": "abcd",
    "token_ids": [97, 98, 99, 100],
    "finish_reason": "stop",
    "stop": None,
    "error": None,
    "num_prompt_tokens": 2,
    "num_generated_tokens": 4,
    "num_forwards": 2,
    "logprobs": [-0.01, -0.3, -6.0, 0.0],
    "step_map": [1, 1, 2, 2],
    "draft_accepted": [True, False, True, False],
    "routed_experts": [[[0, 1], [2, 3]]] * 3 + [[[7, 1], [8, 3]]] * 2,
}
GRADES = {"answer": "c", "answer_start": 2, "answer_end": 3, "reasoning_end": 0, "mark": 1.0}


def decode(ids: list[int]) -> str:
    return "".join(map(chr, ids))


def page(config: dict[str, Any] = CONFIG) -> RowPage:
    return RowPage(config, SCHEMA, decode)


class _Tags(HTMLParser):
    """All tags with their attributes, and the text between them."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: set[str] = set()
        self.text = ""
        self.feed(str(html))  # Markup would escape what is added to it

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_data(self, data: str) -> None:
        self.text += data


def test_text_from_outside_stays_text_wherever_it_stands() -> None:
    row = ROW | {"question": EVIL, "text": EVIL, "stop": EVIL, "row_id": EVIL}
    row |= {"error": {"type": EVIL, "message": EVIL}, "token_ids": list(map(ord, EVIL))}
    grades = {"answer": EVIL, "answer_start": 0, "answer_end": len(EVIL), EVIL: EVIL}
    grades |= {"grade_error": {"type": EVIL, "message": EVIL}}
    html = page().html(RowFacts(row, grades), key="k")
    found = _Tags(html)
    assert not {"script", "img", "style"} & set(found.tags)
    assert not {name for name in found.attributes if name.startswith("on")}
    assert found.text.count("<script>alert(1)</script>") >= 6
    assert "\u202e" not in html and "\x00" not in html
    assert "⟨U+202E⟩" in found.text and "⟨U+0000⟩" in found.text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a\tb\nc", "a\tb\nc"),
        ("\r\x1b[1m", "⟨U+000D⟩⟨U+001B⟩[1m"),
        ("\u2066x\u2069\u200f", "⟨U+2066⟩x⟨U+2069⟩⟨U+200F⟩"),
        ("👩\u200d🔬 é עברית", "👩\u200d🔬 é עברית"),
        ("\ud800", "⟨U+D800⟩"),
    ],
)
def test_hidden_characters_are_shown_as_codes(text: str, shown: str) -> None:
    assert visible(text) == shown
    assert _Tags(marked(text)).text == shown


def test_the_answer_stands_out_in_the_text_and_among_the_tokens() -> None:
    html = page().html(RowFacts(ROW, GRADES), key="k")
    assert '<pre dir="auto">ab<mark title="answer">c</mark>d</pre>' in html
    assert re.findall(r'span class="t([^"]*)" tabindex', html) == [
        " p0 s1 d1 x0-0 x1-2",
        " p2 s1 x0-1 x1-2",
        " p7 s2 d1 x0-1 x1-2 a",
        " p0 s2",
    ]
    assert "forward 2\nno draft" in html and "layer 3: experts 8, 3" in html


def test_the_steps_are_a_film_and_what_was_replaced_is_told() -> None:
    """The slider is hidden where no script moves it."""
    fields = [*SCHEMA, pa.field("edit_log", pa.list_(pa.list_(pa.int32(), 4)))]
    row = ROW | {"edit_log": [[1, 2, 120, 121], [1, 4, 121, 98], [3, 4, 122, 100]]}
    made = RowPage(CONFIG, pa.schema(fields), decode)
    html = made.html(RowFacts(row, GRADES), key="k")
    assert '<p class="film" hidden>' in html and 'max="2" value="2"' in html
    assert re.findall(r" data-s=(\d) ", html) == ["1", "1", "2", "2"]
    assert [" e" in classes for classes in re.findall(r'span class="t([^"]*)" tabindex', html)] == [
        False, True, False, True
    ]  # fmt: skip
    told = "forward 2 replaced “x” id 120\nforward 4 replaced “y” id 121"
    assert told in html and "forward 4 replaced “z” id 122" in html
    none = dict.fromkeys(("step_map", "edit_log"))
    assert "film" not in made.html(RowFacts(ROW | none, GRADES), key="k")


def test_a_classifier_s_scores_have_their_labels_and_an_embedding_is_left_out() -> None:
    labels = {"scope": "row", "label_0": "bad", "label_1": EVIL, "label_2": "good"}
    fields = [
        pa.field("embedding", pa.list_(pa.float32(), 2), metadata={"scope": "row"}),
        pa.field("class_scores", pa.list_(pa.float32(), 3), metadata=labels),
    ]
    schema = pa.schema([*SCHEMA, *fields])
    pooled = {"embedding": [0.25, 0.5], "class_scores": [-1.5, -2.0, 3.25]}
    html = RowPage(CONFIG, schema, decode).html(RowFacts(ROW | pooled), key="k")
    assert "good 3.250, bad -1.500, " in html and "<script>alert" not in html
    assert "0.25" not in html.replace("3.250", "")
    failed = ROW | {"embedding": None, "class_scores": None}
    assert "class_scores" not in RowPage(CONFIG, schema, decode).html(RowFacts(failed), key="k")


def test_every_colour_has_a_legend_that_says_what_it_stands_for() -> None:
    steps = ROW | {"step_map": [1, 2, 7, 13]}
    html = page().html(RowFacts(steps, GRADES), key="k")
    legends = dict(re.findall(r'<p class="legend l-(\w+)">(.*?)</p>', html))
    assert legends["s"] == (
        'The forward that wrote the token: <span class="key s1">1, 7, 13</span> '
        '<span class="key s2">2</span>'
    )
    for key, classes in (("x0", "x0-[0-5]"), ("x1", "x1-[0-5]"), ("p", "p[0-7]"), ("d", "d1")):
        shown = set(re.findall(rf'class="t[^"]* ({classes})[ "]', html))
        assert shown <= set(re.findall(rf'class="key ({classes})"', legends[key])), key
    assert 'Underlined: <span class="t a">the answer</span>' in html
    assert "Underlined" not in page().html(RowFacts(ROW), key="k")


def test_the_prompt_is_the_template_filled_again_or_the_tokens_that_the_model_read() -> None:
    assert "Q: What is 6·7?" in page().html(RowFacts(ROW), key="k")
    assert "&lt;s&gt;hi" in page().html(
        RowFacts(ROW | {"prompt_token_ids": list(b"<s>hi")}), key="k"
    )
    lost = CONFIG | {"prompt": {"user": "{{ question }} {{ gone }}"}}
    assert "What is 6·7?" in page(lost).html(RowFacts(ROW), key="k")
    chat = CONFIG | {"prompt": {"messages_column": "talk"}}
    talk = {"talk": [{"role": "user", "content": "Hello?"}]}
    assert "Hello?" in page(chat).html(RowFacts(ROW | talk), key="k")


def test_reasoning_is_folded_and_spans_move_with_it() -> None:
    text = "<think>6·7 is 42</think>It is 42."
    assert RowFacts(ROW).reasoning_end(text) == 24
    assert RowFacts(ROW, {"reasoning_end": 0}).reasoning_end(text) == 0
    at = text.rindex("42")
    grades = GRADES | {"answer_start": at, "answer_end": at + 2, "reasoning_end": 24}
    html = page().html(RowFacts(ROW | {"text": text}, grades), key="k")
    assert "<summary>Reasoning, 24 characters</summary>" in html
    assert 'It is <mark title="answer">42</mark>.' in html


def test_long_texts_are_shortened_around_the_answer() -> None:
    text = "a" * 5000 + "42" + "b" * 5000
    html = shortened(text, 1000, [Span(5000, 5002, "answer")])
    assert len(html) < 1500
    assert '<mark title="answer">42</mark>' in html
    assert [int(n.replace(",", "")) for n in re.findall(r"… ([\d,]+) char", html)] == [4500, 4500]
    assert shortened(text, None) == text
    assert shortened("short", 1000) == "short"


def test_few_tokens_are_shown_of_many() -> None:
    many = ROW | {"token_ids": list(range(97, 107)), "text": "abcdefghij", "routed_experts": None}
    html = page().html(RowFacts(many), key="k", limits=PageLimits(tokens=4))
    assert html.count('class="t"') == 4 and "6 tokens left out" in html
    assert "toks" not in page().html(RowFacts(many), key="k", limits=PageLimits(tokens=0))
    assert page().html(RowFacts(many), key="k", limits=WHOLE).count('class="t"') == 10


def test_without_a_tokenizer_tokens_are_ids() -> None:
    html = RowPage(CONFIG, SCHEMA).html(RowFacts(ROW), key="k")
    assert ">97 </span>" in html and 'title="id 97' in html


def test_tokens_keep_the_space_that_a_tokenizer_drops_at_the_start() -> None:
    def sentencepiece(ids: list[int]) -> str:
        return " ".join("word" for _ in ids)

    html = RowPage(CONFIG, SCHEMA, sentencepiece).html(RowFacts(ROW), key="k")
    assert html.count("> word</span>") == 4


@pytest.mark.parametrize(
    ("error", "grades", "name"),
    [
        (None, None, "stop"),
        (None, {"mark": 1.0}, "right"),
        (None, {"mark": 0.0, "answer": "3"}, "wrong"),
        (None, {"mark": 0.0, "answer": None}, "no answer"),
        (None, {"mark": 0.25}, "0.25"),
        (None, {"grade_error": {"type": "timeout", "message": ""}}, "not graded: timeout"),
        ({"type": "bad", "message": ""}, {"mark": None}, "bad"),
    ],
)
def test_verdicts(error: Any, grades: Any, name: str) -> None:
    found = RowFacts(ROW | {"error": error}, grades).verdict
    assert found.name == name and (found.kind == "none") == (grades is None)


def test_spans_that_do_not_fit_the_text_are_left_out() -> None:
    assert RowFacts(ROW, {"answer_start": 3, "answer_end": 99}).answers("short") == []
    assert RowFacts(ROW, {"answer_start": None, "answer_end": None}).answers("short") == []
    judged = {"judge_answer_start": 0, "judge_answer_end": 2}
    assert RowFacts(ROW, judged).answers("short") == [Span(0, 2, "judge_answer")]
