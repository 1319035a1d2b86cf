"""Rows with adapters: each is what the model is with that adapter merged into its weights, and what
it is alone."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestError, RequestOutput
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.adapters import add_adapters
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.peft_files import open_adapter
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.support.cases import some_slow
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, expect_short_rows, run
from tests.support.engine.families import TEXT
from tests.support.engine.lora_files import DENSE, merge, write_adapter
from tests.support.engine.ranked_engines import Case, run_divided

CPU = torch.device("cpu")
TARGETS = (
    *DENSE, "q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "in_proj_qkvz", "in_proj_ba",
    "in_proj_qkv", "in_proj_z", "in_proj_b", "in_proj_a", "out_proj", "qkv_proj", "gate_up_proj",
    "per_layer_input_gate", "per_layer_projection",
)  # fmt: skip
TOWERS = ("mistral3", "mistral3_small", "gemma3", "gemma4", "llama4_tower")
KINDS = [kind for kind in TEXT if kind not in TOWERS]
OF_EACH_KIND = (
    "qwen3", "phi3", "qwen3_moe", "qwen3_next", "qwen3_5_text", "deepseek_v2", "gemma4_e2b",
    "gpt_oss", "nemotron_h", "lfm2", "cohere",
)  # fmt: skip
"""Families of which each has modules, or a place for them, that the others have not."""
NAMES = (None, "a", "b", "a", None, "b")
CONFIG = EngineConfig(max_model_len=200, kv_cache_gib=0.01, max_num_seqs=6)


def adapted(base: Path, adapters: Mapping[str, Path], **how: Any) -> CausalLM:
    model = load_model(base, device=CPU, dtype=torch.float32, **how)
    if adapters:
        add_adapters(model, {name: open_adapter(path) for name, path in adapters.items()})
    return model


def engine_of(
    model: CausalLM, strategy: Strategy | None = None, config: EngineConfig = CONFIG
) -> LLMEngine:
    return LLMEngine(model, None, (2,), strategy or ARStrategy(), config)


def two_adapters(base: Path, folder: Path, targets: Sequence[str] = DENSE) -> dict[str, Path]:
    """One with a rank and a factor of their own at some modules, and one of rank-stabilised LoRA in
    some layers."""
    first = write_adapter(
        folder / "a",
        base,
        targets,
        seed=1,
        strength=0.07,
        ranks={"o_proj": 7},
        alpha_pattern={"down_proj": 2},
    )
    second = write_adapter(
        folder / "b",
        base,
        targets,
        rank=9,
        seed=2,
        strength=0.07,
        use_rslora=True,
        layers_to_transform=[0, 2],
    )
    return {"a": first, "b": second}


def rows(count: int = 6, length: int = 20, new: int = 12) -> list[Request]:
    """Rows of few tokens in common, some of them sampled."""
    found = []
    for i in range(count):
        params = RequestParams(
            temperature=0.8 * (i % 2),
            seed=i,
            max_new_tokens=new,
            logprobs=True,
            lora=NAMES[i % len(NAMES)],
        )
        found.append(([(7 * j * j + 3 * j) % 97 + 5 for j in range(length)] + [5 + i] * 3, params))
    return found


@pytest.mark.quick(1, thorough=5)
@pytest.mark.parametrize("kind", some_slow(KINDS, quick=OF_EACH_KIND))
def test_rows_are_those_of_merged_weights(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model(kind)
    adapters = two_adapters(base, tmp_path, TARGETS)
    requests = rows()
    found = run(engine_of(adapted(base, adapters)), requests)
    of_base = run(engine_of(adapted(base, {})), [(p, replace(s, lora=None)) for p, s in requests])
    for name in (None, "a", "b"):
        folder = base if name is None else merge(base, adapters[name], tmp_path / f"merged_{name}")
        own = [i for i, (_, params) in enumerate(requests) if params.lora == name]
        plain = [(requests[i][0], replace(requests[i][1], lora=None)) for i in own]
        expected = run(engine_of(adapted(folder, {})), plain)
        for i, output in zip(own, expected, strict=True):
            assert found[i].token_ids == output.token_ids
            difference = np.abs(found[i].columns["logprobs"] - output.columns["logprobs"]).max()
            # A recurrence adds up what rounding differs by.
            most = 5e-4 if "qwen3_5" in kind or "next" in kind else 2e-5
            assert difference <= (0 if name is None else most)
            changed = found[i].columns["logprobs"][0] != of_base[i].columns["logprobs"][0]
            assert changed == (name is not None)


def test_given_answers_are_scored_with_the_adapter(
    tiny_model: Callable[..., Path],
    reference_logits: Callable[..., torch.Tensor],
    tmp_path: Path,
) -> None:
    base = tiny_model("llama")
    adapters = two_adapters(base, tmp_path)
    ids = [(7 * i * i + 3 * i) % 100 + 5 for i in range(40)]
    engine = engine_of(adapted(base, adapters))
    params = RequestParams(max_new_tokens=0, lora="a")
    (output,) = run(engine, [(ids[:8], params, ids[8:])])
    logits = reference_logits(merge(base, adapters["a"], tmp_path / "merged"), ids)
    expected = logits.log_softmax(-1)[7:-1].gather(1, torch.tensor(ids[8:]).unsqueeze(1))[:, 0]
    (name,) = (name for name in output.columns if name.endswith("logprobs"))
    np.testing.assert_allclose(output.columns[name], expected, atol=1e-5)


MODES: dict[str, tuple[str, Callable[[], Strategy], dict[str, Any], bool]] = {
    "chunks": ("qwen3", ARStrategy, {"max_batched_tokens": 16, "chunk_tokens": 8}, False),
    "preemption": ("qwen3", ARStrategy, {"kv_cache_gib": 0.0002, "prefix_caching": False}, True),
    "drafts": ("llama", partial(ARSpecStrategy, adaptive=False), {}, False),
    "states": ("qwen3_5_text", ARStrategy, {"state_checkpoints": 8}, False),
    "windows": ("gemma3_text", ARStrategy, {}, False),
    "diffusion": ("sdar", partial(DLLMStrategy, block_length=4), {}, False),
}


@pytest.mark.quick(1, thorough=2)
@pytest.mark.parametrize("mode", MODES)
def test_a_row_is_what_it_is_alone(
    mode: str, tiny_model: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, strategy, changes, short = MODES[mode]
    base = tiny_model(kind)
    adapters = two_adapters(base, tmp_path)
    alone = engine_of(adapted(base, adapters), strategy(), replace(CONFIG, prefix_caching=False))
    if short:
        expect_short_rows(monkeypatch)
    config = replace(CONFIG, **changes)
    engine = engine_of(adapted(base, adapters), strategy(), config)
    requests = rows(12, 40, 12) if not short else rows(8, 20, 60)
    found = run(engine, requests)
    Alone(alone, run).check(requests, found)
    if short:
        assert any(output.num_preemptions for output in found)


def test_prefixes_are_shared_by_rows_of_one_adapter_only(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model("qwen3")
    engine = engine_of(adapted(base, two_adapters(base, tmp_path)))
    prompt = list(range(5, 69))

    def cached(name: str | None) -> RequestOutput:
        (output,) = run(engine, [(prompt, RequestParams(max_new_tokens=1, lora=name))])
        return output

    assert [cached(name).num_cached_tokens for name in (None, "a", "b")] == [0, 0, 0]
    assert all(cached(name).num_cached_tokens == 48 for name in (None, "a", "b"))


@pytest.mark.thorough
def test_ranks_divide_adapters(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model("llama")
    adapters = two_adapters(base, tmp_path)
    case = Case(base, rows(), adapters=adapters)
    expected, _ = case.run()
    ((found, _),) = run_divided([case], 2)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.columns["logprobs"], other.columns["logprobs"], atol=1e-5)


def test_weights_in_fp8_stay_so(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Products with the base's weights are in FP8, those with the adapter's are not: all differs
    from dequantised weights by the rounding of activations alone."""
    base = tiny_model("llama", hidden_size=128, intermediate_size=128)
    adapters = {
        name: write_adapter(tmp_path / name, base, seed=seed, strength=0.2)
        for seed, name in enumerate(("a", "b"))
    }
    ids = [(7 * i * i + 3 * i) % 100 + 5 for i in range(40)]
    asked = [(ids[:8], RequestParams(max_new_tokens=0, lora=n), ids[8:]) for n in (None, "a", "b")]

    def scores(adapters: Mapping[str, Path], native: bool, count: int) -> np.ndarray[Any, Any]:
        model = adapted(base, adapters, quantization="fp8", native_fp8=native)
        outputs = run(engine_of(model), asked[:count])
        return np.stack([next(iter(output.columns.values())) for output in outputs])

    native, near = scores(adapters, True, 3), scores(adapters, False, 3)
    assert np.array_equal(native[:1], scores({}, True, 1))
    rounding = np.abs(native - near).mean(1)
    assert 0 < rounding[0] and (rounding[1:] < 2 * rounding[0]).all()
    assert (np.abs(native[1:] - native[0]).mean(1) > 3 * rounding[0]).all()


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["qwen3_5_text", "phi3"])
def test_a_folded_adapter_is_part_of_the_weights(
    kind: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """It is computed as a merged model is, to the rounding of its weights."""
    base = tiny_model(kind)
    first = two_adapters(base, tmp_path, TARGETS)["a"]
    model = load_model(base, device=CPU, dtype=torch.float32)
    add_adapters(model, {"a": open_adapter(first)}, fold=True)
    assert model.lora is None
    merged = load_model(merge(base, first, tmp_path / "merged"), device=CPU, dtype=torch.float32)
    theirs = dict(merged.named_parameters())
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=0)
    plain = [(prompt, replace(params, lora=None)) for prompt, params in rows()]
    found, expected = run(engine_of(model), plain), run(engine_of(merged), plain)
    assert [one.token_ids for one in found] == [other.token_ids for other in expected]


def test_an_unknown_adapter_is_an_error_of_the_row(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    base = tiny_model("llama")
    engine = engine_of(adapted(base, two_adapters(base, tmp_path)))
    with pytest.raises(RequestError, match="no adapter 'c': choose among 'base', 'a'") as caught:
        engine.add_request("0", [5, 6], RequestParams(lora="c"))
    assert caught.value.type == "unknown_adapter"
    with pytest.raises(RequestError, match="made without adapters"):
        engine_of(adapted(base, {})).add_request("0", [5], RequestParams(lora="a"))
