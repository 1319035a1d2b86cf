"""Models with norms after the parts of their layers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.layers import norm as norms
from batchgen.engine.layers.mixers import attention
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.parallel import tensor_parallel
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.attention.qkv import prepare_qkv_triton
from batchgen.kernels.layers.post_norm import post_norm_triton
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.engine.engine_rows import Request, run

TinyModel = Callable[..., Path]
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
PARAMS = RequestParams(temperature=0, max_new_tokens=4, logprobs=True)
ROWS: list[Request] = [([5, 9, 4], PARAMS), (list(range(3, 33)), PARAMS)]


def outputs(folder: Path, dtype: torch.dtype = torch.float32, **config: Any) -> list[RequestOutput]:
    options: dict[str, Any] = {"max_model_len": 128, "kv_cache_gib": 0.01, "max_num_seqs": 4}
    model = load_model(folder, device=DEVICE, dtype=dtype)
    return run(LLMEngine(model, None, (), ARStrategy(), EngineConfig(**options | config)), ROWS)


@pytest.mark.quick(0, thorough=4)
@pytest.mark.parametrize("kind", ["gemma4_moe", "gemma4_text", "gemma4_e2b", "olmo3"])
def test_the_kernels_give_what_the_references_give(
    kind: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tiny_model(kind)
    expected = outputs(folder)
    monkeypatch.setattr(tensor_parallel, "add_post_norm", post_norm_triton)
    monkeypatch.setattr(attention, "prepare_qkv", prepare_qkv_triton)
    for found, output in zip(outputs(folder), expected, strict=True):
        assert found.token_ids == output.token_ids
        assert found.columns.keys() == output.columns.keys() and found.columns
        for name, values in output.columns.items():
            np.testing.assert_allclose(found.columns[name], values, atol=1e-4)


@pytest.mark.parametrize(("kind", "own"), [("gemma4_moe", 1), ("gemma3_text", 1), ("olmo3", 0)])
def test_two_launches_of_a_layer_compute_all_norms_of_the_stream(
    kind: str, own: int, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the norm before the first layer has a launch of its own."""
    model = load_model(tiny_model(kind), device=torch.device("cpu"))
    calls: Counter[str] = Counter()

    def counting(module: Any, name: str) -> None:
        compute = getattr(module, name)

        def counted(*args: Any, **options: Any) -> Any:
            calls[name] += 1
            return compute(*args, **options)

        monkeypatch.setattr(module, name, counted)

    counting(norms, "rms_norm")
    counting(tensor_parallel, "add_post_norm")
    options = EngineConfig(max_model_len=128, kv_cache_gib=0.01)
    engine = LLMEngine(model, None, (), ARStrategy(), options)
    calls.clear()
    run(engine, [([5, 9, 4], RequestParams(temperature=0, max_new_tokens=1))])
    assert calls["add_post_norm"] == 2 * len(model.layers)
    assert calls["rms_norm"] == own


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["gemma4_moe", "gemma4_text", "gemma4_e2b", "gemma3_text"])
def test_a_row_has_the_same_bits_alone_and_in_a_batch(kind: str, tiny_model: TinyModel) -> None:
    """With and without captured graphs."""
    folder = tiny_model(kind)
    together = outputs(folder, torch.bfloat16, deterministic=True)
    for config in ({"max_num_seqs": 1}, {"cuda_graph": False}):
        apart = outputs(folder, torch.bfloat16, deterministic=True, **config)
        for found, expected in zip(apart, together, strict=True):
            assert found.token_ids == expected.token_ids
            for name, values in expected.columns.items():
                np.testing.assert_array_equal(found.columns[name], values)
