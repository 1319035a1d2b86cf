"""`batchgen export --to`: files that trainers and OpenAI's programs read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from hypothesis import given
from hypothesis import strategies as st
from transformers import AutoTokenizer

from batchgen.__main__ import run_command
from batchgen.pipelines.publish.trainers.row_groups import (
    GroupMember,
    adjacent_groups,
    pairs,
    scattered_groups,
)
from tests.support.jobs.finished_job import Row, finished_job, row
from tests.support.jobs.real_job import save_tokenizer
from tests.support.jobs.trl_rules import (
    check_preference,
    check_stepwise,
    check_templates,
    is_conversational,
    type_of,
)

CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
INPUT = {"meaning": "as in the input"}


def job_of(path: Path, texts: list[list[str | None]], **options: Any) -> Path:
    """A graded job with these texts [rows][samples]; `yes` is right."""
    rows = [row(i, k, text=t) for i, row_ in enumerate(texts) for k, t in enumerate(row_)]
    return finished_job(path, rows, graded=True, **options)


def run(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def exported(out: Path) -> list[dict[str, Any]]:
    """The rows of a file as `load_dataset` gives them, for both formats."""
    kind = "parquet" if out.suffix == ".parquet" else "json"
    data = load_dataset(kind, data_files=str(out), split="train", cache_dir=str(out.parent / "c"))
    return list(data)


SUFFIXES = pytest.mark.parametrize("suffix", ["jsonl", "jsonl.gz", "parquet"])


@SUFFIXES
def test_sft_is_the_conversation_of_each_answer(
    tmp_path: Path, suffix: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = {"prompt": {"kind": "chat", "system": "Be brief.", "user": "Q: {{ question }}"}}
    job = job_of(tmp_path / "job", [["yes", "no"], [None, "yes"]], config=config)
    out = tmp_path / f"out.{suffix}"
    assert run("export", job, "--to", "sft", "--where", "mark == 1", "--out", out) == 0
    assert "2 rows" in (said := capsys.readouterr().err)
    assert "1 left out by --where" in said and "1 left out with an error" in said
    found = exported(out)
    assert [one["messages"][1]["content"] for one in found] == ["Q: question 0", "Q: question 1"]
    assert found[0] == {
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Q: question 0"},
            {"role": "assistant", "content": "yes"},
        ]
    }
    assert {type_of(one) for one in found} == {"language modeling"}
    assert all(map(is_conversational, found))


def test_sft_of_a_plain_text_is_a_prompt_and_its_completion(tmp_path: Path) -> None:
    config = {"prompt": {"kind": "text", "text": "{{ question }} ->"}}
    job = job_of(tmp_path / "job", [["yes"]], config=config)
    assert run("export", job, "--to", "sft", "--out", tmp_path / "out.jsonl") == 0
    (found,) = exported(tmp_path / "out.jsonl")
    assert found == {"prompt": "question 0 ->", "completion": "yes"}
    assert type_of(found) == "prompt-completion" and not is_conversational(found)


def test_messages_that_a_user_gives_go_first(tmp_path: Path) -> None:
    """A judge's job exports the answers that it has judged."""
    reply = pa.field("reply", pa.string(), metadata=INPUT)
    rows = [row(i, text=t, reply=f"reply {i}") for i, t in enumerate(["yes", "no"])]
    job = finished_job(tmp_path / "job", rows, [reply], graded=True)
    messages = '[{user: "{{ question }}"}, {assistant: "{{ reply }}"}]'
    out = tmp_path / "out.jsonl"
    asked = ("--to", "sft", "--where", "text == 'yes'", "--messages", messages)
    assert run("export", job, *asked, "--out", out) == 0
    assert [[m["content"] for m in one["messages"]] for one in exported(out)] == [
        ["question 0", "reply 0"]
    ]


def test_stored_conversations_templates_of_messages_and_continued_ones(tmp_path: Path) -> None:
    said = [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Yes"},
            {"from": "human", "value": "So?"}]  # fmt: skip
    kind = pa.list_(pa.struct([("from", pa.string()), ("value", pa.string())]))
    fields = [pa.field("talk", kind, metadata=INPUT)]
    asked = [{"user": "{{ question }}"}]
    prompts: dict[str, dict[str, Any]] = {
        "stored": {"kind": "chat", "messages_column": "talk", "system": "S"},
        "turns": {"kind": "chat", "messages": [*asked, {"assistant": "A"}, {"user": "B"}]},
        "continued": {
            "kind": "chat", "continue": True, "messages": [*asked, {"assistant": "So: "}],
        },
    }  # fmt: skip
    found = {}
    for name, prompt in prompts.items():
        job = finished_job(tmp_path / name, [row(0, talk=said)], fields, config={"prompt": prompt})
        assert run("export", job, "--to", "sft", "--out", tmp_path / f"{name}.jsonl") == 0
        (one,) = exported(tmp_path / f"{name}.jsonl")
        found[name] = [(m["role"], m["content"]) for m in one["messages"]]
    assert found == {
        "stored": [
            ("system", "S"), ("user", "Hi"), ("assistant", "Yes"), ("user", "So?"),
            ("assistant", "yes"),
        ],
        "turns": [("user", "question 0"), ("assistant", "A"), ("user", "B"), ("assistant", "yes")],
        "continued": [("user", "question 0"), ("assistant", "So: yes")],
    }  # fmt: skip


