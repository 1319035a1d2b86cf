"""Folders of adapters that are damaged, of another model, or compute what is not supported: each is
refused by the name of the key or the tensor."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.engine.loading.adapters import check_adapter
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.peft_files import open_adapter
from tests.support.engine.lora_files import write_adapter

LAST = "base_model.model.model.layers.2.self_attn"


def edit(adapter: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    tensors = load_file(adapter / "adapter_model.safetensors")
    change(tensors)
    save_file(tensors, adapter / "adapter_model.safetensors")


@pytest.fixture
def adapter(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    return write_adapter(tmp_path / "a", tiny_model("llama"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"peft_type": "IA3"}, "peft_type is 'IA3'"),
        ({"bias": "all"}, "bias is 'all'"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out"),
        ({"use_dora": True}, "use_dora is True"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices"),
        ({"r": 0}, "r must be a whole number from 1 on, got 0"),
        ({"lora_alpha": "NaN"}, "lora_alpha must be a finite number"),
        ({"rank_pattern": {"(a+)+$": 3}}, r"rank_pattern has the pattern '\(a\+\)\+\$'"),
        ({"alpha_pattern": [1]}, "alpha_pattern must be an object"),
    ],
)
def test_a_configuration_that_is_not_supported(
    changes: dict[str, Any], message: str, adapter: Path
) -> None:
    path = adapter / "adapter_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    with pytest.raises(ValueError, match=message):
        open_adapter(adapter)


@pytest.mark.parametrize("text", ["{", "[]", "[" * 100_000, ""])
def test_a_damaged_configuration(text: str, adapter: Path) -> None:
    (adapter / "adapter_config.json").write_text(text)
    with pytest.raises(ValueError, match=r"adapter_config.json is damaged"):
        open_adapter(adapter)


def test_files_that_are_no_adapter(adapter: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"is not an adapter: it has no adapter_config\.json"):
        open_adapter(tmp_path)
    weights = adapter / "adapter_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-7])
    with pytest.raises(ValueError, match=r"adapter_model.safetensors is damaged or cut off"):
        open_adapter(adapter)
    weights.unlink()
    (adapter / "adapter_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"adapter_model.bin is a pickle, which can run code"):
        open_adapter(adapter)


def lose(name: str) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        del tensors[name]

    return change


def give(name: str, *shape: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = torch.zeros(shape)

    return change


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lose(f"{LAST}.q_proj.lora_B.weight"), rf"tensor {LAST}.q_proj.lora_B.weight is missing"),
        (
            give("base_model.model.lm_head.weight", 128, 64),
            "tensor base_model.model.lm_head.weight is not part",
        ),
        (
            give("base_model.model.model.embed_tokens.lora_embedding_A", 4, 128),
            "embed_tokens.lora_embedding_B is missing",
        ),
        (
            give("base_model.model.model.norm.base_layer.weight", 64),
            "norm.base_layer.weight is not part",
        ),
        (give(f"{LAST}.q_proj.lora_magnitude_vector", 64), "is of DoRA"),
    ],
)
def test_tensors_that_are_no_factors(
    change: Callable[[dict[str, Tensor]], None], message: str, adapter: Path
) -> None:
    edit(adapter, change)
    with pytest.raises(ValueError, match=message):
        open_adapter(adapter)


def pair(module: str, depth: int, width: int) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[f"base_model.model.{module}.lora_A.weight"] = torch.zeros(4, depth)
        tensors[f"base_model.model.{module}.lora_B.weight"] = torch.zeros(width, 4)

    return change


def lose_pair(tensors: dict[str, Tensor]) -> None:
    for factor in "AB":
        del tensors[f"{LAST}.v_proj.lora_{factor}.weight"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            pair("model.layers.3.self_attn.q_proj", 64, 64),
            "layers.3.self_attn.q_proj, which Llama.* does not have",
        ),
        (pair("model.layers.0.mlp.c_fc", 64, 64), "c_fc, which LlamaForCausalLM does not have"),
        (
            pair("model.layers.0.self_attn.q_proj", 48, 64),
            r"q_proj.lora_A.weight has shape \[4, 48\].* 64 in features",
        ),
        (
            pair("model.layers.0.self_attn.k_proj", 64, 64),
            r"k_proj.lora_B.weight has shape \[64, 4\].* 32 out features",
        ),
        (pair("lm_head", 64, 120), r"lora_B.weight has shape \[120, 4\].* 128 out features"),
        (give(f"{LAST}.q_proj.lora_A.weight", 64), r"lora_A.weight has shape \[64\]"),
        (
            give(f"{LAST}.q_proj.lora_A.weight", 5, 64),
            r"lora_A.weight has shape \[5, 64\], and adapter_config.json says that its rank is 4",
        ),
        (
            lose_pair,
            r"has v_proj, and tensor model.layers.2.self_attn.v_proj.lora_A.weight is missing",
        ),
    ],
)
def test_an_adapter_of_another_model(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    adapter: Path,
    tiny_model: Callable[..., Path],
) -> None:
    model = load_model(tiny_model("llama"), device=torch.device("cpu"))
    check_adapter(open_adapter(adapter), model)
    edit(adapter, change)
    with pytest.raises(ValueError, match=message):
        check_adapter(open_adapter(adapter), model)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            pair("model.layers.0.mlp.gate", 64, 8),
            "mlp.gate, and adapters of this module .* add the adapter to the weights",
        ),
        (
            pair("model.layers.0.mlp.experts.3.up_proj", 64, 32),
            r"has up_proj, and tensor model.layers.0.mlp.experts.0.up_proj.lora_A.weight is miss",
        ),
    ],
)
def test_an_adapter_of_a_mixture(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    base = tiny_model("qwen3_moe")
    adapter = write_adapter(tmp_path / "a", base)
    model = load_model(base, device=torch.device("cpu"))
    check_adapter(open_adapter(adapter), model)
    edit(adapter, change)
    with pytest.raises(ValueError, match=message):
        check_adapter(open_adapter(adapter), model)
