"""Fast-dLLM v2: rows against a plain loop over transformers' Qwen2 under a block-causal mask."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from batchgen.engine.constraint.constraint import Constraint
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.model_config import Diffusion
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.dllm.rules.joint_threshold import JointThreshold
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.engine.models.test_sdar import edit_config
from tests.strategies.dllm.test_dllm import EOS, MASK, check, requests, run
from tests.support.cases import some_slow
from tests.support.engine.dllm_reference import Forward, Options, generate, model_forward
from tests.support.engine.engine_rows import expect_short_rows

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def folder(tiny_model: TinyModel) -> Path:
    return tiny_model("fast_dllm_qwen")


@pytest.fixture(scope="module")
def forward(folder: Path) -> Forward:
    values = json.loads((folder / "config.json").read_text())
    config = Qwen2Config.from_dict(values | {"model_type": "qwen2"})
    model = Qwen2ForCausalLM.from_pretrained(
        folder, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    return model_forward(model.eval(), 8)


def make_engine(folder: Path, rule: dict[str, Any], **config: Any) -> LLMEngine:
    model = load_model(folder, device=CPU, dtype=torch.float32)
    options = {"max_model_len": 128, "kv_cache_gib": 0.02, "max_num_seqs": 5} | config
    return LLMEngine(model, None, EOS, DLLMStrategy(**rule), EngineConfig(**options))


@pytest.mark.quick(0, thorough=2)
@pytest.mark.parametrize("overlap", some_slow([True, False], quick=[True]))
@pytest.mark.parametrize(
    "rule",
    [
        {"sub_block_length": 4, "confidence_threshold": 0.05},
        {"sub_block_length": 2, "unmasking": "entropy_bound", "entropy_bound": 5.0},
        {"sub_block_length": 4, "unmasking": "low_confidence_static", "denoising_steps": 3},
        {"unmasking": "sequential"},
    ],
    ids=str,
)
def test_rows_equal_a_plain_loop(
    folder: Path, forward: Forward, rule: dict[str, Any], overlap: bool
) -> None:
    """Prompts of every length modulo a block; the first token of a block is drawn with the one
    before, and sub-blocks from left to right."""
    rows = requests(2, 14, longest=24)
    found = run(make_engine(folder, rule, overlap=overlap), rows)
    own = {"unmasking": "low_confidence_dynamic"} | rule
    options = Options(
        block_length=8, mask_token_id=MASK, eos=EOS, shifted=True, max_model_len=128, **own
    )
    for output, (prompt, params) in zip(found, rows, strict=True):
        wanted = generate(forward, prompt, params, options)
        check(output, wanted, params)
        assert output.counts["num_forwards"] == wanted.num_forwards
        begun = (len(prompt) + len(output.token_ids) - 1) // 8 - (len(prompt) - 1) // 8
        assert output.counts["num_commit_forwards"] == begun


@pytest.mark.thorough
def test_preempted_rows_go_on_as_if_nothing_had_happened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rule = {"sub_block_length": 4, "confidence_threshold": 0.05}
    rows = requests(1, 12, longest=60)
    expected = run(make_engine(folder, rule), rows)
    expect_short_rows(monkeypatch)
    engine = make_engine(
        folder, rule, overlap=True, block_size=4, kv_cache_gib=0.00015, max_num_seqs=8
    )
    outputs = run(engine, rows)
    assert engine.stats.preemptions > 0
    for output, wanted in zip(outputs, expected, strict=True):
        assert output.token_ids == wanted.token_ids and output.counts == wanted.counts
        for name, values in wanted.columns.items():
            np.testing.assert_array_equal(output.columns[name], values)


def test_what_such_a_model_cannot_do_is_refused(folder: Path) -> None:
    engine = make_engine(folder, {})
    for params in (
        RequestParams(decoding=JointThreshold()),
        RequestParams(constraint=object.__new__(Constraint)),
    ):
        with pytest.raises(ValueError, match="whose logits are of the next token"):
            engine.add_request("0", [5], params)
    with pytest.raises(ValueError, match="sub_block_length is 3, and must divide block_length, 8"):
        make_engine(folder, {"sub_block_length": 3})
    with pytest.raises(ValueError, match="sub_block_length must be at least 1"):
        DLLMStrategy(sub_block_length=0)


def test_a_published_configuration(folder: Path, tmp_path: Path) -> None:
    config = load_model_config(edit_config(folder, tmp_path / "m", bd_size=None))
    assert config.diffusion == Diffusion(mask_token_id=MASK, block_length=32, shifted=True)
    assert replace(config.diffusion, block_length=8) == load_model_config(folder).diffusion
