"""A config.json that says something wrong ends in a word that names the file and the key."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.tokenizer import eos_token_ids
from batchgen.engine.models.llama import LlamaForCausalLM
from tests.support.engine.edited_models import edit_config
from tests.support.engine.families import ARCHITECTURES, VISION

CPU = torch.device("cpu")
TinyModel = Callable[..., Path]
# Without two whose configurations transformers has no class for.
KINDS = [kind for kind in ARCHITECTURES if kind not in (*VISION, "llada2_moe", "fast_dllm_qwen")]
# What a key may hold, each a wrong type for most; sizes beyond memory are no matter of types.
VALUES: tuple[Any, ...] = (
    None, True, False, 0, -1, 1, 3, 2.5, float("nan"), float("inf"), "", "wide", [], ["a"], [1],
    [None], [[1]], {}, {"a": 1}, {"rope_type": "yarn"},
)  # fmt: skip
# Keys that published checkpoints have, and that the tiny ones may leave out.
MORE_KEYS = (
    "rope_scaling", "rope_theta", "rope_parameters", "partial_rotary_factor", "quantization_config",
    "torch_dtype", "dtype", "layer_types", "sliding_window", "use_sliding_window", "auto_map",
    "max_window_layers", "mlp_only_layers", "mlp_layer_types", "num_local_experts", "num_experts",
    "num_nextn_predict_layers", "mtp_num_hidden_layers", "num_mtp_layers", "attn_output_gate",
    "moe_layer_freq", "first_k_dense_replace", "scoring_func", "topk_method", "mask_token_id",
    "no_rope_layers", "attn_type_list", "qk_norm_type", "rotary_dim", "use_routing_bias",
    "block_size", "text_config", "head_dim", "id2label", "full_attention_interval",
)  # fmt: skip


def keys(config: dict[str, Any], inside: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """The paths of all keys of a configuration, but of the vision tower's."""
    for key, value in config.items():
        yield (*inside, key)
        if isinstance(value, dict) and key != "vision_config":
            yield from keys(value, (*inside, key))


def with_value(config: dict[str, Any], key: tuple[str, ...], value: Any) -> dict[str, Any]:
    changed: dict[str, Any] = json.loads(json.dumps(config))
    place = changed
    for part in key[:-1]:
        place = place[part]
    place[key[-1]] = value
    return changed


