"""The problems of the nano models, what they learn by, and a few steps of their training."""

from __future__ import annotations

import importlib
import itertools
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import train_nano
from nano_hybrid import Hybrid, draft_mask
from nano_learning import IM_END_ID, Batch
from nano_sdar import add_noise, training_mask
from nano_sums import STORIES, Problem, make_batch, problems
from safetensors.torch import load_file
from transformers import AutoTokenizer

import batchgen

DATA = Path(batchgen.__file__).parent / "data"
CPU = torch.device("cpu")


def config_of(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((DATA / name / "config.json").read_text())
    return config


def eval_problems() -> list[Problem]:
    """The first 500 held-out problems with different questions."""
    rows: dict[str, Problem] = {}
    stream = problems("held_out", "0")
    while len(rows) < 500:
        problem = next(stream)
        rows.setdefault(problem.question, problem)
    return list(rows.values())


def test_problems_are_right_and_held_out_ones_are_not_in_training() -> None:
    train = list(itertools.islice(problems("train", "0"), 3000))
    held_out = list(itertools.islice(problems("held_out", "0"), 500))
    kinds = {"add", "subtract", "multiply", *STORIES}
    assert {each.kind for each in train} == {each.kind for each in held_out} == kinds
    numbers = [set[tuple[str, ...]](), set[tuple[str, ...]]()]
    for keys, some in zip(numbers, (train, held_out), strict=True):
        for each in some:
            in_question = re.findall(r"\d+", each.question)
            in_any_order = each.kind in ("add", "multiply")
            keys.add((each.kind, *(sorted(in_question) if in_any_order else in_question)))
    assert not numbers[0] & numbers[1]
    schema = json.loads((DATA / "nano_sdar" / "answer_schema.json").read_text())
    for problem in train:
        for left, right in re.findall(r"([\d+*/-]+)=(\d+)", problem.working):
            assert eval(left) == int(right), problem
        assert problem.texts(as_json=False)[1].endswith(f" Answer: {problem.final}")
        answer = json.loads(problem.texts(as_json=True)[1])
        assert answer["answer"] == problem.final and list(answer) == schema["required"]


@pytest.mark.parametrize("name", train_nano.MODELS)
def test_the_shipped_problems_are_what_the_tool_draws(name: str) -> None:
    lines = (DATA / name / "eval.jsonl").read_text().splitlines()
    for index, (line, problem) in enumerate(zip(lines, eval_problems(), strict=True)):
        question, answer = problem.texts(as_json=False)
        assert json.loads(line) == {
            "id": f"{problem.kind}-{index}", "kind": problem.kind, "question": question,
            "answer": answer, "final": str(problem.final),
        }  # fmt: skip


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", train_nano.MODELS)
def test_the_shipped_weights_are_near_the_bottom_of_what_training_minimises(name: str) -> None:
    recipe = importlib.import_module(name).RECIPE
    learner = recipe.learner(config_of(name))
    fresh = batch_loss(learner, recipe.make_batch(0, 0, 3))
    weights = load_file(DATA / name / "model.safetensors")
    unset = learner.module.load_state_dict({k: v.float() for k, v in weights.items()}, strict=False)
    assert unset.missing_keys in ([], ["lm_head.weight"]) and not unset.unexpected_keys
    assert batch_loss(learner, recipe.make_batch(0, 0, 3)) < min(0.5, fresh / 4)


def batch_loss(learner: Any, batch: Batch) -> float:
    torch.manual_seed(0)
    with torch.inference_mode():
        return float(learner.loss(batch))


def test_prompts_are_what_the_chat_template_gives() -> None:
    tokenizer = AutoTokenizer.from_pretrained(DATA / "nano_sdar")
    batch = make_batch(0, 0, 2)
    stream = itertools.islice(problems("train", "0.0"), 2)
    for index, problem in enumerate(stream):
        question, answer = problem.texts(as_json=index == 1)
        chat = [{"role": "user", "content": question}]
        ids = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
        prompt, end, row = int(batch.prompt_lens[index]), int(batch.lens[index]), batch.ids[index]
        assert row[:prompt].tolist() == ids
        assert row[prompt:end].tolist() == [*answer.encode(), IM_END_ID]
        assert set(row[end:].tolist()) == {IM_END_ID}


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
    torch.manual_seed(0)
    ids = torch.arange(12).repeat(4000, 1)
    batch = Batch(ids, torch.full((4000,), 5), torch.full((4000,), 12))
    noised, weight = add_noise(batch, 4, 259)
    masked = noised != ids
    assert not masked[:, :5].any() and ((weight > 0) == masked).all()
    assert weight[:, 5:].mean().item() == pytest.approx(1, abs=0.02)
    counts = masked[:, 8:].sum(1).bincount(minlength=5)
    assert counts[0] == 0 and (counts[1:] / 4000 - 0.25).abs().max() < 0.03


def test_later_drafts_do_not_see_what_they_predict() -> None:
    """A change of a token changes no prediction of it or of an earlier one."""
    torch.manual_seed(0)
    learner = Hybrid(config_of("nano_hybrid"))
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


@pytest.mark.thorough
@pytest.mark.parametrize("name", train_nano.MODELS)
def test_a_few_steps_write_a_folder_like_the_shipped_one(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    line = f"train_nano.py {name} --out {tmp_path} --steps 2 --batch-size 2 --lr 0.01"
    monkeypatch.setattr(sys, "argv", line.split())
    train_nano.main()
    assert "step 2  loss" in capsys.readouterr().out
    run = json.loads((tmp_path / "training.json").read_text())
    assert (run["steps"], run["batch_size"], run["lr"]) == (2, 2, 0.01) and run["train_loss"] < 20
    shipped = load_file(DATA / name / "model.safetensors")
    written = load_file(tmp_path / "model.safetensors")
    assert {k: v.shape for k, v in written.items()} == {k: v.shape for k, v in shipped.items()}
    small = {file.name for file in (DATA / name).iterdir() if file.stem != "eval"}
    assert small <= {file.name for file in tmp_path.iterdir()}
