"""Checkpoints with experts in MXFP4."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, GptOssConfig

from batchgen.engine.interface.engine_config import EngineConfig
from batchgen.engine.interface.outputs import RequestOutput
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.layers.mxfp4_format import MXFP4Format, Units, weight_format
from batchgen.engine.llm_engine import LLMEngine
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import chosen_form, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.model_registry import model_class
from batchgen.engine.parallel.tensor_parallel import TensorParallel
from batchgen.engine.sampling.sampling_params import RequestParams
from batchgen.kernels.four_bit.fp4_layout import MXFP4
from batchgen.kernels.four_bit.fp4_weight import quantise_mxfp4
from batchgen.kernels.four_bit.layouts import dequantise_reference, unpack_panels
from batchgen.kernels.four_bit.panels import FourBitPanels
from batchgen.strategies.ar.strategy import ARStrategy

TinyModel = Callable[..., Path]
RunPaged = Callable[..., Tensor]

CPU = torch.device("cpu")
IDS = [(37 * i + 5) % 100 for i in range(40)]
QUANTIZATION = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn",
        "model.layers.*.mlp.router",
        "model.embed_tokens",
        "lm_head",
    ],
}
ORIGINAL = {
    "self_attn.o_proj": "attn.out",
    "self_attn.sinks": "attn.sinks",
    "input_layernorm.weight": "attn.norm.scale",
    "post_attention_layernorm.weight": "mlp.norm.scale",
    "mlp.router": "mlp.gate",
    "mlp.experts.gate_up_proj_bias": "mlp.mlp1_bias",
    "mlp.experts.down_proj_bias": "mlp.mlp2_bias",
    "mlp.experts.gate_up_proj_": "mlp.mlp1_weight.",
    "mlp.experts.down_proj_": "mlp.mlp2_weight.",
}


def write_mxfp4(source: Path, folder: Path) -> tuple[Path, Path]:
    """Copy a model of gpt-oss with experts in MXFP4, and with the values that these have."""
    mxfp4, twin = folder / "mxfp4", folder / "twin"
    for target in (mxfp4, twin):
        shutil.copytree(source, target)
    tensors, plain = load_file(source / "model.safetensors"), {}
    for name, tensor in [*tensors.items()]:
        plain[name] = tensor
        if not name.endswith("_proj") or ".experts." not in name:
            continue
        weight = quantise_mxfp4(tensors.pop(name).transpose(1, 2))
        plain[name] = weight.dequantise().transpose(1, 2).contiguous()
        tensors[f"{name}_blocks"] = weight.values.unflatten(-1, (-1, 16))
        tensors[f"{name}_scales"] = weight.scales
    save_file(tensors, mxfp4 / "model.safetensors", {"format": "pt"})
    save_file(plain, twin / "model.safetensors", {"format": "pt"})
    change_config(mxfp4, quantization_config=QUANTIZATION)
    return mxfp4, twin


def change_config(folder: Path, **values: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | values))


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def name_original(tensors: dict[str, Tensor]) -> None:
    """Give tensors the names that OpenAI gives them, and fuse the projections of attention."""
    for name in [*tensors]:
        new = name.replace("model.embed_tokens", "embedding").replace("lm_head", "unembedding")
        new = new.replace("model.norm.weight", "norm.scale").replace("model.layers.", "block.")
        for own, given in ORIGINAL.items():
            new = new.replace(own, given)
        tensors[new] = tensors.pop(name)
    for layer in range(3):
        for kind in ("weight", "bias"):
            parts = [tensors.pop(f"block.{layer}.self_attn.{p}_proj.{kind}") for p in "qkv"]
            tensors[f"block.{layer}.attn.qkv.{kind}"] = torch.cat(parts)


def log_probabilities(model: CausalLM, run_paged: RunPaged) -> Tensor:
    model.pack()
    return run_paged(model, IDS, [len(IDS)]).log_softmax(-1)


def generate(model: CausalLM, prompts: Sequence[Sequence[int]], **options: Any) -> list[float]:
    """Generate greedy answers, and return the log-probability of the first token of each."""
    settings = EngineConfig(max_model_len=64, kv_cache_gib=0.001, **options)
    engine = LLMEngine(model, None, (), ARStrategy(), settings)
    for i, prompt in enumerate(prompts):
        params = RequestParams(temperature=0, max_new_tokens=8, ignore_eos=True, logprobs=True)
        engine.add_request(str(i), list(prompt), params)
    outputs: dict[str, RequestOutput] = {}
    while engine.has_unfinished():
        outputs |= {output.request_id: output for output in engine.step()}
    assert all(np.isfinite(output.columns["logprobs"]).all() for output in outputs.values())
    return [float(outputs[str(i)].columns["logprobs"][0]) for i in range(len(prompts))]


@pytest.fixture(scope="module")
def checkpoints(
    tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    return write_mxfp4(tiny_model("gpt_oss"), tmp_path_factory.mktemp("mxfp4"))


def test_on_a_cpu_it_equals_its_dequantised_twin_and_transformers(
    checkpoints: tuple[Path, Path], run_paged: RunPaged
) -> None:
    mxfp4, twin = checkpoints
    found = log_probabilities(load_model(mxfp4, device=CPU), run_paged)
    assert torch.equal(found, log_probabilities(load_model(twin, device=CPU), run_paged))
    # transformers before 5.23 leaves experts in bfloat16, which holds their values exactly.
    theirs = AutoModelForCausalLM.from_pretrained(mxfp4, dtype=torch.float32).float()
    with torch.inference_mode():
        expected = theirs(torch.tensor([IDS])).logits[0].log_softmax(-1)
    torch.testing.assert_close(found, expected, atol=2e-4, rtol=1e-4)


def test_the_original_layout_has_other_names(
    checkpoints: tuple[Path, Path], tmp_path: Path, run_paged: RunPaged
) -> None:
    mxfp4, original = checkpoints[0], tmp_path / "original"
    shutil.copytree(mxfp4, original)
    change_tensors(original, name_original)
    names = load_file(original / "model.safetensors").keys()
    assert {"block.1.mlp.mlp1_weight.blocks", "block.2.attn.qkv.bias", "norm.scale"} <= names
    found, expected = (load_model(each, device=CPU) for each in (original, mxfp4))
    assert torch.equal(log_probabilities(found, run_paged), log_probabilities(expected, run_paged))


def test_of_both_layouts_that_of_transformers_is_read(
    checkpoints: tuple[Path, Path], tmp_path: Path
) -> None:
    both = tmp_path / "both"
    shutil.copytree(checkpoints[0], both)
    for part in ("original", "metal"):
        (both / part).mkdir()
        (both / part / "model.safetensors").write_bytes(b"not read")
    load_model(both, device=CPU)
    # The original folder alone has a config.json of its own.
    config = {"num_experts": 8, "swiglu_limit": 7.0, "initial_context_length": 4096}
    (both / "original" / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=r"gpt-oss's original layout.*the folder above"):
        load_model(both / "original", device=CPU)


def _experts(model: CausalLM) -> list[Experts]:
    return [each for each in model.modules() if isinstance(each, Experts)]


def test_weights_stay_in_mxfp4_where_kernels_are(
    checkpoints: tuple[Path, Path], run_paged: RunPaged
) -> None:
    def load(folder: Path, native: bool) -> CausalLM:
        return load_model(folder, device=CPU, dtype=torch.bfloat16, native_fp8=native)

    held, plain = load(checkpoints[0], True), load(checkpoints[1], True)
    assert held.num_parameters == plain.num_parameters
    of_experts = sum(e.gate_up_proj.numel() + e.down_proj.numel() for e in _experts(plain))
    saved = 2 * of_experts - (plain.weight_bytes - held.weight_bytes)
    assert of_experts * MXFP4.value_bytes <= saved <= of_experts * MXFP4.value_bytes * 1.06
    for own, other in zip(_experts(held), _experts(plain), strict=True):
        assert own.gate_up_scales is not None and own.computes_in_four_bits
        assert not own.computes_in_fp8
        panels = FourBitPanels(own.gate_up_proj, own.gate_up_scales, MXFP4)
        assert torch.equal(dequantise_reference(panels), other.gate_up_proj)
    found, expected = (log_probabilities(model, run_paged) for model in (held, plain))
    torch.testing.assert_close(found, expected, atol=0.1, rtol=0.02)


@pytest.mark.gpu
def test_an_engine_on_a_gpu_computes_from_mxfp4_with_and_without_graphs(
    checkpoints: tuple[Path, Path],
) -> None:
    gpu, prompts = torch.device("cuda"), [IDS[i : i + 3 + 5 * i] for i in range(5)]
    expected = generate(load_model(checkpoints[1], device=CPU), prompts)
    for graph in (False, True):
        model = load_model(checkpoints[0], device=gpu, dtype=torch.bfloat16)
        assert all(part.computes_in_four_bits for part in _experts(model))
        # The first token follows from the prompt alone, and its probability from bfloat16.
        for found, exact in zip(generate(model, prompts, cuda_graph=graph), expected, strict=True):
            assert found == pytest.approx(exact, abs=0.3)


@pytest.mark.parametrize("native", [False, True])
def test_ranks_have_whole_experts(checkpoints: tuple[Path, Path], native: bool) -> None:
    def load(rank: int, size: int) -> list[Tensor]:
        model = load_model(
            checkpoints[0], device=CPU, dtype=torch.bfloat16, native_fp8=native,
            parallel=TensorParallel(rank, size),
        )  # fmt: skip
        return [value for part in _experts(model) for value in part.parameters()]

    whole, parts = load(0, 1), [load(rank, 2) for rank in range(2)]
    for value, *halves in zip(whole, *parts, strict=True):
        assert torch.equal(torch.cat(halves), value)


def test_excluded_experts_are_in_the_dtype(checkpoints: tuple[Path, Path], tmp_path: Path) -> None:
    mxfp4, twin = checkpoints
    shutil.copytree(mxfp4, tmp_path / "mixed")
    plain = load_file(twin / "model.safetensors")

    def change(tensors: dict[str, Tensor]) -> None:
        for name in [name for name in tensors if ".1.mlp.experts." in name]:
            del tensors[name]
        tensors |= {name: value for name, value in plain.items() if ".1.mlp.experts." in name}

    change_tensors(tmp_path / "mixed", change)
    excluded = [*QUANTIZATION["modules_to_not_convert"], "model.layers.1.mlp.experts"]
    change_config(
        tmp_path / "mixed", quantization_config=QUANTIZATION | {"modules_to_not_convert": excluded}
    )
    model = load_model(tmp_path / "mixed", device=CPU, dtype=torch.bfloat16, native_fp8=True)
    assert [part.computes_in_four_bits for part in _experts(model)] == [True, False, True]


def test_dummy_weights(checkpoints: tuple[Path, Path], run_paged: RunPaged) -> None:
    def load(native: bool) -> CausalLM:
        return load_model(
            checkpoints[0], device=CPU, dtype=torch.bfloat16, load_format="dummy", native_fp8=native
        )

    for held, plain in zip(_experts(load(True)), _experts(load(False)), strict=True):
        assert held.down_scales is not None
        weight = unpack_panels(FourBitPanels(held.down_proj, held.down_scales, MXFP4)).dequantise()
        assert 0.015 < float(weight.std()) < 0.025
        assert torch.equal(weight.bfloat16(), plain.down_proj)
        assert not torch.equal(weight[0], weight[1])
    assert log_probabilities(load(True), run_paged).isfinite().all()


NAME = "model.layers.1.mlp.experts.gate_up_proj"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{NAME}_scales"), rf"missing tensors: {NAME}_scales$"),
        (
            lambda t: t.update({f"{NAME}_scales": t[f"{NAME}_scales"][:, 1:].contiguous()}),
            "has shape",
        ),
        (lambda t: t.update({f"{NAME}_blocks": t[f"{NAME}_blocks"].float()}), "leave that out"),
        (lambda t: t[f"{NAME}_scales"].fill_(255), r"_scales has the scale 2\*\*128, and kernels"),
    ],
)
def test_damaged_checkpoints_are_refused(
    change: Callable[[dict[str, Tensor]], Any], message: str, checkpoints: tuple[Path, Path],
    tmp_path: Path,
) -> None:  # fmt: skip
    shutil.copytree(checkpoints[0], tmp_path / "damaged")
    change_tensors(tmp_path / "damaged", change)
    with pytest.raises(ValueError, match=message):
        load_model(tmp_path / "damaged", device=CPU, dtype=torch.bfloat16, native_fp8=True)


def test_rounding_to_fp8_besides_is_refused(checkpoints: tuple[Path, Path]) -> None:
    with pytest.raises(ValueError, match=r"quantization is fp8.*MXFP4.*leave it out"):
        load_model(checkpoints[0], device=CPU, quantization="fp8")


def test_which_modules_are_excluded() -> None:
    form = weight_format(QUANTIZATION)
    assert isinstance(form, MXFP4Format)
    for name, excluded in (
        ("model.layers.12.self_attn.q_proj", True),
        ("model.layers.0.mlp.router", True),
        ("model.layers.0.mlp.experts", False),
        ("lm_head", True),
        ("model.norm", False),
    ):
        assert form.excludes(name) == excluded


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"modules_to_not_convert": "lm_head"}, "must be a list"),
        ({"modules_to_not_convert": ["a(b)"]}, "must be a list"),
        ({"block_size": 16}, "block_size is not known"),
    ],
)
def test_unknown_settings_are_refused(values: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        weight_format(QUANTIZATION | values)


@pytest.mark.parametrize(
    ("layers", "experts", "gigabytes"), [(24, 32, 10.2), (36, 128, 60.9)], ids=["20b", "120b"]
)
def test_the_published_sizes_in_mxfp4(
    layers: int, experts: int, gigabytes: float, tmp_path: Path
) -> None:
    GptOssConfig(
        num_hidden_layers=layers,
        num_local_experts=experts,
        vocab_size=201_088,
        architectures=["GptOssForCausalLM"],
    ).save_pretrained(tmp_path)
    change_config(tmp_path, quantization_config=QUANTIZATION, dtype="bfloat16")
    config = load_model_config(tmp_path, "dummy")
    form = chosen_form(config, None, Units(True, True))
    meta = torch.device("meta")
    model = model_class(config.architecture, tmp_path)(
        config, device=meta, dtype=config.dtype, form=form
    )
    moved = sum(value.nbytes for part in _experts(model) for value in part.parameters())
    assert moved == pytest.approx(gigabytes * 1e9, rel=0.01)
    others = 1.4 if experts == 32 else 2.1
    assert model.weight_bytes - moved == pytest.approx((others + 2 * 1.16) * 1e9, rel=0.05)
    (first, *_) = (part for part in model.modules() if isinstance(part, SparseMoE))
    assert first.scratch_bytes(256) == 0
    assert first.scratch_bytes(16_385) == experts * 2 * 2880 * 2880 * 2
