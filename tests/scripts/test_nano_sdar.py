"""nano_sdar: its tokenizer, that training leaks nothing and fits decoding, and its decoder."""

from __future__ import annotations

import json
import math
import sys
from itertools import islice
from pathlib import Path
from typing import cast

import nano_problems
import nano_training
import pytest
import torch
import train_nano_sdar
from nano_batch import SEQUENCE_LENGTH, Batch, encode
from nano_diffusion import (
    add_noise,
    block_causal_mask,
    decode,
    denoise,
    diffusion_loss,
    training_mask,
)
from nano_exam import Exam
from nano_problems import FORMS, KINDS, SCHEMA, Form, Problem, final_number, problems
from nano_sdar import NanoConfig, NanoSDAR
from nano_stories import NAMES, THINGS
from nano_tokenizer import (
    IM_END_ID,
    IM_START_ID,
    MASK_ID,
    SPECIALS,
    VOCAB_SIZE,
    build_tokenizer,
)
from safetensors.torch import load_file
from tokenizers import pre_tokenizers
from torch import Tensor
from train_nano_sdar import SDARLearner
from transformers import BatchEncoding, Qwen3Config, Qwen3ForCausalLM

from batchgen.engine.loading.tokenizer import eos_token_ids, load_tokenizer

CPU = torch.device("cpu")
BLOCK = 4
ROWS = list(islice(problems("train", 0), 24))


def tiny(block_size: int = BLOCK) -> NanoSDAR:
    config = NanoConfig(
        hidden_size=32,
        num_layers=2,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        intermediate_size=48,
        block_size=block_size,
    )
    model = NanoSDAR(config)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough that a leak shows
        if parameter.dim() > 1:
            parameter.data.normal_(0, 0.2, generator=generator)
        else:
            parameter.data.uniform_(0.5, 1.5, generator=generator)
    return model


def random_batch(rows: int, length: int) -> Batch:
    generator = torch.Generator().manual_seed(2)
    ids = torch.randint(256, (rows, length), generator=generator)
    prompt_lens = torch.arange(rows) % length
    return Batch(ids, prompt_lens, torch.full((rows,), length))


def exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


# The tokenizer.


@pytest.mark.parametrize(
    "text", ["12+7=19, then 19-5=14.", "é 中\n\t🙂", "", "".join(map(chr, range(300)))]
)
def test_a_text_is_its_bytes_and_comes_back(text: str) -> None:
    tokenizer = build_tokenizer()
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text


def test_the_specials_have_their_ids_and_vanish_from_text() -> None:
    tokenizer = build_tokenizer()
    assert len(tokenizer) == 260 <= VOCAB_SIZE
    assert set(tokenizer.get_vocab()) == {*pre_tokenizers.ByteLevel.alphabet(), *SPECIALS}
    assert (tokenizer.eos_token_id, tokenizer.mask_token_id) == (IM_END_ID, MASK_ID)
    ids = [IM_START_ID, *b"7", MASK_ID, IM_END_ID, tokenizer.pad_token_id]
    assert tokenizer.decode(ids) == "<|im_start|>7<|MASK|><|im_end|><|endoftext|>"
    assert tokenizer.decode(ids, skip_special_tokens=True) == "7"


@pytest.mark.parametrize("form", FORMS)
def test_training_prompts_are_what_the_chat_template_gives(form: Form) -> None:
    tokenizer = build_tokenizer()
    batch = encode(ROWS, form, tokenizer)
    assert batch.ids.shape == (len(ROWS), SEQUENCE_LENGTH)
    for row, ids, prompt_len, length in zip(ROWS, *(t.tolist() for t in batch), strict=True):
        request = row.request(form)
        text = f"<|im_start|>user\n{request}<|im_end|>\n<|im_start|>assistant\n"
        message = [{"role": "user", "content": request}]
        prompt = cast(
            BatchEncoding, tokenizer.apply_chat_template(message, add_generation_prompt=True)
        )["input_ids"]
        assert ids[:prompt_len] == prompt == tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.decode(ids[prompt_len:length]) == row.answer(form) + "<|im_end|>"
        assert set(ids[length:]) <= {IM_END_ID}


@pytest.mark.parametrize("form", FORMS)
def test_the_longest_problems_fit(form: Form, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nano_problems, "NAMES", [max(NAMES, key=len)] * 2)
    monkeypatch.setattr(nano_problems, "THINGS", [max(THINGS, key=len)])
    batch = encode(islice(problems("train", 0), 20_000), form, build_tokenizer())
    assert SEQUENCE_LENGTH - 48 < batch.lens.max() <= SEQUENCE_LENGTH


# The model and its objective.


def test_it_computes_what_qwen3_of_transformers_computes() -> None:
    model, length = tiny(), 24
    values = {k: v for k, v in model.config.to_hf().items() if k not in ("dtype", "model_type")}
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**values))
    qwen3.set_attn_implementation("eager")
    missing, unexpected = qwen3.load_state_dict(model.state_dict(), strict=False)
    assert (missing, unexpected) == (["lm_head.weight"], [])
    qwen3.tie_weights()
    ids = random_batch(3, length).ids
    mask = block_causal_mask(length, BLOCK, CPU)
    bias = torch.zeros(length, length).masked_fill(~mask, -torch.inf).expand(3, 1, -1, -1)
    with torch.inference_mode():
        expected = qwen3(ids, attention_mask=bias).logits
        exact(model.logits(model(ids, torch.arange(length), mask)), expected)


