"""Adapters of experts, of embeddings and of lm_head beside the weights: each row is what the model
is with its adapter in the weights, and what it is alone."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.loading.adapters import add_adapters, check_adapter
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.peft_files import open_adapter
from batchgen.engine.lora import saved_weights
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.engine.strategy import Strategy
from batchgen.strategies.ar.strategy import ARStrategy
from batchgen.strategies.ar_spec.strategy import ARSpecStrategy
from batchgen.strategies.dllm.strategy import DLLMStrategy
from tests.engine.test_lora import CONFIG, CPU, adapted, engine_of, rows
from tests.support.cases import some_thorough
from tests.support.engine.alone_rows import Alone
from tests.support.engine.engine_rows import Request, run
from tests.support.engine.lora_files import merge, write_adapter
from tests.support.engine.ranked_engines import Case, run_divided

ENDS = ("embed_tokens", "lm_head", "q_proj", "down_proj")
OF_EXPERTS = ("gate_proj", "up_proj", "down_proj", "o_proj")
PATHS = {"gemma4_moe": "model.layers.{}.experts", "nemotron_h": "backbone.layers.{}.mixer.experts"}


def two(base: Path, folder: Path, targets: Sequence[str], **how: Any) -> dict[str, Path]:
    return {
        name: write_adapter(
            folder / name, base, targets, seed=seed, strength=0.1, rank=3 + seed, **how
        )
        for seed, name in enumerate(("a", "b"))
    }


def own(requests: Sequence[Request], name: str | None) -> list[Request]:
    """The requests that ask for an adapter, without it."""
    return [(ids, replace(p, lora=None)) for ids, p in requests if p.lora == name]


def expect_rows(
    requests: Sequence[Request],
    found: Sequence[RequestOutput],
    expected: Mapping[str | None, Sequence[RequestOutput]],
    most: float = 2e-5,
) -> None:
    """Compare rows with those of the models that have their adapters in the weights."""
    for name, others in expected.items():
        mine = [one for one, (_, p) in zip(found, requests, strict=True) if p.lora == name]
        assert mine
        for one, other in zip(mine, others, strict=True):
            assert one.token_ids == other.token_ids
            difference = np.abs(one.columns["logprobs"] - other.columns["logprobs"]).max()
            assert difference <= (0 if name is None else most)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", some_thorough(["gemma3_text", "llama", "qwen3"], ["gemma3_text"]))
def test_embeddings_and_lm_head(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Gemma's embeddings have a factor, which what is added to them has, too."""
    base = tiny_model(kind, tie_word_embeddings=False)
    adapters, requests = two(base, tmp_path, ENDS), rows()
    found = run(engine_of(adapted(base, adapters)), requests)
    expected: dict[str | None, list[RequestOutput]]
    expected = {None: run(engine_of(adapted(base, {})), own(requests, None))}
    for name, path in adapters.items():
        merged = merge(base, path, tmp_path / f"merged_{name}")
        expected[name] = run(engine_of(adapted(merged, {})), own(requests, name))
    expect_rows(requests, found, expected)
    assert found[1].columns["logprobs"][0] != expected[None][0].columns["logprobs"][0]


