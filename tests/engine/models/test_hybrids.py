"""Qwen3.5 and Qwen3-Next against transformers, and the forms that their checkpoints come in."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.caches.model_caches import state_bytes
from batchgen.engine.engine_models import chunk_multiple
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.hybrid import HybridConfig, HybridForCausalLM
from batchgen.engine.models.model_config import ModelConfig
from batchgen.engine.models.qwen3_5_moe import Qwen3_5MoeForCausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.engine.engine_rows import expect_short_rows, run

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(200)]
KINDS = ["qwen3_next", "qwen3_5", "qwen3_5_moe"]
CASES: list[tuple[str, dict[str, Any]]] = [
    *((kind, {}) for kind in KINDS),
    ("qwen3_5", {"tie_word_embeddings": True}),
    ("qwen3_5_text", {"tie_word_embeddings": True, "attention_bias": True}),
    ("qwen3_5_moe_text", {"num_experts_per_tok": 1, "head_dim": 32, "linear_num_value_heads": 2}),
    ("qwen3_next", {"norm_topk_prob": False, "mlp_only_layers": [1], "layer_types": None,
                    "full_attention_interval": 2, "linear_conv_kernel_dim": 3}),
]  # fmt: skip


@pytest.mark.quick(3)
@pytest.mark.parametrize(("kind", "config"), CASES, ids=str)
def test_logits_equal_transformers(
    kind: str,
    config: dict[str, Any],
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    folder = tiny_model(kind, **config)
    logits = run_paged(load_model(folder, device=CPU), IDS, [64, 128, 8])
    theirs = reference_logits(folder, IDS)
    error, size = (logits - theirs).abs(), theirs.abs().max()
    assert float(error.mean() / size) < 5e-6
    # Where the output of a recurrence is near zero, its norm makes errors larger. The two forms in
    # transformers are as far from each other.
    assert float(error.max() / size) < 3e-4


@pytest.mark.quick(1, thorough=1)
@pytest.mark.parametrize("kind", KINDS)
def test_greedy_tokens_and_log_probabilities(
    kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In chunks, with shared prefixes and several samples, and rows that lose their caches."""
    expect_short_rows(monkeypatch)
    folder = tiny_model(kind)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    model = load_model(folder, device=CPU)
    config = EngineConfig(
        max_batched_tokens=64, max_model_len=176, kv_cache_gib=12 * 4096 / 2**30, max_num_seqs=6
    )
    engine = LLMEngine(model, None, (), ARStrategy(), config)
    params = RequestParams(temperature=0, max_new_tokens=22, logprobs=True)
    short = [IDS[first : first + 30] for first in (30, 60, 90)]
    prompts = [IDS[:150], IDS[:150], [*IDS[:70], 5, 6], IDS[40:49], *short]
    found = run(engine, [(prompt, params) for prompt in prompts])
    assert engine.stats.preemptions and engine.stats.cached_tokens
    assert found[0].token_ids == found[1].token_ids
    for prompt, output in zip(prompts[1:], found[1:], strict=True):
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + output.token_ids])).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert output.token_ids == logprobs.argmax(-1).tolist()
        torch.testing.assert_close(
            torch.tensor(output.columns["logprobs"]), logprobs.max(-1).values, atol=1e-3, rtol=1e-3
        )


def copied(folder: Path, into: Path, **config: Any) -> Path:
    """A copy of a model folder with other values in its configuration; None takes a key out."""
    copy = into / "model"
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text())
    for key, value in config.items():
        at, key = (values["text_config"], key[5:]) if key.startswith("text_") else (values, key)
        at[key] = value
        if value is None:
            del at[key]
    (copy / "config.json").write_text(json.dumps(values))
    return copy


def parameters(folder: Path) -> dict[str, Tensor]:
    return dict(load_model(folder, device=CPU).named_parameters())


