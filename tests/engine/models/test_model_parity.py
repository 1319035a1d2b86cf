"""Our forward against transformers', in float32, over a paged cache filled in chunks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.caches.model_caches import CacheSizes
from batchgen.engine.loading.loader import load_model
from batchgen.engine.memory.model_use import ModelUse
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.kernels.attention.metadata import AttentionMetadata

CPU = torch.device("cpu")
IDS = [(7 * i * i + 3 * i) % 128 for i in range(200)]
LLAMA3 = {
    "rope_type": "llama3", "rope_theta": 500.0, "factor": 8.0, "low_freq_factor": 1.0,
    "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
}  # fmt: skip
YARN = {
    "rope_type": "yarn", "rope_theta": 1000.0, "factor": 4.0,
    "original_max_position_embeddings": 64,
}  # fmt: skip
CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "theta": {"rope_parameters": {"rope_type": "default", "rope_theta": 777.0}},
    "linear": {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0}},
    "llama3": {"rope_parameters": LLAMA3},
    "yarn": {"rope_parameters": YARN},
    "yarn_mscale": {"rope_parameters": YARN | {"mscale": 0.7, "mscale_all_dim": 1.2}},
    "yarn_factor": {"rope_parameters": YARN | {"attention_factor": 1.5, "truncate": False}},
    "tied": {"tie_word_embeddings": True},
    "mha": {"num_key_value_heads": 4},
    "mqa": {"num_key_value_heads": 1},
    "attention_bias": {"attention_bias": True},
    "wide_heads": {"head_dim": 32},
}


def relative_error(ours: Tensor, reference: Tensor) -> float:
    return float((ours - reference).abs().max() / reference.abs().max())


@pytest.mark.quick(2, thorough=9)
@pytest.mark.parametrize("kind", ["llama", "qwen3"])
@pytest.mark.parametrize("name", [*CONFIGS, "mlp_bias"])
def test_logits_equal_transformers(
    kind: str,
    name: str,
    tiny_model: Callable[..., Path],
    reference_logits: Callable[..., Tensor],
    run_paged: Callable[..., Tensor],
) -> None:
    if name == "mlp_bias" and kind == "qwen3":
        pytest.skip("Qwen3 has no such option")
    folder = tiny_model(kind, **(CONFIGS | {"mlp_bias": {"mlp_bias": True}})[name])
    logits = run_paged(load_model(folder, device=CPU), IDS, [64, 100, 1, 35])
    assert logits.dtype == torch.float32
    assert relative_error(logits, reference_logits(folder, IDS)) < 1e-5


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_bfloat16_is_as_near_to_float32_as_transformers(
    kind: str, tiny_model: Callable[..., Path], run_paged: Callable[..., Tensor]
) -> None:
    from transformers import AutoModelForCausalLM

    folder = tiny_model(kind)
    exact = run_paged(load_model(folder, device=CPU), IDS, [200])
    ours = run_paged(load_model(folder, device=CPU, dtype=torch.bfloat16), IDS, [200])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.inference_mode():
        logits = theirs(torch.tensor([IDS])).logits[0]
    assert ours.dtype == torch.bfloat16
    our_error = (ours.float() - exact).square().mean()
    assert our_error <= 1.1 * (logits.float() - exact).square().mean()


def _forward_rows(model: CausalLM, tokens: Tensor) -> Tensor:
    """Logits of rows of at most 16 tokens [N, W] in one forward: [N, W, vocab]."""
    num_rows, width = tokens.shape
    positions = torch.arange(width).repeat(num_rows)
    tables = torch.arange(1, num_rows + 1).unsqueeze(1)
    caches = ModelUse(model, (1,)).caches(CacheSizes(num_rows + 1, 16, 0))
    slots = (tables * 16 + torch.arange(width)).flatten()
    attention = [AttentionMetadata(positions, (width,) * num_rows, (width,) * num_rows, tables)]
    with torch.inference_mode():
        hidden = model(tokens.flatten(), positions, ForwardContext(caches.layers, slots, attention))
        return model.compute_logits(hidden).view(num_rows, width, -1)


@pytest.fixture(params=[1, pytest.param(2, marks=pytest.mark.slow), 5])
def threads(request: pytest.FixtureRequest) -> Iterator[int]:
    """5 threads share the elements unevenly, so that their shares end inside rows."""
    before, count = torch.get_num_threads(), int(request.param)
    torch.set_num_threads(count)
    yield count
    torch.set_num_threads(before)


@pytest.mark.quick(1, thorough=3)
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize(
    ("kind", "hidden", "inner", "heads", "kv_heads", "dtype"),
    [
        ("llama", 576, 1536, 9, 3, torch.float32),
        ("qwen3", 2048, 544, 32, 8, torch.float32),
        ("llama", 576, 256, 9, 3, torch.bfloat16),
    ],
)
def test_a_token_has_the_same_bits_in_any_batch(
    kind: str,
    hidden: int,
    inner: int,
    heads: int,
    kv_heads: int,
    dtype: torch.dtype,
    tiny_model: Callable[..., Path],
) -> None:
    sizes = {"hidden_size": hidden, "intermediate_size": inner, "num_hidden_layers": 1}
    counts = {"num_attention_heads": heads, "num_key_value_heads": kv_heads, "head_dim": 64}
    folder = tiny_model(kind, vocab_size=1000, **sizes, **counts)
    model = load_model(folder, device=CPU, dtype=dtype)
    model.pack()  # as the engine does, which tries what this CPU's products are like
    if model.batch_dependence is not None:
        pytest.skip(model.batch_dependence)
    tokens = torch.randint(1000, (7, 16), generator=torch.Generator().manual_seed(0))
    together = _forward_rows(model, tokens)
    for size in (1, 2, 5):
        parts = [_forward_rows(model, part) for part in tokens.split(size)]
        assert torch.equal(together, torch.cat(parts))
    alone = [_forward_rows(model, row[:1, None]) for row in tokens]
    assert torch.equal(together[:, :1], torch.cat(alone))
