"""Models with experts against transformers."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.engine_config import EngineConfig
from batchgen.engine.layers.moe import SparseMoE
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_config, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.moe import MoEConfig
from batchgen.engine.outputs import RequestOutput
from batchgen.engine.sampling.params import SamplingParams
from batchgen.strategies.ar.strategy import ARStrategy

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(100)]
CONFIGS: dict[str, dict[str, Any]] = {
    "renormalised": {},
    "not renormalised": {"norm_topk_prob": False},
    "fused": {"split_experts": False},
    "every second": {"decoder_sparse_step": 2},
    "some dense": {"mlp_only_layers": [0, 2]},
    "one expert": {"num_experts_per_tok": 1},
    "all experts": {"num_experts_per_tok": 8},
    "odd number": {"num_experts": 5, "moe_intermediate_size": 24},
    "tied": {"tie_word_embeddings": True},
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(
    kind: str,
    name: str,
    packed: bool,
    tiny_model: TinyModel,
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    folder = tiny_model(kind, **CONFIGS[name])
    model = load_model(folder, device=CPU)
    if packed:
        model.pack()
    ours, theirs = run_paged(model, IDS, [64, 1, 35]), reference_logits(folder, IDS)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@pytest.mark.parametrize("name", ["renormalised", "not renormalised", "every second"])
def test_greedy_tokens_and_log_probabilities(name: str, tiny_model: TinyModel) -> None:
    """In small chunks, and with so small a cache that rows are preempted."""
    folder = tiny_model("qwen3_moe", **CONFIGS[name])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(
        max_batched_tokens=7, block_size=4, max_model_len=64, kv_cache_gib=0.0001
    )
    engine = LLMEngine(load_model(folder, device=CPU), None, (), ARStrategy(), config)
    params = SamplingParams(temperature=0, max_new_tokens=12, logprobs=True)
    prompts = [IDS[i : i + 3 + 5 * i] for i in range(5)]
    found = run(engine, prompts, params)
    assert engine.stats.preemptions
    for prompt, output in zip(prompts, found, strict=True):
        assert len(output.token_ids) == 12
        with torch.inference_mode():
            logits = theirs(torch.tensor([prompt + output.token_ids])).logits[0]
        logprobs = logits[len(prompt) - 1 : -1].log_softmax(-1)
        assert output.token_ids == logprobs.argmax(-1).tolist()
        expected = logprobs.max(-1).values
        torch.testing.assert_close(
            torch.tensor(output.columns["logprobs"]), expected, atol=1e-4, rtol=1e-4
        )


def run(
    engine: LLMEngine, prompts: list[list[int]], params: SamplingParams
) -> list[RequestOutput]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    return [found[str(i)] for i in range(len(prompts))]