def calls(arguments: object) -> list[dict[str, Any]]:
    call = {"type": "function", "function": {"name": "f", "arguments": arguments}}
    return [
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "r", "name": "f"},
    ]


@pytest.mark.parametrize("asked", ["--to sft", "--to dpo --by mark", "--to grpo", "--columns talk"])
def test_fields_that_a_row_never_had_are_in_no_training_file(tmp_path: Path, asked: str) -> None:
    """Parquet pads the structs of a column with the fields of all rows."""
    talks = [calls({"city": "Oslo"}), calls({"days": 2, "of": {"week": 1}}), calls({})]
    padded = pa.array(talks)
    assert "days" in padded[0].as_py()[1]["tool_calls"][0]["function"]["arguments"]
    fields = [pa.field("talk", padded.type, metadata=INPUT)]
    texts = [(0, "yes"), (1, "no")]
    rows = [row(i, k, text=t, talk=talk) for i, talk in enumerate(talks) for k, t in texts]
    config = {"prompt": {"kind": "chat", "messages_column": "talk"}}
    job = finished_job(tmp_path / "job", rows, fields, graded=True, config=config)
    out = tmp_path / "out.jsonl"
    where = ["--where", "text == 'yes'"] if "dpo" not in asked else []
    assert run("export", job, *asked.split(), *where, "--out", out) == 0
    found = [json.loads(line) for line in out.read_text().splitlines()]
    (key,) = {"messages", "prompt", "talk"} & found[0].keys()
    assert [one[key][:3] for one in found] == talks


def test_tools_are_json_and_reasoning_is_a_key_of_the_answer(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
    fields = [pa.field("tools", pa.string(), metadata=INPUT), pa.field("reasoning", pa.string())]
    rows = [row(0, tools=json.dumps([tool]), reasoning="Hm.")]
    config = {"prompt": {"kind": "chat", "user": "{{ question }}", "tools_column": "tools"}}
    job = finished_job(tmp_path / "job", rows, fields, config=config)
    for suffix in ("jsonl", "parquet"):
        out = tmp_path / f"out.{suffix}"
        assert run("export", job, "--to", "sft", "--reasoning", "reasoning", "--out", out) == 0
        (found,) = exported(out)
        assert json.loads(found["tools"]) == [tool]
        assert found["messages"][-1] == {
            "role": "assistant", "content": "yes", "reasoning_content": "Hm.",
        }  # fmt: skip


def test_bodies_of_openai_have_their_messages_and_tools(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "f"}}
    body = {"messages": [{"role": "user", "content": "Hi"}], "tools": [tool]}
    fields = [pa.field("body", pa.string(), metadata=INPUT)]
    config = {"prompt": {"kind": "openai", "body_column": "body"}}
    job = finished_job(tmp_path / "job", [row(0, body=json.dumps(body))], fields, config=config)
    assert run("export", job, "--to", "sft", "--out", tmp_path / "out.jsonl") == 0
    (found,) = exported(tmp_path / "out.jsonl")
    assert [m["content"] for m in found["messages"]] == ["Hi", "yes"]
    assert json.loads(found["tools"]) == [tool]


@SUFFIXES
def test_dpo_pairs_the_answers_of_a_row(tmp_path: Path, suffix: str) -> None:
    texts: list[list[str | None]] = [
        ["no", "yes", "yes", "No"],
        ["yes"] * 4,
        [None, "no", "yes", None],
    ]
    job = job_of(tmp_path / "job", texts, in_shard=4)
    out = tmp_path / f"out.{suffix}"
    assert run("export", job, "--to", "dpo", "--by", "mark", "--pairs", 2, "--out", out) == 0
    found = exported(out)
    save_tokenizer(tmp_path / "tokenizer")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokenizer.chat_template = CHATML
    for one in found:
        check_preference(one)
        assert is_conversational(one)
        check_templates(one, tokenizer)
    seen = [
        (o["prompt"][0]["content"], o["chosen"][0]["content"], o["rejected"][0]["content"])
        for o in found
    ]
    assert seen == [
        ("Q: question 0", "yes", "no"), ("Q: question 0", "yes", "No"),
        ("Q: question 2", "yes", "no"),
    ]  # fmt: skip
    assert {(one["score_chosen"], one["score_rejected"]) for one in found} == {(1.0, 0.0)}
    assert set(found[0]) == {"prompt", "chosen", "rejected", "score_chosen", "score_rejected"}


