"""Every parameter is filled exactly once, or the load fails and names what is wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from tests.support.engine.edited_models import edit_config, edit_weights

CPU = torch.device("cpu")
WINDOWS = {"use_sliding_window": True, "sliding_window": 8, "layer_types": None}
TinyModel = Callable[..., Path]


def test_merged_weights_hold_the_parts_in_order(tiny_model: TinyModel) -> None:
    folder = tiny_model("llama", attention_bias=True)
    tensors = load_file(folder / "model.safetensors")
    model = load_model(folder, device=CPU)
    for kind in ("weight", "bias"):
        parts = [tensors[f"model.layers.1.self_attn.{p}_proj.{kind}"] for p in "qkv"]
        merged = model.get_parameter(f"model.layers.1.mixer.qkv_proj.{kind}")
        assert torch.equal(merged, torch.cat(parts))
    assert model.config.dtype == model.dtype == torch.float32


def test_shards_load_as_one_file_does(tiny_model: TinyModel) -> None:
    whole = load_model(tiny_model("qwen3"), device=CPU)
    folder = tiny_model("qwen3", max_shard_size="100KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    sharded = load_model(folder, device=CPU)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, sharded.get_parameter(name))


def test_dtype_is_the_checkpoints_or_the_one_asked_for(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    exact = load_model(tiny_model("llama"), device=CPU)
    halved = load_model(tiny_model("llama"), device=CPU, dtype=torch.bfloat16)
    for name, parameter in halved.named_parameters():
        assert torch.equal(parameter, exact.get_parameter(name).bfloat16())
    config_only = edit_config(tiny_model("llama"), tmp_path / "m", dtype="float16")
    assert load_model_config(config_only).dtype == torch.float16


def test_tensors_that_follow_from_others_are_skipped(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tiny_model("llama", tie_word_embeddings=True)

    def add(tensors: dict[str, Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    model = load_model(edit_weights(folder, tmp_path / "m", add), device=CPU)
    assert model.lm_head is not None
    assert model.lm_head.weight is model.model.embed_tokens.weight


def _drop(tensors: dict[str, Tensor]) -> None:
    del tensors["model.layers.2.mlp.up_proj.weight"]


def _add(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.3.mlp.up_proj.weight"] = torch.zeros(1)


def _cut(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = torch.ones(63)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_drop, r"missing tensors: model\.layers\.2\.mlp\.up_proj\.weight"),
        (_add, r"unexpected tensors: model\.layers\.3\.mlp\.up_proj\.weight"),
        (_cut, r"model\.norm\.weight has shape \[63\], the configuration says \[64\]"),
        (dict.clear, r"missing tensors: .* and \d+ more"),
    ],
)
def test_wrong_tensors_are_named(
    change: Callable[[dict[str, Tensor]], None],
    message: str,
    tiny_model: TinyModel,
    tmp_path: Path,
) -> None:
    folder = edit_weights(tiny_model("llama"), tmp_path / "m", change)
    with pytest.raises(ValueError, match=message):
        load_model(folder, device=CPU)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.bool, torch.float8_e4m3fn, torch.complex64]
)
@pytest.mark.parametrize("name", ["model.layers.1.mlp.down_proj.weight", "model.norm.weight"])
def test_quantised_weights_without_a_word_on_how_are_refused(
    name: str, dtype: torch.dtype, tiny_model: TinyModel, tmp_path: Path
) -> None:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name].to(dtype)
        tensors[f"{name}_scale"] = torch.ones(1)

    folder = edit_weights(tiny_model("llama"), tmp_path / "m", change)
    kind = str(dtype).removeprefix("torch.")
    with pytest.raises(ValueError, match=rf"tensor {name} is in {kind}, and no quantization_con"):
        load_model(folder, device=CPU)
    with pytest.raises(ValueError, match=rf"tensor {name} is in {kind}, and no quantization_con"):
        load_model(folder, device=CPU, quantization="fp8")


def test_a_tensor_in_two_shards_is_an_error(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model("llama", max_shard_size="100KB"), folder)
    extra = {"model.norm.weight": torch.ones(64)}
    save_file(extra, folder / "model-extra.safetensors")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    index["weight_map"]["extra"] = "model-extra.safetensors"
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ValueError, match=r"unexpected tensors: model\.norm\.weight"):
        load_model(folder, device=CPU)


@pytest.mark.parametrize(
    "weight_map",
    [
        None,
        {},
        [],
        {"a": 1},
        {"a": "../m.st"},
        {"a": "/etc/passwd"},
        {"a": "b.st"},
        {"a": "x" * 300},
    ],
)
def test_a_wrong_index_is_named(weight_map: Any, tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = edit_config(tiny_model("llama"), tmp_path / "m")
    shutil.copy(tiny_model("llama") / "model.safetensors", tmp_path / "m.st")
    values = {} if weight_map is None else {"weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"no 'weight_map'|not a file of the folder|is missing"):
        load_model(folder, device=CPU)


def test_shards_need_no_index(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    shutil.copytree(tiny_model("llama", max_shard_size="100KB"), folder)
    whole = load_model(folder, device=CPU)
    (folder / "model.safetensors.index.json").unlink()
    sharded = load_model(folder, device=CPU)
    for name, parameter in whole.named_parameters():
        assert torch.equal(parameter, sharded.get_parameter(name))
    next(folder.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors\.index\.json, and . of the"):
        load_model(folder, device=CPU)


def test_files_that_cannot_be_read_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    config_only = edit_config(tiny_model("llama"), tmp_path / "config")
    with pytest.raises(ValueError, match=r"has no weights .* load_format=dummy"):
        load_model(config_only, device=CPU)
    with pytest.raises(ValueError, match=r"not a .gguf file, which load_format=gguf"):
        load_model(config_only, device=CPU, load_format="gguf")
    (config_only / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(ValueError, match=r"pytorch_model\.bin.*convert them to safetensors"):
        load_model(config_only, device=CPU)

    cut = tmp_path / "cut"
    shutil.copytree(tiny_model("llama"), cut)
    data = (cut / "model.safetensors").read_bytes()
    (cut / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged or cut off"):
        load_model(cut, device=CPU)

    sharded = tmp_path / "sharded"
    shutil.copytree(tiny_model("llama", max_shard_size="100KB"), sharded)
    next(sharded.glob("model-00002-*")).unlink()
    with pytest.raises(ValueError, match=r"model-00002-.*, named by .*index.json, is missing"):
        load_model(sharded, device=CPU)


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"architectures": None}, "names no architecture"),
        (
            "llama",
            {"architectures": ["GPT2LMHeadModel"]},
            "'GPT2LMHeadModel' is not supported; docs/reference/models.md lists",
        ),
        (
            "llama",
            {"architectures": ["NemotronForCausalLM"]},
            "is not supported: the nearest is LlamaForCausalLM, which lacks norms",
        ),
        ("llama", {"architectures": ["Qwen3ForCausualLM"]}, "is Qwen3ForCausalLM meant"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ("llama", {"quantization_config": {"quant_method": "hqq"}}, "the checkpoint is quantized"),
        ("llama", {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0}},
         "'dynamic' is not supported"),
        ("llama", {"num_key_value_heads": 3}, "num_heads 4 is not a multiple of num_kv_heads 3"),
        ("llama", {"hidden_size": "wide"}, "hidden_size"),
        ("llama", {"num_hidden_layers": 0}, "num_layers is 0"),
        *(
            (kind, WINDOWS | {"max_window_layers": 2}, "sliding-window attention")
            for kind in ("qwen2", "qwen3", "qwen2_moe", "qwen3_moe")
        ),
        ("qwen2", {"layer_types": ["sliding_attention"] + ["full_attention"] * 2}, "layer_types"),
        ("llama", {"quantization_config": ["fp8"]}, "quantization_config is .*, and must be an ob"),
        ("qwen3_5", {"quantization_config": "fp8"}, "quantization_config is 'fp8', and must"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edit_config(tiny_model(kind), tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model_config(folder)
    assert str(folder) in str(error.value)


@pytest.mark.parametrize("content", ["{", "[]", "\xff"])
def test_a_damaged_config_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"neither a .gguf file nor a folder with a config.json"):
        load_model_config(tmp_path)


def test_dummy_weights_need_a_config_only_and_are_the_same_each_time(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edit_config(tiny_model("qwen3"), tmp_path / "m")
    first, second = (
        load_model(folder, device=CPU, load_format="dummy", dtype=torch.bfloat16) for _ in range(2)
    )
    for name, parameter in first.named_parameters():
        assert torch.equal(parameter, second.get_parameter(name))
        assert parameter.dtype == torch.bfloat16
        if name.endswith("norm.weight"):
            assert (parameter == 1).all()
        else:
            assert 0.015 < parameter.float().std() < 0.025
    two = [first.get_parameter(f"model.layers.{i}.mlp.down_proj.weight") for i in (0, 1)]
    assert not torch.equal(*two)
