"""What responses follow which instructions, and that hostile ones take no time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from batchgen import follows_instruction
from batchgen.evals.graders.instructions import Instructions
from batchgen.evals.graders.step import AnswerRow, GradeFailure
from batchgen.evals.instructions.follows_instruction import CHECKS
from batchgen.evals.instructions.ifbench_forms import REFUSED
from batchgen.evals.instructions.ifbench_words import tokens
from batchgen.evals.instructions.ifeval import IFEVAL
from batchgen.evals.instructions.sentences import count_sentences, count_words

HERE = Path(__file__).parent
CASES: dict[str, list[Any]] = yaml.safe_load((HERE / "cases.yaml").read_text())
CASES |= yaml.safe_load((HERE / "ifbench.yaml").read_text())
ROWS = [(name, *case) for name, cases in CASES.items() for case in cases]
LANGUAGES = ("language:response_language", "change_case:english_capital",
             "change_case:english_lowercase")  # fmt: skip
ARGUMENTS = {
    "keywords": ["(a+)+$", "b"], "keyword": "(a+)+$", "forbidden_words": ["(a+)+$"], "letter": "a",
    "frequency": 3, "let_frequency": 3, "relation": "at least", "let_relation": "less than",
    "capital_relation": "at least", "capital_frequency": 2, "num_words": 5, "num_sentences": 5,
    "num_paragraphs": 2, "nth_paragraph": 1, "first_word": "a", "num_placeholders": 2,
    "postscript_marker": "P.P.S", "num_bullets": 2, "num_highlights": 2, "num_sections": 2,
    "section_spliter": "SECTION", "end_phrase": "end", "language": "en", "prompt_to_repeat": "a",
    "min_words": 1, "max_words": 9, "N": 3, "small_n": 2, "percentage": 50, "word": "a",
    "reference_text": "a b c", "keyword1": "a", "keyword2": "b", "keyword3": "c", "keyword4": "d",
    "keyword5": "e", "n": 2, "m": 2, "n_start": 0, "n_end": 2, "options": "a/b", "sep": "-",
}  # fmt: skip
HOSTILE = (
    "[",
    "*",
    "-\n",
    "<<",
    "\n",
    "a. ",
    "...",
    "SECTION ",
    '"',
    "p.p.",
    "{",
    "[{",
    "A-",
    "***",
)


def test_every_instruction_has_cases() -> None:
    assert set(CASES) == set(CHECKS)
    assert len(CHECKS) == 25 + 56 and len(REFUSED) == 2
    for name, cases in CASES.items():
        verdicts = [case[2] for case in cases]
        assert len(cases) >= (4 if name in IFEVAL else 2) and {True, False} == set(verdicts), name


@pytest.mark.quick(20)
@pytest.mark.parametrize(("name", "kwargs", "response", "follows"), ROWS)
def test_a_response_follows_an_instruction(
    name: str, kwargs: dict[str, Any], response: str, follows: bool
) -> None:
    if name in LANGUAGES:
        pytest.importorskip("langdetect")
    assert follows_instruction(name, kwargs, response) is follows
    if follows:
        assert follows_instruction(name, kwargs, response, loose=True)


@pytest.mark.parametrize(
    ("name", "kwargs", "response"),
    [
        ("punctuation:no_comma", {}, "Sure, here it is:\nIt is wide."),
        ("startend:end_checker", {"end_phrase": "That is all."}, "That is all.\nDo you like it?"),
        ("startend:quotation", {}, 'Here:\n"It is wide."\nWell?'),
        ("startend:quotation", {}, '*"It is wide."*'),
    ],
)
def test_loose_checks_leave_out_lines_and_marks_that_are_not_the_answer(
    name: str, kwargs: dict[str, Any], response: str
) -> None:
    assert not follows_instruction(name, kwargs, response)
    assert follows_instruction(name, kwargs, response, loose=True)


@pytest.mark.parametrize("text", ["", " \n", "\n\n\n"])
@pytest.mark.parametrize("loose", [False, True])
def test_an_empty_response_follows_nothing(text: str, loose: bool) -> None:
    assert not follows_instruction("punctuation:no_comma", {}, text, loose=loose)


@pytest.mark.quick(1, thorough=4)
@pytest.mark.timeout(60)
@pytest.mark.parametrize("piece", HOSTILE)
def test_hostile_responses_take_a_time_in_proportion_to_their_length(piece: str) -> None:
    for name in sorted(CHECKS.keys() - set(LANGUAGES)):
        verdict = follows_instruction(name, ARGUMENTS, piece * 20_000, loose=True)
        assert verdict in (True, False)


@pytest.mark.parametrize(
    ("name", "kwargs", "message"),
    [
        (
            "keywords:extinction",
            {},
            "unknown instruction 'keywords:extinction'; known: change_case",
        ),
        (
            "keywords:existence",
            {},
            "keywords must be a list of texts, got None",
        ),
        ("keywords:existence", {"keywords": "sea"}, "keywords must be a list of texts, got 'sea'"),
        ("keywords:existence", {"keywords": ["a", 1]}, "keywords must be a list of texts"),
        ("length_constraints:number_words", {"relation": "about", "num_words": 3}, "relation must"),
        ("length_constraints:number_words", {"relation": "at least", "num_words": 2.5}, "whole"),
        ("length_constraints:number_words", {"relation": "at least", "num_words": True}, "whole"),
        (
            "length_constraints:number_words",
            {"relation": "at least", "num_words": float("inf")},
            "whole",
        ),
        ("combination:repeat_prompt", {}, "prompt_to_repeat must be a text"),
    ],
)
def test_what_is_no_instruction_is_named(name: str, kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        follows_instruction(name, kwargs, "text")


@pytest.mark.parametrize("name", sorted(REFUSED))
def test_what_no_program_can_check_is_refused_by_name(name: str) -> None:
    with pytest.raises(ValueError, match=f"{name} cannot be checked here: it needs a "):
        follows_instruction(name, {}, "Go on.")
    with pytest.raises(GradeFailure, match="cannot be checked"):
        Instructions().apply(row([name], [{}], "Go on."))


def test_tokens_are_words_parts_of_contractions_and_marks() -> None:
    text = "Don't you'll I'm well-known 3.14 1,000 a,b (x) O'Neil so?!"
    wanted = "Do n't you 'll I 'm well-known 3.14 1,000 a , b ( x ) O'Neil so ? !"
    assert tokens(text) == wanted.split()


def test_the_prompt_is_what_a_response_repeats() -> None:
    name = "combination:repeat_prompt"
    assert follows_instruction(name, {}, "How are you?\nWell.", prompt="How are you?")
    assert not follows_instruction(name, {}, "Well.", prompt="How are you?")
    own = {"prompt_to_repeat": "How are you?"}
    assert follows_instruction(name, own, "How are you?\nWell.", prompt="Other")


@pytest.mark.parametrize(
    ("text", "sentences"),
    [
        ("", 0),
        ("One", 1),
        ("One. Two! Three?", 3),
        ("One.Two", 1),
        ("Mr. Smith met Dr. A. Jones at 5 p.m. in the U.S. Department. They talked.", 2),
        ("It costs 3.50 dollars, e.g. Two.", 1),
        ("Well... perhaps. Well... Perhaps.", 3),
        ("- one\n- two\n- three", 1),
        ("1. One.\n2. Two.", 4),
        ("(He came.) She went.", 2),
        ('"He came." "She went."', 2),
        ("“He came.” She went.", 2),
        ("He saw apples, pears, etc. Then he left.", 2),
        ("He saw apples, pears, etc. and left.", 1),
        ("is it o. yes", 2),
    ],
)
def test_sentences(text: str, sentences: int) -> None:
    assert count_sentences(text) == sentences


def test_words() -> None:
    assert count_words("It's 3.5 well-known\nwords_here, naïve 日本") == 9


def row(ids: Any, kwargs: Any, text: str) -> AnswerRow:
    fields = {"instruction_id_list": ids, "kwargs": kwargs, "prompt": "How?"}
    return AnswerRow(text, fields, {})


def test_the_step_marks_a_row() -> None:
    ids = ["punctuation:no_comma", "startend:end_checker"]
    found = Instructions().apply(row(ids, [None, {"end_phrase": "End"}], "Well,\nit is the End"))
    assert found == {
        "mark": 0.0, "mark_loose": 1.0, "num_instructions": 2, "num_followed": 1,
        "num_followed_loose": 2, "not_followed": ["punctuation:no_comma"],
    }  # fmt: skip
    assert Instructions(prefix="if_").apply(row(ids[:1], [{}], "Well"))["if_mark"] == 1


@pytest.mark.parametrize(
    ("ids", "kwargs", "kind"),
    [
        (None, [{}], "no_target"),
        ([], [], "no_target"),
        (["punctuation:no_comma"], [], "no_target"),
        ("punctuation:no_comma", "{}", "no_target"),
        (["punctuation:no_comma"], ["{}"], "no_target"),
        ([3], [{}], "no_target"),
        (["no:such"], [{}], "bad_target"),
        (["keywords:existence"], [{"keywords": []}], "bad_target"),
    ],
)
def test_a_row_without_instructions_has_no_mark(ids: Any, kwargs: Any, kind: str) -> None:
    with pytest.raises(GradeFailure) as error:
        Instructions().apply(row(ids, kwargs, "text"))
    assert error.value.type == kind


def test_without_the_package_for_languages_a_row_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "langdetect", None)
    with pytest.raises(GradeFailure, match=r"pip install 'batchgen\[evals\]'") as error:
        Instructions().apply(row(["language:response_language"], [{"language": "de"}], "text"))
    assert error.value.type == "failed"
