"""Jobs that score given answers: columns, error rows, refusals, and what reads their folder."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from batchgen import LLM
from batchgen.cli.verb_table import run_verb
from batchgen.evals.graders.parse_score import ChoiceScore
from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import ROWS, contents, overrides, run

SCORED = ("sampling.n=1", "sampling.max_new_tokens=0", "prompt.answer=' {{ id }}!'")


def test_columns_are_those_of_the_python_interface(model: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    columns = ("output.columns=[top_logprobs,prompt_token_ids]", "output.top_logprobs=7")
    arguments = overrides(model, rows, out, *SCORED, *columns)
    assert run(arguments).exit_code == 0
    before = contents(out)
    assert "complete already" in run(arguments).message and contents(out) == before
    table = pq.read_table(out / "data")
    assert "logprobs" not in table.column_names and "answer_logprobs" in table.column_names
    with LLM(str(model), device="cpu") as llm:
        chats = [[{"role": "user", "content": row["q"]}] for row in ROWS]
        scores = llm.score(chats, [f" {row['id']}!" for row in ROWS], top_logprobs=7)
    for found, score in zip(table.to_pylist(), scores, strict=True):
        assert (found["finish_reason"], found["text"], found["token_ids"]) == ("scored", "", [])
        assert found["answer_token_ids"] == score.token_ids
        assert found["prompt_token_ids"] == score.prompt_token_ids
        assert found["num_prompt_tokens"] == len(score.prompt_token_ids)
        for name in ("answer_logprobs", "answer_top_logprobs", "answer_rest_probs"):
            np.testing.assert_array_equal(found[name], score.columns[name].tolist())
        assert found["answer_top_logprob_ids"] == score.columns["answer_top_logprob_ids"].tolist()
    metrics = json.loads((out / "metrics.json").read_text())
    assert metrics["finish_reasons"] == {"scored": len(ROWS)}


@pytest.mark.quick(1)
@pytest.mark.parametrize("verb", ["show", "report", "status", "plan", "export"])
def test_verbs_cope_with_rows_that_generated_nothing(
    verb: str, model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    arguments = overrides(model, rows, out, *SCORED)
    if verb != "plan":
        assert run(arguments).exit_code == 0
    assert run_verb(verb, arguments if verb == "plan" else [str(out)]) == 0
    said = capsys.readouterr()
    assert "Traceback" not in said.err
    if verb in ("show", "export"):
        assert "scored" in said.out


def test_rows_without_an_answer_become_errors(model: Path, tmp_path: Path) -> None:
    answers = ["yes", "", None, "long " * 200]
    data = [{"id": str(i), "q": "hi", "answer": answer} for i, answer in enumerate(answers)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, data)))
    out = tmp_path / "out"
    run(overrides(model, rows, out, *SCORED[:2], "prompt.answer='{{ answer }}'"))
    found = pq.read_table(out / "data").to_pylist()
    errors = [None if row["error"] is None else row["error"]["type"] for row in found]
    assert errors == [None, "empty_answer", "missing_field", "answer_too_long"]
    assert [row["answer_token_ids"] is None for row in found] == [False, True, True, True]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("sampling.max_new_tokens=0",), "sampling.max_new_tokens=0 generates nothing"),
        (("prompt.answer=' a'",), "prompt.answer is scored and nothing is generated after it"),
        ((*SCORED, "sampling.n=2"), "sampling.n=2 asks for several samples of"),
        ((*SCORED, "constraint=choice", "constraint.choices=[a,b]"), "constraint=choice restricts"),
        (
            (*SCORED[:2], "prompt.answer='{{ nothing }}'"),
            "prompt.answer: the data set has no column",
        ),
        (
            (*SCORED, "strategy=ar_spec", "output.columns=[step_map]"),
            "column step_map describes gener",
        ),
        ((*SCORED, "output.columns=[top_logprobs]", "output.top_logprobs=257"), "1 to 256"),
    ],
)
def test_what_makes_no_sense_is_refused(
    given: tuple[str, ...], message: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        run(overrides(model, rows, tmp_path / "out", *given))


def test_choices_are_scored_as_given_answers(model: Path, tmp_path: Path) -> None:
    """A hundred choices of unequal lengths, one the beginning of another, and rows without any."""
    many = ["yes", "yes, but", *("n" * (1 + i % 13) + str(i) for i in range(98))]
    cells = [many, ["a", "b"], None]
    data = [{"id": str(i), "q": "hi" * i, "own": cell} for i, cell in enumerate(cells)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, data)))
    for end in (False, True):
        out = tmp_path / f"out {end}"
        given = ("constraint=choice", "constraint.column=own", "constraint.scores=true")
        arguments = overrides(model, rows, out, "sampling.n=1", *given)
        run([*arguments, f"constraint.scores_end={end}"])
        found = pq.read_table(out / "data").to_pylist()
        with LLM(str(model), device="cpu", prefix_caching=False) as llm:
            assert llm.tokenizer is not None
            for row, choices in zip(found, cells, strict=True):
                assert row["error"] is None
                if choices is None:
                    assert row["choice_logprobs"] == row["choice_scores"] == []
                    continue
                ids = [llm.tokenizer.encode(c) + [256] * end for c in choices]
                scores = llm.score([{"role": "user", "content": row["q"]}], ids)
                expected = np.array([score.logprob for score in scores])
                np.testing.assert_allclose(row["choice_logprobs"], expected, atol=1e-4)
                weights = np.exp(expected - expected.max())
                np.testing.assert_allclose(row["choice_scores"], weights / weights.sum(), atol=1e-4)
                assert row["text"] in choices
            if not end:
                assert found[0]["choice_logprobs"][0] > found[0]["choice_logprobs"][1]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (("constraint.scores=true",), "constraint.scores describes a row and not its samples"),
        (("sampling.n=1", "constraint.scores_end=true"), "needs constraint.scores=true"),
        (
            ("sampling.n=1", "constraint.scores=true", "constraint.start_after=x"),
            "start_after puts free text before them",
        ),
    ],
)
def test_scores_of_choices_that_make_no_sense_are_refused(
    given: tuple[str, ...], message: str, model: Path, rows: Path, tmp_path: Path
) -> None:
    choices = ("constraint=choice", "constraint.choices=[a,b]")
    with pytest.raises(ConfigError, match=message):
        run(overrides(model, rows, tmp_path / "out", *choices, *given))


@pytest.mark.thorough
def test_a_post_step_makes_one_score_of_the_choices(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    step = "batchgen.grading.parse_score.ChoiceScore"
    given = ("constraint=choice", "constraint.choices=['1','3']", "constraint.scores=true")
    for choice, expected in (("choice: '3'", (0, 1)), ("choice: null", (1, 3))):
        out = tmp_path / choice[-3:].strip("'")
        post = f"post=[{{_target_: {step}, choices: ['1', '3'], {choice}}}]"
        assert run(overrides(model, rows, out, "sampling.n=1", *given, post)).exit_code == 0
        scores = pq.read_table(out / "grades")["score"].to_pylist()
        for score, row in zip(scores, pq.read_table(out / "data").to_pylist(), strict=True):
            assert score == pytest.approx(np.dot(row["choice_scores"], expected))
    with pytest.raises(ConfigError, match="reads the column 'choice_scores'"):
        run(overrides(model, rows, tmp_path / "none", post))
    with pytest.raises(ConfigError, match="not one of choices"):
        ChoiceScore(choices=["a", "b"], choice="c")
    with pytest.raises(ConfigError, match="not all numbers"):
        ChoiceScore(choices=["a", "2"])


def test_answers_may_be_token_ids(model: Path, tmp_path: Path) -> None:
    """They are scored as they are, also where a tokenizer would have cut the text elsewhere."""
    fine = [72, 105]
    answers = [fine, [], None, [5, 300], [9] * 1100]
    data = [{"id": str(i), "q": [1, 2, 3], "a": ids} for i, ids in enumerate(answers)]
    rows = tmp_path / "rows.jsonl"
    rows.write_text("\n".join(map(json.dumps, data)))
    keys = ("prompt=tokens", "prompt.token_ids_column=q", "prompt.answer_ids_column=a")
    arguments = overrides(model, rows, tmp_path / "out", *SCORED[:2], *keys)
    arguments = [one for one in arguments if not one.startswith("prompt.user")]
    run(arguments)
    found = pq.read_table(tmp_path / "out" / "data").to_pylist()
    errors = [None if row["error"] is None else row["error"]["type"] for row in found]
    assert errors == [None, "empty_answer", *["bad_token_ids"] * 2, "answer_too_long"]
    with LLM(str(model), device="cpu") as llm:
        score = llm.score([1, 2, 3], fine)
    assert found[0]["answer_token_ids"] == fine
    np.testing.assert_array_equal(found[0]["answer_logprobs"], score.logprobs.tolist())
    with pytest.raises(ConfigError, match="are both set: choose one"):
        run([*arguments, "prompt.answer=x"])
