"""nano_hybrid: what transformers computes, drafts as they are trained, its decoder and script."""

from __future__ import annotations

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import nano_training
import pytest
import torch
import torch.nn.functional as F
import train_nano_hybrid
from nano_batch import Batch, Decoded, collect
from nano_delta_net import CHUNK, gated_delta_rule
from nano_hybrid import Drafted, MoE, NanoHybrid, Past, load
from nano_hybrid_config import HybridConfig
from nano_problems import FORMS, SCHEMA, final_number
from nano_speculation import DRAFTS, decode, draft_mask, losses, passes
from nano_tokenizer import IM_END_ID, VOCAB_SIZE
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, Qwen3_5MoeForCausalLM
from transformers.cache_utils import MtpCache
from transformers.modeling_layers import MtpModel
from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import torch_recurrent_gated_delta_rule

CPU = torch.device("cpu")
TINY = HybridConfig(
    hidden_size=32,
    num_layers=4,
    head_dim=16,
    linear_head_dim=16,
    expert_size=16,
    shared_expert_size=16,
)


def tiny() -> NanoHybrid:
    model = NanoHybrid(TINY)
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # large enough that a wrong term shows
        parameter.data += torch.randn(parameter.shape, generator=generator) * 0.15
    return model


def random_ids(rows: int, length: int) -> Tensor:
    return torch.randint(256, (rows, length), generator=torch.Generator().manual_seed(2))


def exact(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def of_transformers(model: NanoHybrid, folder: Path) -> tuple[Qwen3_5MoeForCausalLM, MtpModel]:
    """The same weights in transformers' model, and in its MTP model."""
    (folder / "config.json").write_text(json.dumps(model.config.to_hf()))
    config = AutoConfig.from_pretrained(folder, dtype="float32")
    config.num_mtp_layers, config.mtp_layer_types = 1, ["full_attention"]
    main = Qwen3_5MoeForCausalLM(config).eval()
    weights = model.state_dict()
    missing, unexpected = main.load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    assert unexpected == [name for name in weights if name.startswith("mtp.")]
    main.tie_weights()
    head = MtpModel(main, 1).eval()
    names = {"fc": "eh_proj", "pre_fc_norm_embedding": "enorm", "pre_fc_norm_hidden": "hnorm"}
    renamed = {"embed_tokens.weight": weights["model.embed_tokens.weight"]}
    for name, weight in model.mtp.state_dict().items():
        first, rest = name.split(".", 1)
        if first == "layers":
            renamed[name.replace("layers.0", "layers.0.mtp_block")] = weight
        else:
            renamed[f"layers.0.{names.get(first, 'post_norm')}.{rest}"] = weight
    assert head.load_state_dict(renamed, strict=False).missing_keys == ["shared_head.weight"]
    return main, head


# The model.


@pytest.mark.parametrize("length", [1, CHUNK, 2 * CHUNK + 9])
def test_the_chunked_rule_is_the_recurrent_one(length: int) -> None:
    generator = torch.Generator().manual_seed(0)
    shape = (2, length, 3)
    q, k, v = (torch.randn(*shape, 8, generator=generator) for _ in range(3))
    q, k = (torch.nn.functional.normalize(x, dim=-1) for x in (q, k))
    g = -torch.rand(shape, generator=generator).square() * 3
    beta = torch.rand(shape, generator=generator)
    inputs = [x.requires_grad_() for x in (q, k, v, g, beta)]
    expected, _ = torch_recurrent_gated_delta_rule(q, k, v, g=g, beta=beta)
    found = gated_delta_rule(q * 8**-0.5, k, v, g, beta)
    exact(found, expected)
    weight = torch.randn(expected.shape, generator=generator)
    gradients = [torch.autograd.grad(out, inputs, weight) for out in (found, expected)]
    for gradient, told in zip(*gradients, strict=True):
        exact(gradient, told)


def test_it_computes_what_transformers_computes(tmp_path: Path) -> None:
    model, ids = tiny(), random_ids(3, 150)
    main, head = of_transformers(model, tmp_path)
    real = torch.ones(ids.shape)
    with torch.inference_mode():
        expected = main(ids, output_hidden_states=True)
        hidden, _ = model(ids, real)
        exact(model.logits(hidden), expected.logits)
        first = next(passes(model, hidden, ids, real, 1))
        positions = torch.arange(1, 150).expand(3, -1)
        cache = MtpCache(config=head.config)
        told = head.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=ids[:, 1:])
        exact(first.hidden[:, :-1], told)


