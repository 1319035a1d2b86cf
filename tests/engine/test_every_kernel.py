"""Every Triton kernel runs in engines of tiny random models on a GPU, whose greedy rows in float32
equal those of the PyTorch references on the CPU.

NVIDIA's memory checker runs them too, together with the kernels' own tests; it slows kernels down
by 20 to 50 times:

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck \\
        --report-api-errors no --error-exitcode 9 python -m pytest tests/engine/test_every_kernel.py

Without PyTorch's caching every tensor is an allocation of its own, so a write past its end is
noticed. CUDA graphs cannot be captured then, so they are off.
"""

from __future__ import annotations

import ast
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from triton.runtime import KernelInterface

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.imports import syntax_tree

KERNELS = Path(__file__).parents[2] / "kernels"
EOS = 2
_SIZES: dict[str, Any] = {
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 5003,  # a prime, so no multiple of any tile
    "max_position_embeddings": 1024,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
QWEN3 = _SIZES | {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "num_attention_heads": 6,
    "head_dim": 128,
    "attention_bias": False,
}
LLAMA = _SIZES | {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "num_attention_heads": 8,
    "head_dim": 24,
    "attention_bias": True,
    "mlp_bias": True,
}
SDAR = QWEN3 | {
    "architectures": ["SDARForCausalLM"],
    "model_type": "sdar",
    "block_size": 4,
    "mask_token_id": 5002,
}
QWEN3_MOE = QWEN3 | {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 72,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
DEEPSEEK = _SIZES | {
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "num_attention_heads": 6,
    "num_key_value_heads": 6,
    "q_lora_rank": 40,
    "kv_lora_rank": 72,
    "qk_nope_head_dim": 24,
    "qk_rope_head_dim": 16,
    "v_head_dim": 40,
    "first_k_dense_replace": 1,
    "n_routed_experts": 8,
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 72,
    "n_group": 4,
    "topk_group": 2,
    "num_nextn_predict_layers": 0,
}
HYBRID = QWEN3_MOE | {
    "architectures": ["Qwen3NextForCausalLM"],
    "model_type": "qwen3_next",
    "partial_rotary_factor": 0.25,
    "full_attention_interval": 2,
    "linear_conv_kernel_dim": 4,
    "shared_expert_intermediate_size": 72,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 24,
    "linear_value_head_dim": 40,
}
_GEMMA4 = _SIZES | {
    "architectures": ["Gemma4ForCausalLM"],
    "model_type": "gemma4_text",
    "hidden_activation": "gelu_pytorch_tanh",
    "num_attention_heads": 6,
    "head_dim": 64,
    "global_head_dim": 128,
    "num_global_key_value_heads": 1,
    "sliding_window": 24,
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 5003,
}
GEMMA4_MOE = _GEMMA4 | {
    "attention_k_eq_v": True,
    "layer_types": ["sliding_attention", "full_attention"],
    "enable_moe_block": True,
    "num_experts": 6,
    "top_k_experts": 3,
    "moe_intermediate_size": 72,
}
GEMMA4_SMALL = _GEMMA4 | {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "num_kv_shared_layers": 1,
    "use_double_wide_mlp": True,
    "hidden_size_per_layer_input": 40,
}
GPT_OSS = _SIZES | {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "num_attention_heads": 6,
    "head_dim": 32,
    "attention_bias": True,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "sliding_window": 40,
    "layer_types": ["sliding_attention", "full_attention"],
    "swiglu_limit": 1.0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
MXFP4 = GPT_OSS | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "quantization_config": {"quant_method": "mxfp4"},
}
INT4 = QWEN3 | {
    "hidden_size": 128,
    "intermediate_size": 192,
    "quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 64},
}
NVFP4 = INT4 | {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}}
RUNS = (
    (QWEN3, torch.float32),
    (LLAMA, torch.float32),
    (QWEN3, torch.bfloat16),
    (SDAR, torch.float32),
    (QWEN3_MOE, torch.float32),
    (QWEN3_MOE, torch.bfloat16),
    (DEEPSEEK, torch.float32),
    (DEEPSEEK, torch.bfloat16),
    (HYBRID, torch.float32),
    (GPT_OSS, torch.float32),
    (GPT_OSS, torch.bfloat16),
    (GEMMA4_MOE, torch.float32),
    (GEMMA4_MOE, torch.bfloat16),
    (GEMMA4_SMALL, torch.float32),
    (MXFP4, torch.bfloat16),
    (INT4, torch.bfloat16),
    (NVFP4, torch.bfloat16),
)
ELSEWHERE = (
    "fp8.", "four_bit.dequantise_triton.", "layers.add_splits_triton.", "parallel.",
    "moe.persistent_triton.", "moe.moe_align_triton.", "sampling.token_mask.",
    "layers.narrow_linear_triton.", "lora.",
    "layers.cache_plane.", "attention.kv_gather.", "attention.full_attention_triton.",
    "moe.experts_triton._sum_slots",
)  # fmt: skip
"""How the names of kernels begin that these runs do not need; tests/kernels runs them."""

STRATEGIES: dict[str, dict[str, Any]] = {
    "ar": {},
    "ngram": {"adaptive": False, "ngram_min": 1, "ngram_pool": True},
    "draft": {"adaptive": False, "proposer": "draft", "verifier": "rejection"},
    "dllm": {},
}
"""The options of each strategy; models of SDAR run in the last one, all others in the others."""

GREEDY = RequestParams(temperature=0, max_new_tokens=3)
PLAIN = [(1, GREEDY), (17, GREEDY), (33, RequestParams(temperature=1.3, max_new_tokens=3))]
"""Rows that run together: (tokens of the prompt, sampling parameters)."""
EVERY_OPTION = [
    (
        70,
        replace(
            GREEDY,
            logprobs=True,
            columns=("entropy",),
            repetition_penalty=1.3,
            presence_penalty=0.5,
        ),
    ),
    (16, replace(GREEDY, frequency_penalty=0.7, min_new_tokens=3, stop_token_ids=(7, 4999))),
    (31, RequestParams(temperature=0.7, top_k=40, top_p=0.9, max_new_tokens=3)),
    (
        5,
        RequestParams(
            min_p=0.01, top_p=0.8, top_logprobs=20, logprobs_mode="processed", max_new_tokens=3
        ),
    ),
    # This prompt is longer than a split of the decode kernel, and is prefilled in several steps.
    (530, replace(GREEDY, top_logprobs=7)),
]


class Counted:
    """A kernel whose launches are counted in `launches[name]`."""

    def __init__(self, name: str, kernel: KernelInterface, launches: Counter[str]) -> None:
        self._name, self._kernel, self._launches = name, kernel, launches

    def __getitem__(self, grid: Any) -> Any:
        self._launches[self._name] += 1
        return self._kernel[grid]


def launched_kernels() -> Iterator[tuple[ModuleType, str]]:
    """Find every kernel that is launched in `kernels/`: the module of the launch, and the name."""
    for source in sorted(KERNELS.rglob("*.py")):
        parts = source.relative_to(KERNELS.parent).with_suffix("").parts
        module = import_module(".".join(("batchgen", *parts)))
        names = {
            ast.unparse(node.func.value)
            for node in ast.walk(syntax_tree(source))
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)  # kernel[grid]()
        }
        for name in sorted(names):
            if isinstance(vars(module).get(name), KernelInterface):
                yield module, name