def test_the_training_mask_for_two_blocks_of_two() -> None:
    assert training_mask(4, 2, CPU).int().tolist() == [
        [1, 1, 0, 0, 0, 0, 0, 0],
        [1, 1, 0, 0, 0, 0, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 1, 1, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 0, 0],
        [0, 0, 0, 0, 1, 1, 1, 1],
        [0, 0, 0, 0, 1, 1, 1, 1],
    ]


@pytest.mark.parametrize("position", range(12))
def test_a_prediction_sees_no_clean_token_of_its_own_or_a_later_block(position: int) -> None:
    model, clean = tiny(), random_batch(1, 12).ids
    noised = torch.full_like(clean, MASK_ID)
    changed = clean.clone()
    changed[0, position] = (clean[0, position] + 1) % 256
    with torch.inference_mode():
        before, after = denoise(model, noised, clean)[0], denoise(model, noised, changed)[0]
    seen_from = position // BLOCK * BLOCK + BLOCK
    assert torch.equal(before[:seen_from], after[:seen_from])
    assert ((before[seen_from:] - after[seen_from:]).abs().amax(-1) > 1e-3).all()


@pytest.mark.parametrize("block_size", [2, 4, 8])
def test_a_noised_block_sees_in_training_what_it_sees_in_decoding(block_size: int) -> None:
    model, length = tiny(block_size), 16
    batch = random_batch(5, length)
    noised, _ = add_noise(batch, block_size, torch.Generator().manual_seed(0))
    positions, mask = torch.arange(length), block_causal_mask(length, block_size, CPU)
    with torch.inference_mode():
        trained = denoise(model, noised, batch.ids)
        for start in range(0, length, block_size):
            block = slice(start, start + block_size)
            canvas = torch.full_like(batch.ids, MASK_ID)
            canvas[:, :start] = batch.ids[:, :start]
            canvas[:, block] = noised[:, block]
            exact(model(canvas, positions, mask)[:, block], trained[:, block])


def test_noise_masks_a_uniform_number_of_the_answers_tokens_and_weighs_them_by_the_rate() -> None:
    batch = Batch(torch.zeros(6000, 8, dtype=torch.long), torch.arange(6000) % 8, torch.tensor(8))
    noised, weight = add_noise(batch, BLOCK, torch.Generator().manual_seed(0))
    masked = noised == MASK_ID
    assert torch.equal(masked, weight > 0)
    prompt = torch.arange(8) < batch.prompt_lens[:, None]
    assert not masked[prompt].any()
    free = (~prompt).view(-1, 2, BLOCK).sum(-1)
    count = masked.view(-1, 2, BLOCK).sum(-1)
    exact(weight.view(-1, 2, BLOCK).sum(-1), free.float())  # count times free / count
    for size in range(1, BLOCK + 1):
        shares = torch.bincount(count[free == size], minlength=BLOCK + 1) / (free == size).sum()
        expected = [0.0, *([1 / size] * size), *([0.0] * (BLOCK - size))]
        torch.testing.assert_close(shares, torch.tensor(expected), rtol=0, atol=0.06)
    whole = masked.view(-1, 2, BLOCK)[free == BLOCK].float().mean(0)
    torch.testing.assert_close(whole, torch.full((BLOCK,), 0.625), rtol=0, atol=0.03)


def test_the_loss_of_a_model_that_knows_nothing_is_the_log_of_the_vocabulary() -> None:
    model = tiny()
    model.model.norm.weight.data.zero_()
    ids = random_batch(4, 12).ids
    batch = Batch(ids, torch.tensor([0, 3, 5, 8]), torch.tensor([12, 12, 12, 12]))
    loss = diffusion_loss(model, batch, torch.Generator().manual_seed(0))
    assert loss.item() == pytest.approx(math.log(VOCAB_SIZE), rel=1e-5)


# The decoder.


class Oracle(NanoSDAR):
    """Predicts fixed tokens, each with a given probability above or below the threshold."""

    def __init__(self, ids: Tensor, sure: Tensor) -> None:
        super().__init__(tiny().config)
        self.ids, self.sure = ids, sure

    def forward(self, ids: Tensor, positions: Tensor, mask: Tensor) -> Tensor:
        # Probabilities of 1, and of a half, the later the more.
        copies = ids.shape[1] // self.ids.shape[1]  # two in training
        told, sure = self.ids.repeat(1, copies), self.sure.repeat(1, copies)
        peak = torch.where(sure, 20.0, math.log(VOCAB_SIZE)) + positions * 0.01
        return torch.zeros(*ids.shape, VOCAB_SIZE).scatter_(2, told[..., None], peak[..., None])

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden


