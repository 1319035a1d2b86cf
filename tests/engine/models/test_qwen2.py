"""Qwen2 and Qwen2.5 against transformers."""

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

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.dense import DenseConfig
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.strategies.ar.strategy import ARStrategy

CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(100)]
CONFIGS: dict[str, dict[str, Any]] = {
    "untied": {},
    "tied": {"tie_word_embeddings": True},
    "mha": {"num_key_value_heads": 4},
    "wide heads": {"head_dim": 32},
    "windows that no layer has": {
        "use_sliding_window": True,
        "sliding_window": 8,
        "max_window_layers": 3,
    },
    "yarn": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
}


@pytest.mark.quick(3)
@pytest.mark.parametrize("name", CONFIGS)
def test_logits_equal_transformers(
    name: str,
    tiny_model: Callable[..., Path],
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    folder = tiny_model("qwen2", **CONFIGS[name])
    model = load_model(folder, device=CPU)
    model.pack()
    ours, theirs = run_paged(model, IDS, [64, 1, 35]), reference_logits(folder, IDS)
    assert float((ours - theirs).abs().max() / theirs.abs().max()) < 1e-5


@pytest.mark.quick(1)
@pytest.mark.parametrize("tied", [False, True])
def test_greedy_tokens_and_log_probabilities(tied: bool, tiny_model: Callable[..., Path]) -> None:
    folder = tiny_model("qwen2", tie_word_embeddings=tied)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(max_batched_tokens=7, block_size=4, max_model_len=64, kv_cache_gib=0.001)
    engine = LLMEngine(load_model(folder, device=CPU), None, (), ARStrategy(), config)
    params = RequestParams(temperature=0, max_new_tokens=12, logprobs=True)
    prompts = [IDS[i : i + 3 + 5 * i] for i in range(5)]
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    for i, prompt in enumerate(prompts):
        ids = list(prompt)
        logprobs = []
        for _ in range(12):
            with torch.inference_mode():
                logits = theirs(torch.tensor([ids])).logits[0, -1]
            ids.append(int(logits.argmax()))
            logprobs.append(float(logits.log_softmax(-1).max()))
        output = found[str(i)]
        assert output.token_ids == ids[len(prompt) :]
        torch.testing.assert_close(
            torch.tensor(output.columns["logprobs"]), torch.tensor(logprobs), atol=1e-4, rtol=1e-4
        )


def test_the_biases_are_those_of_the_family(tiny_model: Callable[..., Path]) -> None:
    family = load_model_config(tiny_model("qwen2")).family_as(DenseConfig)
    assert family.qkv_bias and not family.output_bias and not family.mlp_bias
    assert not family.qk_norm and family.head_dim == 16


def test_fused_projections_are_read_as_well(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Some checkpoints hold q, k and v, or gate and up, in one tensor."""
    folder = edited(tiny_model("qwen2"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(3):
        at = f"model.layers.{layer}."
        for whole, parts in (
            ("self_attn.qkv_proj", ("q_proj", "k_proj", "v_proj")),
            ("mlp.gate_up_proj", ("gate_proj", "up_proj")),
        ):
            room = whole.split(".")[0]
            for kind in ("weight", "bias"):
                names = [f"{at}{room}.{part}.{kind}" for part in parts]
                if names[0] in tensors:
                    tensors[f"{at}{whole}.{kind}"] = torch.cat([tensors.pop(n) for n in names])
    save_file(tensors, folder / "model.safetensors")
    fused, original = (load_model(f, device=CPU) for f in (folder, tiny_model("qwen2")))
    for name, parameter in original.named_parameters():
        assert torch.equal(parameter, fused.get_parameter(name)), name

    tensors["model.layers.1.self_attn.q_proj.weight"] = torch.zeros(64, 64)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"1\.self_attn\.q_proj\.weight, which came before"):
        load_model(folder, device=CPU)
    del tensors["model.layers.1.self_attn.q_proj.weight"]
    del tensors["model.layers.2.self_attn.qkv_proj.bias"]
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=r"missing tensors: .*layers\.2\.self_attn\.k_proj\.bias"):
        load_model(folder, device=CPU)


def edited(folder: Path, into: Path, **config: Any) -> Path:
    """A copy of a model folder with other values in its configuration."""
    copy = into / "model"
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text()) | config
    (copy / "config.json").write_text(json.dumps(values))
    return copy