@pytest.mark.quick(2)
@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("prefix", ["model.", "language_model.", "language_model.model."])
def test_other_names_are_the_same_weights(
    prefix: str, split: bool, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Text-only checkpoints were saved under several prefixes; experts fused or each for itself;
    small tensors in the dtype of the model."""
    whole = tiny_model("qwen3_5_moe")
    folder = copied(tiny_model("qwen3_5_moe", split_experts=split), tmp_path)
    tensors = {
        name.replace("model.language_model.", prefix): tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not name.startswith("model.visual.")
    }
    if prefix != "model.":
        tensors["language_model.lm_head.weight"] = tensors.pop("lm_head.weight")
    save_file(tensors, folder / "model.safetensors")
    expected = parameters(whole)
    for name, parameter in parameters(folder).items():
        assert torch.equal(parameter, expected[name]), name


def test_what_is_not_loaded_is_said(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("qwen3_5"), tmp_path)
    assert load_model(folder, device=CPU).skipped_parts == ("the vision tower",)
    tensors = load_file(folder / "model.safetensors")
    head = {"mtp.fc.weight": torch.zeros(64, 128), "mtp.norm.weight": torch.zeros(64)}
    save_file(tensors | head, folder / "model.safetensors")
    head_too = ("the head for multi-token prediction", "the vision tower")
    assert load_model(folder, device=CPU).skipped_parts == head_too
    save_file(tensors | {"model.audio.weight": torch.zeros(3)}, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.audio\.weight$"):
        load_model(folder, device=CPU)
    again = tensors | {"model.norm.weight": tensors["model.language_model.norm.weight"].clone()}
    save_file(again, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"unexpected tensors: model\S*\.norm\.weight$"):
        load_model(folder, device=CPU)


def test_small_parameters_stay_in_float32(tiny_model: TinyModel, tmp_path: Path) -> None:
    """Whatever dtype the checkpoint and the model have; the norms have their 1 in float32 too."""
    folder = copied(tiny_model("qwen3_5_text"), tmp_path)
    tensors = {
        name: tensor.bfloat16() for name, tensor in load_file(folder / "model.safetensors").items()
    }
    save_file(tensors, folder / "model.safetensors")
    model = load_model(folder, device=CPU, dtype=torch.bfloat16)
    at = "model.layers.0."
    found = {name: p for name, p in model.named_parameters() if p.dtype == torch.float32}
    for name, theirs in (
        ("A_log", "A_log"),
        ("dt_bias", "dt_bias"),
        ("norm_weight", "norm.weight"),
    ):
        expected = tensors[f"{at}linear_attn.{theirs}"].float()
        assert torch.equal(found[f"{at}mixer.{name}"], expected)
    norm = tensors[f"{at}input_layernorm.weight"].float() + 1
    assert torch.equal(found[f"{at}mixer_norm.weight"], norm)
    assert found["model.layers.1.mixer.q_norm.weight"].dtype == torch.float32


def family(folder: Path) -> tuple[ModelConfig, HybridConfig]:
    config = load_model_config(folder)
    return config, config.family_as(HybridConfig)


def test_configurations_are_read(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(
        tiny_model("qwen3_5_moe"),
        tmp_path,
        text_layer_types=None,
        text_full_attention_interval=3,
        text_mtp_num_hidden_layers=1,
        text_dtype=None,
        dtype="bfloat16",
    )
    config, hybrid = family(folder)
    assert hybrid.attention_layers == (2,) and hybrid.moe_layers == (0, 1, 2)
    assert hybrid.rotary_dim == 4 and hybrid.renormalise and hybrid.shared_size == 48
    assert config.heads == ("mtp",) and hybrid.mtp_layers == 1
    assert config.dtype == torch.bfloat16


def test_a_flat_configuration_with_the_old_names_of_rotary_embedding(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = copied(
        tiny_model("qwen3_next"),
        tmp_path,
        rope_parameters=None,
        rope_theta=777.0,
        partial_rotary_factor=0.5,
    )
    _, hybrid = family(folder)
    assert hybrid.rotary_dim == 8 and hybrid.rope.rope_theta == 777.0


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"]}, "layer_types"),
        ("qwen3_next", {"layer_types": ["linear_attention", "sliding_attention", "full_attention"]},
         "'sliding_attention', which is not supported"),
        ("qwen3_next", {"linear_num_value_heads": 3}, "3 is not a multiple of .* 2"),
        ("qwen3_next", {"linear_key_head_dim": 0}, "linear_key_head_dim is 0"),
        ("qwen3_next", {"linear_conv_kernel_dim": 1}, "linear_conv_kernel_dim is 1"),
        ("qwen3_5", {"text_tie_word_embeddings": True}, "write the same value in both places"),
        ("qwen3_5", {"quantization_config": {"quant_method": "hqq"}}, "is quantized"),
        ("qwen3_5", {"text_quantization_config": {"quant_method": "hqq"}}, "is quantized"),
        ("qwen3_5", {"text_hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("qwen3_5_moe", {"text_num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(copied(tiny_model(kind), tmp_path, **changes))


def test_dummy_weights_and_the_column_of_experts(tiny_model: TinyModel, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention"]
    changes = {"text_layer_types": kinds, "text_num_hidden_layers": 2, "text_num_experts": 512}
    folder = copied(tiny_model("qwen3_5_moe"), tmp_path, **changes)
    model = load_model(folder, device=CPU, load_format="dummy")
    assert isinstance(model, Qwen3_5MoeForCausalLM)
    config = EngineConfig(max_model_len=128, kv_cache_gib=0.001, max_num_seqs=3)
    columns = ("routed_experts",)
    engine = LLMEngine(model, None, (), ARStrategy(), config, context_columns=columns)
    engine.add_request("0", IDS[:70], RequestParams(max_new_tokens=4, columns=columns))
    outputs = []
    while engine.has_unfinished():
        outputs += engine.step()
    routes = outputs[0].columns["routed_experts"]
    assert routes.shape == (73, 2, 3) and routes.dtype == np.uint16
    assert len(outputs[0].token_ids) == 4 and 255 < routes.max() < 512
    few = load_model_config(tiny_model("qwen3_5_moe"))
    assert model.declared_columns(few)[0].dtype == np.uint8


def test_the_plan_counts_states_and_checkpoints(tiny_model: TinyModel) -> None:
    model = load_model(tiny_model("qwen3_5_text"), device=CPU)
    assert isinstance(model, HybridForCausalLM)
    assert chunk_multiple(model) == model.config.family.chunk_multiple == 64
    state = 2 * (3 * 96 * 4 + 4 * 8 * 16 * 4)  # two layers: windows, and matrices
    records = 2 * 2 * 4 * (96 + 4 * 8 + 2 * 16 + 4)  # two halves: inputs, updates, keys, decays
    assert state_bytes(model.cache_specs) == state
    config = EngineConfig(
        max_model_len=128, kv_cache_gib=0.001, max_num_seqs=3, state_checkpoints=5
    )
    memory = LLMEngine(model, None, (), ARStrategy(), config).memory
    assert memory.row_states == 4 * (state + records)
    assert memory.checkpoints == 5 * state and memory.num_checkpoints == 5