@pytest.mark.parametrize("anchor", [0, 7, 20])
def test_a_trained_pass_is_a_step_of_drafting(anchor: int, tmp_path: Path) -> None:
    model, ids = tiny(), random_ids(2, 24)
    _, head = of_transformers(model, tmp_path)
    real = torch.ones(ids.shape)
    with torch.inference_mode():
        hidden, _ = model(ids, real)
        trained = [drafted.hidden for drafted in passes(model, hidden, ids, real, 3)]
        # Behind the anchor: first all positions up to it, then one position after the other.
        cache, new = MtpCache(config=head.config), hidden[:, : anchor + 1]
        for index, hidden in enumerate(trained):
            end = anchor + 1 + index
            positions = torch.arange(end - new.shape[1], end).expand(2, -1) + 1
            following = ids[:, end + 1 - new.shape[1] : end + 1]
            new = head.forward_layer(0, new, positions, cache, input_ids=following)[:, -1:]
            exact(hidden[:, end - 1], new[:, 0])


def test_the_masks_of_the_second_and_third_pass() -> None:
    assert draft_mask(3, 1, CPU).int().tolist() == [
        [0, 0, 0, 1, 0, 0],
        [1, 0, 0, 0, 1, 0],
        [1, 1, 0, 0, 0, 1],
    ]
    assert draft_mask(3, 2, CPU).int().tolist() == [
        [0, 0, 0, 0, 0, 0, 1, 0, 0],
        [0, 0, 0, 1, 0, 0, 0, 1, 0],
        [1, 0, 0, 0, 1, 0, 0, 0, 1],
    ]


def test_the_balance_loss_is_one_if_even_and_else_what_the_worst_gets() -> None:
    moe = MoE(TINY)
    experts, used = TINY.num_experts, TINY.experts_per_token
    x = torch.eye(experts, TINY.hidden_size).repeat(1, 2, 1)
    for expert in range(experts):  # the token i uses the experts i and i + 1
        moe.gate.weight.data[expert, [expert, (expert - 1) % experts]] = 60.0
    real = torch.ones(1, 2 * experts)
    assert moe(x, real)[1].item() == pytest.approx(1)
    real[:, 1:] = 0  # only the first token counts
    assert moe(x, real)[1].item() == pytest.approx(experts / used)


def test_losses_of_a_model_that_knows_nothing_are_the_log_of_the_vocabulary() -> None:
    model = tiny()
    for norm in (model.model.norm, model.mtp.norm):
        norm.weight.data.fill_(-1)
    batch = Batch(random_ids(4, 12), torch.tensor([1, 3, 5, 8]), torch.tensor([12, 9, 12, 12]))
    found = losses(model, batch)
    assert found.answer.item() == pytest.approx(math.log(VOCAB_SIZE), rel=1e-5)
    assert found.drafts.item() == pytest.approx(DRAFTS * math.log(VOCAB_SIZE), rel=1e-5)


# The decoder.


class Oracle(NanoHybrid):
    """Tells fixed tokens; its head drafts those of them right that `good` names.

    A row's first two tokens are its number.
    """

    def __init__(self, ids: Tensor, good: Tensor) -> None:
        super().__init__(TINY)
        self.told, self.good = F.pad(ids, (0, 16)), F.pad(good, (0, 16), value=True)

    def forward(self, ids: Tensor, real: Tensor) -> tuple[Tensor, Tensor]:
        return self._sure(self.told[ids[:, 0], 1 : ids.shape[1] + 1]), torch.ones(())

    def draft(
        self,
        hidden: Tensor,
        following: Tensor,
        real: Tensor,
        past: Past | None,
        mask: Tensor | None,
    ) -> Drafted:
        rows, ahead = following[:, 0], slice(2, following.shape[1] + 2)
        told = torch.where(self.good, self.told, 255)[rows, ahead]
        return Drafted(self._sure(told), torch.ones(()), Past(told, told))

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden

    @staticmethod
    def _sure(told: Tensor) -> Tensor:
        return F.one_hot(told, VOCAB_SIZE) * 100.0


def numbered(rows: int, length: int) -> Tensor:
    ids = random_ids(rows, length)
    ids[:, :2] = torch.arange(rows)[:, None]
    return ids