@pytest.mark.quick(5)
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=settings().max_examples // 3)
@given(data=st.data())
def test_a_wrong_value_is_named_or_makes_no_difference(
    kind: str, data: st.DataObject, tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever one key holds, the model loads or a ValueError names the folder."""
    source = tiny_model(kind)
    folder = tmp_path_factory.getbasetemp() / f"config of {kind}"
    if not folder.exists():
        shutil.copytree(source, folder)
    config = json.loads((source / "config.json").read_text())
    places = [*keys(config), *((key,) for key in MORE_KEYS)]
    if "text_config" in config:
        places += [("text_config", key) for key in MORE_KEYS]
    key = data.draw(st.sampled_from(places))
    changed = with_value(config, key, data.draw(st.sampled_from(VALUES)))
    (folder / "config.json").write_text(json.dumps(changed))
    try:
        model = load_model(folder, device=CPU)
        eos_token_ids(folder, None)
    except ValueError as error:
        assert str(folder) in str(error)
        assert len(str(error)) < 1000
    else:
        assert all(parameter.isfinite().all() for parameter in model.parameters())
        for table in model.model.rotaries:
            assert table is None or table._table.isfinite().all()


FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
ROPE = {"rope_type": "default", "rope_theta": 1e4}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0}
CLASSIFIER = {"architectures": ["LlamaForSequenceClassification"]}


@pytest.mark.parametrize(
    ("kind", "changes", "message"),
    [
        ("llama", {"architectures": True}, "architectures is True, and must be a list of names"),
        ("llama", {"architectures": "Llama"}, "architectures is 'Llama', and must be a list"),
        ("llama", {"architectures": [[1]]}, r"architectures is \[\[1\]\], and must be a list"),
        ("llama", {"dtype": "wide"}, "dtype is 'wide', and must be null or one of float32"),
        ("llama", {"dtype": ["a"]}, r"dtype is \['a'\], and must be null or one of"),
        ("llama", {"dtype": "int8"}, "dtype is 'int8', and must be null or one of float32"),
        ("llama", {"id2label": 3}, "id2label is 3, which cannot be read"),
        ("llama", {"num_labels": 10**9}, "num_labels is 1000000000, and must be null or 1 to"),
        ("llama", CLASSIFIER | {"id2label": {"1": "x"}}, "must give each class from 0 on a name"),
        ("llama", CLASSIFIER | {"id2label": {"0": 5}}, "must give each class from 0 on a name"),
        ("llama", {"num_attention_heads": 0}, "num_attention_heads is 0, which cannot be read"),
        ("llama", {"vocab_size": 2.5}, r"'vocab_size' expected int, got float \(value: 2.5\)"),
        ("llama", {"rope_parameters": "wide"}, "rope_parameters is 'wide', and must be an object"),
        ("llama", {"rope_scaling": ["a"]}, r"rope_scaling is \['a'\], and must be an object"),
        ("llama", {"rope_parameters": ROPE | {"rope_theta": "x"}}, "rope_theta is 'x', and must"),
        ("llama", {"rope_parameters": ROPE | {"rope_theta": 0}}, "rope_theta is 0, and must be a"),
        ("llama", {"rope_parameters": YARN | {"truncate": 1}}, "truncate is 1, and must be true"),
        ("llama", {"rope_parameters": YARN | {"factor": True}}, "factor is True, and must be a"),
        ("llama", {"rope_parameters": YARN | {"beta_fast": [1]}}, "rope_parameters is .* cannot"),
        *(
            ("llama", {"quantization_config": FP8 | {key: value}}, f"quantization_config.{key} is")
            for key, value in (
                ("quant_method", {}), ("weight_block_size", 3), ("weight_block_size", "x"),
                ("weight_block_size", [128]), ("fmt", [1]), ("modules_to_not_convert", 3),
                ("modules_to_not_convert", "lm_head"), ("modules_to_not_convert", [1]),
                ("ignored_layers", True), ("activation_scheme", {}), ("scale_fmt", []), ("x", 1),
            )
        ),
        ("llama", {"rms_norm_eps": 2.0}, "rms_norm_eps is 2.0; it must be between 0 and 1"),
        ("llama", {"layer_types": ["full_attention"]}, "'layer_types'|`layer_types`"),
        ("qwen2_moe", {"mlp_only_layers": "wide"}, "mlp_only_layers"),
        ("qwen3_5", {"text_config": None}, "text_config, which describes the decoder, is missing"),
        ("qwen3_5", {"text_config": [1]}, r"text_config is \[1\], and must be an object or null"),
        ("qwen3_5_text", {"attn_output_gate": "no"}, "attn_output_gate is 'no', and must be true"),
        ("qwen3_5_text", {"mtp_num_hidden_layers": "x"}, "mtp_num_hidden_layers is 'x', and must"),
        ("qwen3_5_text", {"rope_parameters": ROPE | {"partial_rotary_factor": [1]}},
         r"partial_rotary_factor is \[1\], and must be a number"),
        ("deepseek_v3", {"num_nextn_predict_layers": 1.5}, "num_nextn_predict_layers is 1.5, and"),
        ("deepseek_v3", {"routed_scaling_factor": float("nan")}, "routed_scaling_factor is nan"),
        ("deepseek_v2", {"moe_layer_freq": "x"}, "moe_layer_freq is 'x', and must be an integer"),
    ],
)  # fmt: skip
def test_wrong_values_are_named(
    kind: str, changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = edit_config(tiny_model(kind), tmp_path / "m", **changes)
    with pytest.raises(ValueError, match=message) as error:
        load_model_config(folder)
    assert str(error.value).startswith(f"{folder}/config.json: ")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("key", ["quantization_config", "rope_scaling", "text_config"])
def test_null_says_as_little_as_nothing(key: str, tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    config = json.loads((source / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, key: None}))
    assert load_model_config(tmp_path) == load_model_config(source)


def test_a_class_that_an_older_transformers_lacks_is_named(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LlamaForCausalLM, "hf_class", "FutureConfig")
    folder = tiny_model("llama")
    message = "LlamaForCausalLM needs FutureConfig, .* install a newer transformers"
    with pytest.raises(ValueError, match=message) as error:
        load_model_config(folder)
    assert str(error.value).startswith(f"{folder}/config.json: ")


def test_long_values_are_cut(tiny_model: TinyModel, tmp_path: Path) -> None:
    for number, (key, value) in enumerate(
        [("hidden_size", "x" * 10**5), ("id2label", [0] * 10**5)]
    ):
        folder = edit_config(tiny_model("llama"), tmp_path / str(number), **{key: value})
        with pytest.raises(ValueError, match=key) as error:
            load_model_config(folder)
        assert len(str(error.value)) < 600


@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("eos", ["x", [None], [1, None], True, 2.5, {}, [[1]]])
def test_ids_of_the_end_are_checked(name: str, eos: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_text(json.dumps({"eos_token_id": eos}))
    with pytest.raises(ValueError, match=rf"{name}: eos_token_id is .*, and must be a token id"):
        eos_token_ids(tmp_path, None)


@pytest.mark.parametrize("content", ["", "{", "[]", "null", "\xff"])
def test_a_damaged_generation_config_is_named(content: str, tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text(content, encoding="latin-1")
    with pytest.raises(ValueError, match=r"generation_config\.json (is not valid|does not hold)"):
        eos_token_ids(tmp_path, None)
