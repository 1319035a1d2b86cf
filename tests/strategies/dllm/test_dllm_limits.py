"""Block diffusion where the limits of tokens are no multiples of a block."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.dllm.strategy import DLLMStrategy

CPU = torch.device("cpu")


def make_engine(tiny_model: Callable[..., Path], length: int, **config: object) -> LLMEngine:
    model = load_model(tiny_model("sdar"), device=CPU, dtype=torch.float32)
    return LLMEngine(
        model,
        None,
        (),
        DLLMStrategy(length),
        EngineConfig(**config),  # type: ignore[arg-type]
    )


def finish(engine: LLMEngine) -> dict[str, RequestOutput]:
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    return found


def test_a_prefill_of_less_than_a_block_is_refused(tiny_model: Callable[..., Path]) -> None:
    with pytest.raises(ValueError, match=r"max_batched_tokens is 3, but .* multiples of 4 tokens"):
        make_engine(tiny_model, 4, max_batched_tokens=3, max_model_len=64)


def test_a_row_whose_last_block_does_not_fit_is_refused(tiny_model: Callable[..., Path]) -> None:
    """Its 40 tokens fit a cache of 48, but two blocks of 32 do not."""
    per_block = 16 * 3 * 2 * 2 * 16 * 4
    engine = make_engine(
        tiny_model, 32, block_size=16, kv_cache_gib=4.5 * per_block / 2**30, max_num_seqs=1
    )
    assert engine.memory.kv_tokens == 48
    with pytest.raises(RequestError, match=r"may need 64 tokens of KV cache, .* has 48") as caught:
        engine.add_request("0", [5] * 30, RequestParams(max_new_tokens=10))
    assert caught.value.type == "kv_cache_too_small"
    engine.add_request("1", [5] * 20, RequestParams(max_new_tokens=12))
    assert len(finish(engine)["1"].token_ids) == 12


@pytest.mark.parametrize("max_model_len", [33, 63])
def test_the_engine_says_how_long_rows_can_get(
    tiny_model: Callable[..., Path], max_model_len: int
) -> None:
    """Whole blocks: the strategy tells the job the same number before any weights load."""
    engine = make_engine(tiny_model, 32, max_model_len=max_model_len, kv_cache_gib=0.01)
    model = engine._runner.model
    assert engine.max_model_len == 32
    assert DLLMStrategy(32).model_len(max_model_len, model.config) == 32  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="less than one block of 32"):
        make_engine(tiny_model, 32, max_model_len=31, kv_cache_gib=0.01)
