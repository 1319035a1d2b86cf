"""Models with experts against transformers."""

from __future__ import annotations

import json
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from batchgen.engine.caches.forward_context import ForwardContext
from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.layers.decoder_layer import DecoderLayer
from batchgen.engine.layers.feed_forward import experts as expert_layers
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.model_config import Diffusion
from batchgen.engine.models.moe_model import MoEConfig
from batchgen.engine.parallel.placement import Placement
from batchgen.engine.parallel.tensor_parallel import PendingParts, TensorParallel
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.moe.epilogues import Epilogues
from batchgen.kernels.moe.experts_triton import ExpertWeights, grouped_parts_triton
from batchgen.strategies.ar.strategy import ARStrategy
from tests.support.engine.engine_rows import expect_short_rows

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


@pytest.mark.quick(1, thorough=7)
@pytest.mark.parametrize(("kind", "packed"), [("qwen2_moe", True), ("qwen3_moe", False)])
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


@pytest.mark.quick(1)
@pytest.mark.parametrize("name", ["renormalised", "not renormalised", "every second"])
def test_greedy_tokens_and_log_probabilities(
    name: str, tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In small chunks, and with so small a cache that rows are preempted."""
    expect_short_rows(monkeypatch)
    folder = tiny_model("qwen3_moe", **CONFIGS[name])
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = EngineConfig(
        max_batched_tokens=7, block_size=4, max_model_len=64, kv_cache_gib=0.00008
    )
    engine = LLMEngine(load_model(folder, device=CPU), None, (), ARStrategy(), config)
    params = RequestParams(temperature=0, max_new_tokens=12, logprobs=True)
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


def run(engine: LLMEngine, prompts: list[list[int]], params: RequestParams) -> list[RequestOutput]:
    for i, prompt in enumerate(prompts):
        engine.add_request(str(i), prompt, params)
    found: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        found |= {output.request_id: output for output in engine.step()}
    return [found[str(i)] for i in range(len(prompts))]


def copied(folder: Path, into: Path, **config: Any) -> Path:
    """A copy of a model folder with other values in its configuration; None takes a key out."""
    copy = into / "model"
    shutil.copytree(folder, copy)
    values = json.loads((copy / "config.json").read_text()) | config
    kept = {key: value for key, value in values.items() if value is not None}
    (copy / "config.json").write_text(json.dumps(kept))
    return copy


@pytest.mark.parametrize("ending", ["", ".weight"])
def test_fused_experts_are_the_same_weights(
    ending: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    fused = copied(tiny_model("qwen3_moe", split_experts=False), tmp_path)
    tensors = load_file(fused / "model.safetensors")
    for name in list(tensors):
        if "experts" in name:
            tensors[name + ending] = tensors.pop(name)
    save_file(tensors, fused / "model.safetensors")
    one, other = (load_model(f, device=CPU) for f in (fused, tiny_model("qwen3_moe")))
    for name, parameter in other.named_parameters():
        assert torch.equal(parameter, one.get_parameter(name)), name


def test_missing_and_repeated_experts_are_named(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("qwen3_moe"), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "model.layers.1.mlp.experts.3.up_proj.weight"
    taken = tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(ValueError, match=f"missing tensors: {name}$"):
        load_model(folder, device=CPU)
    whole = torch.zeros(8, 64, 64)
    save_file(
        tensors | {name: taken, "model.layers.1.mlp.experts.gate_up_proj": whole},
        folder / "model.safetensors",
    )
    with pytest.raises(ValueError, match=r"layers\.1\.mlp\.experts\.\S+, which came before"):
        load_model(folder, device=CPU)


@pytest.mark.parametrize("name", ["num_experts", "num_local_experts"])
def test_both_names_of_the_number_of_experts_are_read(
    name: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """transformers 5.17 writes one, 5.23 the other."""
    values: dict[str, Any] = {"num_experts": None, "num_local_experts": None} | {name: 8}
    config = load_model_config(copied(tiny_model("qwen3_moe"), tmp_path, **values))
    assert config.family_as(MoEConfig).num_experts == 8


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"num_experts_per_tok": 9}, "num_experts_per_tok 9 is more than num_experts 8"),
        ({"num_experts_per_tok": 0}, "num_experts_per_tok is 0"),
        ({"moe_intermediate_size": 0}, "moe_intermediate_size is 0"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0"),
        ({"hidden_act": "gelu"}, "hidden_act 'gelu' is not supported"),
        ({"use_sliding_window": True}, "sliding-window attention"),
    ],
)  # fmt: skip
def test_unsupported_configurations_are_named(
    changes: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=message):
        load_model_config(copied(tiny_model("qwen3_moe"), tmp_path, **changes))


def test_without_experts_all_layers_are_dense(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder = copied(tiny_model("qwen3_moe"), tmp_path, num_experts=None, num_local_experts=0)
    config = load_model_config(folder)
    assert config.family_as(MoEConfig).moe_layers == ()
    model = load_model(folder, device=CPU, load_format="dummy")
    assert model.declared_columns(config) == ()


def test_dummy_weights_of_experts(tiny_model: TinyModel) -> None:
    """Every expert has its own, so that a benchmark's routing is not degenerate."""
    model = load_model(tiny_model("qwen2_moe"), device=CPU, load_format="dummy")
    moe = next(module for module in model.modules() if isinstance(module, SparseMoE))
    weights = torch.cat((moe.experts.gate_up_proj.flatten(1), moe.experts.down_proj.flatten(1)), 1)
    assert len({tuple(row[:4].tolist()) for row in weights}) == 8
    assert (weights.std(1) - 0.02).abs().max() < 0.002


@pytest.mark.quick(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_token_has_the_same_bits_in_any_batch(
    dtype: torch.dtype, tiny_model: TinyModel, run_paged: Callable[..., Tensor]
) -> None:
    sizes = {"hidden_size": 256, "moe_intermediate_size": 160, "num_hidden_layers": 1}
    model = load_model(tiny_model("qwen2_moe", **sizes), device=CPU, dtype=dtype)
    model.pack()
    if model.batch_dependence is not None:
        pytest.skip(model.batch_dependence)
    moe = next(module for module in model.modules() if isinstance(module, SparseMoE))
    x = torch.randn(90, 256, generator=torch.Generator().manual_seed(0)).to(dtype)

    def of(x: Tensor) -> Tensor:
        caches = ForwardContext((), torch.ones(len(x), dtype=torch.int64), ())
        with torch.inference_mode():
            out: Tensor = moe(x, torch.zeros_like(x), caches)
            return out

    together = of(x)
    for size in (1, 2, 3, 7, 16, 17, 40):
        assert torch.equal(together, torch.cat([of(part.clone()) for part in x.split(size)]))


def test_not_a_number_stays_in_its_own_token(tiny_model: TinyModel) -> None:
    """Nor does it matter which experts it goes through."""
    model = load_model(tiny_model("qwen2_moe"), device=CPU)
    moe = next(module for module in model.modules() if isinstance(module, SparseMoE))
    x = torch.randn(20, 64, generator=torch.Generator().manual_seed(0))
    broken = x.clone()
    broken[3, 7], broken[11, 0] = float("nan"), float("inf")
    slots = torch.ones(20, dtype=torch.int64)
    with torch.inference_mode():
        clean, other = (
            moe(v, torch.zeros_like(x), ForwardContext((), slots, ())) for v in (x, broken)
        )
    finite = torch.ones(20, dtype=torch.bool)
    finite[[3, 11]] = False
    assert torch.equal(clean[finite], other[finite])
    assert not other[~finite].isfinite().any(1).any()


def test_tokens_without_a_row_go_through_no_expert(tiny_model: TinyModel) -> None:
    model = load_model(tiny_model("qwen3_moe"), device=CPU)
    moe = next(module for module in model.modules() if isinstance(module, SparseMoE))
    x = torch.randn(5, 64)
    own = torch.tensor([7, 0, 3, 0, 0])
    with torch.inference_mode():
        assert not moe(x, torch.zeros_like(x), ForwardContext((), own * 0, ())).any()
        found = moe(x, torch.zeros_like(x), ForwardContext((), own, ()))
        whole = moe(x, torch.zeros_like(x), ForwardContext((), torch.ones_like(own), ()))
    torch.testing.assert_close(found, whole * (own > 0).unsqueeze(1))
    assert not found[own == 0].any()


@pytest.mark.parametrize("packed", [False, True])
def test_experts_add_to_a_residual_in_place(packed: bool, tiny_model: TinyModel) -> None:
    model = load_model(tiny_model("qwen3_moe"), device=CPU)
    if packed:
        model.pack()
    experts = next(module for module in model.modules() if isinstance(module, Experts))
    x, residual = torch.randn(2, 5, 64)
    ids, weights = torch.tensor([[0, 3]] * 5, dtype=torch.int32), torch.rand(5, 2)
    with torch.inference_mode():
        expected = residual + experts(x, ids, weights)
        assert experts(x, ids, weights, residual) is residual
    assert torch.equal(residual, expected)


@pytest.mark.quick(0, thorough=1)
@pytest.mark.parametrize(
    "kind",
    ["qwen2_moe", "qwen3_moe", "deepseek_v3", pytest.param("qwen3_next", marks=pytest.mark.slow)],
)
def test_the_next_norm_adds_the_results_of_experts(
    kind: str,
    tiny_model: TinyModel,
    run_paged: Callable[..., Tensor],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As on a GPU. A prefill's results are large: they are gone before anything else is made."""
    model = load_model(tiny_model(kind), device=CPU)
    expected = run_paged(model, IDS[:38], [32, 1, 5])
    held: list[weakref.ref[Tensor]] = []

    def parts(
        x: Tensor, experts: ExpertWeights, ids: Tensor, weights: Tensor, epilogues: Epilogues
    ) -> Tensor:
        found = grouped_parts_triton(x, experts, ids, weights, epilogues=epilogues)
        found = found.view(*weights.shape, -1).transpose(0, 1)
        held.append(weakref.ref(found))
        return found

    def check(*_: object) -> None:
        assert all(parts() is None for parts in held)

    monkeypatch.setattr(expert_layers, "grouped_parts", parts)
    for layer in model.modules():
        if isinstance(layer, DecoderLayer):
            assert isinstance(layer.mixer, torch.nn.Module)
            layer.mixer.register_forward_pre_hook(check)
    found = run_paged(model, IDS[:38], [32, 1, 5])
    assert len(held) == 3 * sum(isinstance(module, SparseMoE) for module in model.modules())
    assert float((found - expected).abs().max() / expected.abs().max()) < 1e-5


def test_what_a_shared_expert_adds_is_asked_for_before_the_stream_goes_on(
    tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind the routed experts. A capture could not end otherwise."""
    model = load_model(tiny_model("qwen2_moe"), device=CPU)
    moe = next(module for module in model.modules() if isinstance(module, SparseMoE))
    assert moe.shared_expert is not None
    events: list[str] = []
    moe.shared_expert.down_proj.register_forward_hook(lambda *_: events.append("shared"))

    def parts(x: Tensor, *_: object) -> Tensor:
        events.append("experts")
        return torch.zeros((2, *x.shape))

    monkeypatch.setattr(expert_layers, "grouped_parts", parts)
    x = torch.randn(5, 64)
    with torch.inference_mode():
        stream = moe(x, x.clone(), ForwardContext((), torch.ones(5, dtype=torch.int64), ()))
    assert isinstance(stream, PendingParts)
    assert events == ["experts", "shared"]
    added, shared = stream.take()
    assert len(added) == 2 and shared is not None and shared.gate is not None


@pytest.mark.parametrize("kind", ["qwen2_moe", "qwen3_moe"])
def test_a_token_goes_through_k_experts_of_a_layer(kind: str, tiny_model: TinyModel) -> None:
    model = load_model(tiny_model(kind), device=CPU)
    layers = [module for module in model.modules() if isinstance(module, SparseMoE)]
    spared = 0
    for layer in layers:
        experts = list(layer.experts.parameters())
        whole = sum(parameter.numel() for parameter in experts)
        spared += whole - whole * layer.experts_per_token // len(experts[0])
    assert layers and spared
    assert model.parameters_per_token == model.num_parameters - spared


def test_sdar_moe_is_qwen3_moe_under_a_block_mask(tiny_model: TinyModel) -> None:
    folder = tiny_model("sdar_moe")
    config = load_model_config(folder)
    assert config.architecture == "SDARMoeForCausalLM"
    assert config.diffusion == Diffusion(mask_token_id=127, block_length=None)
    sdar, qwen3 = (load_model(tiny_model(k), device=CPU) for k in ("sdar_moe", "qwen3_moe"))
    for name, parameter in qwen3.named_parameters():
        assert torch.equal(parameter, sdar.get_parameter(name)), name


@pytest.mark.parametrize("rank", range(4))
def test_experts_of_other_ranks_are_one_past_the_last(rank: int) -> None:
    where = Placement(CPU, torch.float32, TensorParallel(rank, 4))
    experts = Experts(8, 16, 32, where=where)
    ids = torch.arange(8, dtype=torch.int32).reshape(4, 2)
    own = experts._own_ids(ids)
    expected = torch.full((4, 2), 2, dtype=torch.int32)
    expected[rank] = torch.tensor([0, 1])
    assert own.dtype == torch.int32 and own.is_contiguous() and torch.equal(own, expected)