def test_dpo_across_pairs_answers_that_two_writers_gave_to_one_row(tmp_path: Path) -> None:
    source = pa.struct(
        [("row_id", pa.string()), ("sample_index", pa.int32()), ("digest", pa.string())]
    )
    fields = [
        pa.field("reply", pa.string(), metadata=INPUT),
        pa.field("source", source, metadata=INPUT),
        pa.field("score", pa.float64(), metadata=INPUT),
    ]
    given = [("a", "q1", 0, 3), ("a", "q1", 1, 9), ("a", "q2", 0, 5), ("b", "q1", 0, 1),
             ("b", "q2", 0, 5), ("b", "q3", 0, 7)]  # fmt: skip
    rows: list[Row] = []
    for i, (writer, name, sample, score) in enumerate(given):
        of = {"row_id": f"{writer}/{name}", "sample_index": sample, "digest": "x"}
        one = row(i, text=str(score), reply=f"{writer}{sample}", source=of, score=score)
        rows.append({**one, "row_id": f"{writer}/{name}#{sample}", "question": f"about {name}"})
    config = {"dataset": {"kind": "job", "path": ["out/a", "out/b"]}}
    job = finished_job(tmp_path / "judge", rows, fields, config=config)
    messages = '[{user: "{{ question }}"}, {assistant: "{{ reply }}"}]'
    asked = ("--to", "dpo", "--by", "score", "--gap", "2", "--across", "--messages", messages)
    assert run("export", job, *asked, "--pairs", 5, "--out", tmp_path / "out.jsonl") == 0
    found = exported(tmp_path / "out.jsonl")
    for one in found:
        check_preference(one)
    assert [
        (
            o["prompt"][0]["content"],
            o["chosen"][0]["content"],
            o["rejected"][0]["content"],
            o["score_chosen"],
        )
        for o in found
    ] == [("about q1", "a1", "b0", 9), ("about q1", "a1", "a0", 9), ("about q1", "a0", "b0", 3)]


