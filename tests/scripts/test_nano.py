"""The problems of the nano models, what they learn by, and a few steps of their training."""

from __future__ import annotations

import itertools
import json
import re
import sys
from argparse import Namespace
from pathlib import Path

import nano_reading
import nano_sums
import pytest
import torch
import train_nano
from nano_learning import IM_END_ID, Batch
from nano_problems import (
    FORMS,
    KINDS,
    SCHEMA,
    final_number,
    held_out_set,
    problems,
    row_json,
)
from nano_sums import encode
from nano_text import Hybrid, add_noise, draft_mask, training_mask
from nano_tokenizer import build_tokenizer

import batchgen

DATA = Path(batchgen.__file__).parent / "data"
CPU = torch.device("cpu")


def test_problems_are_right_and_held_out_ones_are_not_in_training() -> None:
    train = list(itertools.islice(problems("train", 0), 3000))
    held_out = list(itertools.islice(problems("held_out", 0), 500))
    assert {each.kind for each in train} == {each.kind for each in held_out} == set(KINDS)
    numbers = [set[tuple[str, ...]](), set[tuple[str, ...]]()]
    for found, some in zip(numbers, (train, held_out), strict=True):
        for each in some:
            given = re.findall(r"\d+", each.question)
            in_any_order = each.kind in ("add", "multiply")
            found.add((each.kind, *(sorted(given) if in_any_order else given)))
    assert not numbers[0] & numbers[1]
    for problem in train:
        for left, right in re.findall(r"([\d+*/-]+)=(\d+)", problem.working):
            assert eval(left) == int(right), problem
        for form in FORMS:
            assert final_number(problem.answer(form), form) == problem.final
        assert list(json.loads(problem.answer("json"))) == SCHEMA["required"]
    assert final_number("Answer: 3 or 4", "plain") is None
    assert final_number('{"answer": true}', "json") is None


@pytest.mark.parametrize("name", nano_sums.RECIPES)
def test_what_is_shipped_is_what_the_tool_makes(name: str) -> None:
    """Its problems and files, and weights that are near the bottom of what the tool makes small."""
    folder, rows = DATA / name, held_out_set(500, 0)
    lines = (folder / "eval.jsonl").read_text().splitlines()
    assert lines == [row_json(i, problem) for i, problem in enumerate(rows)]
    assert json.loads((folder / "answer_schema.json").read_text()) == SCHEMA
    assert sum(file.stat().st_size for file in folder.iterdir()) < 12e6
    told = json.loads((folder / "training.json").read_text())
    settings = train_nano.find_recipe(name).settings
    arguments = {**settings, **told["arguments"], "compile": False, "eval_count": 3}
    run = train_nano.Run(Namespace(**arguments, model=name, start=folder))
    assert run.learner.config == json.loads((folder / "config.json").read_text())
    batch = encode(rows[:3], "plain", CPU)
    with torch.inference_mode():
        loss = float(run.learner.loss(batch, torch.Generator().manual_seed(0)))
    assert loss < 2 * told["train_loss"]


def test_prompts_are_what_the_chat_template_gives() -> None:
    tokenizer = build_tokenizer()
    (problem,) = held_out_set(1, 0)
    batch = encode([problem], "json", CPU)
    chat = [{"role": "user", "content": problem.request("json")}]
    ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    prompt, row = int(batch.prompt_lens[0]), batch.ids[0].tolist()
    assert row[:prompt] == ids
    answer = [*problem.answer("json").encode(), IM_END_ID]
    assert row[prompt : int(batch.lens[0])] == answer and set(row[int(batch.lens[0]) :]) == {
        IM_END_ID
    }


def test_the_training_mask_for_two_blocks_of_two() -> None:
    seen = [
        "11.. ....",
        "11.. ....",
        "..11 11..",
        "..11 11..",
        ".... 11..",
        ".... 11..",
        ".... 1111",
        ".... 1111",
    ]
    expected = [[cell == "1" for cell in line.replace(" ", "")] for line in seen]
    assert training_mask(4, 2, CPU).tolist() == expected


def test_the_mask_of_the_second_pass_of_drafting() -> None:
    """Keys of the first pass but the newest one, and one key of its own."""
    seen = ["... 1..", "1.. .1.", "11. ..1"]
    expected = [[cell == "1" for cell in line.replace(" ", "")] for line in seen]
    assert draft_mask(3, 1, CPU).tolist() == expected


def test_noise_weighs_masked_tokens_by_the_rate() -> None:
    ids = torch.arange(12).repeat(4000, 1)
    batch = Batch(ids, torch.full((4000,), 5), torch.full((4000,), 12))
    noised, weight = add_noise(batch, 4, torch.Generator().manual_seed(0))
    masked = noised != ids
    assert not masked[:, :5].any() and ((weight > 0) == masked).all()
    assert weight[:, 5:].mean().item() == pytest.approx(1, abs=0.02)
    counts = masked[:, 8:].sum(1).bincount(minlength=5)
    assert counts[0] == 0 and (counts[1:] / 4000 - 0.25).abs().max() < 0.03


def test_later_drafts_do_not_see_what_they_predict() -> None:
    """A change of a token changes no prediction of it or of an earlier one."""
    arguments = {"hidden_size": 64, "layers": 4, "seed": 0, "compile": False}
    learner = Hybrid(Namespace(**arguments))
    ids = torch.arange(24)[None]
    changed = ids.clone()
    changed[0, 15] = 99
    with torch.inference_mode():
        hidden = [learner.module.model(x).last_hidden_state for x in (ids, changed)]
        one, other = map(list, map(learner.passes, hidden, (ids, changed)))
    for first, second in zip(one, other, strict=True):
        same = ((first - second).abs().amax(-1)[0] < 1e-5).tolist()
        # Position i has read token i + 1 in the first pass, and in later ones as well.
        assert all(same[:14]) and not any(same[14:18])


@pytest.mark.parametrize("name", train_nano.MODELS)
def test_a_few_steps_write_a_folder_that_a_second_run_goes_on_with(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(nano_sums, "MOST_TOKENS", 8)
    monkeypatch.setattr(nano_reading, "CHUNK", 2)
    sizes = {"nano_sdar": "--layers 1", "nano_hybrid": "--layers 4 --no-compile"}
    line = (
        f"train_nano.py {name} --out {tmp_path} --steps 3 --batch-size 4 --examples 28 --lr 0.01 "
        "--eval-count 3 --quick-count 2 --eval-every 2 --hidden-size 64 "
        + sizes.get(name, "--layers 2 --width 32 --depth 2")
    )
    starts = [] if name == "nano_hybrid" else [f" --start {tmp_path} --steps 1"]
    for more in ("", *starts):
        monkeypatch.setattr(sys, "argv", (line + more).split())
        train_nano.main()
        said = capsys.readouterr().out
        assert "step 2  loss" in said or more
        assert f"wrote {tmp_path}: " in said
    monkeypatch.setattr(sys, "argv", f"t {name} --eval-set {tmp_path} --eval-count 3".split())
    train_nano.main()
    told = json.loads((tmp_path / "training.json").read_text())
    assert told["steps"] == (1 if starts else 3) and told["train_loss"] < 20
    assert told["arguments"]["lr"] == 0.01
    assert all(0 < found["rows"] <= 3 for found in told["held_out"].values())
    assert {file.name for file in tmp_path.iterdir()} >= {
        "config.json", "model.safetensors", "tokenizer.json",
        *(["preprocessor_config.json", "eval.parquet"] if name == "nano_vl" else
          ["answer_schema.json", "eval.jsonl"]),
    }  # fmt: skip
