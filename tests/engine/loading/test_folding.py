"""Adapters that are added to the weights: by PEFT's definition of each kind of them, and as PEFT
itself merges them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from batchgen.engine.loading.adapters import add_adapters, check_adapter
from batchgen.engine.loading.loader import load_model
from batchgen.engine.loading.peft_files import open_adapter
from tests.support.engine.edited_models import edit_weights

CPU, RANK, SCALE = torch.device("cpu"), 4, 1.5
PREFIX = "base_model.model."
Tensors = dict[str, Tensor]


def drawn(*shape: int) -> Tensor:
    return torch.randn(shape) * 0.2


def write(folder: Path, tensors: Mapping[str, Tensor], **config: Any) -> Path:
    folder.mkdir()
    named = {PREFIX + name: tensor.contiguous() for name, tensor in tensors.items()}
    save_file(named, folder / "adapter_model.safetensors")
    written = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK * SCALE} | config
    (folder / "adapter_config.json").write_text(json.dumps(written))
    return folder


def factors(module: str, width: int, depth: int) -> tuple[Tensors, Tensor]:
    """Factors of one weight, and what they add to it."""
    down, up = drawn(RANK, depth), drawn(width, RANK)
    return {f"{module}.lora_A.weight": down, f"{module}.lora_B.weight": up}, SCALE * up @ down


def of_experts(name: str, count: int, width: int, depth: int) -> tuple[Tensors, Tensor]:
    """Factors of a weight of all experts, and what they add to it [E, out, in]: PEFT has A's rows
    expert by expert, and in B's columns the experts take turns."""
    downs, ups = drawn(count, RANK, depth), drawn(count, width, RANK)
    columns = ups.permute(1, 2, 0).reshape(width, RANK * count)
    stored = {f"{name}.lora_A.weight": downs.flatten(0, 1), f"{name}.lora_B.weight": columns}
    return stored, SCALE * ups @ downs


def expect(
    base: Path,
    oracle: Path,
    adapter: Path,
    change: Callable[[Tensors], None],
    tmp_path: Path,
) -> None:
    """Fold an adapter into `base`, and compare with the weights of `oracle` that were changed."""
    model = load_model(base, device=CPU, dtype=torch.float32)
    add_adapters(model, {"a": open_adapter(adapter, fold=True)}, fold=True)
    edited = edit_weights(oracle, tmp_path / "changed", change)
    theirs = dict(load_model(edited, device=CPU, dtype=torch.float32).named_parameters())
    before = dict(load_model(base, device=CPU, dtype=torch.float32).named_parameters())
    changed = set()
    for name, weight in model.named_parameters():
        torch.testing.assert_close(weight, theirs[name], atol=1e-6, rtol=1e-6)
        if not torch.equal(weight, before[name]):
            changed.add(name)
    assert changed


