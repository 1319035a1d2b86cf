"""Jobs of a model that writes Harmony: columns, days, constraints, and what people see of them."""

from __future__ import annotations

import json
import re
from datetime import date
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow.parquet as pq
import pytest

from batchgen.__main__ import run_command
from batchgen.cli.verbs import show
from batchgen.cli.verbs.validate import validate
from batchgen.config.compose.compose_config import compose
from batchgen.engine.loading.tokenizer import eos_token_ids
from batchgen.inputs.prompts import chat_templates
from batchgen.util.errors import ConfigError
from tests.support.jobs.harmony_model import ids, save_model, tokenizer
from tests.support.jobs.real_job import overrides, run

MESSAGE = re.compile(
    r"<\|channel\|>(\w+)( to=\S+?)?(?:<\|constrain\|>json)?<\|message\|>(.*?)"
    r"(?=<\|end\|>|<\|return\|>|<\|call\|>|$)"
)
LONGER = "sampling.max_new_tokens=24"
SCHEMA = {"type": "object", "properties": {"b": {"type": "boolean"}}, "required": ["b"]}
FORMAT = {"type": "json_schema", "json_schema": {"schema": SCHEMA}}


@pytest.fixture(scope="session")
def harmony(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_model(tmp_path_factory.mktemp("harmony"))


def table(out: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = pq.read_table(out / "data", partitioning=None).to_pylist()
    return found


def said(row: dict[str, Any], channel: str, *, to_tool: bool = False) -> list[str]:
    """What a row says in a channel, found in its text with the tokens of the format."""
    text = str(tokenizer().decode(row["token_ids"], skip_special_tokens=False))
    found = MESSAGE.findall(text)
    return [said for name, tool, said in found if name == channel and bool(tool) == to_tool]


def joined(texts: list[str]) -> str | None:
    return "\n\n".join(filter(None, texts)) if texts else None


def test_the_columns_and_what_people_see(
    harmony: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert eos_token_ids(harmony, tokenizer()) == tuple(sorted(ids("<|return|><|call|>")))
    out = tmp_path / "out"
    options = ["prompt.template_kwargs={reasoning_effort: low}", "prompt.date=2026-01-02"]
    step = "post=[{_target_: batchgen.grading.extract.Extract, methods: [whole]}]"
    result = run(overrides(harmony, rows, out, LONGER, *options, "sampling.n=8", step,
                           "output.columns=[prompt_token_ids]", "output.report=true"))  # fmt: skip
    found = table(out)
    names = list(found[0])
    at = names.index("text")
    assert names[at + 1 : at + 5] == ["reasoning", "commentary", "tool_calls", "channel"]
    for row in found:
        calls = [*said(row, "commentary", to_tool=True), *said(row, "analysis", to_tool=True)]
        last = row["token_ids"][-1]
        if last != ids("<|call|>")[0]:
            assert row["text"] == joined(said(row, "final"))
            assert row["reasoning"] == joined(said(row, "analysis"))
            assert row["commentary"] == joined(said(row, "commentary"))
            assert [call["arguments"] for call in row["tool_calls"] or ()] == calls
        expected = {ids("<|call|>")[0]: "tool_call"}.get(last, "length")
        if last == ids("<|return|>")[0]:
            expected = "stop" if row["channel"] == "final" else "no_answer"
        assert row["finish_reason"] == expected
    reasons = {row["finish_reason"] for row in found}
    assert reasons == {"stop", "length", "tool_call", "no_answer"}
    prompt = tokenizer().decode(found[0]["prompt_token_ids"])
    assert "Today: 2026-01-02\nReasoning: low" in prompt
    cut = [row for row in found if row["finish_reason"] == "length" and row["channel"] != "final"]
    metrics = json.loads((out / "metrics.json").read_text())
    assert sum(n for name, n in metrics["cut_in"].items() if name != "final") == len(cut)
    told = f"{len(cut)} of {len(found)} answers"
    assert told in result.message and "before the model began to answer" in result.message
    assert told in (out / "report.html").read_text()
    # An answer that is not there is no error: it counts as wrong, and is no example for training.
    grades = pq.read_table(out / "grades", partitioning=None).to_pylist()
    assert [row["reasoning_end"] is not None for row in grades] == [True] * len(found)
    capsys.readouterr()
    assert show.main([str(out)]) == 0
    assert "reasoning" in (shown := capsys.readouterr().out) and "tool_call" in shown
    sft = tmp_path / "sft.jsonl"
    assert run_command([*f"export {out} --to sft --reasoning reasoning --out {sft}".split()]) == 0
    answered = [row for row in found if row["text"] is not None]
    assert f"{len(found) - len(answered)} left out without a text" in capsys.readouterr().err
    lines = [json.loads(line)["messages"][-1] for line in sft.read_text().splitlines()]
    assert [line["content"] for line in lines] == [row["text"] for row in answered]
    assert [line["reasoning_content"] for line in lines] == [row["reasoning"] for row in answered]
    openai = tmp_path / "openai.jsonl"
    assert run_command([*f"export {out} --to openai --out {openai}".split()]) == 0
    first = json.loads(openai.read_text().splitlines()[0])["response"]["body"]["choices"]
    for choice, row in zip(first, found, strict=False):
        called = row["finish_reason"] == "tool_call"
        assert (choice["finish_reason"] == "tool_calls") == called
        if called:
            assert choice["message"]["tool_calls"][-1]["function"] == row["tool_calls"][-1]


@pytest.mark.thorough
def test_the_day_of_the_job_stays(harmony: Path, rows: Path, tmp_path: Path) -> None:
    out, columns = tmp_path / "out", "output.columns=[prompt_token_ids]"
    with mock.patch.object(chat_templates, "date", mock.Mock(today=lambda: date(2026, 3, 4))):
        run(overrides(harmony, rows, out, columns, "dataset.limit=5"))
    with mock.patch.object(chat_templates, "date", mock.Mock(today=lambda: date(2026, 3, 5))):
        run(overrides(harmony, rows, out, columns))
        with pytest.raises(ConfigError, match=r"prompt\.date") as refused:
            run(overrides(harmony, rows, out, columns, "prompt.date=2026-03-05"))
        again = tmp_path / "again"
        run(overrides(harmony, rows, again, columns, "dataset.limit=1"))
    assert 'prompt.date: "2026-03-04" → "2026-03-05"' in str(refused.value)
    prompts = [tokenizer().decode(row["prompt_token_ids"]) for row in table(out)]
    assert len(prompts) == 22 and all("Today: 2026-03-04" in prompt for prompt in prompts)
    assert "Today: 2026-03-05" in tokenizer().decode(table(again)[0]["prompt_token_ids"])
    assert "date: '2026-03-04'" in (out / "config.yaml").read_text()
    assert (
        json.loads((out / "manifest.json").read_text())["identity"]["prompt"]["date"]
        == "2026-03-04"
    )


@pytest.mark.thorough
@pytest.mark.parametrize("strategy", ["ar", "ar_spec"])
def test_a_constraint_holds_in_the_final_channel(
    harmony: Path, tmp_path: Path, strategy: str
) -> None:
    rows, out = tmp_path / "rows.jsonl", tmp_path / "out"
    given = [
        {"id": f"r{i}", "q": f"{i}?", "options": {"response_format": FORMAT} if i % 2 else None}
        for i in range(10)
    ]
    rows.write_text("".join(json.dumps(row) + "\n" for row in given))
    more = ["sampling.column=options", "sampling.max_new_tokens=80", "sampling.n=4"]
    arguments = overrides(harmony, rows, out, *more, f"strategy={strategy}")
    run([*arguments, "dataset.limit=5"])
    run(arguments)
    found = table(out)
    free = [row for row in found if row["constraint_satisfied"] is None]
    held = [row for row in found if row["constraint_satisfied"] is not None]
    assert len(free) == len(held) == 20
    done = [row for row in held if row["constraint_satisfied"]]
    assert len(done) > 6 and any(row["reasoning"] for row in done)
    for row in done:
        assert set(json.loads(row["text"])) == {"b"}
        assert (row["finish_reason"], row["channel"]) == ("stop", "final")
    assert {row["finish_reason"] for row in held} <= {"stop", "length"}
    assert {"tool_call", "no_answer"} <= {row["finish_reason"] for row in free}
    assert all(not set(ids("<|return|><|call|>")) & {*row["token_ids"][:-1]} for row in held)


@pytest.mark.thorough
def test_a_constraint_of_all_rows(harmony: Path, rows: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    schema = ["constraint=json_schema", f"constraint.schema={json.dumps(SCHEMA)}"]
    longer = ["sampling.max_new_tokens=80", "output.columns=[parsed]", "dataset.limit=6"]
    run(overrides(harmony, rows, out, *schema, *longer))
    done = [row for row in table(out) if row["constraint_satisfied"]]
    assert done and all(json.loads(row["text"]) == row["parsed"] for row in done)
    report = validate(out)
    assert report.counts["valid"] == len(done) and not report.counts["invalid"]


@pytest.mark.thorough
def test_the_text_may_stay_whole(harmony: Path, rows: Path, tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    few = "dataset.limit=4"
    run(overrides(harmony, rows, parts, LONGER, few))
    run(overrides(harmony, rows, whole, LONGER, few, "output.whole_text=true"))
    for one, other in zip(table(parts), table(whole), strict=True):
        assert one["token_ids"] == other["token_ids"] and "channel" not in other
        assert other["text"] == tokenizer().decode(one["token_ids"], skip_special_tokens=True)
        assert other["finish_reason"] in ("stop", "length")


@pytest.mark.thorough
def test_copied_rows_are_the_computed_ones(harmony: Path, rows: Path, tmp_path: Path) -> None:
    older, newer = tmp_path / "older", tmp_path / "newer"
    day = "prompt.date=2026-01-02"
    run(overrides(harmony, rows, older, LONGER, day, "output.reuse=[]"))
    run(overrides(harmony, rows, newer, LONGER, day, f"output.reuse=[{older}]"))
    assert table(older) == table(newer)
    metrics = json.loads((newer / "metrics.json").read_text())
    assert metrics["rows_copied"] == 22


@pytest.mark.thorough
def test_what_is_refused(
    harmony: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    regex = ["constraint=regex", "constraint.pattern=a+"]
    choice = ["constraint=choice", "constraint.choices=[a,b]", "constraint.scores=true"]
    for given, why in (
        ([*regex, "constraint.start_after=x"], "constraint.start_after must be null with this"),
        ([*regex, "output.whole_text=true"], "leave one out"),
        ([*choice, "sampling.n=1"], "constraint.scores gives the probabilities"),
        (["prompt.template_kwargs={reasoning_effort: huge}"], "low, medium, high, got 'huge'"),
        (["prompt.date=tomorrow"], "a day such as 2026-11-25, got 'tomorrow'"),
        (["output.whole_text=true", "output.reasoning_end=x"], "choose one"),
    ):
        with pytest.raises(ConfigError, match=re.escape(why)):
            run(overrides(harmony, rows, tmp_path / "out", *given))
    text = ["prompt=text", "prompt.text={{ q }}", "~prompt.user"]
    arguments = overrides(harmony, rows, tmp_path / "out", "dataset.limit=1")
    run([*(one for one in arguments if not one.startswith("prompt.")), *text[:2]])
    assert "leaves out the chat format of the model (Harmony)" in capsys.readouterr().err


def test_other_models_have_no_day(model: Path, rows: Path, tmp_path: Path) -> None:
    config = compose({}, overrides(model, rows, tmp_path / "out"))
    assert config.prompt.kind == "chat" and config.prompt.date is None
    with pytest.raises(
        ConfigError, match=r"prompt\.date: the model's chat template writes no date"
    ):
        run(overrides(model, rows, tmp_path / "out", "prompt.date=2026-01-02"))
