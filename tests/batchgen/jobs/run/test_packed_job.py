"""Jobs of checkpoints in 4 bits: what is said of their weights, and where."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from batchgen.config.compose.compose_config import compose
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import plan_text
from batchgen.jobs.planning.planner import make_plan
from batchgen.util.text.text_table import size_text
from tests.support.engine.packed_checkpoints import pack_quantized, write_packed
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32},
            "input_activations": {"num_bits": 8, "type": "int"},
        }
    },
    "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
}
UNUSED = "activations: float32 instead of int8; KV cache: float32 instead of FP8"
NAME = "int4 (compressed-tensors)"


@pytest.fixture
def packed(tiny_model: Callable[..., Path], tmp_path: Path) -> Path:
    sizes = VOCAB | {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
    plain = tiny_model("qwen3", **sizes)
    save_tokenizer(plain)
    return write_packed(plain, tmp_path / "models", INT4, partial(pack_quantized, zero=True))[0]


def test_a_job_says_what_it_does_not_compute_with(
    packed: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(overrides(packed, rows, tmp_path / "out", "output.report=true"))
    size = size_text((packed / "model.safetensors").stat().st_size)
    text = f"weights in {NAME} are dequantised to float32 ({size} in the files); {UNUSED}"
    assert f"model: {text}\n" in capfd.readouterr().err
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["fingerprints"]["weights"] == f"dequantised {NAME}; {UNUSED}"
    assert UNUSED in (tmp_path / "out" / "report.html").read_text()


@pytest.mark.thorough
def test_a_plan_says_how_large_weights_are_in_which_form(
    packed: Path, rows: Path, tmp_path: Path
) -> None:
    arguments = overrides(packed, rows, tmp_path / "out", "model.dtype=bfloat16")
    texts, sizes = {}, {}
    for device in ("A100", "cpu"):
        plan = make_plan(compose({}, arguments), PlanSettings(device=device))
        texts[device] = " ".join(plan_text(plan).split())
        sizes[device] = plan.engine.weight_bytes
    assert f"of it in {NAME}" in texts["A100"]
    files = f"({size_text((packed / 'model.safetensors').stat().st_size)} in the files)"
    assert f"dequantised from {NAME} {files}" in texts["cpu"]
    assert sizes["A100"] < 0.6 * sizes["cpu"]