def count_launches(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Count the launches of every kernel until the test ends, by MODULE.KERNEL."""
    launches: Counter[str] = Counter()
    for module, name in launched_kernels():
        full_name = f"{module.__name__.removeprefix('batchgen.kernels.')}.{name}"
        launches[full_name] = 0
        monkeypatch.setattr(module, name, Counted(full_name, vars(module)[name], launches))
    return launches


def make_model(sizes: dict[str, Any], dtype: torch.dtype, device: torch.device) -> CausalLM:
    """Make a model with random weights that are drawn on the CPU, so they are the same anywhere.

    `sizes` is its config.json.
    """
    with TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(sizes))
        model = load_model(Path(folder), device=device, dtype=dtype, load_format="dummy")
    for index, (name, weight) in enumerate(model.named_parameters()):
        if not weight.is_floating_point():  # in 4 bits; only runs in float32 are compared
            continue
        generator = torch.Generator().manual_seed(index)
        mean = 1.0 if name.endswith(("norm.weight", "scale", "scales", "scalar")) else 0.0
        weight.copy_(torch.empty(weight.shape).normal_(mean, 0.15, generator=generator))
    return model


def batches_of(sizes: dict[str, Any]) -> tuple[list[tuple[int, RequestParams]], ...]:
    """Return the batches for a model: rows without options, and rows with all that it allows."""
    diffusion = sizes["model_type"] == "sdar"
    return PLAIN, [row for row in EVERY_OPTION if not (diffusion and row[1].has_penalties)]


def run(
    model: CausalLM,
    strategy: Strategy,
    batches: tuple[list[tuple[int, RequestParams]], ...],
    draft: CausalLM | None = None,
) -> list[RequestOutput]:
    """Run the batches one after another in one engine; returns the outputs of all rows in order."""
    config = EngineConfig(
        max_num_seqs=len(EVERY_OPTION), max_batched_tokens=256, kv_cache_gib=0.02, cuda_graph=False
    )
    engine = LLMEngine(
        model, None, (EOS,), strategy, config, others={} if draft is None else {"draft": draft}
    )
    outputs: dict[str, RequestOutput] = {}
    index = 0
    for rows in batches:
        for length, params in rows:
            prompt = [(7 * index + 13 * i + i * i) % model.config.vocab_size for i in range(length)]
            engine.add_request(str(index), prompt, replace(params, seed=index))
            index += 1
        while engine.has_unfinished():
            outputs |= {output.request_id: output for output in engine.step()}
    return [outputs[str(i)] for i in range(index)]


def differences(
    expected: list[RequestOutput],
    found: list[RequestOutput],
    batches: tuple[list[tuple[int, RequestParams]], ...],
) -> list[str]:
    """List how the greedy rows of `found` differ from those of `expected`."""
    problems = []
    params = [params for rows in batches for _, params in rows]
    for index, (a, b, own) in enumerate(zip(expected, found, params, strict=True)):
        if not own.greedy:
            continue
        if a.token_ids != b.token_ids or a.error != b.error:
            problems.append(f"row {index}: tokens {b.token_ids} ({b.error}), not {a.token_ids}")
        elif any(not np.allclose(a.columns[k], b.columns[k], atol=1e-3) for k in a.columns):
            problems.append(f"row {index}: other log-probabilities")
    return problems


def strategy_of(kind: str) -> Strategy:
    options = STRATEGIES[kind]
    if kind == "dllm":
        return DLLMStrategy(**options)
    return ARSpecStrategy(**options) if options else ARStrategy()


@pytest.mark.gpu
def test_engines_launch_every_kernel_and_agree_with_the_references(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problems, launches = [], count_launches(monkeypatch)
    for sizes, dtype in RUNS:
        batches, diffusion = batches_of(sizes), sizes["model_type"] == "sdar"
        kinds = [kind for kind in STRATEGIES if (kind == "dllm") == diffusion]
        # No draft model has recurrent layers or windows here.
        if sizes["model_type"] in ("qwen3_next", "gpt_oss", "gemma4_text"):
            kinds.remove("draft")
        reference = make_model(sizes, torch.float32, torch.device("cpu"))
        expected = run(reference, strategy_of(kinds[0]), batches)
        for kind in kinds:
            model, draft = (make_model(sizes, dtype, torch.device("cuda")) for _ in range(2))
            found = run(model, strategy_of(kind), batches, draft if kind == "draft" else None)
            torch.cuda.synchronize()
            name = f"{sizes['model_type']} {dtype} {kind}"
            if dtype == torch.float32:
                problems += [f"{name}, {each}" for each in differences(expected, found, batches)]
            problems += [f"{name}: {row.error}" for row in found if row.error is not None]
    problems += [
        f"{name} was never launched"
        for name, count in launches.items()
        if not count and not name.startswith(ELSEWHERE)
    ]
    assert not problems


def test_kernels_are_found_in_every_file_that_launches_some() -> None:
    found = list(launched_kernels())
    files = {
        KERNELS.joinpath(*module.__name__.split(".")[2:]).with_suffix(".py") for module, _ in found
    }
    assert files == {
        path
        for path in KERNELS.rglob("*.py")
        for node in ast.walk(syntax_tree(path))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Subscript)
    }
    names = {f"{module.__name__}.{name}" for module, name in found}
    assert "batchgen.kernels.attention.decode._decode_kernel" in names
    assert len(names) == len(found)
