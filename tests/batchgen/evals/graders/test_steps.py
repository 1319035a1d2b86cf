"""The steps' options, columns and errors; the table answers.yaml has what they say of texts."""

import pickle
import random
import re
import subprocess
import sys
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from batchgen.config.groups.job_config import StepConfig
from batchgen.evals.graders.answer_forms import choice_letter, normal_integer
from batchgen.evals.graders.build_steps import post_steps
from batchgen.evals.graders.extract import Extract
from batchgen.evals.graders.grade import Grade
from batchgen.evals.graders.grade_rows import Grader, StepChain
from batchgen.evals.graders.latex import boxes, latex_number, plain
from batchgen.evals.graders.parse_score import ParseScore
from batchgen.evals.graders.step import AnswerRow, GradeFailure, PostStep, arrow_schema
from batchgen.util.errors import ConfigError

FUNCTION = {"_target_": "tests.support.jobs.bad_functions.mark", "bonus": 0.5}
STEPS: list[PostStep] = [
    Extract(methods=["letter", "regex"], pattern="x(.)"),  # type: ignore[arg-type]
    Grade(method="function", function=FUNCTION, prefix="own_"),
    Grade(method="json_schema", schema={"type": "object"}),
    ParseScore(low=1, high=5, prefix="judge_"),
]