@pytest.mark.parametrize("prompt_len", range(6))
def test_decoding_stops_at_the_end_and_counts_tokens_and_steps(prompt_len: int) -> None:
    ids = torch.arange(1, 17).repeat(3, 1)
    ids[0, 9], ids[1, 14] = IM_END_ID, IM_END_ID  # the third row never ends
    if prompt_len:
        ids[2, prompt_len - 1] = IM_END_ID  # of the prompt: it ends nothing
    sure = torch.ones_like(ids, dtype=torch.bool)
    sure[1] = False
    batch = Batch(ids, torch.full((3,), prompt_len), torch.full((3,), 16))
    decoded = decode(Oracle(ids, sure), batch, 0.9)
    ends = [9, 14, 16]
    expected = [ids[row, prompt_len:end].tolist() for row, end in enumerate(ends)]
    assert decoded.answers == expected
    assert decoded.tokens == [10 - prompt_len, 15 - prompt_len, 16 - prompt_len]
    first = prompt_len // BLOCK
    # A step per block, a step per token to the end of the last block, a step per block.
    assert decoded.steps == [3 - first, 16 - prompt_len, 4 - first]


def test_a_step_unmasks_all_above_the_threshold_or_else_the_surest() -> None:
    ids = torch.arange(1, 9).repeat(1, 1)
    sure = torch.tensor([[1, 0, 1, 0, 1, 1, 1, 0]]).bool()
    decoded = decode(Oracle(ids, sure), Batch(ids, torch.tensor([0]), torch.tensor([8])), 0.9)
    assert (decoded.answers, decoded.steps) == ([list(range(1, 9))], [3 + 2])


# The exam.


@pytest.mark.parametrize("form", FORMS)
def test_the_exam_counts_right_answers_tokens_and_steps_by_kind(form: Form) -> None:
    tokenizer = build_tokenizer()
    taught, untaught = ROWS[:16], ROWS[16:]
    wrong = [Problem(p.kind, p.question, p.working, p.final + 1) for p in untaught]
    told = encode([*taught, *wrong], form, tokenizer)
    grade = Exam(ROWS, tokenizer, CPU).grade(
        SDARLearner(Oracle(told.ids, torch.ones_like(told.ids, dtype=torch.bool))), form
    )
    assert grade.all.accuracy == 16 / 24
    assert (grade.all.rows, grade.all.tokens) == (24, int((told.lens - told.prompt_lens).sum()))
    blocks = -(-told.lens // BLOCK) - told.prompt_lens // BLOCK
    assert grade.all.steps == blocks.sum()
    for kind, tally in grade.by_kind.items():
        rows = [row for row, problem in enumerate(ROWS) if problem.kind == kind]
        assert (tally.rows, tally.right) == (len(rows), sum(row < 16 for row in rows))
        assert tally.steps == blocks[rows].sum()
    assert sum(tally.rows for tally in grade.by_kind.values()) == 24


# The script.


def test_the_script_learns_and_writes_a_model_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        f"--out {tmp_path} --steps 8 --batch-size 2 --examples 40 --eval-count 3 --quick-count 2 "
        "--eval-every 4 --hidden-size 64 --layers 1 --lr 0.01"
    )
    monkeypatch.setattr(nano_training, "WARMUP_STEPS", 2)
    monkeypatch.setattr(sys, "argv", ["train", *arguments.split()])
    train_nano_sdar.main()
    training = json.loads((tmp_path / "training.json").read_text())
    assert training["steps"] == 8
    lines = [line for line in capsys.readouterr().out.splitlines() if "step" in line[:12]]
    for form in FORMS:
        losses = [float(line.split(f"{form}: loss ")[1].split()[0]) for line in lines[:2]]
        assert losses[1] < losses[0]
        measured = training["held_out"][form]
        assert measured["rows"] == 3 == sum(k["rows"] for k in measured["by_kind"].values())
        assert set(measured["by_kind"]) <= set(KINDS)
    assert json.loads((tmp_path / "answer_schema.json").read_text()) == SCHEMA

    config = json.loads((tmp_path / "config.json").read_text())
    assert (config["model_type"], config["block_size"]) == ("sdar", 4)
    assert (config["mask_token_id"], config["vocab_size"]) == (MASK_ID, VOCAB_SIZE)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None and tokenizer.chat_template == build_tokenizer().chat_template
    assert tokenizer.encode("1 é") == list("1 é".encode())
    assert eos_token_ids(tmp_path, tokenizer) == (IM_END_ID,)
    keys = ("attention_bias", "head_dim", "hidden_size", "intermediate_size", "vocab_size")
    more = ("num_attention_heads", "num_hidden_layers", "num_key_value_heads")
    qwen3 = Qwen3ForCausalLM(Qwen3Config(**{key: config[key] for key in (*keys, *more)}))
    weights = load_file(tmp_path / "model.safetensors")
    assert {name: w.shape for name, w in weights.items()} == {
        name: p.shape for name, p in qwen3.state_dict().items() if name != "lm_head.weight"
    }
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert len({row["id"] for row in rows}) == 3
    assert all(final_number(row["answer"], "plain") == int(row["final"]) for row in rows)
