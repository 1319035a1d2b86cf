"""Jobs whose keys and values are kept in FP8."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from batchgen import LLM, SamplingParams
from batchgen.__main__ import run_command
from batchgen.config.compose.compose_config import compose
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.models.model_config import KVCacheDtype
from batchgen.inputs.model import engine_recipe
from batchgen.inputs.model.engine_recipe import EngineRecipe
from batchgen.inputs.model.open_model import open_model
from batchgen.inputs.model.other_models import open_others
from batchgen.jobs.planning.job_plan import Plan
from batchgen.jobs.planning.plan_settings import PlanSettings
from batchgen.jobs.planning.plan_text import plan_text
from batchgen.jobs.planning.planner import make_plan
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.util.errors import ConfigError
from tests.support.jobs.real_job import overrides, run

FP8 = "model.kv_cache_dtype=fp8"


def answers(out: Path) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = pq.read_table(out / "data", partitioning=None).to_pylist()
    return rows


def copied(out: Path) -> int:
    attempts = json.loads((out / "metrics.json").read_text())["attempts"]
    return sum(attempt["rows_copied"] for attempt in attempts)


def test_a_job_goes_on_with_its_dtype_alone(model: Path, rows: Path, tmp_path: Path) -> None:
    fp8, plain, again = (tmp_path / name for name in ("fp8", "plain", "again"))
    short = ("output.columns=[logprobs]", "sampling.n=1", "sampling.max_new_tokens=3")

    def made(out: Path, limit: int, *more: str) -> list[dict[str, Any]]:
        run(overrides(model, rows, out, f"dataset.limit={limit}", *short, *more))
        return answers(out)

    made(fp8, 2, FP8, "output.reuse=[]")
    first = made(fp8, 4, FP8, "output.reuse=[]")
    assert made(plain, 4, f"output.reuse={fp8}") != first and copied(plain) == 0
    assert made(again, 4, FP8, f"output.reuse={fp8}") == first and copied(again) == 4
    for folder, more in ((fp8, ()), (plain, (FP8,))):
        with pytest.raises(ConfigError, match=r"model\.kv_cache_dtype"):
            made(folder, 4, *more)


def planned(arguments: list[str], device: str) -> Plan:
    return make_plan(compose({}, arguments), PlanSettings(device=device))


def test_a_plan_knows_the_smaller_tokens(
    model: Path, rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = overrides(model, rows, tmp_path / "out", "model.dtype=bfloat16")
    plain, fp8 = (planned([*arguments, *more], "H100") for more in ((), (FP8,)))
    # Each of two heads of 16 values has two scales of four bytes.
    assert fp8.engine.token_bytes / plain.engine.token_bytes == (16 + 4) / 32
    assert "keys and values in FP8" in " ".join(plan_text(fp8).split())
    assert not fp8.errors and "FP8" not in plan_text(plain)
    (error,) = planned([*arguments, FP8], "A100").errors
    assert "kv_cache_dtype is fp8" in error and "set it to auto" in error
    assert run_command([*arguments, FP8, "--dry-run"]) == 0
    assert "bfloat16, keys and values in FP8, at most" in " ".join(capsys.readouterr().out.split())


def test_from_python(model: Path) -> None:
    found = []
    cases: list[tuple[KVCacheDtype, bool]] = [("fp8", False), ("fp8", True), ("auto", False)]
    for dtype, drafts in cases:
        strategy = ARSpecStrategy("ngram", ngram_min=1, adaptive=False) if drafts else None
        params = SamplingParams(temperature=0, max_new_tokens=6, logprobs=True)
        with LLM(
            str(model), device="cpu", kv_cache_gib=0.01, kv_cache_dtype=dtype, strategy=strategy
        ) as llm:
            found.append(llm.generate("How are you?", params)[0])
    assert found[0].token_ids == found[1].token_ids
    plain, drafted, other = (np.array(each.logprobs) for each in found)
    assert np.array_equal(plain, drafted) and not np.array_equal(plain, other)
    with pytest.raises(ValueError, match="kv_cache_dtype must be 'auto' or 'fp8', got 'int8'"):
        LLM(str(model), kv_cache_dtype="int8")  # type: ignore[arg-type]


def test_an_older_gpu_is_refused_before_weights_load(
    model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine_recipe, "device_of", lambda _: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (8, 0))
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    opened = open_model(str(model), None, "auto", kv_cache_dtype="fp8")
    recipe = EngineRecipe(opened, {}, ARStrategy(), EngineConfig(), "bfloat16", "cpu", ())
    with pytest.raises(ValueError, match=r"kv_cache_dtype is fp8, .*8\.9.*set it to auto"):
        recipe.check()


def test_a_draft_model_keeps_its_tokens_as_the_target_does(
    tiny_model: Callable[..., Path],
) -> None:
    folder = str(tiny_model("llama"))
    opened = open_model(folder, None, "auto", kv_cache_dtype="fp8")
    strategy = ARSpecStrategy("draft", draft_model=folder)
    others = open_others(strategy, opened, 256)
    target = opened.load("float32", "cpu")
    recipe = EngineRecipe(opened, others, strategy, EngineConfig(), "float32", "cpu", ())
    (draft,) = recipe.load_others(target).values()
    assert {spec.in_fp8 for spec in (*target.attention_shapes, *draft.attention_shapes)} == {True}
