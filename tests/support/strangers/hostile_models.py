"""Attacks by the files of a model."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

from tests.support.strangers.attack import Attack, Work

CONFIG: Mapping[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 16,
    "max_position_embeddings": 64,
    "tie_word_embeddings": True,
}


def tensor_header(**changes: Any) -> bytes:
    """A safetensors file of one tensor without data, with its header's length before it."""
    tensor = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]} | changes
    text = json.dumps({"model.norm.weight": tensor}).encode()
    return struct.pack("<Q", len(text)) + text


def run_model(work: Work, files: Mapping[str, bytes | Mapping[str, Any]]) -> str | None:
    """What is wrong if a job with a model of these files does not end in a clear word."""
    model = work.path / "model"
    model.mkdir(exist_ok=True)
    everything = {"config.json": CONFIG, "model.safetensors": tensor_header()} | dict(files)
    for name, content in everything.items():
        data = content if isinstance(content, bytes) else json.dumps(content).encode()
        (model / name).write_bytes(data)
    rows = work.rows('{"ids": [1, 2]}\n')
    run = work.batchgen(
        *("model=hf", f"model.path={model}", f"dataset.path={rows}", "prompt=tokens"),
        *("prompt.token_ids_column=ids", "engine.device=cpu", "output.dir=out"),
    )
    return run.refused("model: ", str(model))


def each(work: Work, cases: Mapping[str, Mapping[str, bytes | Mapping[str, Any]]]) -> str | None:
    """The first of several models that got through, with its name."""
    for name, files in cases.items():
        path = work.path / str(len(list(work.path.iterdir())))
        path.mkdir()
        if (wrong := run_model(Work(path, work.shared), files)) is not None:
            return f"{name}: {wrong}"
    return None


def wrong_types(work: Work) -> str | None:
    """Keys of config.json hold values of wrong types."""
    wrong: Mapping[str, Any] = {
        "architectures": "Llama",
        "rope_scaling": "linear",
        "rope_parameters": {"rope_type": "yarn", "rope_theta": {}, "factor": "x"},
        "id2label": 3,
        "eos_token_id": [None],
        "num_hidden_layers": "x\x1b[31m",
    }
    return each(work, {key: {"config.json": {**CONFIG, key: wrong[key]}} for key in wrong})


def damaged_json(work: Work) -> str | None:
    """Files that should hold JSON objects hold anything else."""
    names = ("config.json", "generation_config.json", "model.safetensors.index.json")
    contents = {"half of it": b'{"a":', "a list": b"[]"}
    cases = {f"{name}, {c}": {name: contents[c]} for name in names for c in contents}
    return each(work, cases)


def safetensors_headers(work: Work) -> str | None:
    """Headers of weights lie about lengths, shapes and places."""
    return each(
        work,
        {
            "a length of 2^62": {"model.safetensors": struct.pack("<Q", 2**62) + b"{}"},
            "a shape that overflows": {"model.safetensors": tensor_header(shape=[2**40, 2**40])},
            "a shape of NaN": {"model.safetensors": tensor_header(shape=[float("nan")])},
            "data behind the end": {"model.safetensors": tensor_header(data_offsets=[0, 2**50])},
            "data before the start": {"model.safetensors": tensor_header(data_offsets=[-8, 0])},
        },
    )


def shards_outside(work: Work) -> str | None:
    """An index of shards names files outside of the folder, and none at all."""
    wrong = ("../rows.jsonl", "/etc/passwd", "x" * 300, "a\0b", 3)
    index = "model.safetensors.index.json"
    return each(work, {str(name): {index: {"weight_map": {"a": name}}} for name in wrong})


def pickled_weights(work: Work) -> str | None:
    """Weights are a pickle that would run code."""
    ran = work.path / "ran"
    code = f"cposix\nsystem\n(S'touch {ran}'\ntR.".encode()
    model = work.path / "model"
    model.mkdir()
    (model / "pytorch_model.bin").write_bytes(code)
    (model / "config.json").write_text(json.dumps(CONFIG))
    run = work.batchgen("model=hf", f"model.path={model}", "dataset=demo", "output.dir=out")
    return "the code ran" if ran.exists() else run.refused("pickled weights", "safetensors")


def gguf_headers(work: Work) -> str | None:
    """Headers of GGUF files count what is not there."""
    start = b"GGUF" + struct.pack("<I", 3)
    found = {
        "2^63 tensors": start + struct.pack("<QQ", 2**63, 0),
        "2^63 values": start + struct.pack("<QQ", 0, 2**63),
        "a string of 2^62 bytes": start + struct.pack("<QQQ", 0, 1, 2**62),
        "a list of 2^62 numbers": start + struct.pack("<QQQsIIQ", 0, 1, 1, b"a", 9, 4, 2**62),
        "nothing": start[:4],
    }
    for name, data in found.items():
        file = work.path / "m.gguf"
        file.write_bytes(data)
        run = work.batchgen("model=hf", f"model.path={file}", "dataset=demo", "output.dir=out")
        if (wrong := run.refused("model: ", str(file))) is not None:
            return f"{name}: {wrong}"
    return None


ATTACKS: tuple[Attack, ...] = (
    wrong_types,
    damaged_json,
    safetensors_headers,
    shards_outside,
    pickled_weights,
    gguf_headers,
)
