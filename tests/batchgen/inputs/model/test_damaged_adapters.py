"""Each way in which an adapter can be damaged, hostile or of another model: an error before weights
load, which names the file and the tensor or key and says what to do."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.inputs.model.model_adapters import with_adapters
from batchgen.inputs.model.open_model import OpenedModel, open_model
from batchgen.util.errors import ConfigError, mistakes_in
from tests.support.engine.lora_files import write_adapter

MODULE = "base_model.model.model.layers.1.mlp.up_proj"
DOWN, UP = f"{MODULE}.lora_A.weight", f"{MODULE}.lora_B.weight"
Damage = Callable[[Path], None]


@pytest.fixture(scope="module")
def opened(model: Path) -> OpenedModel:
    return open_model(str(model), None, "auto")


@pytest.fixture(scope="module")
def whole(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_adapter(tmp_path_factory.mktemp("adapter") / "a", model)


def tensors(change: Callable[[dict[str, Tensor]], Any]) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "adapter_model.safetensors"
        found = load_file(path)
        change(found)
        save_file(found, path)

    return damage


def value(name: str, number: float) -> Damage:
    def change(found: dict[str, Tensor]) -> None:
        found[name][1, 2] = number

    return tensors(change)


def given(**values: Any) -> Damage:
    return tensors(lambda found: found.update(**values))


def config(**values: Any) -> Damage:
    def damage(folder: Path) -> None:
        path = folder / "adapter_config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | values))

    return damage


def text(name: str, content: bytes) -> Damage:
    return lambda folder: void((folder / name).write_bytes(content))


def void(_: object) -> None:
    """Return nothing, whatever a call returns."""


def cut_off(folder: Path) -> None:
    path = folder / "adapter_model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def pickled(folder: Path) -> None:
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")


def link(name: str) -> Damage:
    def damage(folder: Path) -> None:
        outside = shutil.copytree(folder, folder.parent / "outside") / name
        outside.touch()
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(outside)

    return damage


def pipe(folder: Path) -> None:
    (folder / "adapter_config.json").unlink()
    os.mkfifo(folder / "adapter_config.json")


def deep(folder: Path) -> None:
    (folder / "adapter_config.json").write_text('{"r":' + "[" * 100_000)


def large(folder: Path) -> None:
    with (folder / "adapter_config.json").open("ab") as file:
        file.truncate(2**25)


CASES: dict[str, tuple[Damage, str]] = {
    "cut off": (cut_off, "adapter_model.safetensors is damaged or cut off"),
    "no safetensors": (text("adapter_model.safetensors", b"PK\x03\x04"), "is damaged or cut off"),
    "a header of 2^60 bytes": (
        text("adapter_model.safetensors", b"\0" * 7 + b"\x10"),
        "is damaged or cut off",
    ),
    "pickled": (pickled, "adapter_model.bin is a pickle, which can run code: save it as safetens"),
    "no tensors": (tensors(dict.clear), "has no tensors: the adapter adds nothing"),
    "a missing tensor": (tensors(lambda t: t.pop(UP)), f"tensor {UP} is missing"),
    "a missing pair": (
        tensors(lambda t: (t.pop(UP), t.pop(DOWN))),
        "target_modules has up_proj, and tensor model.layers.1.mlp.up_proj.lora_A.weight is missi",
    ),
    "NaN": (value(DOWN, float("nan")), f"tensor {DOWN} has NaN or infinity: the training has"),
    "infinity": (value(UP, float("inf")), f"tensor {UP} has NaN or infinity"),
    "whole numbers": (
        given(**{DOWN: torch.zeros(4, 64, dtype=torch.int64)}),
        f"tensor {DOWN} is in I64, and factors are floating-point",
    ),
    "another width": (
        given(**{DOWN: torch.zeros(4, 48)}),
        f"tensor {DOWN} has shape [4, 48], and model.layers.1.mlp.up_proj of the model has 64 in",
    ),
    "one axis": (given(**{DOWN: torch.zeros(4)}), f"tensor {DOWN} has shape [4], and"),
    "no rows": (given(**{DOWN: torch.zeros(0, 64)}), f"tensor {DOWN} has shape [0, 64], and"),
    "another base": (
        given(
            **{
                DOWN.replace("layers.1", "layers.7"): torch.zeros(4, 64),
                UP.replace("layers.1", "layers.7"): torch.zeros(96, 4),
            }
        ),
        "layers.7.mlp.up_proj, which LlamaForCausalLM does not have: the adapter is of another mo",
    ),
    "an unknown module": (
        given(
            **{
                DOWN.replace("up_proj", "c_fc"): torch.zeros(4, 64),
                UP.replace("up_proj", "c_fc"): torch.zeros(96, 4),
            }
        ),
        "mlp.c_fc, which LlamaForCausalLM does not have",
    ),
    "a module of no model": (
        given(**{"../../etc/passwd": torch.zeros(1)}),
        "tensor ../../etc/passwd is not part of a low-rank adapter",
    ),
    "a resized embedding": (
        given(**{"base_model.model.model.embed_tokens.weight": torch.zeros(300, 64)}),
        "tensor base_model.model.model.embed_tokens.weight is not part of a low-rank adapter",
    ),
    "another rank": (config(r=8), "has shape [4, 96], and adapter_config.json says that its rank"),
    "rank 0": (config(r=0), "r must be a whole number from 1 on, got 0"),
    "a rank of 400 digits": (config(r=10**400), "r must be a whole number from 1 on, got 1000"),
    "rank true": (config(r=True), "r must be a whole number from 1 on, got True"),
    "rank NaN": (config(r=float("nan")), "r must be a whole number from 1 on, got nan"),
    "no rank": (config(r=None), "r must be a whole number from 1 on, got None"),
    "alpha infinite": (config(lora_alpha=float("inf")), "lora_alpha must be a finite number"),
    "an alpha of 400 digits": (config(lora_alpha=10**400), "lora_alpha must be a finite number"),
    "alpha a text": (config(lora_alpha="16"), "lora_alpha must be a finite number"),
    "a factor beyond float32": (
        lambda folder: (value(UP, 3e38)(folder), config(lora_alpha=1e17)(folder))[0],
        f"tensor {UP} times 2.5e+16 is more than float32 holds: adapter_config.json says lora_alp",
    ),
    "a slow pattern": (config(rank_pattern={"(a+)+$": 2}), "rank_pattern has the pattern '(a+)+$'"),
    "patterns in a list": (config(alpha_pattern=[1]), "alpha_pattern must be an object, got [1]"),
    "another kind": (config(peft_type="IA3"), "peft_type is 'IA3', and only LORA adapters are"),
    "a kind of objects": (config(peft_type={"x": 1}), "peft_type is {'x': 1}, and only LORA"),
    "PiSSA": (config(init_lora_weights="pissa"), "init_lora_weights is 'pissa', which changes"),
    "a configuration in a list": (text("adapter_config.json", b"[]"), "it holds no object"),
    "no UTF-8": (text("adapter_config.json", b"\xff\xfe{}"), "adapter_config.json is damaged"),
    "deep": (deep, "adapter_config.json is damaged"),
    "large": (large, "adapter_config.json is damaged: it is larger than any configuration"),
    "a pipe": (pipe, "is not an adapter: it has no adapter_config.json"),
    "a link of the configuration": (link("adapter_config.json"), "outside of the adapter's folder"),
    "a link of the tensors": (link("adapter_model.safetensors"), "outside of the adapter's folder"),
    "a link of the template": (link("chat_template.jinja"), "put the file itself there"),
}


@pytest.mark.quick(10)
@pytest.mark.parametrize("case", CASES)
def test_an_adapter_that_is_refused(
    case: str, whole: Path, opened: OpenedModel, tmp_path: Path
) -> None:
    damage, says = CASES[case]
    folder = shutil.copytree(whole, tmp_path / "a")
    with_adapters(opened, str(folder))
    damage(folder)
    with pytest.raises(ConfigError) as error, mistakes_in("model"):
        with_adapters(opened, {"mine": str(folder)})
    assert says in str(error.value)
    assert str(folder) in str(error.value)


def test_a_rank_that_only_weights_take(model: Path, opened: OpenedModel, tmp_path: Path) -> None:
    folder = write_adapter(tmp_path / "a", model, ("q_proj",), rank=257)
    with pytest.raises(ValueError, match=r"has rank 257, .* at most 256: .* lora_fold=true"):
        with_adapters(opened, str(folder))
    assert with_adapters(opened, str(folder), fold=True).folds


def test_links_of_the_cache_of_the_hub(whole: Path, opened: OpenedModel, tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "m/blobs", tmp_path / "m/snapshots/0123abcd"
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    for number, file in enumerate(sorted(whole.iterdir())):
        shutil.copy(file, blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")
    assert with_adapters(opened, str(snapshot)).adapters
