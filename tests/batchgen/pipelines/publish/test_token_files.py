"""`batchgen export --to kd` and `--to rl`: tokens, distributions and experts for trainers."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from datasets import load_dataset
from hypothesis import given
from hypothesis import strategies as st
from trainer_files import read_rollouts, read_teacher, unpack

from batchgen.__main__ import run_command
from batchgen.pipelines.publish.trainers.token_rows import packed
from tests.support.jobs.finished_job import finished_job, row
from tests.support.jobs.token_job import CHAT, PROMPT, TOP, TOP_IDS, scored_job, top_of

LAYERS, EXPERTS = 2, 4
TRACE = ("step_map", "tail_token_ids", "tail_step_map")
ROUTED = pa.field(
    "routed_experts",
    pa.list_(pa.list_(pa.list_(pa.uint8(), 2), LAYERS)),
    metadata={"num_experts": str(EXPERTS), "moe_layers": "[0, 1]"},
)


def run(*arguments: object) -> int:
    return run_command([str(argument) for argument in arguments])


def test_a_teacher_s_file_has_the_conversation_and_the_likeliest_tokens(tmp_path: Path) -> None:
    job, rows = scored_job(tmp_path / "job")
    for name in ("kd.jsonl", "kd.parquet"):
        assert run("export", job, "--to", "kd", "--out", tmp_path / name) == 0
        kind = "json" if name.endswith("jsonl") else "parquet"
        files = str(tmp_path / name)
        found = list(load_dataset(kind, data_files=files, split="train", cache_dir=str(tmp_path)))
        assert [one["messages"][1]["content"] for one in found] == ["It is yes."] * 2
        for one, expected in zip(found, rows, strict=True):
            assert one["target_token_ids"] == expected["answer_top_logprob_ids"]
            assert np.allclose(one["logprobs"], expected["answer_top_logprobs"])


def test_the_older_form_names_tokens_by_their_ids(tmp_path: Path) -> None:
    job, rows = scored_job(tmp_path / "job")
    assert run("export", job, "--to", "kd-v1", "--out", tmp_path / "kd.jsonl") == 0
    lines = [json.loads(line) for line in (tmp_path / "kd.jsonl").read_text().splitlines()]
    for line, expected in zip(lines, rows, strict=True):
        ids = [[int(e["token"].split(":")[1]) for e in one] for one in line["logprobs"]]
        assert ids == expected["answer_top_logprob_ids"]
        assert line["logprobs"][0][0]["logprob"] == pytest.approx(
            expected["answer_top_logprobs"][0][0], abs=1e-6
        )


def test_packed_files_are_read_again(tmp_path: Path) -> None:
    job, rows = scored_job(tmp_path / "job")
    assert run("export", job, "--to", "kd-packed", "--out", tmp_path / "kd.parquet") == 0
    found = list(read_teacher(tmp_path / "kd.parquet"))
    assert len(found) == 2
    for one, expected in zip(found, rows, strict=True):
        assert one.prompt.tolist() == expected["prompt_token_ids"]
        assert one.answer.tolist() == expected["answer_token_ids"]
        assert one.top_ids.tolist() == expected["answer_top_logprob_ids"]
        assert np.allclose(one.top_logprobs, expected["answer_top_logprobs"], rtol=1e-3)
        assert np.allclose(one.rest_probs, expected["answer_rest_probs"], rtol=1e-3)


def test_generated_tokens_can_teach_too_and_the_rest_is_what_the_top_leaves(tmp_path: Path) -> None:
    top = top_of(np.random.default_rng(1), 3)
    rest = top.pop("rest")
    fields = [PROMPT, pa.field("top_logprobs", TOP), pa.field("top_logprob_ids", TOP_IDS)]
    rows = [row(0, text="yes", prompt_token_ids=[7], **top)]
    job = finished_job(tmp_path / "job", rows, fields, config={"prompt": CHAT})
    assert run("export", job, "--to", "kd-packed", "--out", tmp_path / "kd.parquet") == 0
    (one,) = read_teacher(tmp_path / "kd.parquet")
    assert one.answer.tolist() == [ord(letter) for letter in "yes"]
    assert np.allclose(one.rest_probs, rest, atol=1e-3)


@given(st.integers(1, 31), st.data())
def test_packed_ids_are_the_ids(bits: int, data: st.DataObject) -> None:
    ids = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=1, max_size=50))
    found = packed(np.array(ids), bits)
    assert len(found) == -(-len(ids) * bits // 8)
    assert unpack(found, bits, len(ids)).tolist() == ids


def test_rollouts_have_masks_rewards_and_the_experts_of_all_tokens_but_the_last(
    tmp_path: Path,
) -> None:
    draws = np.random.default_rng(2)
    experts = draws.integers(0, EXPERTS, (4, LAYERS, 2)).tolist()
    rows = [row(0, k, text=t, prompt_token_ids=[5, 6], routed_experts=experts)
            for k, t in enumerate(["yes", "noo"])]  # fmt: skip
    config = {"prompt": CHAT, "sampling": {"temperature": 0.7}}
    job = finished_job(tmp_path / "job", rows, [PROMPT, ROUTED], graded=True, config=config)
    assert run("export", job, "--to", "rl", "--out", tmp_path / "rl.parquet") == 0
    found = list(read_rollouts(tmp_path / "rl.parquet"))
    assert [one.reward for one in found] == [1, 0]
    for one, text in zip(found, ("yes", "noo"), strict=True):
        assert one.token_ids.tolist() == [5, 6, *map(ord, text)]
        assert one.mask.tolist() == [False, False, True, True, True]
        assert one.logprobs.tolist() == [0, 0, -0.5, -0.5, -0.5]
        assert np.allclose(one.temperatures, 0.7)
        assert one.routed_experts is not None and one.routed_experts.dtype == np.uint8
        assert one.routed_experts.tolist() == experts
    names = pq.read_schema(tmp_path / "rl.parquet").names
    assert names[:2] == ["row_id", "sample_index"]


def test_traces_have_steps_to_the_end_of_the_last_block(tmp_path: Path) -> None:
    ids = pa.list_(pa.int32())
    fields = [PROMPT, *(pa.field(name, ids) for name in TRACE)]
    tail: dict[str, list[int]] = {"tail_token_ids": [9, 8], "tail_step_map": [3, 2]}
    none: dict[str, list[int]] = {"tail_token_ids": [], "tail_step_map": []}
    rows = [
        row(0, 0, text="yes", prompt_token_ids=[5, 6], step_map=[2, 1, 2], **tail),
        row(0, 1, text="no", prompt_token_ids=[5, 6], step_map=[1, 1], **none),
        row(1, text=None),
    ]
    job = finished_job(tmp_path / "job", rows, fields, graded=True, config={"prompt": CHAT})
    assert run("export", job, "--to", "trace_rl", "--out", tmp_path / "trace.jsonl") == 0
    first, second = map(json.loads, (tmp_path / "trace.jsonl").read_text().splitlines())
    assert first["token_ids"] == [*map(ord, "yes"), 9, 8] and first["step_map"] == [2, 1, 2, 3, 2]
    assert first["mask"] == [True, True, True, False, False] and first["stop_length"] == 3
    assert first["logprobs"] == [-0.5, -0.5, -0.5, 0, 0]
    assert (first["reward"], second["reward"]) == (1, 0)
    assert second["token_ids"] == [*map(ord, "no")] and second["mask"] == [True, True]
    assert first["prompt"] is first["response"] is None


def test_traces_need_what_a_cut_removed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = finished_job(tmp_path / "job", [row(0, prompt_token_ids=[5])], [PROMPT])
    assert run("export", job, "--to", "trace_rl", "--out", tmp_path / "trace.jsonl") == 2
    assert "output.columns=[step_map,tail_step_map,tail_token_ids]" in capsys.readouterr().err


def test_rows_bring_their_own_temperature(tmp_path: Path) -> None:
    own = pa.field("how", pa.struct([("temperature", pa.float64())]))
    rows = [
        row(i, prompt_token_ids=[1], how={"temperature": t}) for i, t in enumerate((0.25, None))
    ]
    config = {"prompt": CHAT, "sampling": {"temperature": 0.5, "column": "how"}}
    job = finished_job(tmp_path / "job", rows, [PROMPT, own], config=config)
    assert run("export", job, "--to", "rl", "--out", tmp_path / "rl.parquet") == 0
    found = [one.temperatures[0] for one in read_rollouts(tmp_path / "rl.parquet")]
    assert found == [0.25, 0.5]


@pytest.mark.parametrize(
    ("to", "out", "said"),
    [
        ("kd", "a.jsonl", "output.columns=[top_logprobs]"),
        ("kd-packed", "a.parquet", "output.columns=["),
        ("rl", "a.parquet", "output.columns=[prompt_token_ids]"),
    ],
)
def test_a_job_without_the_columns_is_told_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str, out: str, said: str
) -> None:
    job = finished_job(tmp_path / "job", [row(0)], config={"prompt": CHAT})
    assert run("export", job, "--to", to, "--out", tmp_path / out) == 2
    assert said in capsys.readouterr().err
    assert not (tmp_path / out).exists()


def test_bytes_are_refused_as_json_lines(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    job, _ = scored_job(tmp_path / "job")
    assert run("export", job, "--to", "kd-packed", "--out", tmp_path / "a.jsonl") == 2
    assert "top_ids" in (said := capsys.readouterr().err) and ".parquet" in said
