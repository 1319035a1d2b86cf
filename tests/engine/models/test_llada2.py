"""LLaDA2: our forwards and rows against a plain forward in float32 of what published files say."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config, strange_keys
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.model_config import Diffusion
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.engine.models.test_sdar import PagedRows, edit_config, equal, random_rows
from tests.strategies.dllm.test_dllm import EOS, MASK, check, requests, run
from tests.support.engine.dllm_reference import Options, block_causal, generate

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
SIZES = {
    "mini": {
        "num_hidden_layers": 20, "hidden_size": 2048, "intermediate_size": 5120,
        "moe_intermediate_size": 512, "num_attention_heads": 16, "max_position_embeddings": 32768,
    },
    "flash": {
        "num_hidden_layers": 32, "hidden_size": 4096, "intermediate_size": 9216,
        "moe_intermediate_size": 1024, "num_attention_heads": 32, "max_position_embeddings": 16384,
    },
}  # fmt: skip
PUBLISHED: dict[str, Any] = {
    "architectures": ["LLaDA2MoeModelLM"], "model_type": "llada2_moe", "num_key_value_heads": 4,
    "first_k_dense_replace": 1, "hidden_act": "silu", "num_experts": 256, "num_experts_per_tok": 8,
    "num_shared_experts": 1, "n_group": 8, "topk_group": 4, "norm_topk_prob": True,
    "norm_head": False, "rope_theta": 600000, "rope_scaling": None, "rms_norm_eps": 1e-06,
    "torch_dtype": "bfloat16", "use_bias": False, "use_rmsnorm": True, "head_dim": 128,
    "use_cache": False, "use_qkv_bias": False, "embedding_dropout": 0.0, "norm_softmax": False,
    "output_dropout": 0.0, "vocab_size": 157184, "rotary_dim": 64, "router_dtype": "fp32",
    "using_split_qkv_in_self_attention": False, "moe_router_enable_expert_bias": True,
    "routed_scaling_factor": 2.5, "score_function": "sigmoid", "initializer_range": 0.02,
    "max_window_layers": 28, "output_router_logits": False, "pad_token_id": 156892,
    "partial_rotary_factor": 0.5, "use_sliding_window": False, "tie_word_embeddings": False,
    "mask_token_id": 156895, "attention_dropout": 0.0,
}  # fmt: skip


class Plain:
    """The published forward of one sequence, by the names of the checkpoint's tensors."""

    def __init__(self, folder: Path, block_length: int) -> None:
        self.config = json.loads((folder / "config.json").read_text())
        self.tensors = {k: v.float() for k, v in load_file(folder / "model.safetensors").items()}
        self.length = block_length

    def __call__(self, ids: list[int]) -> Tensor:
        t, stream = self.tensors, self.tensors["model.word_embeddings.weight"][ids]
        for i in range(self.config["num_hidden_layers"]):
            at = f"model.layers.{i}."
            stream = stream + self.attention(
                at, self.norm(stream, t[at + "input_layernorm.weight"])
            )
            hidden = self.norm(stream, t[at + "post_attention_layernorm.weight"])
            dense = i < self.config["first_k_dense_replace"]
            stream = stream + (self.mlp(at + "mlp.", hidden) if dense else self.moe(at, hidden))
        return self.norm(stream, t["model.norm.weight"]) @ t["lm_head.weight"].T

    def norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return (
            x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.config["rms_norm_eps"]) * weight
        )

    def mlp(self, at: str, x: Tensor) -> Tensor:
        gate, up, down = (self.tensors[f"{at}{n}_proj.weight"] for n in ("gate", "up", "down"))
        return (F.silu(x @ gate.T) * (x @ up.T)) @ down.T

    def moe(self, at: str, x: Tensor) -> Tensor:
        c, at = self.config, at + "mlp."
        scores = (x @ self.tensors[at + "gate.weight"].T).sigmoid()
        biased = scores + self.tensors[at + "gate.expert_bias"]
        groups = biased.view(len(x), c["n_group"], -1)
        best = groups.topk(2).values.sum(-1).topk(c["topk_group"]).indices
        kept = torch.zeros(groups.shape[:2], dtype=torch.bool).scatter_(1, best, True)
        biased = groups.masked_fill(~kept.unsqueeze(2), -torch.inf).flatten(1)
        chosen = biased.topk(c["num_experts_per_tok"]).indices
        weights = scores.gather(1, chosen)
        weights = weights / (weights.sum(1, keepdim=True) + 1e-20) * c["routed_scaling_factor"]
        out = self.mlp(at + "shared_experts.", x)
        for row in range(len(x)):
            for expert, weight in zip(chosen[row].tolist(), weights[row], strict=True):
                out[row] += weight * self.mlp(f"{at}experts.{expert}.", x[row])
        return out

    def attention(self, at: str, x: Tensor) -> Tensor:
        c, t, at = self.config, self.tensors, at + "attention."
        heads, few, size = (
            c[k] for k in ("num_attention_heads", "num_key_value_heads", "head_dim")
        )
        qkv = (x @ t[at + "query_key_value.weight"].T).view(len(x), -1, size).transpose(0, 1)
        q, k, v = qkv.split([heads, few, few])
        q = self.rotated(self.norm(q, t[at + "query_layernorm.weight"]))
        k = self.rotated(self.norm(k, t[at + "key_layernorm.weight"]))
        k, v = (each.repeat_interleave(heads // few, 0) for each in (k, v))
        scores = q @ k.transpose(1, 2) / size**0.5
        scores = scores.masked_fill(~block_causal(len(x), self.length), -torch.inf)
        mixed = (scores.softmax(-1) @ v).transpose(0, 1).flatten(1)
        out: Tensor = mixed @ t[at + "dense.weight"].T
        return out

    def rotated(self, x: Tensor) -> Tensor:
        turned = int(x.shape[-1] * self.config["partial_rotary_factor"])
        powers = torch.arange(0, turned, 2).float() / turned
        angles = torch.arange(x.shape[1])[:, None] * self.config["rope_theta"] ** -powers
        cos, sin = angles.cos().repeat(1, 2), angles.sin().repeat(1, 2)
        part, rest = x.split([turned, x.shape[-1] - turned], dim=-1)
        first, second = part.chunk(2, dim=-1)
        return torch.cat((part * cos + torch.cat((-second, first), -1) * sin, rest), -1)


@pytest.mark.parametrize("chunk", [40, pytest.param(8, marks=pytest.mark.thorough)])
def test_logits_equal_a_plain_forward(tiny_model: TinyModel, chunk: int) -> None:
    folder = tiny_model("llada2_moe")
    model = load_model(folder, device=CPU, dtype=torch.float32)
    model.pack()
    plain, lengths = Plain(folder, 8), [3, 16, 29]
    rows = random_rows(lengths)
    paged = PagedRows(model, 8, lengths)
    parts: list[list[Tensor]] = [[] for _ in rows]
    for start in range(0, max(lengths), chunk):
        spans = [(i, start, min(start + chunk, n)) for i, n in enumerate(lengths) if n > start]
        logits = paged.prefill(spans, [rows[i][a:b] for i, a, b in spans])
        for (i, _, _), part in zip(spans, logits.split([b - a for _, a, b in spans]), strict=True):
            parts[i].append(part)
    for row, ours in zip(rows, parts, strict=True):
        equal(torch.cat(ours), plain(row))


@pytest.mark.parametrize(
    "rule",
    [
        {"unmasking": "joint_threshold", "confidence_threshold": 0.05, "edit_threshold": 0.1},
        pytest.param({"confidence_threshold": 0.05}, marks=pytest.mark.thorough),
    ],
    ids=str,
)
def test_rows_equal_a_plain_loop(tiny_model: TinyModel, rule: dict[str, Any]) -> None:
    """With edits, as LLaDA2.1 decodes, and without, as LLaDA2.0 does."""
    folder = tiny_model("llada2_moe")
    model = load_model(folder, device=CPU, dtype=torch.float32)
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.02, max_num_seqs=3)
    rows = requests(3, 6, longest=12)
    found = run(LLMEngine(model, None, EOS, DLLMStrategy(8, **rule), config), rows)
    options = Options(
        block_length=8, mask_token_id=MASK, eos=EOS,
        **{"unmasking": "low_confidence_dynamic"} | rule,
    )  # fmt: skip
    for output, (prompt, params) in zip(found, rows, strict=True):
        check(output, generate(Plain(folder, 8), prompt, params, options), params)


@pytest.mark.thorough
def test_edits_beside_the_experts_that_tokens_went_through(tiny_model: TinyModel) -> None:
    """Whose column needs a block's last forward to have read its final tokens: same tokens, and one
    place more of experts for each."""
    model = load_model(tiny_model("llada2_moe"), device=CPU, dtype=torch.float32)
    rule: dict[str, Any] = {
        "unmasking": "joint_threshold",
        "confidence_threshold": 0.05,
        "edit_threshold": 0.1,
    }
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.02, max_num_seqs=3)
    rows = requests(4, 5, longest=20)
    plain = run(LLMEngine(model, None, EOS, DLLMStrategy(8, **rule), config), rows)
    columns = ("step_map", ROUTED_EXPERTS)
    asked = [(prompt, replace(params, columns=columns)) for prompt, params in rows]
    engine = LLMEngine(
        model, None, EOS, DLLMStrategy(8, **rule), config, context_columns=[ROUTED_EXPERTS]
    )
    for wanted, output in zip(plain, run(engine, asked), strict=True):
        assert output.token_ids == wanted.token_ids
        assert (output.columns["step_map"] == wanted.columns["step_map"]).all()
        length = len(output.prompt_token_ids) + len(output.token_ids) - 1
        assert output.columns[ROUTED_EXPERTS].shape == (length, 2, 3)


@pytest.mark.parametrize(("name", "parameters"), [("mini", 16.26e9), ("flash", 102.9e9)])
def test_published_configurations(name: str, parameters: float, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED | SIZES[name]))
    config = load_model_config(tmp_path)
    assert config.diffusion == Diffusion(mask_token_id=156895, block_length=32)
    assert strange_keys(tmp_path) == []
    kind = model_class(config.architecture, tmp_path)
    model = kind(config, device=torch.device("meta"), dtype=torch.bfloat16)
    assert model.num_parameters == pytest.approx(parameters, rel=0.003)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"score_function": "softmax"}, "score_function is 'softmax', and must be 'sigmoid'"),
        ({"use_bias": True}, "use_bias is True, and must be False"),
        ({"norm_head": True}, "norm_head is True"),
        ({"mask_token_id": None}, "neither config.json"),
        ({"n_group": 3}, "group"),
    ],
    ids=str,
)
def test_unsupported_configurations_are_named(
    changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(edit_config(tiny_model("llada2_moe"), tmp_path / "m", **changes))
