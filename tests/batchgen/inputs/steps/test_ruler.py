"""`Ruler` makes texts of a chosen length, and its exam finds what stands in them."""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from batchgen.__main__ import run_command
from batchgen.evals.graders.grade import Grade
from batchgen.evals.graders.step import AnswerRow, GradeFailure
from batchgen.inputs.steps.ruler import Ruler
from batchgen.inputs.steps.ruler_texts import TASKS
from batchgen.inputs.steps.table_step import StepRow, Tools
from batchgen.util.errors import ConfigError

MODEL = Path(__file__).parents[4] / "batchgen/data/nano_hybrid"


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    return AutoTokenizer.from_pretrained(MODEL)


def rows(step: Ruler, tokenizer: Any, count: int) -> list[dict[str, Any]]:
    made = step.start(Tools({}, tokenizer))
    return [dict(made.take(StepRow(str(i), i, {}))[0]) for i in range(count)]  # type: ignore[index]


def test_rows_go_through_tasks_and_lengths_and_fill_them(tokenizer: Any) -> None:
    step = Ruler(lengths=[1500, 2000], reserve=100)
    found = rows(step, tokenizer, 22)
    assert [row["task"] for row in found] == [*TASKS] * 2 and len(TASKS) == 11
    assert [row["length"] for row in found] == [1500] * 11 + [2000] * 11
    for index, row in enumerate(found):
        tokens = len(tokenizer(row["input"]).input_ids)
        more = step.row(index, row["ruler_units"] + 1)["input"]
        assert tokens <= row["length"] - 100 < len(tokenizer(more).input_ids) + 25
        assert tokens > 0.8 * (row["length"] - 100)


def test_a_row_follows_from_its_number_and_the_seed(tokenizer: Any) -> None:
    step = Ruler(lengths=[1500])
    found, again = rows(step, tokenizer, 11), rows(step, tokenizer, 14)
    assert found == again[:11]
    assert len({row["input"] for row in again}) == 14
    other = rows(Ruler(lengths=[1500], seed=1), tokenizer, 11)
    assert not {row["input"] for row in other} & {row["input"] for row in found}
    for row in found:
        stored = {"ruler_index": row["ruler_index"], "ruler_units": row["ruler_units"]}
        assert {**step.restored({}, 0, stored), **stored} == row


def test_the_wanted_texts_stand_there(tokenizer: Any) -> None:
    for row in rows(Ruler(lengths=[1500]), tokenizer, 22):
        text, wanted = row["input"], row["outputs"]
        if row["task"] in ("niah_multivalue", "niah_multiquery"):
            asked = re.search(r"magic numbers for (.+) mentioned", text)
            assert asked is not None and f" for {asked[1]} " in row["answer_prefix"]
            keys = asked[1].replace(", and ", ", ").split(", ")
            assert len(keys) == (1 if row["task"] == "niah_multivalue" else 4)
            held = [re.findall(rf"numbers for {key} is: (\d+)\.", text) for key in keys]
            assert (
                sorted(value for values in held for value in values) == sorted(wanted)
                and len(set(wanted)) == 4
            )
        elif row["task"] == "cwe":
            counts = Counter(re.findall(r"\d+\. ([a-z]+)", text))
            assert counts == {word: 6 if word in wanted else 1 for word in counts}
            assert len(wanted) == 10 and set(wanted) < set(counts)
        elif row["task"].startswith("niah"):
            key = re.search(r"for (\S+) mentioned", text)
            assert key is not None and f" for {key[1]} " in row["answer_prefix"]
            assert re.findall(rf"s for {key[1]} is: (\S+)\.", text) == wanted
        elif row["task"] == "vt":
            chain = re.findall(r"VAR ([A-Z]{5}) = (?:VAR )?(\w+)", text)
            value = re.search(r"assigned the value (\d+)", text)
            assert value is not None
            assert [name for name, _ in chain] == wanted and len(wanted) == 5
            assert [held for _, held in chain] == [value[1], *wanted[:-1]]
        else:
            words = Counter(re.findall(r"\b[a-z]{6}\b", text.partition("words. ")[2]))
            common = [word for word, _ in words.most_common(3)]
            assert common == wanted and text.count("... ") > words[wanted[0]]


def test_common_words_are_as_often_as_the_definition_says() -> None:
    for length, (often, seldom) in {4095: (6, 1), 4096: (30, 3)}.items():
        row = Ruler(tasks=["cwe"], lengths=[length]).row(0, 20)
        counts = Counter(re.findall(r"\d+\. ([a-z]+)", row["input"]))
        assert sorted(counts.values()) == [seldom] * 20 + [often] * 10
        assert {word for word in counts if counts[word] == often} == set(row["outputs"])


def test_texts_are_those_of_the_definition() -> None:
    """As lm-eval 0.4.13 writes them."""
    step = Ruler(tasks=["niah_single_1", "vt", "fwe"], lengths=[1500])
    needle, chain, coded = (step.row(index, 8) for index in range(3))
    assert needle["input"].startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. I "
        "will quiz you about the number afterwards.\n"
    )
    assert (
        "\nThe grass is green. The sky is blue. The sun is yellow. Here we go. " in needle["input"]
    )
    assert re.search(
        r"\nWhat is the special magic number for [a-z]+-[a-z]+ mentioned in the provided text\?\Z",
        needle["input"],
    )
    assert chain["input"].startswith(
        "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n"
    )
    assert chain["answer_prefix"].endswith("are assgined the value " + re.findall(
        r"= (\d+)", chain["input"])[0] + ", they are:")  # fmt: skip
    assert coded["input"].endswith(
        "\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the "
        "three most frequently appeared words in the above coded text?"
    )


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"tasks": ["qa_1"]}, "tasks must be one of"),
        ({"tasks": []}, "at least one"),
        ({"lengths": []}, "at least one"),
        ({"lengths": [100]}, "from 768 on"),
        ({"lengths": ["x"]}, "whole numbers"),
        ({"reserve": -1}, "must be at least 0"),
    ],
)
def test_mistakes_in_options(options: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        Ruler(**options)


def test_a_model_without_tokenizer_is_refused() -> None:
    with pytest.raises(ConfigError, match="needs a model with a tokenizer"):
        Ruler().start(Tools({}))


@pytest.mark.parametrize(
    ("target", "answer", "mark"),
    [
        (["ab", "cd"], "AB and so on", 0.5),
        (["ab", "cd"], "cdab", 1.0),
        ("ab", "none", 0.0),
        (["ab"], None, 0.0),
    ],
)
def test_the_mark_is_the_share_of_the_wanted_texts(target: Any, answer: Any, mark: float) -> None:
    found = Grade(method="contains").apply(AnswerRow("", {"target": target}, {"answer": answer}))
    assert found["mark"] == mark


@pytest.mark.parametrize("target", [None, [], [1], [""], 3])
def test_no_wanted_texts(target: Any) -> None:
    with pytest.raises(GradeFailure):
        Grade(method="contains").apply(AnswerRow("", {"target": target}, {"answer": "a"}))


def test_the_exam_has_a_dry_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    own = ["+experiment=ruler", "rows=[{Ruler: {lengths: [800]}}]", "dataset.limit=5"]
    nano = ["model=nano_hybrid", "sampling.max_new_tokens=4", "prompt.too_long=truncate_left"]
    assert run_command([*own, *nano, "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "5 rows of the data set → Ruler 5" in said and "The special magic number for" in said
