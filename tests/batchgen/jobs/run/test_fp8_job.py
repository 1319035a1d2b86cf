"""Jobs whose weights are rounded to FP8 while they load."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import pyarrow.parquet as pq
import pytest
import torch

from batchgen import LLM, SamplingParams
from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose
from batchgen.engine.layers.mxfp4_format import Units
from batchgen.jobs.forecast.engine_estimate import estimate_engine
from batchgen.jobs.planning.job_plan import Plan
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import plan_text
from batchgen.jobs.planning.planner import make_plan
from batchgen.jobs.resolve.open_job import open_job
from batchgen.util.errors import ConfigError
from tests.support.engine.fp8_checkpoints import write_fp8
from tests.support.jobs.real_job import VOCAB, overrides, run, save_tokenizer

FP8 = "model.quantization=fp8"
SAID = "model: this device does not compute in FP8, so weights in FP8 are dequantised to float32\n"


def answers(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / "data", partitioning=None).to_pylist()
    return rows


def test_a_job_rounds_its_weights_and_says_so(
    model: Path, rows: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    run(overrides(model, rows, tmp_path / "fp8", FP8))
    assert SAID in capfd.readouterr().err
    _, twin = write_fp8(model, tmp_path / "checkpoints")
    run(overrides(twin, rows, tmp_path / "twin"))
    assert SAID not in capfd.readouterr().err
    assert answers(tmp_path / "fp8") == answers(tmp_path / "twin")
    manifest = (tmp_path / "fp8" / "manifest.json").read_text()
    assert '"weights": "dequantised FP8"' in manifest
    assert '"weights"' not in (tmp_path / "twin" / "manifest.json").read_text()
    with pytest.raises(ConfigError, match=r"model\.quantization"):
        run(overrides(model, rows, tmp_path / "fp8"))


def test_a_dry_run_names_the_weights(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(model, rows, tmp_path / "out", FP8, "--dry-run")
    assert run_command(arguments) == 0
    assert "float32 with weights in dequantised FP8" in capsys.readouterr().out


def planned(arguments: list[str], device: str) -> Plan:
    return make_plan(compose({}, arguments), PlanSettings(device=device))


@pytest.mark.thorough
def test_a_plan_knows_the_smaller_weights(
    tiny_model: Callable[..., Path], rows: Path, tmp_path: Path
) -> None:
    model = tiny_model("qwen3_moe", **VOCAB, moe_intermediate_size=256)
    save_tokenizer(model)
    arguments = overrides(model, rows, tmp_path / "out", "model.dtype=bfloat16")
    sizes = {
        (device, how): planned([*arguments, *given], device).engine.weight_bytes
        for device in ("H100", "A100")
        for how, given in (("plain", ()), ("fp8", (FP8,)))
    }
    assert sizes["A100", "fp8"] == sizes["A100", "plain"] == sizes["H100", "plain"]
    assert sizes["H100", "fp8"] < 0.7 * sizes["H100", "plain"]
    text = plan_text(planned([*arguments, FP8], "H100"))
    assert " in FP8," in text
    assert "FP8" not in plan_text(planned([*arguments, FP8], "A100"))


def test_the_sizes_of_a_quantised_model_are_those_of_the_plain_one(
    model: Path, rows: Path, tmp_path: Path
) -> None:
    found = {}
    for name, given in (("plain", []), ("fp8", [FP8])):
        config = compose({}, overrides(model, rows, tmp_path / "out", *given))
        room = estimate_engine(open_job(config), config, 80 * 2**30, Units(True, True))
        found[name] = room
    plain, fp8 = found["plain"].sizes, found["fp8"].sizes
    assert fp8.weight_dtype == torch.float8_e4m3fn and plain.weight_dtype == plain.dtype
    assert (fp8.values, fp8.head, fp8.share) == (plain.values, plain.head, plain.share)


def test_a_checkpoint_in_fp8_needs_no_option(
    model: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    checkpoint, twin = write_fp8(model, tmp_path)
    params = SamplingParams(temperature=0, max_new_tokens=6)
    found = []
    cases: list[tuple[Path, Literal["fp8"] | None]] = [
        (checkpoint, None), (twin, None), (model, "fp8"),
    ]  # fmt: skip
    for path, quantization in cases:
        with LLM(str(path), device="cpu", kv_cache_gib=0.01, quantization=quantization) as llm:
            found.append([output.token_ids for output in llm.generate("How are you?", params)])
        assert (SAID in capfd.readouterr().err) == (path != twin)
    assert found[0] == found[1] == found[2]


def test_other_quantisations_are_refused(model: Path, rows: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"model\.quantization must be .*fp8.*, got 'int8'"):
        compose({}, overrides(model, rows, tmp_path / "out", "model.quantization=int8"))
    with pytest.raises(ValueError, match="quantization must be 'fp8' or None, got 'awq'"):
        LLM(str(model), quantization="awq")  # type: ignore[arg-type]
    config = json.loads((model / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "hqq"}
    folder = tmp_path / "hqq"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    arguments = overrides(folder, rows, tmp_path / "out", "model.load_format=dummy")
    with pytest.raises(ConfigError, match="quant_method is 'hqq', and it must be"):
        open_job(compose({}, arguments))
