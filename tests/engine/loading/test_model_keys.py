"""A key of a config.json that changes a model is honoured, listed as without effect, or refused."""

from __future__ import annotations

import importlib
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import PretrainedConfig

import batchgen.data
from batchgen.engine.loading.config_file import (
    load_model_config,
    strange_keys,
    with_infinities,
)
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.model_keys import FIXED, INERT, INERT_OF
from batchgen.engine.models.model_registry import model_class
from batchgen.inputs.model.open_model import open_model
from tests.engine.loading.test_config_file import KINDS
from tests.support.engine.vision_models import vision_folder
from tests.support.jobs.image_job import tiny_config

TinyModel = Callable[..., Path]
READS = re.compile(r"\b\w*config\.([a-z]\w*)\b(?!\()|getattr\(\s*(?:self\.)?\w*config,\s*\"(\w+)\"")


def modelling_file(kind: type[PretrainedConfig]) -> Path | None:
    """The code of transformers that computes the model of a class of configurations."""
    for each in kind.__mro__:
        module = each.__module__
        if module.startswith("transformers.models."):
            file = importlib.import_module(module).__file__
            assert file is not None
            path = Path(file.replace("configuration_", "modeling_"))
            return path if path.exists() else None
    raise AssertionError(kind)


def read_by_transformers(hf: PretrainedConfig) -> set[str]:
    """The keys of the decoder that the modelling file reads."""
    file = modelling_file(type(hf))
    found = READS.findall(file.read_text()) if file is not None else []
    names = {name or other for name, other in found}
    own = {*hf.to_dict(), *(hf.text_config.to_dict() if "text_config" in hf.sub_configs else ())}
    module = type(hf).__module__
    beside = [each for each in vars(importlib.import_module(module)).values()
              if isinstance(each, type) and issubclass(each, PretrainedConfig)
              and each.__module__ == module]  # fmt: skip
    towers = {key for each in beside for key in each().to_dict()}
    return {hf.attribute_map.get(name, name) for name in names if name in own or name not in towers}


def parsed(folder: Path) -> PretrainedConfig:
    values = with_infinities(json.loads((folder / "config.json").read_text()))
    return model_class(values["architectures"][0], folder).hf_config().from_dict(values)


def read_by_engine(folder: Path) -> set[str]:
    """The keys that `config_from_hf` reads of a model's configuration, with their other names."""
    hf = parsed(folder)
    model = model_class(
        json.loads((folder / "config.json").read_text())["architectures"][0], folder
    )
    seen = set[str]()

    class Values(dict[str, Any]):
        def get(self, key: str, default: Any = None) -> Any:
            seen.add(key)
            return super().get(key, default)

        def __getitem__(self, key: str) -> Any:
            seen.add(key)
            return super().__getitem__(key)

    for part in [hf, *([hf.text_config] if "text_config" in model.hf_config().sub_configs else [])]:
        kind = type(part)

        def get(self: Any, name: str, kind: Any = kind) -> Any:
            seen.add(kind.attribute_map.get(name, name))
            seen.add(name)
            return kind.__getattribute__(self, name)

        def to_dict(self: Any, kind: Any = kind) -> Values:
            return Values(kind.to_dict(self))

        part.__class__ = type(kind.__name__, (kind,), {"__getattribute__": get, "to_dict": to_dict})
    before = {"__class__", "__dict__"}
    seen.clear()
    model.config_from_hf(hf)
    return seen - before


@pytest.mark.quick(3)
@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_reads_is_honoured_inert_or_refused(
    kind: str, tiny_model: TinyModel
) -> None:
    folder = tiny_model(kind)
    hf = parsed(folder)
    listed = {*INERT, *FIXED, *INERT_OF.get(hf.model_type, ())}
    assert read_by_transformers(hf) - read_by_engine(folder) - listed == set()


def test_what_transformers_reads_of_qwen2_5_vl_is_honoured_inert_or_refused() -> None:
    folder = vision_folder("qwen2_5_vl")
    listed = {*INERT, *FIXED, *INERT_OF["qwen2_5_vl"]}
    assert read_by_transformers(parsed(folder)) - read_by_engine(folder) - listed == set()


def test_the_keys_of_qwen2_5_vl_may_stand_beside_its_tower(tmp_path: Path) -> None:
    """As in the files that are published, which have no text_config."""
    nested = json.loads((vision_folder("qwen2_5_vl") / "config.json").read_text())
    flat = nested | {k: v for k, v in nested["text_config"].items() if k != "model_type"}
    del flat["text_config"], flat["rope_parameters"]
    flat |= {"rope_theta": 100.0, "rope_scaling": {"type": "mrope", "mrope_section": [3, 3, 2]}}
    (tmp_path / "config.json").write_text(json.dumps(flat))
    expected = load_model_config(vision_folder("qwen2_5_vl"), "dummy")
    assert load_model_config(tmp_path, "dummy") == expected and expected.vision is not None
    assert strange_keys(tmp_path) == []
    (tmp_path / "config.json").write_text(json.dumps(flat | {"num_layerz": 3}))
    assert strange_keys(tmp_path) == ["num_layerz"]


def test_what_transformers_reads_of_qwen3_vl_is_honoured_inert_or_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny_config()))
    read = read_by_transformers(parsed(tmp_path))
    listed = {*INERT, *FIXED, *INERT_OF.get("qwen3_vl", ())}
    assert read - read_by_engine(tmp_path) - listed == set()