@pytest.mark.parametrize("step", STEPS, ids=lambda step: type(step).__name__)
def test_steps_can_be_pickled_and_declare_what_they_write(step: PostStep) -> None:
    assert pickle.loads(pickle.dumps(step)) == step
    row = AnswerRow("Answer: C", {"target": "C", "x": 1}, {"answer": "{}"})
    values = step.apply(row)
    assert list(values) == [column.name for column in step.columns]
    schema = arrow_schema(step.columns)
    batch = pa.RecordBatch.from_pylist([values], schema=schema)
    assert batch.to_pylist() == [values]
    assert all(field.metadata[b"meaning"] for field in schema)


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: Extract(methods=("box",)), "methods must be one of"),  # type: ignore[arg-type]
        (lambda: Extract(methods=()), "methods is empty"),
        (lambda: Extract(methods=("regex",)), "pattern belongs"),
        (lambda: Extract(pattern="x"), "pattern belongs"),
        (lambda: Extract(methods=("regex",), pattern="("), "not a regular expression"),
        (lambda: Extract(methods=("regex",), pattern="x"), "group 1"),
        (lambda: Extract(methods=("json_path",), path="a.b"), "must be like"),
        (lambda: Extract(methods=("json_path",), path="$.a[x]"), "must be like"),
        (lambda: Extract(letters="a-d"), "letters A to Z"),
        (lambda: Extract(which="all"), "first or last"),  # type: ignore[arg-type]
        (lambda: Grade(method="sum"), "method must be one of"),  # type: ignore[arg-type]
        (lambda: Grade(method="function"), "function belongs"),
        (lambda: Grade(method="function", function={"_target_": "f"}), "import path"),
        (lambda: Grade(method="function", function={"_target_": "os.no"}), "does not exist"),
        (lambda: Grade(method="function", function={"_target_": "os.sep"}), "not a function"),
        (lambda: Grade(method="exact", schema="{}"), "schema belongs"),
        (lambda: Grade(method="json_schema", schema="{"), "schema"),
        (lambda: Grade(method="json_schema", schema={"type": "x"}), "not a valid JSON Schema"),
        (lambda: Grade(method="exact", target_pattern="x"), "must have a group"),
        (lambda: Grade(method="exact", target_pattern="("), "target_pattern"),
        (lambda: ParseScore(low=2, high=2), "low must be below high"),
        (lambda: ParseScore(pattern="x"), "must have a group"),
        (lambda: ParseScore(pattern="("), "not a regular expression"),
        (lambda: StepChain((Extract(), Extract())), "write the column 'answer'"),
    ],
)
def test_mistakes_in_options_are_refused(make: Any, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        make()


@pytest.mark.parametrize(
    ("steps", "says"),
    [
        (
            [Grade(method="exact")],
            "post[0]: Grade reads the column 'answer', which no step before it writes: put a step "
            "before it that does (Extract writes answer)",
        ),
        ([Grade(method="exact"), Extract()], "put post[1] (Extract) before it"),
        ([Extract(prefix="a_"), Grade(method="math")], "choose among a_answer, a_answer_start, "),
        ([Extract(), Grade(method="choice", answer="answr")], "reads the column 'answr'"),
        ([Grade(method="function", function=FUNCTION, answer="own")], "reads the column 'own'"),
        ([ParseScore(prefix="answer_"), Grade(method="exact")], "choose among answer_score, "),
    ],
)
def test_a_column_that_no_step_before_writes_is_refused(steps: list[PostStep], says: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(says)):
        StepChain(tuple(steps))


def test_a_function_may_do_with_the_text() -> None:
    StepChain((Grade(method="function", function=FUNCTION),))
    StepChain((Extract(prefix="a_"), Grade(method="exact", answer="a_answer")))


def test_a_class_that_lacks_a_member_is_no_step() -> None:
    says = re.escape(
        "has no value_names (batchgen.evals.graders.step.PostStep says what a step has)"
    )
    with pytest.raises(ConfigError, match=says):
        post_steps([StepConfig(target="tests.support.jobs.bad_functions.StepWithoutReads")])


@pytest.mark.parametrize(
    ("text", "score"),
    [
        ("Score: 7", 7.0),
        ("The rating is **8.5**/10", 8.5),
        ("Score: 3. On reflection, score: [[9]]", 9.0),
        ('{"score": 4}', 4.0),
        ("Score: 70", None),
        ("Score: 3, then score: 70", 3.0),
        ("Very good", None),
        ("score" + " " * 100_000 + "7", None),
    ],
)
def test_scores_of_judges(text: str, score: float | None) -> None:
    values = ParseScore().apply(AnswerRow(text, {}, {}))
    assert values["score"] == score
    assert values["mark"] == (None if score is None else pytest.approx(score / 10))
    if score is not None:
        assert float(text[values["score_start"] : values["score_end"]]) == score


def test_a_function_of_the_user_gets_everything_and_gives_marks() -> None:
    step = Grade(method="function", function=FUNCTION)
    rows = [("\\boxed{5}", {"target": "5", "x": x}) for x in (1, 2)]
    with Grader([Extract(), step], workers=1) as grader:
        assert [values["mark"] for values in grader.grade(rows)] == [0.5, 0.0]
    odd = Grade(
        method="function", function={"_target_": "tests.support.jobs.bad_functions.no_mark"}
    )
    with pytest.raises(GradeFailure, match="number from 0 to 1"):
        odd.apply(AnswerRow("", {}, {}))


def test_rows_with_an_error_have_no_mark_and_no_grade_error() -> None:
    with Grader([Extract(), Grade(method="integer")]) as grader:
        (values,) = grader.grade([(None, {"target": "5"})])
    assert set(values.values()) == {None} and "grade_error" in values


def test_rows_come_in_order_whether_a_worker_has_seen_them_or_not() -> None:
    steps: list[PostStep] = [Extract(), Grade(method="regex")]
    rows: list[tuple[str | None, dict[str, str]]] = [
        (None if i % 3 == 0 else f"\\boxed{{{i}}}", {"target": f"{i - i % 2}"}) for i in range(300)
    ]
    with Grader(steps, workers=2) as grader:
        marks = [values["mark"] for values in grader.grade(rows)]
    assert marks == [None if i % 3 == 0 else float(i % 2 == 0) for i in range(300)]


def test_workers_get_no_long_text_that_they_do_not_need() -> None:
    chain = StepChain((Extract(), Grade(method="regex")))
    _, row = chain.start("x" * 1000 + "\\boxed{1}", {"target": "1", "other": "y" * 1000})
    assert row is not None and row.text == "" and dict(row.fields) == {"target": "1"}


def test_votes_for_the_right_answer_are_one() -> None:
    step = Grade(method="math")
    keys = [
        step.apply(AnswerRow("", {"target": "\\frac{1}{2}"}, {"answer": answer}))["answer_key"]
        for answer in ("1/2", "0.5", "\\dfrac12", "2")
    ]
    assert keys == ["1/2"] * 3 + ["2"]


@pytest.mark.parametrize(
    ("text", "value"),
    [("1/2", "1/2"), ("-0.5", "-1/2"), ("1,000.5", "2001/2"), ("\\frac12", "1/2"), ("--3", "3")],
)
def test_numbers(text: str, value: str) -> None:
    assert str(latex_number(text)) == value


@pytest.mark.parametrize("text", ["", ".", "1/0", "\\frac{1}{0}", "x", "1e5", "9" * 5000, "1 2"])
def test_what_is_no_number(text: str) -> None:
    assert latex_number(text) is None


def test_a_letter_wins_over_the_text_of_another_choice() -> None:
    assert choice_letter("b", ["x", "y", "b"]) == "B"
    assert choice_letter("bb", ["x", "y", "BB"]) == "C"


PIECES = ["\\boxed{", "\\fbox{", "{", "}", "\\", "\\\\", "1", " ", "\\{", "$", "\n", "\\boxed "]


def test_boxes_of_any_text_are_balanced_and_apart() -> None:
    draw = random.Random(0)
    for _ in range(3000):
        text = "".join(draw.choices(PIECES, k=draw.randrange(1, 14)))
        found = boxes(text)
        assert all(text[start:end].strip() for start, end in found)
        assert all(a[1] <= b[0] for a, b in pairwise(found))


HOSTILE = [
    "\\boxed{",
    "{",
    "\\text{",
    "answer ",
    "1,",
    "-",
    "$",
    "```json\n",
    "score: ",
    "\\ ",
    "(",
    "9",
]


@pytest.mark.quick(1)
@pytest.mark.timeout(120)  # quadratic time would be hours
@pytest.mark.parametrize("piece", HOSTILE)
def test_no_text_takes_long(piece: str) -> None:
    """Steps that run in the job's own process must take time in proportion to the text."""
    text = piece * (200_000 // len(piece))
    Extract(methods=("boxed", "letter", "last_number", "whole")).apply(AnswerRow(text, {}, {}))
    ParseScore().apply(AnswerRow(text, {}, {}))
    normal_integer(text)
    plain(text)


def test_nothing_heavy_is_imported() -> None:
    program = (
        "import sys, batchgen.evals.graders.grade_rows, batchgen.evals.graders.extract, "
        "batchgen.evals.graders.grade, "
        "batchgen.evals.graders.parse_score, batchgen.evals.graders.choices; "
        "print({'torch', 'numpy', 'pyarrow', 'sympy', 'hydra'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "set()", done.stderr


WORDS = st.sampled_from(
    [
        *"{}7 \n\\$éx",
        "<think>",
        "</think>",
        "\\boxed{",
        "\\boxed 7 ",
        "\\fbox{",
        "Answer: B",
        "1,000",
    ]
)
TARGETS: list[list[Any]] = [
    [None, "7", 7, "1000", "B", "x = 7", "none"],
    ["7", "-7", "0", "-0", "07", " 7", "7\n", "1,000", "7\ud800", None],
    [7, -7, 0, 1000, None],
    [7, 2**70],
    [True],
    [7.0, 7.5],
]


@st.composite
def answered_rows(draw: st.DrawFn) -> list[Any]:
    """Texts with targets and choices. Columns are often of one type, and sometimes of several."""
    text = st.none() | st.lists(WORDS, max_size=9).map("".join)
    text |= st.sampled_from(["7", "-7", "0", "\\,7", "1000"]).map("It is \\boxed{{{}}}.".format)
    target = st.sampled_from(draw(st.sampled_from(TARGETS)))
    choices = st.sampled_from([None, ["iron", "7"]])
    return draw(st.lists(st.tuples(text, target, choices), max_size=6))


CHAINS = [
    (Extract(), Grade(method="integer")),
    (Extract(methods=("last_number", "whole"), which="first"), Grade(method="exact")),
    (Extract(reasoning_required=True), Grade(method="integer", prefix="a_"), Grade(method="exact")),
    (Extract(methods=("letter", "boxed"), reasoning_start=None), Grade(method="choice")),
    (Extract(), Grade(method="integer", target_pattern="([0-9])")),
]


@pytest.mark.quick(2)
@pytest.mark.parametrize("steps", CHAINS, ids=lambda steps: "-".join(str(s)[:40] for s in steps))
@given(rows=answered_rows())
def test_columns_have_the_values_of_rows(steps: tuple[PostStep, ...], rows: list[Any]) -> None:
    chain = StepChain(steps)
    assert chain.takes_columns
    fields = [{"target": target, "choices": choices} for _, target, choices in rows]
    texts = [text for text, _, _ in rows]
    columns = {name: [row[name] for row in fields] for name in ("target", "choices")}
    padded = pa.array(["before", *texts, "behind"], pa.string())
    found = chain.all_values(padded.slice(1, len(texts)), columns)
    with Grader(steps) as grader:
        wanted = list(grader.grade(zip(texts, fields, strict=True)))
    assert [{name: column[at] for name, column in found.items()} for at in range(len(rows))] == (
        wanted
    )


def test_steps_that_can_hang_or_know_rows_only_take_no_columns() -> None:
    assert not StepChain((Extract(), Grade(method="regex"))).takes_columns
    assert not StepChain((Extract(), ParseScore())).takes_columns


@given(st.lists(WORDS, max_size=12).map("".join))
def test_one_box_is_found_as_among_others(text: str) -> None:
    """A text with one box goes a shorter way, and a box before it makes it go the longer one."""
    assume("\\\\" not in text)  # two backslashes are a line break, unless the box begins there
    before = "\\boxed{1} "
    found = [(start - len(before), end - len(before)) for start, end in boxes(before + text)]
    assert [span for span in found if span[0] >= 0] == boxes(text)


def test_a_wrong_answer_in_another_unit_does_not_vote_for_the_right_one() -> None:
    step = Grade(method="math", choices=None)
    for target, wrong in (("5 cm", "5 m"), ("y = 5", "x = 5")):
        graded = {
            answer: step.apply(AnswerRow("", {"target": target}, {"answer": answer}))
            for answer in (target, "5", wrong)
        }
        marks = [values["mark"] for values in graded.values()]
        right, bare, other = (values["answer_key"] for values in graded.values())
        assert marks == [1, 1, 0] and right == bare != other