@pytest.mark.parametrize("split", [True, False])
@pytest.mark.parametrize("old", [False, True])
def test_weights_of_all_experts(
    split: bool, old: bool, tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    oracle = tiny_model("qwen3_moe", split_experts=False, moe_intermediate_size=48)
    path = "model.layers.1.mlp.experts"
    count, both, hidden = _tensors(oracle)[f"{path}.gate_up_proj"].shape
    inner = both // 2
    # The weight that is wrapped first is the inmost.
    wide, of_wide = of_experts(f"{path}.base_layer", count, 2 * inner, hidden)
    narrow, of_narrow = of_experts(path, count, hidden, inner)
    if old:  # older versions of PEFT exchanged in and out features
        wide, of_wide = of_experts(f"{path}.base_layer", count, hidden, 2 * inner)
        narrow, of_narrow = of_experts(path, count, inner, hidden)
        of_wide, of_narrow = of_wide.transpose(1, 2), of_narrow.transpose(1, 2)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    adapter = write(tmp_path / "a", wide | narrow, target_parameters=names)

    def change(tensors: Tensors) -> None:
        tensors[f"{path}.gate_up_proj"] += of_wide
        tensors[f"{path}.down_proj"] += of_narrow

    base = tiny_model("qwen3_moe", moe_intermediate_size=48) if split else oracle
    expect(base, oracle, adapter, change, tmp_path)


def test_weights_of_gpt_oss_experts(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """Checkpoints and PEFT have them as [E, in, out]."""
    torch.manual_seed(0)
    base = tiny_model("gpt_oss")
    sizes = json.loads((base / "config.json").read_text())
    path = "model.layers.0.mlp.experts"
    count, hidden = sizes["num_local_experts"], sizes["hidden_size"]
    stored, added = of_experts(path, count, 2 * sizes["intermediate_size"], hidden)
    router, of_router = factors("model.layers.0.mlp.router", count, hidden)
    names = ["experts.gate_up_proj", "router.weight"]
    adapter = write(tmp_path / "a", stored | router, target_parameters=names)

    def change(tensors: Tensors) -> None:
        tensors[f"{path}.gate_up_proj"] += added.transpose(1, 2)
        tensors["model.layers.0.mlp.router.weight"] += of_router

    expect(base, base, adapter, change, tmp_path)


def test_each_expert_by_itself_and_latent_attention(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base = tiny_model("deepseek_v3")
    layer = "model.layers.1"
    change_of: dict[str, Tensor] = {}

    def change(tensors: Tensors) -> None:
        for name, added in change_of.items():
            tensors[name] += added

    stored: Tensors = {}
    shapes = {n: tuple(t.shape) for n, t in _tensors(base).items()}
    modules = (
        "self_attn.kv_b_proj",
        "mlp.experts.3.up_proj",
        "mlp.experts.0.down_proj",
        "mlp.gate",
    )
    for module in modules:
        own, added = factors(f"{layer}.{module}", *shapes[f"{layer}.{module}.weight"])
        stored |= own
        change_of[f"{layer}.{module}.weight"] = added
    expect(base, base, write(tmp_path / "a", stored), change, tmp_path)


def _tensors(base: Path) -> Tensors:
    from safetensors.torch import load_file

    return load_file(base / "model.safetensors")


def test_embeddings_whole_weights_and_biases(
    tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    torch.manual_seed(0)
    base = tiny_model("qwen2", tie_word_embeddings=False)
    shapes = {n: tuple(t.shape) for n, t in _tensors(base).items()}
    vocab, hidden = shapes["model.embed_tokens.weight"]
    down, up = drawn(RANK, vocab), drawn(hidden, RANK)
    query = "model.layers.0.self_attn.q_proj"
    stored, of_head = factors("lm_head", vocab, hidden)
    bias, norm = drawn(shapes[f"{query}.bias"][0]), drawn(hidden)
    stored |= {
        "model.embed_tokens.lora_embedding_A": down,
        "model.embed_tokens.lora_embedding_B": up,
        "model.norm.weight": norm,
        f"{query}.base_layer.bias": bias,
    }
    adapter = write(tmp_path / "a", stored, modules_to_save=["norm"], bias="all")

    def change(tensors: Tensors) -> None:
        tensors["model.embed_tokens.weight"] += SCALE * (up @ down).t()
        tensors["lm_head.weight"] += of_head
        tensors["model.norm.weight"].copy_(norm)
        tensors[f"{query}.bias"].copy_(bias)

    expect(base, base, adapter, change, tmp_path)


@pytest.mark.parametrize("kind", ["llama", "phi3"])
def test_norms_of_rows(kind: str, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    """DoRA (Liu et al. 2024): each row of W + scale · B·A gets the norm m (its equation 5)."""
    torch.manual_seed(0)
    base = tiny_model(kind)
    layer, weights = "model.layers.0", _tensors(base)
    modules = {"llama": ("q_proj", "o_proj"), "phi3": ("qkv_proj", "o_proj")}[kind]
    stored: Tensors = {}
    change_of = {}
    for name in modules:
        module = f"{layer}.self_attn.{name}"
        own, added = factors(module, *weights[f"{module}.weight"].shape)
        norms = torch.rand(len(added)) + 0.5
        stored |= own | {f"{module}.lora_magnitude_vector": norms}
        change_of[f"{module}.weight"] = (added, norms)

    def change(tensors: Tensors) -> None:
        for name, (added, norms) in change_of.items():
            rows = tensors[name] + added
            tensors[name].copy_(norms[:, None] * rows / rows.norm(dim=1, keepdim=True))

    expect(base, base, write(tmp_path / "a", stored, use_dora=True), change, tmp_path)


@pytest.mark.parametrize(
    ("stored", "config", "message"),
    [
        ({"lm_head.lora_A.weight": drawn(4, 64)}, {}, "tensor .*lm_head.lora_B.weight is missing"),
        ({"lm_head.lora_A.weight": drawn(4, 32), "lm_head.lora_B.weight": drawn(128, 4)}, {},
         r"lm_head.lora_A.weight of shape \[4, 32\] does not fit lm_head.weight"),
        ({"lm_head.lora_A.weight": drawn(3, 64), "lm_head.lora_B.weight": drawn(128, 3)}, {},
         r"lora_A.weight has shape \[3, 64\], and adapter_config.json says that its rank is 4"),
        ({"lm_head.weight": drawn(132, 64)}, {"modules_to_save": ["lm_head"]},
         r"tensor base_model.model.lm_head.weight of shape \[132, 64\] does not fit lm_head"),
        ({"model.norm.weight": drawn(64)}, {}, "model.norm.weight is neither a factor nor of"),
        ({"model.layers.0.mlp.experts.lora_A.weight": drawn(4, 64),
          "model.layers.0.mlp.experts.lora_B.weight": drawn(64, 4)}, {},
         r"changes model.layers.0.mlp.experts.weight, which LlamaForCausalLM does not have"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_named(
    stored: Tensors,
    config: dict[str, Any],
    message: str,
    tiny_model: Callable[..., Path],
    tmp_path: Path,
) -> None:
    model = load_model(tiny_model("llama", tie_word_embeddings=False), device=CPU)
    adapter = write(tmp_path / "a", stored, **config)
    with pytest.raises(ValueError, match=message):
        check_adapter(open_adapter(adapter, fold=True), model, fold=True)


def test_a_weight_of_two_layers_is_refused(tiny_model: Callable[..., Path], tmp_path: Path) -> None:
    model = load_model(tiny_model("llama", tie_word_embeddings=True), device=CPU)
    stored, _ = factors("lm_head", 128, 64)
    adapter = open_adapter(write(tmp_path / "a", stored), fold=True)
    with pytest.raises(ValueError, match=r"lora_A.weight changes lm_head.* share one weight"):
        check_adapter(adapter, model, fold=True)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("kind", "config"),
    [
        ("llama", {"target_modules": ["q_proj", "down_proj"], "use_dora": True}),
        ("llama", {"target_modules": ["embed_tokens", "lm_head", "v_proj"]}),
        ("llama", {"target_modules": ["q_proj"], "modules_to_save": ["lm_head"]}),
        ("qwen2", {"target_modules": ["q_proj", "o_proj"], "bias": "lora_only"}),
        ("qwen3_moe", {"target_modules": ["q_proj"], "target_parameters": [
            "experts.gate_up_proj", "experts.down_proj", "gate.weight"]}),
        ("gpt_oss", {"target_modules": ["q_proj"], "target_parameters": [
            "experts.gate_up_proj", "experts.down_proj"]}),
        ("deepseek_v3", {"target_modules": ["kv_b_proj", "o_proj", "q_b_proj"],
                         "target_parameters": ["experts.down_proj"]}),
    ],
)  # fmt: skip
def test_as_peft_computes(
    kind: str, config: dict[str, Any], tiny_model: Callable[..., Path], tmp_path: Path
) -> None:
    """Adapters that PEFT has written give the logits that PEFT computes with them unmerged."""
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    from batchgen.engine.sampling.sampling_params import RequestParams
    from tests.engine.test_lora import engine_of
    from tests.support.engine.engine_rows import run

    torch.manual_seed(0)
    base = tiny_model(kind, **({"tie_word_embeddings": False} if kind == "llama" else {}))
    theirs = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32)
    wrapped = peft.get_peft_model(theirs, peft.LoraConfig(r=4, lora_alpha=6, **config))
    for name, parameter in wrapped.named_parameters():
        if parameter.requires_grad:
            parameter.data += torch.randn_like(parameter) * (0.1 if "lora" in name else 0.02)
    wrapped.eval().save_pretrained(tmp_path / "a")
    ids = [(7 * i * i + 3 * i) % 100 + 5 for i in range(40)]
    with torch.inference_mode():
        logits = wrapped(torch.tensor([ids])).logits[0].log_softmax(-1)
    expected = logits[7:-1].gather(1, torch.tensor(ids[8:]).unsqueeze(1))[:, 0]
    model = load_model(base, device=CPU, dtype=torch.float32)
    add_adapters(model, {"a": open_adapter(tmp_path / "a", fold=True)}, fold=True)
    engine = engine_of(model)
    asked = (ids[:8], RequestParams(max_new_tokens=0), ids[8:])
    answered = (ids[:8], RequestParams(max_new_tokens=12, temperature=0.0))
    scored, written = run(engine, [asked, answered])
    (found,) = scored.columns.values()
    torch.testing.assert_close(torch.tensor(found), expected, atol=1e-5, rtol=0)
    greedy = list(ids[:8])
    with torch.inference_mode():
        for _ in range(len(written.token_ids)):
            greedy.append(int(wrapped(torch.tensor([greedy])).logits[0, -1].argmax()))
    assert list(written.token_ids) == greedy[8:]
