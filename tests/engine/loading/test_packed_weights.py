"""Checkpoints in the forms that people publish: as their dequantised twins, or refused by name."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from batchgen.engine.layers.packed_format import FourBitFormat, PackedFormat, packed_format
from batchgen.engine.loading.config_file import load_model_config
from batchgen.engine.loading.loader import load_model
from tests.support.engine.packed_checkpoints import (
    Packed,
    awq,
    fp8,
    gptq,
    gptq_v2,
    int8,
    nvfp4,
    pack_quantized,
    write_packed,
)

TinyModel = Callable[..., Path]
Pack = Callable[[tuple[int, int], int], Packed]
CPU = torch.device("cpu")
IDS = [(37 * i + 5) % 100 for i in range(40)]
GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": True}
AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "version": "gemm",
                       "zero_point": True}  # fmt: skip


def groups(bits: int, kind: str, **more: Any) -> dict[str, Any]:
    weights = {"num_bits": bits, "type": kind, "strategy": "group", "symmetric": True}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": None} | more
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": group},
            "ignore": ["lm_head"], "kv_cache_scheme": None}  # fmt: skip


INT4 = groups(4, "int")
ORDERED = groups(4, "int")
ORDERED["config_groups"]["group_0"]["weights"]["actorder"] = "group"
FLOAT8 = groups(8, "float", input_activations={"num_bits": 8, "type": "float", "dynamic": True})


def blocks(shape: tuple[int, int], seed: int, size: int = 20) -> Packed:
    scales = (-(-shape[0] // size), -(-shape[1] // size))
    return fp8(shape, seed, scales, "weight_scale_inv", size)


def blocks_of_128(shape: tuple[int, int], seed: int) -> Packed:
    tensors, weight = blocks(shape, seed, 128)
    return {"weight": tensors["weight"], "weight_scale": tensors["weight_scale_inv"]}, weight


BLOCKS = groups(8, "float")
BLOCKS["config_groups"]["group_0"]["weights"]["block_structure"] = [128, 128]
FORMS: dict[str, tuple[dict[str, Any], Pack]] = {
    "gptq": (GPTQ, gptq),
    "gptq by activation": (GPTQ | {"desc_act": True}, partial(gptq, ordered=True)),
    "gptq v2": (GPTQ | {"checkpoint_format": "gptq_v2", "desc_act": True}, gptq_v2),
    "awq": (AWQ, awq),
    "int4 in groups": (INT4, pack_quantized),
    "int4 with zero points": (INT4, partial(pack_quantized, zero=True)),
    "int4 by activation": (ORDERED, partial(pack_quantized, ordered=True, zero=True)),
    "int8 packed": (groups(8, "int"), partial(pack_quantized, bits=8, zero=True)),
    "int8": (groups(8, "int"), int8),
    "int8 with zero points": (groups(8, "int"), partial(int8, zero=True)),
    "fp8 by tensor": (FLOAT8, partial(fp8, scales=(1,), name="weight_scale")),
    "fp8 by blocks": ({"quant_method": "fp8", "weight_block_size": [20, 20]}, blocks),
    "fp8 by blocks of 128": (BLOCKS, blocks_of_128),
    "fp8 by output": (
        {"quant_method": "fbgemm_fp8"},
        lambda shape, seed: fp8(shape, seed, (shape[0], 1), "weight_scale"),
    ),
    "fp8 of one number": ({"quant_method": "fp8"}, partial(fp8, scales=(), name="weight_scale")),
    "fp8 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "FP8"},
        partial(fp8, scales=(), name="weight_scale"),
    ),
    "nvfp4": (groups(4, "float"), nvfp4),
    "nvfp4 of modelopt": (
        {"quant_method": "modelopt", "quant_algo": "NVFP4"}, partial(nvfp4, modelopt=True)),
}  # fmt: skip


@pytest.mark.quick(2, thorough=6)
@pytest.mark.parametrize("name", FORMS)
def test_a_packed_checkpoint_is_its_dequantised_twin(
    name: str, tiny_model: TinyModel, tmp_path: Path, run_paged: Callable[..., Tensor]
) -> None:
    quantization, pack = FORMS[name]
    packed, plain = write_packed(tiny_model("qwen3_moe"), tmp_path, quantization, pack)
    ours, twin = load_model(packed, device=CPU), load_model(plain, device=CPU)
    for key, value in twin.state_dict().items():
        torch.testing.assert_close(ours.state_dict()[key], value, rtol=1e-6, atol=0)
    assert torch.allclose(run_paged(ours, IDS, [40]), run_paged(twin, IDS, [40]), rtol=1e-4)
    assert isinstance(load_model_config(packed).form, PackedFormat)


@pytest.mark.gpu
@pytest.mark.parametrize("name", FORMS)
def test_a_gpu_dequantises_as_a_cpu_does(
    name: str, tiny_model: TinyModel, tmp_path: Path, run_paged: Callable[..., Tensor]
) -> None:
    packed, _ = write_packed(tiny_model("qwen3_moe"), tmp_path, *FORMS[name])
    options: dict[str, Any] = {"dtype": torch.float32, "native_fp8": False}
    logits, expected = (
        run_paged(load_model(packed, device=torch.device(kind), **options), IDS, [40]).cpu()
        for kind in ("cuda", "cpu")
    )
    torch.testing.assert_close(logits, expected, rtol=5e-3, atol=5e-3)


@pytest.mark.quick(1)
@pytest.mark.parametrize("kind", ["deepseek_v3", "gpt_oss", "glm4", "mixtral"])
def test_families_load_int4(
    kind: str, tiny_model: TinyModel, tmp_path: Path, run_paged: Callable[..., Tensor]
) -> None:
    """With latents, merged projections, and experts under names of their own; biases of zeros that
    no module has are passed over."""
    packed, plain = write_packed(tiny_model(kind), tmp_path, INT4, partial(pack_quantized, group=4))
    tensors = load_file(packed / "model.safetensors")
    tensors["model.layers.0.mlp.no.bias"] = torch.zeros(4)
    save_file(tensors, packed / "model.safetensors", metadata={"format": "pt"})
    ours, twin = load_model(packed, device=CPU), load_model(plain, device=CPU)
    assert torch.allclose(run_paged(ours, IDS, [40]), run_paged(twin, IDS, [40]), rtol=1e-4)


def test_int4_is_rounded_to_fp8_where_that_is_asked_for(
    tiny_model: TinyModel, tmp_path: Path, run_paged: Callable[..., Tensor]
) -> None:
    packed, plain = write_packed(tiny_model("qwen3"), tmp_path, INT4, pack_quantized)
    ours, twin = (load_model(f, device=CPU, quantization="fp8") for f in (packed, plain))
    assert torch.allclose(run_paged(ours, IDS, [40]), run_paged(twin, IDS, [40]), rtol=1e-4)


def test_the_format_is_named_for_the_user() -> None:
    names = {name: packed_format(quantization) for name, (quantization, _) in FORMS.items()}
    assert names["gptq by activation"] == PackedFormat(
        name="int4 (GPTQ, groups of 32 ordered by activation)", zeros_are_less=True, ordered=True
    )
    assert names["fp8 by tensor"] == PackedFormat(
        name="float8 (compressed-tensors)", activations="float8"
    )
    awq = "int4 (AWQ, groups of 32)"
    assert names["awq"] == PackedFormat(name=awq, kept=FourBitFormat(name=awq, group=32))


AT = "model.layers.0.self_attn.q_proj."


@pytest.mark.quick(4)
@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("gptq", {"qzeros": None}, "q_proj.qweight: its qzeros is missing"),
        ("gptq", {"scales": None}, "its scales is missing"),
        ("gptq", {"g_idx": torch.full((64,), 7, dtype=torch.int32)}, "g_idx must name one of 2"),
        ("gptq", {"g_idx": torch.zeros(3, dtype=torch.int32)}, "g_idx must name one of 2 groups"),
        ("gptq", {"qzeros": torch.zeros(2, 8)}, "words must be int32, and are float32"),
        ("awq", {"scales": torch.ones(3, 64)}, "64 inputs do not fall into 3 groups"),
        ("int4 in groups", {"weight_shape": torch.tensor([64, 640])}, "do not hold a weight of"),
        ("int4 in groups", {"weight_scale": torch.ones(64, 7)}, "7 scales are not for 64 values"),
        ("int4 in groups", {"weight_scale": None}, "its weight_scale is missing"),
        ("int8", {"weight_scale": torch.ones(3, 1)}, "3 scales are not for 64 values"),
        ("fp8 by tensor", {"weight_scale": None}, "its weight_scale_inv is missing"),
        ("nvfp4", {"weight_scale": torch.ones(64, 3)}, "is not for"),
        ("nvfp4", {"weight_scale": torch.ones(64, 4)}, "of float32 is not for"),
        ("nvfp4", {"weight_global_scale": None}, "its weight_global_scale is missing"),
        ("nvfp4", {"weight_global_scale": torch.zeros(1)}, "must be one number over 0"),
        ("nvfp4", {"weight_global_scale": torch.ones(2)}, "must be one number over 0"),
        ("nvfp4 of modelopt", {"weight_scale_2": None}, "its weight_global_scale is missing"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    form: str, change: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    packed, _ = write_packed(tiny_model("qwen3"), tmp_path, *FORMS[form])
    tensors = load_file(packed / "model.safetensors")
    tensors |= {AT + name: value for name, value in change.items()}
    kept = {name: value for name, value in tensors.items() if value is not None}
    save_file(kept, packed / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message) as error:
        load_model(packed, device=CPU)
    assert str(packed) in str(error.value)


@pytest.mark.quick(3)
@pytest.mark.parametrize(
    ("quantization", "message"),
    [
        (GPTQ | {"bits": 8}, "bits is 8, and it must be 4"),
        (GPTQ | {"bits": 3}, "bits is 3"),
        (GPTQ | {"group_size": 0}, "group_size is 0, and it must be -1 or"),
        (GPTQ | {"dynamic": {"+:.*down.*": {"bits": 8}}}, "dynamic is"),
        (GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format is 'marlin'"),
        (AWQ | {"version": "gemv"}, "version is 'gemv', and it must be 'gemm'"),
        (INT4 | {"sparsity_config": {"format": "sparse-24-bitmask"}}, "sparsity_config is"),
        (INT4 | {"transform_config": {"config_groups": {"R1": {}}}}, "transform_config is"),
        (INT4 | {"kv_cache_scheme": {"num_bits": 3, "type": "int"}}, "kv_cache_scheme is"),
        (INT4 | {"config_groups": {}}, "config_groups is {}"),
        (groups(2, "int"), "weights is 'int of 2 bits'"),
        ({"quant_method": "modelopt", "quant_algo": "W4A8"}, "quant_algo is 'W4A8'"),
        ({"quant_method": "fp8", "weight_block_size": [0, 16]}, "weight_block_size is"),
        ({"quant_method": "bitsandbytes"}, "quant_method is 'bitsandbytes'"),
        ({"quant_method": "hqq"}, "quant_method is 'hqq', and it must be awq, compressed"),
    ],
)
def test_what_is_not_supported_is_refused_by_name(
    quantization: dict[str, Any], message: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    config = json.loads((tiny_model("qwen3") / "config.json").read_text())
    config["quantization_config"] = quantization
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(ValueError, match=message):
        load_model_config(tmp_path)


def test_forms_may_differ_between_modules(
    tiny_model: TinyModel, tmp_path: Path, run_paged: Callable[..., Tensor]
) -> None:
    """int4, int8 and FP8 in one model, and modules that `ignore` names by a pattern; scales of the
    cache are passed over."""
    folder, target = tiny_model("qwen3"), tmp_path / "mixed"
    forms = {"int4": INT4, "int8": groups(8, "int"), "fp8": FLOAT8}
    parts = [q["config_groups"]["group_0"] for q in forms.values()]
    mixed = INT4 | {
        "config_groups": {f"group_{place}": part for place, part in enumerate(parts)},
        "ignore": ["lm_head", "re:.*o_proj"],
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "dynamic": False},
    }
    packs: dict[str, Pack] = {
        "int4": pack_quantized, "int8": int8, "fp8": partial(fp8, scales=(1,), name="weight_scale"),
    }  # fmt: skip
    made = {
        name: [load_file(f / "model.safetensors") for f in write_packed(
            folder, tmp_path / name, mixed, pack)]
        for name, pack in packs.items()
    }  # fmt: skip
    chosen = {"q_proj": "int8", "down_proj": "fp8"}
    packed, plain = (made["int4"][place].copy() for place in (0, 1))
    for place, into in ((0, packed), (1, plain)):
        for name in [name for name in into if any(f".{part}." in name for part in chosen)]:
            del into[name]
        for part, form in chosen.items():
            own = made[form][place].items()
            into.update({name: tensor for name, tensor in own if f".{part}." in name})
    for name in [name for name in packed if ".o_proj." in name]:
        del packed[name]
    packed |= {name: tensor for name, tensor in plain.items() if ".o_proj." in name}
    packed |= {f"model.layers.{i}.self_attn.{kind}_scale": torch.ones(1)
               for i in range(3) for kind in ("k", "v")}  # fmt: skip
    shutil.copytree(tmp_path / "int4" / "packed", target)
    save_file(packed, target / "model.safetensors", metadata={"format": "pt"})
    twin = tmp_path / "int4" / "plain"
    save_file(plain, twin / "model.safetensors", metadata={"format": "pt"})
    for native in (True, False):
        ours = load_model(target, device=CPU, native_fp8=native)
        expected = run_paged(load_model(twin, device=CPU), IDS, [40])
        assert torch.allclose(run_paged(ours, IDS, [40]), expected, rtol=1e-4)
    read = load_model_config(target).form
    assert isinstance(read, PackedFormat) and read.kept is None
    assert read.name == "int4 and int8 and float8 (compressed-tensors)"
    assert (read.activations, read.kv_cache) == ("float8", "FP8")


@pytest.mark.parametrize("form", ["gptq", "int4 in groups"])
def test_groups_out_of_order_must_be_declared(
    form: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    ordered: Pack = partial(gptq if form == "gptq" else pack_quantized, ordered=True)
    folder, _ = write_packed(tiny_model("qwen3"), tmp_path, FORMS[form][0], ordered)
    with pytest.raises(ValueError, match=r"g_idx is out of order, and quantization_config does"):
        load_model(folder, device=CPU)
