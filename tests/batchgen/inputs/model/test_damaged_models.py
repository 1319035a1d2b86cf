"""Models that are damaged, or that strangers made: the command says what is wrong, and where."""

from __future__ import annotations

import json
import shutil
import struct
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from batchgen.__main__ import run_command
from tests.support.jobs.real_job import overrides

DAMAGED: list[tuple[str, Any, str]] = [
    ("config.json", {"architectures": 3}, "config.json: architectures is 3, and must be a list"),
    ("config.json", {"dtype": "wide"}, "config.json: dtype is 'wide', and must be null or one of"),
    ("config.json", {"rope_scaling": "wide"}, "rope_scaling is 'wide', and must be an object"),
    ("config.json", {"num_hidden_layers": 2.5}, "'num_hidden_layers' expected int, got float"),
    ("config.json", {"num_hidden_layers": True}, "'num_hidden_layers' expected int, got bool"),
    ("config.json", {"num_hidden_layers": -1}, "num_layers is -1; it must be a positive integer"),
    ("config.json", {"layer_types": ["full_attention"]}, "`num_hidden_layers` (3) must be equal"),
    ("config.json", {"quantization_config": ["fp8"]}, "quantization_config is ['fp8'], and must"),
    ("config.json", {"vocab_size": 300}, "lm_head.weight has shape [257, 64], the configuration"),
    ("config.json", b"{", "config.json is not valid JSON"),
    ("generation_config.json", {"eos_token_id": [1, None]}, "eos_token_id is [1, None], and must"),
    ("generation_config.json", b"[]", "generation_config.json does not hold a JSON object"),
    ("tokenizer_config.json", {"tokenizer_class": 3}, "its tokenizer cannot be loaded"),
    ("tokenizer_config.json", b"\xff", "tokenizer_config.json is not valid JSON"),
    ("tokenizer.json", b"null", "its tokenizer cannot be loaded"),
    ("model.safetensors", struct.pack("<Q", 2**62), "model.safetensors is damaged or cut off"),
    ("model.safetensors", b"", "model.safetensors is damaged or cut off"),
    ("model.safetensors.index.json", b"{}", "index.json has no 'weight_map'"),
    (
        "model.safetensors.index.json",
        {"weight_map": {"a": "../b"}},
        "'../b', which is not a file of",
    ),
]


@pytest.mark.quick(4)
@pytest.mark.parametrize(("file", "damage", "message"), DAMAGED)
def test_what_is_damaged_is_named(
    file: str,
    damage: Any,
    message: str,
    model: Path,
    rows: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    if isinstance(damage, dict):
        values = json.loads((folder / file).read_text()) if (folder / file).exists() else {}
        damage = json.dumps(values | damage).encode()
    (folder / file).write_bytes(damage)
    assert run_command(overrides(folder, rows, tmp_path / "out")) == 2
    told = capsys.readouterr().err
    assert f"batchgen: model: {folder}" in told and message in told
    assert "Traceback" not in told


@pytest.mark.quick(1)
@pytest.mark.parametrize("eos", [-1, 300, [256, 10**6]])
def test_ids_behind_the_vocabulary_end_no_answer(
    eos: int | list[int], model: Path, rows: Path, tmp_path: Path
) -> None:
    """Some checkpoints name such; the job's rows are those of the model without them."""
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": eos}))
    least = ("sampling.min_new_tokens=2", "dataset.limit=2")
    for source, out in ((model, tmp_path / "a"), (folder, tmp_path / "b")):
        assert run_command(overrides(source, rows, out, *least)) == 0
    first, second = (sorted((tmp_path / name / "data").rglob("*.parquet")) for name in "ab")
    assert [file.read_bytes() for file in first] == [file.read_bytes() for file in second]


def test_weights_of_nan_stop_the_job(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "m"
    shutil.copytree(model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"].fill_(torch.nan)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    assert run_command(overrides(folder, rows, tmp_path / "out", "dataset.limit=2")) == 1
    assert "NaN or infinite logits" in capsys.readouterr().err