@pytest.mark.parametrize("target", ["embed_tokens", "lm_head"])
def test_one_of_two_layers_that_share_a_weight(
    target: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """PEFT leaves the other one as it is. It saves the weight beside the factors."""
    base = tiny_model("qwen3", tie_word_embeddings=True)
    separate = tmp_path / "separate"
    separate.mkdir()
    tensors = load_file(base / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, separate / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((base / "config.json").read_text()) | {"tie_word_embeddings": False}
    (separate / "config.json").write_text(json.dumps(config))
    adapter = write_adapter(tmp_path / "a", separate, (target, "k_proj"), strength=0.1)
    of_target = (
        f"{target}.base_layer.weight"
        if target == "lm_head"
        else f"model.{target}.base_layer.weight"
    )
    edit(adapter, **{of_target: tensors["lm_head.weight"] * 1.01})
    requests = own(rows(4), None)
    asked = [(ids, replace(params, lora="a")) for ids, params in requests]
    with pytest.raises(ValueError, match=r"base_layer.weight is not the model's own"):
        adapted(base, {"a": adapter})
    edit(adapter, **{of_target: tensors["lm_head.weight"]})
    found = run(engine_of(adapted(base, {"a": adapter})), asked)
    merged = merge(separate, adapter, tmp_path / "merged")
    expect_rows(asked, found, {"a": run(engine_of(adapted(merged, {})), requests)})


def edit(adapter: Path, **tensors: Tensor) -> None:
    path = adapter / "adapter_model.safetensors"
    named = {f"base_model.model.{name}": tensor for name, tensor in tensors.items()}
    save_file(load_file(path) | named, path)


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    "kind", some_thorough(["qwen3_moe", "deepseek_v3", "nemotron_h"], ["qwen3_moe"])
)
def test_modules_of_experts(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Without a gate, too (Nemotron-H)."""
    base = tiny_model(kind)
    adapters, requests = two(base, tmp_path, OF_EXPERTS, experts=True), rows()
    found = run(engine_of(adapted(base, adapters)), requests)
    expected: dict[str | None, list[RequestOutput]]
    expected = {None: run(engine_of(adapted(base, {})), own(requests, None))}
    for name, path in adapters.items():
        merged = merge(base, path, tmp_path / f"merged_{name}")
        expected[name] = run(engine_of(adapted(merged, {})), own(requests, name))
    expect_rows(requests, found, expected)


def saving(base: Path, folder: Path, names: Sequence[str], seed: int) -> tuple[Path, Path]:
    """Write an adapter of attention and of whole weights, and the model that it makes of `base`."""
    adapter = write_adapter(
        folder / f"s{seed}", base, ("q_proj", "o_proj"), seed=seed, strength=0.1,
        modules_to_save=[name.rpartition(".")[2] for name in names],
    )  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    drawn = {f"{n}.weight": torch.randn(128, 64, generator=generator) * 0.15 for n in names}
    edit(adapter, **drawn)
    merged = merge(base, adapter, folder / f"merged{seed}")
    edited = load_file(merged / "model.safetensors") | drawn
    save_file(edited, merged / "model.safetensors", metadata={"format": "pt"})
    return adapter, merged


@pytest.mark.quick(1)
@pytest.mark.parametrize(
    ("kind", "slots", "stacked"),
    [("gemma3_text", None, False), ("llama", 1, False), ("gemma3_text", None, True),
     ("llama", 2, True)],
)  # fmt: skip
def test_weights_that_were_trained_as_a_whole(
    kind: str, slots: int | None, stacked: bool, tiny_model: Callable[..., Path], tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    """One for each adapter, with fewer slots than adapters too; also as a GPU computes them."""
    if stacked:
        monkeypatch.setattr(saved_weights, "stacks", lambda device: True)
    base = tiny_model(kind, tie_word_embeddings=False)
    both = ("model.embed_tokens", "lm_head")
    made = {
        name: saving(base, tmp_path, names, seed)
        for seed, (name, names) in enumerate({"a": both, "b": both[1:], "c": both[:1]}.items())
    }
    model, requests = load_model(base, device=CPU, dtype=torch.float32), rows()
    requests.append((requests[1][0], replace(requests[1][1], lora="c")))
    opened = {name: open_adapter(adapter) for name, (adapter, _) in made.items()}
    add_adapters(model, opened, slots=slots)
    found = run(engine_of(model, None, replace(CONFIG, lora_slots=slots)), requests)
    expected: dict[str | None, list[RequestOutput]]
    expected = {None: run(engine_of(adapted(base, {})), own(requests, None))}
    for name, (_, merged) in made.items():
        expected[name] = run(engine_of(adapted(merged, {})), own(requests, name))
    expect_rows(requests, found, expected)


def test_whole_weights_that_are_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model("llama", tie_word_embeddings=False)
    model = load_model(base, device=CPU)
    adapter, _ = saving(base, tmp_path, ("lm_head", "model.norm"), 0)
    with pytest.raises(ValueError, match=r"replaces model.norm, and adapters of this module"):
        check_adapter(open_adapter(adapter), model)
    adapter, _ = saving(base, tmp_path, ("lm_head",), 1)
    check_adapter(open_adapter(adapter), model)
    edit(adapter, **{"lm_head.weight": torch.zeros(130, 64)})
    with pytest.raises(ValueError, match=r"has shape \[130, 64\], .* of another vocabulary are"):
        check_adapter(open_adapter(adapter), model)
    path = write_adapter(tmp_path / "none", base, modules_to_save=["embed_tokens"])
    with pytest.raises(ValueError, match="modules_to_save has embed_tokens, and its tensor is mis"):
        check_adapter(open_adapter(path), model)


def of_parameters(
    folder: Path, base: Path, kind: str, *, seed: int, rank: int = 3, exchanged: bool = False
) -> Path:
    """Write an adapter of weights of all experts, as PEFT does."""
    model = load_model(base, device=CPU, dtype=torch.float32)
    generator, tensors = torch.Generator().manual_seed(seed), dict[str, Tensor]()
    path = PATHS.get(kind, "model.layers.{}.mlp.experts")
    names = ("up_proj" if kind == "nemotron_h" else "gate_up_proj", "down_proj")
    for index, layer in enumerate(model.layers):
        experts = getattr(layer.mlp, "experts", None) or getattr(
            getattr(layer.mlp, "moe", None), "experts", None
        )
        if experts is None or (seed and not index):
            continue
        for name, nested in zip(names, (".base_layer", ""), strict=True):
            count, width, depth = experts.sizes(name)
            if exchanged:
                width, depth = depth, width
            module = f"base_model.model.{path.format(index)}{nested}"
            for factor, shape in (("A", (count * rank, depth)), ("B", (width, rank * count))):
                drawn = torch.randn(shape, generator=generator) * 0.1
                tensors[f"{module}.lora_{factor}.weight"] = drawn
    assert tensors
    folder.mkdir()
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {
        "peft_type": "LORA",
        "r": rank,
        "lora_alpha": 2.0 * rank,
        "target_parameters": [f"experts.{name}" for name in names],
    }
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


MIXTURES = ("qwen3_moe", "gpt_oss", "gemma4_moe", "qwen3_next", "deepseek_v3", "nemotron_h")


@pytest.mark.quick(2)
@pytest.mark.parametrize("kind", some_thorough(MIXTURES, ["qwen3_moe", "gpt_oss"]))
def test_weights_of_all_experts(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """As when they are folded into the weights."""
    square = kind == "gpt_oss"
    base = tiny_model(kind, **({} if square else {"moe_intermediate_size": 48}))
    adapters = {
        "a": of_parameters(tmp_path / "a", base, kind, seed=0),
        "b": of_parameters(tmp_path / "b", base, kind, seed=1, rank=5, exchanged=not square),
    }
    requests = rows()
    found = run(engine_of(adapted(base, adapters)), requests)
    expected: dict[str | None, list[RequestOutput]]
    expected = {None: run(engine_of(adapted(base, {})), own(requests, None))}
    for name, path in adapters.items():
        folded = load_model(base, device=CPU, dtype=torch.float32)
        add_adapters(folded, {name: open_adapter(path, fold=True)}, fold=True)
        expected[name] = run(engine_of(folded), own(requests, name))
    expect_rows(requests, found, expected, 5e-4 if kind == "qwen3_next" else 2e-5)


MODES: dict[str, tuple[str, Callable[[], Strategy], dict[str, Any]]] = {
    "chunks": ("qwen3_moe", ARStrategy, {"max_batched_tokens": 16, "chunk_tokens": 8}),
    "drafts": ("qwen3_moe", partial(ARSpecStrategy, adaptive=False), {}),
    "diffusion": ("sdar", partial(DLLMStrategy, block_length=4), {}),
}


@pytest.mark.quick(1)
@pytest.mark.parametrize("mode", some_thorough(MODES, ["chunks"]))
def test_a_row_is_what_it_is_alone(
    mode: str, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    kind, strategy, changes = MODES[mode]
    base = tiny_model(kind, tie_word_embeddings=False)
    adapters = two(base, tmp_path, (*ENDS, "gate_proj"), experts=True)
    alone = engine_of(adapted(base, adapters), strategy(), replace(CONFIG, prefix_caching=False))
    engine = engine_of(adapted(base, adapters), strategy(), replace(CONFIG, **changes))
    requests = rows(12, 40, 12)
    Alone(alone, run).check(requests, run(engine, requests))


def test_answers_are_scored_with_an_adapted_lm_head(
    tiny_model: Callable[..., Path], reference_logits: Callable[..., Tensor], tmp_path: Path
) -> None:
    base = tiny_model("llama", tie_word_embeddings=False)
    adapters = two(base, tmp_path, ENDS)
    ids = [(7 * i * i + 3 * i) % 100 + 5 for i in range(40)]
    asked = [(ids[:8], RequestParams(max_new_tokens=0, lora=n), ids[8:]) for n in ("b", None, "a")]
    outputs = run(engine_of(adapted(base, adapters)), asked)
    for output, (_, params, _) in zip(outputs, asked, strict=True):
        folder = base
        if (name := params.lora) is not None:
            folder = merge(base, adapters[name], tmp_path / f"merged_{name}")
        logits = reference_logits(folder, ids).log_softmax(-1)[7:-1]
        expected = logits.gather(1, torch.tensor(ids[8:]).unsqueeze(1))[:, 0]
        found = next(iter(output.columns.values()))
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.thorough
def test_ranks_divide_experts_and_ids(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe", tie_word_embeddings=False)
    adapters = two(base, tmp_path, (*ENDS, *OF_EXPERTS), experts=True)
    adapters["a"], _ = saving(base, tmp_path, ("model.embed_tokens", "lm_head"), 3)
    case = Case(base, rows(), adapters=adapters)
    expected, _ = case.run()
    ((found, _),) = run_divided([case], 2)
    for one, other in zip(expected, found, strict=True):
        assert one.token_ids == other.token_ids
        np.testing.assert_allclose(one.columns["logprobs"], other.columns["logprobs"], atol=1e-5)


def test_parameters_that_do_not_fit(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    base = tiny_model("qwen3_moe")
    model = load_model(base, device=CPU)
    adapter = of_parameters(tmp_path / "a", base, "qwen3_moe", seed=0)
    check_adapter(open_adapter(adapter), model)
    path, whole = "model.layers.1.mlp.experts", load_file(adapter / "adapter_model.safetensors")
    edit(adapter, **{f"{path}.lora_A.weight": torch.zeros(24, 40)})
    with pytest.raises(ValueError, match=r"lora_A.weight has shape \[24, 40\], .* 32 in features"):
        check_adapter(open_adapter(adapter), model)
    edit(adapter, **{f"{path}.lora_A.weight": torch.zeros(25, 32)})
    with pytest.raises(ValueError, match=r"says that its rank is 24"):
        check_adapter(open_adapter(adapter), model)
    save_file(whole, adapter / "adapter_model.safetensors")
    edit(
        adapter,
        **{
            f"{path}.3.down_proj.lora_{f}.weight": torch.zeros(s)
            for f, s in (("A", (3, 32)), ("B", (64, 3)))
        },
    )
    with pytest.raises(ValueError, match=r"adapt the same weight, .*experts.3.down_proj"):
        check_adapter(open_adapter(adapter), model)


@pytest.mark.gpu
@pytest.mark.parametrize("slots", [None, 1])
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_a_gpu_computes_what_a_cpu_does(
    kind: str, slots: int | None, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """In CUDA graphs, whose slots are written anew, and with the same bits each time."""
    base = tiny_model(kind, tie_word_embeddings=False)
    adapters = two(base, tmp_path, ENDS)
    adapters["c"] = of_parameters(tmp_path / "c", base, kind, seed=0)
    requests = [
        (ids, replace(params, temperature=0.0, lora=name))
        for (ids, params), name in zip(rows(12), (None, "a", "c", "b") * 3, strict=True)
    ]
    found = []
    for device in ("cpu", "cuda", "cuda"):
        model = load_model(base, device=torch.device(device), dtype=torch.float32)
        opened = {name: open_adapter(path) for name, path in adapters.items()}
        add_adapters(model, opened, slots=slots if device == "cuda" else None)
        own = slots if device == "cuda" else None
        engine = engine_of(model, ARStrategy(), replace(CONFIG, lora_slots=own))
        if device == "cuda":
            engine.capture_graphs()
        found.append(run(engine, requests))
    for on_cpu, once, again in zip(*found, strict=True):
        assert on_cpu.token_ids == once.token_ids == again.token_ids
        assert np.array_equal(once.columns["logprobs"], again.columns["logprobs"])
        difference = np.abs(once.columns["logprobs"] - on_cpu.columns["logprobs"]).max()
        assert difference < 1e-3
