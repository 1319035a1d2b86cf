"""Checkpoints whose weights stay in int4, against their dequantised twins in the same dtype."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.layers.linear import Linear
from batchgen.engine.layers.mxfp4_format import Units
from batchgen.engine.layers.packed_format import PackedFormat
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import chosen_form, load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.kernels.four_bit.layouts import dequantise_reference
from batchgen.kernels.four_bit.panels import FourBitPanels
from tests.support.engine.packed_checkpoints import (
    Packed,
    awq,
    gptq,
    nvfp4,
    pack_quantized,
    write_packed,
)

TinyModel = Callable[..., Path]
RunPaged = Callable[..., Tensor]
CPU = torch.device("cpu")
IDS = [(37 * i + 5) % 100 for i in range(40)]
WIDE: dict[str, Any] = {"hidden_size": 128, "head_dim": 32, "intermediate_size": 256}
LAYERS = 3  # of tiny models
MOE = WIDE | {"moe_intermediate_size": 64}
INT4: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "group_size": 32},
        }
    },
}  # fmt: skip
CHANNEL = json.loads(json.dumps(INT4).replace('"group_size": 32', '"group_size": null'))
NVFP4: dict[str, Any] = json.loads(
    json.dumps(INT4).replace('"int", "group_size": 32', '"float", "group_size": 16')
)
MODELOPT: dict[str, Any] = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32}


def by_row(shape: tuple[int, int], seed: int) -> Packed:
    return pack_quantized(shape, seed, group=shape[1], zero=True)


FORMS: dict[str, tuple[dict[str, Any], Callable[[tuple[int, int], int], Packed]]] = {
    "gptq": (GPTQ, gptq),
    "awq": (AWQ, awq),
    "symmetric": (INT4, pack_quantized),
    "zero points": (INT4, partial(pack_quantized, zero=True)),
    "a scale for each output": (CHANNEL, by_row),
    "nvfp4": (NVFP4, nvfp4),
    "nvfp4 of modelopt": (MODELOPT, partial(nvfp4, modelopt=True)),
}


def load(
    folder: Path, native: bool = True, dtype: torch.dtype = torch.bfloat16, **options: Any
) -> CausalLM:
    return load_model(folder, device=CPU, native_fp8=native, dtype=dtype, **options)


def panels(model: CausalLM) -> dict[str, FourBitPanels]:
    """The weights in int4 of a model's linear layers and experts, by name."""
    found = {}
    for name, part in model.named_modules():
        if isinstance(part, Linear) and (own := part.in_four_bits) is not None:
            found[name] = own
        if isinstance(part, Experts) and (both := part.in_four_bits) is not None:
            for kind, each in zip(("gate_up_proj", "down_proj"), both, strict=True):
                found[f"{name}.{kind}"] = each
    return found