def test_a_loss_counts_the_tokens_of_the_answer_that_come_after_its_pass() -> None:
    ids, start, end = numbered(1, 14), 5, 11
    batch = Batch(ids, torch.tensor([start]), torch.tensor([end]))
    for wrong in range(2, 14):
        told = ids.clone()
        told[0, wrong] += 1
        found = losses(Oracle(told, torch.ones_like(ids, dtype=torch.bool)), batch)
        firsts = range(start, start + 1 + DRAFTS)
        answer, *drafts = [100 / (end - first) if first <= wrong < end else 0.0 for first in firsts]
        assert found.answer.item() == pytest.approx(answer)
        assert found.drafts.item() == pytest.approx(sum(drafts))


@pytest.mark.parametrize("drafts", [0, 1, DRAFTS])
def test_decoding_keeps_right_drafts_and_counts_tokens_and_forwards(drafts: int) -> None:
    rows, room = 5, 24
    ids = numbered(rows, room)
    ends = [9, 10, 17, 23, room]
    for row, end in enumerate(ends[:-1]):
        ids[row, end] = IM_END_ID
    ids[4, 3] = IM_END_ID  # of the prompt: it ends nothing
    good = torch.rand(rows, room, generator=torch.Generator().manual_seed(3)) < 0.7
    starts = [4, 9, 5, 3, 6]
    batch = Batch(ids, torch.tensor(starts), torch.full((rows,), room))
    decoded = decode(Oracle(ids, good), batch, drafts)
    for row, (start, end) in enumerate(zip(starts, ends, strict=True)):
        assert decoded.answers[row] == ids[row, start:end].tolist()
        stop = min(end + 1, room)
        assert decoded.tokens[row] == stop - start
        known, forwards = start + 1, 1
        while known < stop:
            right = [*good[row, known : known + drafts].tolist(), *[True] * drafts, False]
            known += min(right.index(False), drafts) + 1
            forwards += 1
        assert decoded.steps[row] == forwards


def test_drafts_change_no_token() -> None:
    model, ids = tiny(), random_ids(6, 40)
    batch = Batch(ids, torch.tensor([3, 9, 20, 38, 39, 5]), torch.full((6,), 40))
    plain, drafted = decode(model, batch, 0), decode(model, batch, DRAFTS)
    assert (drafted.answers, drafted.tokens) == (plain.answers, plain.tokens)
    assert plain.steps == plain.tokens


# The script.


def test_the_script_learns_and_writes_a_model_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = (
        f"--out {tmp_path} --steps 8 --batch-size 2 --examples 40 --eval-count 2 --quick-count 1 "
        "--eval-every 4 --hidden-size 32 --layers 4 --lr 0.01"
    )
    monkeypatch.setattr(nano_training, "WARMUP_STEPS", 2)
    # An untrained model never ends; what a decoder does is tested above.
    monkeypatch.setattr(train_nano_hybrid, "decode", lambda model, batch, drafts: given(batch))
    monkeypatch.setattr(sys, "argv", ["train", *arguments.split()])
    train_nano_hybrid.main()
    training = json.loads((tmp_path / "training.json").read_text())
    assert (training["steps"], training["drafts"]) == (8, DRAFTS)
    lines = [line for line in capsys.readouterr().out.splitlines() if "step" in line[:12]]
    for form in FORMS:
        nats = [float(line.split(f"{form}: loss ")[1].split()[0]) for line in lines[:2]]
        assert nats[1] < nats[0]
        assert training["held_out"][form]["accuracy"] == 1
        assert training["held_out"][form]["tokens_per_step"] == 2
    assert json.loads((tmp_path / "answer_schema.json").read_text()) == SCHEMA
    weights = load_file(tmp_path / "model.safetensors")
    assert {weight.dtype for weight in weights.values()} == {torch.bfloat16}
    assert load(tmp_path).config == replace(HybridConfig(), hidden_size=32, num_layers=4)
    config = AutoConfig.from_pretrained(tmp_path)
    assert config.model_type == "qwen3_5_moe_text"
    missing, _ = Qwen3_5MoeForCausalLM(config).load_state_dict(weights, strict=False)
    assert missing == ["lm_head.weight"]
    rows = [json.loads(line) for line in (tmp_path / "eval.jsonl").read_text().splitlines()]
    assert all(final_number(row["answer"], "plain") == int(row["final"]) for row in rows)


def given(batch: Batch) -> Decoded:
    """The answers of a batch, two tokens a step."""
    counts = (batch.lens - batch.prompt_lens).tolist()
    tokens = [2 * (count // 2) for count in counts]
    decoded = collect(batch.ids, batch.prompt_lens, [count // 2 for count in counts])
    return Decoded(decoded.answers, tokens, decoded.steps)
