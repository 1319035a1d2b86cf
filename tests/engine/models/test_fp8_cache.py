"""Rows whose keys and values are kept in FP8: the same bits however they are scheduled, and what
plain keys and values give that are rounded to FP8 before they are kept."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from batchgen.engine.caches.cache_specs import KVSpec, LatentSpec
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.kernels.attention import attention, qkv
from batchgen.kernels.attention.kv_cache import KVCache, quantise_vectors, write_kv
from batchgen.kernels.fp8.fp8_weight import FP8
from batchgen.kernels.mla import latent_prepare, latent_prepare_triton, mla_attention
from batchgen.kernels.mla.latent_prepare import prepare_latent_reference
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, Scored, expect_short_rows, run
from tests.support.engine.forced_drafts import ForcedStrategy

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
KINDS = ("qwen3", "gpt_oss", "gemma4_text", "deepseek_v3", "qwen3_next")


def load(
    folder: Path,
    kv_cache_dtype: Any = "fp8",
    *,
    device: torch.device = CPU,
    dtype: torch.dtype = torch.float32,
) -> CausalLM:
    return load_model(folder, device=device, dtype=dtype, kv_cache_dtype=kv_cache_dtype)


def make_engine(model: CausalLM, strategy: Strategy | None = None, **config: Any) -> LLMEngine:
    options: dict[str, Any] = {"max_model_len": 256, "kv_cache_gib": 0.01, "max_num_seqs": 6}
    return LLMEngine(model, None, (), strategy or ARStrategy(), EngineConfig(**options | config))


def requests(seed: int, count: int = 8, temperatures: Sequence[float] = (0, 0.8)) -> list[Request]:
    """Prompts of which some begin alike."""
    rng = random.Random(seed)
    common = [rng.randrange(3, 128) for _ in range(70)]
    rows: list[Request] = []
    while len(rows) < count:
        own = [rng.randrange(3, 128) for _ in range(rng.choice([1, 5, 40]))]
        params = RequestParams(
            temperature=rng.choice(temperatures), max_new_tokens=rng.choice([1, 6, 12]),
            seed=rng.randrange(4), logprobs=True,
        )  # fmt: skip
        rows.append(([*common[: rng.choice([0, 20, 64])], *own], params))
    return rows


@pytest.fixture(params=KINDS)
def folder(request: pytest.FixtureRequest, tiny_model: TinyModel) -> Path:
    return tiny_model(request.param)


def alone(folder: Path) -> Alone:
    return Alone(make_engine(load(folder), max_num_seqs=1, prefix_caching=False), run)


@pytest.mark.quick(1, thorough=2)
def test_any_schedule(folder: Path) -> None:
    rows = requests(seed=1, count=5)
    engine = make_engine(load(folder), overlap=True, max_batched_tokens=64, block_size=4)
    alone(folder).check(rows, run(engine, rows, restarts=(7,)))
    # Prefixes of a model with states are shared from 64 tokens on.
    assert engine.stats.cached_tokens > 0 or "next" in folder.name


@pytest.mark.quick(0, thorough=2)
def test_rows_that_lose_their_caches(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expect_short_rows(monkeypatch)
    params = RequestParams(max_new_tokens=60, seed=3, logprobs=True)
    rows = [([3 + (i + 2) * j % 125 for j in range(8 + 5 * i)], params) for i in range(8)]
    model = load(folder)
    kept = [s for s in model.cache_specs if isinstance(s, KVSpec | LatentSpec)]
    of_token = sum(spec.token_bytes(model.dtype) for spec in kept)
    engine = make_engine(
        model, max_model_len=128, kv_cache_gib=200 * of_token / 2**30, max_batched_tokens=64
    )
    alone(folder).check(rows, run(engine, rows))
    assert engine.stats.preemptions


@pytest.mark.quick(0, thorough=2)
def test_drafts_are_taken_back(folder: Path) -> None:
    rows, expected = requests(seed=20, count=16), alone(folder)
    answers = {str(i): expected(row).token_ids for i, row in enumerate(rows)}
    forced = ForcedStrategy(answers, k=3, seed=3)
    engine = make_engine(load(folder), forced, max_num_seqs=4)
    forced._engine = engine
    expected.check(rows, run(engine, rows))
    assert all(forced.held)
    ngram = ARSpecStrategy(num_spec_tokens=3, adaptive=False, ngram_min=1)
    expected.check(rows, run(make_engine(load(folder), ngram, overlap=True), rows))


def rounded(x: Tensor) -> Tensor:
    values, scales = quantise_vectors(x)
    return values.float() * scales


def write_rounded(key: Tensor, value: Tensor, cache: KVCache, slots: Tensor) -> None:
    write_kv(rounded(key), rounded(value), cache, slots)


def prepare_rounded(
    q: Tensor, latent: Tensor, weight: Tensor, eps: float, cos_sin: Tensor, plane: Tensor,
    slots: Tensor, _: None,
) -> Tensor:  # fmt: skip
    own, scales = torch.zeros(plane.shape).to(FP8), torch.zeros(plane.shape[:2])
    q = prepare_latent_reference(q, latent, weight, eps, cos_sin, own, slots, scales)
    wide = (own.float() * scales.unsqueeze(-1)).flatten(0, 1)
    plane.view(wide.shape)[slots] = wide[slots]
    return q


def round_before_writing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(qkv, "write_kv", write_rounded)
    monkeypatch.setattr(latent_prepare, "prepare_latent_reference", prepare_rounded)


def assert_close(found: Sequence[RequestOutput], expected: Sequence[RequestOutput]) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.token_ids == theirs.token_ids
        for name in ours.columns:
            np.testing.assert_allclose(ours.columns[name], theirs.columns[name], atol=1e-4)


@pytest.mark.quick(2)
def test_a_row_sees_keys_and_values_rounded_to_fp8(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[Request | Scored] = [*requests(seed=5, count=4, temperatures=(0,))]
    rows.append(([5, 9, 4], RequestParams(max_new_tokens=0, logprobs=True), [7, 8, 100, 3]))
    found = run(make_engine(load(folder)), rows)
    plain = run(make_engine(load(folder, "auto")), rows)
    round_before_writing(monkeypatch)
    assert_close(found, run(make_engine(load(folder, "auto")), rows))
    differences = [
        np.abs(a.columns[name] - b.columns[name]).max()
        for a, b in zip(found, plain, strict=True)
        if a.token_ids == b.token_ids
        for name in a.columns
    ]
    assert 0 < max(differences) < 1


def latent_by_kernels(
    q: Tensor, plane: Tensor, expansion: Any, rotated: int, parts: Any, scale: float, scales: Tensor
) -> Tensor:
    counts = [len(part.positions) for part in parts]
    found = [
        mla_attention.attend_part(own, plane, expansion, rotated, part, scale, scales=scales)
        for own, part in zip(q.split(counts), parts, strict=True)
    ]
    return torch.cat(found)


@pytest.mark.quick(0, thorough=2)
def test_the_kernels_give_what_the_references_give(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    params = RequestParams(temperature=0, max_new_tokens=3, logprobs=True)
    rows: list[Request] = [([5, 9, 4], params), (list(range(3, 33)), params)]
    expected = run(make_engine(load(folder)), rows)
    monkeypatch.setattr(attention, "attend_part_reference", attention.attend_part_triton)
    monkeypatch.setattr(qkv, "prepare_qkv_reference", qkv.prepare_qkv_triton)
    monkeypatch.setattr(mla_attention, "latent_attention_reference", latent_by_kernels)
    monkeypatch.setattr(
        latent_prepare, "prepare_latent_reference", latent_prepare_triton.prepare_latent_triton
    )
    assert_close(run(make_engine(load(folder)), rows), expected)


def test_blocks_of_diffusion(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tiny_model("sdar", block_size=4)
    params = RequestParams(temperature=0, max_new_tokens=10)
    rows: list[Request] = [(list(range(3, 3 + n)), params) for n in (5, 18, 40)]

    def generated(dtype: str, **config: Any) -> list[RequestOutput]:
        return run(make_engine(load(folder, dtype), DLLMStrategy(block_length=4), **config), rows)

    found = generated("fp8")
    one_by_one = generated("fp8", max_num_seqs=1, prefix_caching=False)
    assert [row.token_ids for row in found] == [row.token_ids for row in one_by_one]
    round_before_writing(monkeypatch)
    assert [row.token_ids for row in generated("auto")] == [row.token_ids for row in found]


def test_latents_take_half_the_bytes() -> None:
    cache = LatentSpec(4, 24, 8, in_fp8=True).allocate(3, 4, torch.bfloat16, CPU)
    assert cache.scales is not None
    assert cache.plane.nbytes + cache.scales.nbytes == 12 * (24 + 8 + 4)


def test_tokens_take_half_the_bytes(tiny_model: TinyModel) -> None:
    plain, fp8 = (
        [s for s in load(tiny_model("gpt_oss"), dtype).cache_specs if isinstance(s, KVSpec)]
        for dtype in ("auto", "fp8")
    )
    for one, other in zip(plain, fp8, strict=True):
        cache = other.allocate(3, 4, torch.bfloat16, CPU)
        assert cache.scales is not None and cache.key.dtype == torch.float8_e4m3fn
        parts = (cache.key, cache.value, cache.scales)
        assert sum(part.nbytes for part in parts) == 12 * other.token_bytes(torch.bfloat16)
        scales = 8 * one.num_kv_heads
        assert other.token_bytes(torch.bfloat16) == one.token_bytes(torch.bfloat16) // 2 + scales


@pytest.mark.gpu
@pytest.mark.parametrize("cuda_graph", [False, True])
@pytest.mark.parametrize("drafts", [False, True])
def test_a_gpu_gives_the_tokens_of_a_cpu(folder: Path, drafts: bool, cuda_graph: bool) -> None:
    """But where a difference in rounding is one between two values of FP8."""
    rows = requests(seed=3, count=12, temperatures=(0,))
    made = []
    for device in ("cpu", "cuda"):
        strategy = ARSpecStrategy(num_spec_tokens=3, adaptive=False) if drafts else ARStrategy()
        config: dict[str, Any] = {} if device == "cpu" else {"cuda_graph": cuda_graph}
        model = load(folder, device=torch.device(device))
        made.append(run(make_engine(model, strategy, **config), rows))
    equal = [cpu.token_ids == gpu.token_ids for cpu, gpu in zip(*made, strict=True)]
    assert sum(equal) >= len(rows) - 1
    for cpu, gpu in zip(*made, strict=True):
        first, other = cpu.columns["logprobs"][0], gpu.columns["logprobs"][0]
        np.testing.assert_allclose(other, first, atol=0.02)


@pytest.mark.gpu
def test_rows_keep_their_bits_on_a_gpu(folder: Path) -> None:
    where: dict[str, Any] = {"device": torch.device("cuda"), "dtype": torch.bfloat16}
    rows = requests(seed=1)
    exact: dict[str, Any] = {"deterministic": True}
    one = make_engine(load(folder, **where), max_num_seqs=1, prefix_caching=False, **exact)
    engine = make_engine(load(folder, **where), max_batched_tokens=64, block_size=16, **exact)
    Alone(one, run).check(rows, run(engine, rows, restarts=(7,)))