@pytest.mark.quick(12)
@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_change_any_model_are_refused(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """`is_causal: false` and others were passed over, and the answers were others."""
    values = json.loads((tiny_model(kind) / "config.json").read_text())
    others: dict[str, Any] = {
        "is_causal": False,
        "add_cross_attention": True,
    }
    others |= {} if kind.startswith("llama4") else {"attention_chunk_size": 8}
    if not kind.startswith(("gemma4", "diffusion_gemma")):
        others["per_layer_config"] = {"0": {"rms_norm_eps": 1}}
    places = [values, *([values["text_config"]] if "text_config" in values else [])]
    for place in places:
        for key, value in others.items():
            before = place.pop(key, None)
            place[key] = value
            (tmp_path / "config.json").write_text(json.dumps(values))
            with pytest.raises(ValueError, match=f"config.json: (text_config.)?{key} is"):
                load_model_config(tmp_path)
            place.pop(key) if before is None else place.update({key: before})


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", KINDS)
def test_kinds_of_layers_that_a_model_lacks_are_named(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Gemma 3 ended in a KeyError. A name of old, which transformers replaces, is none of them."""
    values = json.loads((tiny_model(kind) / "config.json").read_text())
    text = values.get("text_config", values)
    reads = "layer_types" in read_by_transformers(parsed(tiny_model(kind)))
    known = set(text.get("layer_types") or ()) | {"full_attention", "sliding_attention"}
    for layer in ("chunked_attention", "linear_attention", "conv", "strange", 3):
        text["layer_types"] = [layer] * text.get("num_hidden_layers", 5)
        (tmp_path / "config.json").write_text(json.dumps(values))
        try:
            load_model_config(tmp_path)
        except ValueError:
            continue
        assert layer in known or not reads


def test_a_head_dim_that_does_not_fit_latent_attention_is_refused(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    """In other families with latent attention, transformers' class overwrites it."""
    values = json.loads((tiny_model("deepseek_v3") / "config.json").read_text())
    values["head_dim"] = values["qk_rope_head_dim"] * 2
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match=r"head_dim is .*, and must be qk_rope_head_dim"):
        load_model_config(tmp_path)


@pytest.mark.parametrize("kind", ["llama", "qwen3", "phi3", "gemma3_text", "gpt_oss", "qwen3_5"])
def test_a_head_dim_that_does_not_fit_the_weights_is_refused(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model(kind), folder)
    values = json.loads((folder / "config.json").read_text())
    text = values.get("text_config", values)
    text["head_dim"] = 2 * (
        text.get("head_dim") or text["hidden_size"] // text["num_attention_heads"]
    )
    (folder / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="model"):
        load_model(folder, device=torch.device("cpu"))


def test_partial_rotation_of_qwen3_vl_is_refused(tmp_path: Path) -> None:
    values = tiny_config()
    (tmp_path / "config.json").write_text(json.dumps(values))
    load_model_config(tmp_path)
    values["text_config"]["partial_rotary_factor"] = 0.5
    (tmp_path / "config.json").write_text(json.dumps(values))
    with pytest.raises(ValueError, match="partial_rotary_factor"):
        load_model_config(tmp_path)


@pytest.mark.quick(12)
@pytest.mark.parametrize("kind", KINDS)
def test_no_key_of_transformers_is_strange(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    hf = parsed(tiny_model(kind))
    values = type(hf)().to_dict() | {"architectures": hf.architectures}
    if "text_config" in values:
        values["text_config"] = type(hf.text_config)().to_dict()
    (tmp_path / "config.json").write_text(json.dumps(values, default=str))
    assert strange_keys(tmp_path) == []


def test_strange_keys_are_one_line(
    tiny_model: TinyModel, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "model"
    shutil.copytree(tiny_model("llama"), folder)
    values = json.loads((folder / "config.json").read_text())
    values |= {"a_new_gate": 3, "unsloth_fixed": True}
    (folder / "config.json").write_text(json.dumps(values))
    open_model(str(folder), None, "auto")
    lines = [line for line in capsys.readouterr().err.splitlines() if "a_new_gate" in line]
    assert len(lines) == 1 and "unsloth_fixed" in lines[0]


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "deepseek_v3", "gemma3_text", "glm4"])
def test_names_of_weights_without_their_prefix_load(
    kind: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Files of a decoder without its head have none; its embedding stands for the head."""
    source, folder = tiny_model(kind), tmp_path / "model"
    shutil.copytree(source, folder)
    weights = load_file(folder / "model.safetensors")
    bare = {name.removeprefix("model."): value for name, value in weights.items()}
    assert bare.keys() != weights.keys()
    save_file(bare, folder / "model.safetensors", {"format": "pt"})
    one, two = (load_model(path, device=torch.device("cpu")) for path in (source, folder))
    pairs = zip(one.state_dict().items(), two.state_dict().items(), strict=True)
    assert all(name == other and (x == y).all() for (name, x), (other, y) in pairs)


@pytest.mark.parametrize("name", ["nano_hybrid", "nano_sdar", "nano_vl"])
def test_no_key_of_the_shipped_models_is_strange(name: str) -> None:
    assert strange_keys(Path(batchgen.data.__path__[0]) / name) == []