def values(model: CausalLM) -> dict[str, Tensor]:
    """Every weight, in int4 as it is computed with."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name, own in panels(model).items():
        is_linear = f"{name}.weight" in found
        scales = f"{name}.scales" if is_linear else f"{name.removesuffix('proj')}scales"
        del found[scales]
        plain = dequantise_reference(own)
        found[f"{name}.weight" if is_linear else name] = plain[0] if is_linear else plain
    return found


@pytest.mark.quick(1)
@pytest.mark.parametrize("form", FORMS)
def test_a_model_in_int4_equals_its_dequantised_twin(
    form: str, tiny_model: TinyModel, tmp_path: Path, run_paged: RunPaged
) -> None:
    folder, plain = write_packed(tiny_model("qwen3_moe", **MOE), tmp_path, *FORMS[form])
    # Kernels multiply by scales in the dtype of the activations.
    dtype = torch.float16 if form in ("gptq", "awq") else torch.bfloat16
    options: dict[str, Any] = {"dtype": dtype}
    ours, twin = load(folder, **options), load(plain, **options)
    assert len(panels(ours)) == 4 * LAYERS
    assert ours.weight_bytes < 0.6 * twin.weight_bytes
    assert ours.num_parameters == twin.num_parameters
    expected = dict(twin.named_parameters())
    for name, value in values(ours).items():
        assert torch.equal(value, expected[name]), name
    # The products on a CPU are the same, with weights of the same values.
    found, logits = (run_paged(model, IDS, [40]) for model in (ours, twin))
    assert torch.allclose(found, logits, rtol=0.02, atol=0.02)


@pytest.mark.quick(1)
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", WIDE), ("qwen3_moe", MOE)])
def test_the_ranks_hold_every_value_once(
    kind: str, sizes: dict[str, Any], tiny_model: TinyModel, tmp_path: Path
) -> None:
    """Groups of 128 that end at 64 on the first rank have their scale on both."""
    group = partial(pack_quantized, group=128 if kind == "qwen3" else 32, zero=True)
    quantization = json.loads(json.dumps(INT4).replace("32", "128" if kind == "qwen3" else "32"))
    sizes = sizes | {"intermediate_size": 384 if kind == "qwen3" else 256}
    folder, _ = write_packed(tiny_model(kind, **sizes), tmp_path, quantization, group)
    whole = values(load(folder))
    models = [load(folder, parallel=TensorParallel(rank, 2)) for rank in range(2)]
    assert all(len(panels(model)) == len(panels(load(folder))) for model in models)
    ranks = [values(model) for model in models]
    for name, value in whole.items():
        own = [rank[name] for rank in ranks]
        if own[0].numel() == value.numel():
            assert torch.equal(own[0], value)
            continue
        squares = sum(float(part.double().square().sum()) for part in own)
        assert squares == pytest.approx(float(value.double().square().sum()), rel=1e-9), name
    down = "model.layers.1.mlp.down_proj.weight"
    if kind == "qwen3":
        assert torch.equal(torch.cat([rank[down] for rank in ranks], 1), whole[down])
        assert panels(models[0])["model.layers.1.mlp.down_proj"].layout.group == 64


@pytest.mark.thorough
def test_what_kernels_cannot_keep_is_dequantised(
    tiny_model: TinyModel, tmp_path: Path, run_paged: RunPaged
) -> None:
    """A width of 96, a part of a merged layer that is not quantised, and float32."""
    folder, plain = write_packed(
        tiny_model("qwen3", **WIDE | {"intermediate_size": 96}), tmp_path, INT4, pack_quantized
    )
    tensors, twin = (load_file(f / "model.safetensors") for f in (folder, plain))
    name = "model.layers.0.self_attn.k_proj.weight"
    kept = {key: value for key, value in tensors.items() if not key.startswith(name)}
    save_file(kept | {name: twin[name]}, folder / "model.safetensors", {"format": "pt"})
    ours = load(folder)
    assert len(panels(ours)) == 3 * LAYERS - 1
    left_out = ("layers.0.mixer.qkv_proj", "down_proj")
    assert not any(name.endswith(left_out) for name in panels(ours))
    for key, value in values(ours).items():
        assert torch.equal(value, dict(load(plain).named_parameters())[key]), key
    assert not panels(load(folder, dtype=torch.float32))
    assert not panels(load(folder, native=False))


@pytest.mark.thorough
def test_experts_in_one_tensor(tiny_model: TinyModel, tmp_path: Path) -> None:
    """`experts.gate_up_proj` [E, 2·I, H/8] and `experts.down_proj`, with scales of three axes."""
    folder, plain = write_packed(tiny_model("qwen3_moe", **MOE), tmp_path, INT4, pack_quantized)
    tensors = load_file(folder / "model.safetensors")
    for layer in range(LAYERS):
        at = f"model.layers.{layer}.mlp.experts"
        for part in ("weight_packed", "weight_scale", "weight_shape"):
            kinds = ("gate", "up", "down")
            each = [
                {kind: tensors.pop(f"{at}.{i}.{kind}_proj.{part}") for kind in kinds}
                for i in range(8)
            ]
            if part == "weight_shape":
                tensors[f"{at}.gate_up_proj.{part}"] = torch.tensor([8, 128, 128])
                tensors[f"{at}.down_proj.{part}"] = torch.tensor([8, 128, 64])
                continue
            wide = [torch.cat((own["gate"], own["up"])) for own in each]
            tensors[f"{at}.gate_up_proj.{part}"] = torch.stack(wide)
            tensors[f"{at}.down_proj.{part}"] = torch.stack([own["down"] for own in each])
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    expected = dict(load(plain).named_parameters())
    for native in (True, False):
        ours = load(folder, native=native)
        assert len(panels(ours)) == (4 * LAYERS if native else 0)
        for key, value in values(ours).items():
            assert torch.equal(value, expected[key]), key
    assert len(panels(load(folder, parallel=TensorParallel(1, 2)))) == 4 * LAYERS


def test_dummy_weights_are_in_int4(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder, _ = write_packed(tiny_model("qwen3", **WIDE), tmp_path, INT4, pack_quantized)
    model = load(folder, load_format="dummy")
    assert len(panels(model)) == 4 * LAYERS
    for name, own in panels(model).items():
        assert 0.01 < float(dequantise_reference(own).std()) < 0.03, name
    parts = [load(folder, load_format="dummy", parallel=TensorParallel(rank, 2)) for rank in (0, 1)]
    down = "model.layers.0.mlp.down_proj.weight"
    both = torch.cat([values(part)[down] for part in parts], 1)
    assert torch.equal(both, values(model)[down])


@pytest.mark.quick(2)
@pytest.mark.parametrize(
    ("group", "change", "message"),
    [
        (64, {}, "has groups of 32 values, and quantization_config says another size"),
        (
            32,
            {
                "weight_packed": torch.zeros(128, 4, dtype=torch.int32),
                "weight_shape": torch.tensor([128, 32]),
                "weight_scale": torch.ones(128, 1),
            },
            r"has shape \[128, 32\], the configuration says \[128, 128\]",
        ),
        (32, {"weight_scale": torch.full((128, 4), torch.inf)}, "not finite in bfloat16"),
        (32, {"weight_scale": torch.ones(64, 4)}, r"points \[64, 4\] are not for 128 values"),
        (32, {"weight_scale": torch.ones(128, 0)}, r"scales have the shape \[128, 0\]"),
        (32, {"weight_g_idx": torch.arange(127, -1, -1) // 32}, "weight_g_idx is out of order"),
    ],
)
def test_a_weight_that_does_not_fit_is_named(
    group: int, change: dict[str, Tensor], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    quantization = json.loads(json.dumps(INT4).replace("32", f"{group}"))
    folder, _ = write_packed(tiny_model("qwen3", **WIDE), tmp_path, quantization, pack_quantized)
    tensors = load_file(folder / "model.safetensors")
    tensors |= {f"model.layers.1.self_attn.o_proj.{name}": value for name, value in change.items()}
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        load(folder)
    assert not change or "o_proj" in str(error.value)
    assert str(folder) in str(error.value)


@pytest.mark.thorough
def test_names_of_modules_come_from_the_files(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder, _ = write_packed(tiny_model("mixtral", **WIDE), tmp_path, INT4, pack_quantized)
    form, dummy = load_model_config(folder).form, load_model_config(folder, "dummy").form
    assert isinstance(form, PackedFormat) and form.kept is not None and form.kept.modules
    assert "model.layers.0.self_attn.q_proj" in form.kept.modules
    assert isinstance(dummy, PackedFormat) and dummy.kept is not None
    assert dummy.kept.modules is None
    assert len(panels(load(folder, parallel=ALONE))) == 4 * LAYERS


def test_nvfp4_is_dequantised_for_float16(tiny_model: TinyModel, tmp_path: Path) -> None:
    folder, _ = write_packed(tiny_model("qwen3", **WIDE), tmp_path, *FORMS["nvfp4"])
    config = load_model_config(folder)
    assert chosen_form(config, None, Units(True, True, torch.bfloat16)) is not None
    assert chosen_form(config, None, Units(True, True, torch.float16)) is None
    assert not panels(load(folder, dtype=torch.float16))


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", WIDE), ("qwen3_moe", MOE)])
def test_a_gpu_computes_with_the_values_of_the_twin(
    kind: str, sizes: dict[str, Any], tiny_model: TinyModel, tmp_path: Path, run_paged: RunPaged
) -> None:
    """Loaded as a job does, in both dtypes; logits differ by roundings of sums."""
    folder, plain = write_packed(tiny_model(kind, **sizes), tmp_path, INT4, pack_quantized)
    for dtype in (torch.bfloat16, torch.float16):
        ours, twin = (
            load_model(path, device=torch.device("cuda"), dtype=dtype) for path in (folder, plain)
        )
        assert len(panels(ours)) == 4 * LAYERS
        if dtype == torch.bfloat16:
            expected = dict(twin.named_parameters())
            for name, value in values(ours).items():
                if value.ndim == 2:  # experts of the twin are in other panels
                    assert torch.equal(value, expected[name]), name
        for chunks in ([40], [1] * 40):
            found, logits = (run_paged(model, IDS, chunks).float() for model in (ours, twin))
            assert (found - logits).norm() < 0.02 * logits.norm()


@pytest.mark.gpu
@pytest.mark.parametrize(("kind", "sizes"), [("qwen3", WIDE), ("qwen3_moe", MOE)])
@pytest.mark.parametrize("form", ["nvfp4", "nvfp4 of modelopt"])
def test_a_gpu_computes_nvfp4_from_4_bits(
    form: str, kind: str, sizes: dict[str, Any], tiny_model: TinyModel, tmp_path: Path,
    run_paged: RunPaged,
) -> None:  # fmt: skip
    """The twin has weights that are rounded to bfloat16, which products from 4 bits do not."""
    folder, plain = write_packed(tiny_model(kind, **sizes), tmp_path, *FORMS[form])
    ours, twin = (
        load_model(path, device=torch.device("cuda"), dtype=torch.bfloat16)
        for path in (folder, plain)
    )
    assert len(panels(ours)) == 4 * LAYERS
    for chunks in ([40], [1] * 40):
        found, logits = (run_paged(model, IDS, chunks).float() for model in (ours, twin))
        assert (found - logits).norm() < 0.03 * logits.norm()
