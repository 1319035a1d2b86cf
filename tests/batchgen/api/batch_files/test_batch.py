"""Batch files of OpenAI: good and bad lines, kills, and files that have grown."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from batchgen.__main__ import run_command
from batchgen.api.batch_files.batch_lines import BadLine, BatchRequest, batch_lines
from tests.support.jobs.forked import Forked
from tests.support.jobs.job_comparison import finished_rows

CHAT, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SCHEMA = {"type": "object", "properties": {"a": {"type": "boolean"}}, "required": ["a"]}
NO_ANSWER = {
    "no JSON": ("nonsense {", "invalid_json_line"),
    "no object": ('["a"]', "invalid_json_line"),
    "a key twice": ('{"custom_id": "x", "custom_id": "y"}', "invalid_json_line"),
    "no id": (json.dumps({"url": CHAT, "body": {"messages": []}}), "missing_custom_id"),
    "repeated": (
        json.dumps({"custom_id": "ok0", "url": CHAT, "body": {}}), "duplicate_custom_id"
    ),
    "url": (json.dumps({"custom_id": "u", "url": "/v1/embeddings", "body": {}}), "invalid_url"),
    "method": (
        json.dumps({"custom_id": "m", "method": "GET", "url": CHAT, "body": {}}), "invalid_method"
    ),
    "no prompt": (json.dumps({"custom_id": "p", "url": COMPLETIONS, "body": {}}), "invalid_body"),
    "option": (
        json.dumps(
            {
                "custom_id": "o",
                "url": COMPLETIONS,
                "body": {"prompt": "x", "logit_bias": {"5": 1}},
            }
        ),
        "bad_option",
    ),
    "role": (
        json.dumps(
            {
                "custom_id": "r",
                "url": CHAT,
                "body": {"messages": [{"role": "judge", "content": "x"}]},
            }
        ),
        "bad_messages",
    ),
}  # fmt: skip


def good(i: int, **options: Any) -> str:
    """A request of the kind that its number says."""
    if i % 3 == 2:
        prompt: Any = f"Say {i}" if i % 2 else [65, 66, 67]
        line = {"custom_id": f"ok{i}", "url": COMPLETIONS, "body": {"prompt": prompt, **options}}
    else:
        messages = [{"role": "user", "content": f"What is {i}?"}]
        line = {"custom_id": f"ok{i}", "url": CHAT, "body": {"messages": messages, **options}}
    return json.dumps(line)


def lines() -> list[str]:
    """30 lines, of which each third one is bad, after its first good one."""
    options: list[dict[str, Any]] = [
        {},
        {"max_tokens": 3, "temperature": 0},
        {"temperature": 1.2, "seed": 4, "user": "u", "model": "gpt-9"},
        {"response_format": {"type": "json_schema", "json_schema": {"schema": SCHEMA}}},
        {"stop": ["a", "b", "c", "d", "e"], "max_completion_tokens": 20},
    ]
    found = []
    bad = iter(NO_ANSWER.values())
    for i in range(20):
        found.append(good(i, **options[i % len(options)]))
        if i % 2:
            found.append(next(bad)[0])
    assert len(found) == 30
    return found


def arguments(given: Path, results: Path, model: Path) -> list[str]:
    keys = ["model=hf", f"model.path={model}", "engine.device=cpu", "engine.kv_cache_gib=0.01"]
    keys += ["sampling.max_new_tokens=30", "sampling.temperature=1", "engine.max_num_seqs=2"]
    return ["batch", str(given), str(results), *keys, "output.rows_per_shard=4"]


def results(path: Path) -> list[dict[str, Any]]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    for line in found:
        if line["response"] is not None:
            del line["response"]["body"]["created"]
    return found


def check(found: list[dict[str, Any]]) -> None:
    """What each of the 30 result lines must be."""
    assert len(found) == 30
    codes = [code for _, code in NO_ANSWER.values()]
    assert [line["error"]["code"] for line in found if line["error"]] == codes
    for line, given_line in zip(found, lines(), strict=True):
        assert (line["response"] is None) != (line["error"] is None)
        if line["error"] is not None:
            continue
        request, body = json.loads(given_line), line["response"]["body"]
        assert line["custom_id"] == request["custom_id"]
        assert line["response"]["status_code"] == 200
        is_chat = request["url"] == CHAT
        assert body["object"] == ("chat.completion" if is_chat else "text_completion")
        (choice,) = body["choices"]
        assert isinstance(choice["message"]["content"] if is_chat else choice["text"], str)
        usage = body["usage"]
        assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"]
        most = request["body"].get("max_tokens", 30)
        assert 0 < usage["completion_tokens"] <= most


@pytest.mark.thorough
def test_bad_lines_have_an_error_and_others_an_answer(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given_file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given_file.write_text("\n".join(lines()) + "\n\n")
    assert run_command(arguments(given_file, out, model)) == 3
    found = results(out)
    check(found)
    told = capsys.readouterr()
    assert "20 answers and 10 errors" in told.out
    assert "lines name the model gpt-9" in told.err
    # The same again, and with lines that were added.
    before = out.read_bytes()
    assert run_command(arguments(given_file, out, model)) == 3
    assert out.read_bytes() == before
    with given_file.open("a") as file:
        file.write(good(99, temperature=0) + "\n")
    assert run_command(arguments(given_file, out, model)) == 3
    grown = results(out)
    assert [line["custom_id"] for line in grown[:30]] == [line["custom_id"] for line in found]
    for one, two in zip(grown, found, strict=False):
        if one["response"] is not None:
            assert one["response"]["body"]["choices"] == two["response"]["body"]["choices"]
    assert grown[30]["custom_id"] == "ok99" and grown[30]["error"] is None


@pytest.mark.thorough
def test_killed_and_resumed(model: Path, tmp_path: Path) -> None:
    given_file, whole, out = (tmp_path / n for n in ("in.jsonl", "whole.jsonl", "out.jsonl"))
    given_file.write_text("\n".join(lines()))
    assert run_command(arguments(given_file, whole, model)) == 3
    process = Forked("batchgen", arguments(given_file, out, model))
    job, deadline = tmp_path / "out.jsonl.job", time.monotonic() + 120
    while finished_rows(job) < 3 and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=60)
    assert 0 < finished_rows(job) < 20 and not out.exists()
    assert run_command(arguments(given_file, out, model)) == 3
    check(results(out))
    for one, two in zip(results(whole), results(out), strict=True):
        assert one["error"] == two["error"]
        if one["response"] is not None:
            assert one["response"]["body"]["choices"] == two["response"]["body"]["choices"]


@pytest.mark.thorough
def test_a_file_without_a_request(model: Path, tmp_path: Path) -> None:
    given_file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given_file.write_text("nothing\n")
    assert run_command(arguments(given_file, out, model)) == 3
    (line,) = results(out)
    assert line["error"]["code"] == "invalid_json_line" and line["custom_id"] is None
    assert run_command(arguments(given_file, out, model)) == 3
    assert not (tmp_path / "out.jsonl.job").exists()


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["dataset.limit=3"], "a batch decides dataset.limit itself"),
        (["output.dir=x"], "a batch decides output.dir itself"),
        (["prompt=text"], "a batch decides prompt itself"),
        (["sampling.column=x"], "a batch decides sampling.column itself"),
    ],
)
def test_keys_that_a_batch_decides(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], more: list[str], message: str
) -> None:
    given_file = tmp_path / "in.jsonl"
    given_file.write_text(good(0))
    assert run_command(["batch", str(given_file), str(tmp_path / "out.jsonl"), *more]) == 2
    assert message in capsys.readouterr().err


def test_files_that_cannot_be(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given_file = tmp_path / "in.jsonl"
    assert run_command(["batch", str(given_file), str(tmp_path / "out.jsonl")]) == 2
    assert "there is no file" in capsys.readouterr().err
    given_file.write_text(good(0))
    assert run_command(["batch", str(given_file), str(given_file)]) == 2
    assert "both read and written" in capsys.readouterr().err
    assert run_command(["batch", str(given_file), str(tmp_path / "no/out.jsonl")]) == 2
    assert "there is no folder" in capsys.readouterr().err


@pytest.mark.parametrize("how", ["exchanged", "link", "hard link", "way around", "other"])
def test_a_file_that_is_no_result_of_the_batch_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], how: str
) -> None:
    """`batch OUT IN` after `batch IN OUT`, and OUT as another name of IN."""
    requests, out = tmp_path / "requests.jsonl", tmp_path / "out.jsonl"
    requests.write_text("\n".join(lines()) + "\n")
    out.write_text('{"id": "batch_req_0", "custom_id": "a"}\n')
    (tmp_path / "out.jsonl.requests.parquet").touch()
    other = tmp_path / "other.jsonl"
    if how == "link":
        other.symlink_to(requests)
    elif how == "hard link":
        other.hardlink_to(requests)
    else:
        other.write_text("mine")
    around = tmp_path / "folder" / ".." / "requests.jsonl"
    (tmp_path / "folder").mkdir()
    pairs = {"exchanged": (out, requests), "way around": (requests, around)}
    before = {path: path.read_bytes() for path in (requests, out, other)}
    assert run_command(["batch", *map(str, pairs.get(how, (requests, other)))]) == 2
    said = capsys.readouterr().err
    assert "name another OUT" in said or "Name another OUT" in said
    assert {path: path.read_bytes() for path in before} == before


@given(st.lists(st.binary(max_size=60) | st.sampled_from([line.encode() for line in lines()])))
def test_any_bytes_are_requests_or_bad_lines(
    tmp_path_factory: pytest.TempPathFactory, given_lines: list[bytes]
) -> None:
    path = tmp_path_factory.mktemp("batch") / "in.jsonl"
    path.write_bytes(b"\n".join(given_lines))
    found = list(batch_lines(path))
    ids = [line.custom_id for line in found if isinstance(line, BatchRequest)]
    assert len(set(ids)) == len(ids)
    assert all(isinstance(line, BatchRequest | BadLine) for line in found)


def test_halves_of_characters_and_deep_nesting_are_bad_lines(tmp_path: Path) -> None:
    path = tmp_path / "in.jsonl"
    half = good(0).replace("What", "\\ud800")
    deep = '{"custom_id": "a", "body": ' + "[" * 100_000 + "]" * 100_000 + "}"
    path.write_text(f"{half}\n{deep}\n{good(1)}\n")
    first, second, third = batch_lines(path)
    assert isinstance(first, BadLine) and isinstance(second, BadLine)
    assert first.code == second.code == "invalid_json_line" and isinstance(third, BatchRequest)


def test_log_probabilities_of_the_lines_that_ask(model: Path, tmp_path: Path) -> None:
    given_file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    asked: list[dict[str, Any]] = [{"logprobs": True, "top_logprobs": 3}, {"logprobs": True}, {}]
    rows = [good(i, **options, max_tokens=4) for i, options in enumerate(asked)]
    given_file.write_text("\n".join([*rows, good(5, logprobs=2, max_tokens=4)]))
    assert run_command(arguments(given_file, out, model)) == 0
    three, none, without, two = (
        line["response"]["body"]["choices"][0]["logprobs"] for line in results(out)
    )
    assert without is None
    for entry in three["content"]:
        likely = entry["top_logprobs"]
        spelled = bytes(entry["bytes"])
        assert len(likely) == 3
        assert entry["token"] == spelled.decode(errors="backslashreplace")
        assert [one["logprob"] for one in likely] == sorted(o["logprob"] for o in likely)[::-1]
        assert entry["logprob"] <= likely[0]["logprob"] + 1e-6
    assert all(entry["top_logprobs"] == [] for entry in none["content"])
    assert len(two["tokens"]) == len(two["token_logprobs"]) == len(two["text_offset"])
    assert all(len(likely) == 2 for likely in two["top_logprobs"])


@pytest.mark.thorough
def test_a_zero_of_tokens_is_an_error_of_its_line(model: Path, tmp_path: Path) -> None:
    given_file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    given_file.write_text(f"{good(0, max_tokens=0)}\n{good(1)}\n")
    assert run_command(arguments(given_file, out, model)) == 3
    assert [line["error"] and line["error"]["code"] for line in results(out)] == [
        "bad_option",
        None,
    ]