def test_a_pair_has_one_prompt(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = job_of(tmp_path / "job", [["yes", "no"]])
    messages = '[{user: "Is {{ text }} right?"}, {assistant: "{{ text }}"}]'
    asked = ("--to", "dpo", "--by", "mark", "--messages", messages)
    assert run("export", job, *asked, "--out", tmp_path / "out.jsonl") == 2
    assert "different prompts" in capsys.readouterr().err
    assert not (tmp_path / "out.jsonl").exists()


@SUFFIXES
def test_kto_labels_every_answer(tmp_path: Path, suffix: str) -> None:
    job = job_of(tmp_path / "job", [["yes", "no"], [None, "yes"]])
    out = tmp_path / f"out.{suffix}"
    assert run("export", job, "--to", "kto", "--label", "mark == 1", "--out", out) == 0
    found = exported(out)
    assert [(one["completion"][0]["content"], one["label"]) for one in found] == [
        ("yes", True), ("no", False), ("yes", True),
    ]  # fmt: skip
    assert {type_of(one) for one in found} == {"unpaired preference"}
    assert all(map(is_conversational, found))


@SUFFIXES
def test_grpo_is_a_prompt_for_each_row_with_its_difficulty(tmp_path: Path, suffix: str) -> None:
    job = job_of(tmp_path / "job", [["yes", "no", "no", None], ["no"] * 4, [None] * 4])
    out = tmp_path / f"out.{suffix}"
    assert run("export", job, "--to", "grpo", "--out", out) == 0
    found = exported(out)
    assert found == [
        {"prompt": [{"role": "user", "content": f"Q: question {i}"}], "answer": "yes",
         "pass_rate": rate, "row_id": f"id{i}"}
        for i, rate in ((0, pytest.approx(1 / 3)), (1, 0))
    ]  # fmt: skip
    assert {type_of(one) for one in found} == {"prompt only"}


@SUFFIXES
def test_prm_is_texts_with_a_label_for_each_step(tmp_path: Path, suffix: str) -> None:
    fields = [
        pa.field("steps", pa.list_(pa.string()), metadata=INPUT),
        pa.field("good", pa.list_(pa.float32()), metadata=INPUT),
    ]
    rows = [row(0, steps=["1 + 1", "= 2"], good=[0.9, 0.2]), row(1, steps=[], good=[])]
    job = finished_job(tmp_path / "job", rows, fields)
    out = tmp_path / f"out.{suffix}"
    labels = "good | map('round') | list"
    assert run("export", job, "--to", "prm", "--labels", labels, "--out", out) == 0
    (found,) = exported(out)
    check_stepwise(found)
    assert found == {
        "prompt": "Q: question 0", "completions": ["1 + 1", "= 2"], "labels": [True, False],
    }  # fmt: skip


def test_openai_lines_have_a_choice_for_each_answer_and_an_error_for_a_row_without(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job", [["yes", "no"], [None, "yes"], [None, None]])
    assert run("export", job, "--to", "openai") == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["custom_id"] for line in lines] == ["id0", "id1", "id2"]
    assert all(set(line) == {"id", "custom_id", "response", "error"} for line in lines)
    response = lines[0]["response"]
    assert response["status_code"] == 200 and response["request_id"].startswith("req_")
    body = response["body"]
    assert body["object"] == "chat.completion" and body["model"] == "a model"
    assert [(c["index"], c["message"]["content"], c["finish_reason"]) for c in body["choices"]] == [
        (0, "yes", "stop"), (1, "no", "stop"),
    ]  # fmt: skip
    assert body["usage"] == {"prompt_tokens": 10, "completion_tokens": 5, "total_tokens": 15}
    assert [c["index"] for c in lines[1]["response"]["body"]["choices"]] == [1]
    assert lines[2]["response"] is None
    assert lines[2]["error"] == {"code": "bad_row", "message": "row 2"}
    assert run("export", job, "--to", "openai") == 0
    assert [json.loads(line) for line in capsys.readouterr().out.splitlines()] == lines


def test_a_folder_has_shards_a_card_and_where_it_came_from(tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", [["yes", "no"]] * 3)
    out = tmp_path / "pairs"
    asked = ("export", job, "--to", "dpo", "--by", "mark", "--out", out)
    assert run(*asked) == 0
    data = load_dataset(str(out), split="train", cache_dir=str(tmp_path / "c"))
    assert len(data) == 3
    check_preference(data[0])
    facts = json.loads((out / "selection.json").read_text())
    assert facts["kind"] == "dpo" and facts["jobs"][0]["path"] == str(job)
    assert "`nowhere`" in (out / "README.md").read_text()
    before = (out / "README.md").read_bytes()
    assert run(*asked) == 0 and (out / "README.md").read_bytes() == before
    assert run(*asked[:-2], "--pairs", 2, "--out", out) == 2


def test_a_set_is_exported_as_its_job_is(tmp_path: Path) -> None:
    texts: list[list[str | None]] = [["no", "yes", "yes"], ["yes", "no", "no"]]
    job = job_of(tmp_path / "job", texts)
    assert run("select", job, "--by", "mark", "--out", tmp_path / "set") == 0
    for to, *more in (
        ("sft",),
        ("dpo", "--by", "mark"),
        ("kto", "--label", "mark == 1"),
        ("grpo",),
    ):
        for name in ("job", "set"):
            out = tmp_path / f"{to}-{name}.jsonl"
            assert run("export", tmp_path / name, "--to", to, *more, "--out", out) == 0
        rows = [
            sorted(
                json.dumps({**one, "row_id": ""}) for one in exported(tmp_path / f"{to}-{n}.jsonl")
            )
            for n in ("job", "set")
        ]
        assert rows[0] == rows[1]


def test_where_also_chooses_the_rows_of_the_plain_formats(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = job_of(tmp_path / "job", [["yes"], ["no"], ["yes"]])
    assert run("export", job, "--where", "mark == 0", "--columns", "row_id,text") == 0
    assert capsys.readouterr().out == '{"row_id": "id1", "text": "no"}\n'
    assert run("select", job, "--where", "mark == 1", "--out", tmp_path / "set") == 0
    capsys.readouterr()
    assert run("export", tmp_path / "set", "--columns", "id,response", "--format", "csv") == 0
    assert capsys.readouterr().out == "id,response\nid0#0,yes\nid2#0,yes\n"


@pytest.mark.quick(5)
@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--to dpo", "--to dpo needs --by"),
        ("--to kto", "--to kto needs --label"),
        ("--to sft --by mark", "--by is not for --to sft"),
        ("--to dpo --by marks", "no column 'marks'"),
        ("--to dpo --by mark --across", "--across needs rows with the column"),
        ("--to prm", "no column 'steps'"),
        ("--to grpo --answer gold", "no column 'gold'"),
        ("--to sft --columns text", "--columns is not for --to sft"),
        ("--to sft --messages '[{user: x}]'", "must end with the assistant's"),
        (
            "--to sft --messages '[{user: \"{{ nothing }}\"}, {assistant: x}]'",
            "no column 'nothing'",
        ),
        ("--to sft --messages '{user: x}'", "must be a list"),
        ("--to sft --reasoning thoughts", "no column 'thoughts'"),
        ("--to sft --out out.csv", "writes .jsonl"),
        ("--to openai --out out.parquet", "writes JSON lines"),
        ("--gap 1", "--gap needs --to"),
        ("--to dpo --by mark --gap -1", "give 0 or more"),
        ("--to dpo --by mark --pairs 0", "give at least 1"),
    ],
)
def test_an_option_that_does_not_fit_is_refused_by_name(
    arguments: str,
    says: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    import shlex

    monkeypatch.chdir(tmp_path)
    job_of(tmp_path / "job", [["yes", "no"]])
    assert run("export", "job", *shlex.split(arguments)) == 2
    assert says in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["job"]


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ({"kind": "tokens", "token_ids_column": "ids"}, "token ids"),
        ({"kind": "chat", "user": "{{ gone }}"}, "'gone'"),
        ({"kind": "chat", "messages_column": "talk"}, "'talk'"),
    ],
)
def test_a_prompt_that_cannot_be_made_again_asks_for_messages(
    prompt: dict[str, Any], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job = finished_job(tmp_path / "job", [row(0)], config={"prompt": prompt})
    assert run("export", job, "--to", "sft") == 2
    said = capsys.readouterr().err
    assert says in said and "--messages '[{user:" in said


def test_a_row_that_cannot_be_made_ends_the_export_and_leaves_no_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [row(0), {**row(1), "question": None}]
    job = finished_job(tmp_path / "job", rows)
    for name in ("out.jsonl", "out.parquet", "out"):
        assert run("export", job, "--to", "sft", "--out", tmp_path / name) == 2
        assert "row 'id1'" in (said := capsys.readouterr().err) and "question" in said
        assert not (tmp_path / name).exists()
    good = ("--where", "question is not none")
    assert run("export", job, "--to", "sft", *good, "--out", tmp_path / "out.jsonl") == 0


def test_parquet_says_what_it_was_made_of(tmp_path: Path) -> None:
    job = job_of(tmp_path / "job", [["yes"]])
    assert run("export", job, "--to", "sft", "--out", tmp_path / "out.parquet") == 0
    told = json.loads(pq.read_schema(tmp_path / "out.parquet").metadata[b"batchgen.export"])
    assert told["of"] == str(job) and told["asked"]["to"] == "sft" and told["digest"]


SCORES = st.lists(st.one_of(st.none(), st.integers(0, 4).map(float)), max_size=8)


@given(SCORES, st.floats(0, 3), st.integers(1, 40))
def test_pairs_differ_by_the_gap_and_are_all_there_are(
    scores: list[float | None], gap: float, most: int
) -> None:
    texts = [i % 5 for i in range(len(scores))]
    found = pairs(scores, texts, gap, most)
    every = [
        (i, j)
        for i, a in enumerate(scores)
        for j, b in enumerate(scores)
        if a is not None and b is not None and a - b >= gap and a > b and texts[i] != texts[j]
    ]
    assert len(found) == len(set(found)) == min(most, len(every))
    assert set(found) <= set(every)
    if found:  # the first pair is as far apart as any
        numbers = [score or 0.0 for score in scores]
        apart = [numbers[i] - numbers[j] for i, j in (found[0], *every)]
        assert apart[0] == max(apart)
    assert pairs(scores, texts, gap, most) == found


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.one_of(st.none(), st.floats(0, 1))), max_size=20)
)
def test_scattered_groups_are_the_groups_by_key_in_the_order_of_their_first_rows(
    given: list[tuple[str, float | None]],
) -> None:
    members = [
        GroupMember(key, score, {"at": i, "text": "ü\n"}) for i, (key, score) in enumerate(given)
    ]
    expected: dict[str, list[GroupMember]] = {}
    for one in members:
        expected.setdefault(one.key, []).append(one)
    assert list(scattered_groups(members)) == list(expected.values())
    ordered = sorted(members, key=lambda one: one.key)
    assert list(adjacent_groups(ordered)) == [expected[key] for key in sorted(expected)]
