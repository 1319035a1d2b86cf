"""Experts that are kept in panels, as on a GPU, against the same ones in rows."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from batchgen.engine.layers.feed_forward import experts as expert_layers
from batchgen.engine.layers.feed_forward.experts import Experts
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.parallel.tensor_parallel import TensorParallel
from batchgen.kernels.fp8.fp8_experts import FP8Experts
from batchgen.kernels.fp8.fp8_weight import FP8Weight
from batchgen.kernels.moe.experts import PlainExperts
from batchgen.kernels.moe.experts_triton import grouped_parts_triton
from batchgen.kernels.moe.tiled_layout import keeps_panels, rows_of_panels
from tests.support.engine.qwen_mtp import TheirHead

TinyModel = Callable[..., Path]
Load = Callable[..., CausalLM]
CPU, GPU = torch.device("cpu"), torch.device("cuda")
SIZES = {"moe_intermediate_size": 128}
"""Those of a tiny model whose experts fit panels."""
FUSED = [("qwen3_moe", False), ("gpt_oss", False)]
"""Models whose experts stand in one tensor, and in gpt-oss's in another order."""
EXPERTS = "model.layers.1.mlp.experts"


@pytest.fixture
def load_panels(monkeypatch: pytest.MonkeyPatch) -> Load:
    """`load_rows` with experts in the layout of a GPU."""

    def load(folder: Path, **options: Any) -> CausalLM:
        with monkeypatch.context() as patch:
            patch.setattr(expert_layers, "keeps_panels", lambda _, *of: keeps_panels(GPU, *of))
            return load_rows(folder, **options)

    return load


def load_rows(folder: Path, **options: Any) -> CausalLM:
    return load_model(folder, device=CPU, dtype=torch.bfloat16, **options)


def expect_panels(count: int, ours: nn.Module, in_rows: nn.Module) -> None:
    """All parameters are the same, and so many of ours are panels."""
    for name, parameter in ours.named_parameters():
        expected, values = in_rows.get_parameter(name).float(), parameter.float().cpu()
        if parameter.ndim == 4:
            assert parameter.is_contiguous()
            values, count = rows_of_panels(values).flatten(2), count - 1
        assert values.shape == expected.shape and torch.equal(values, expected), name
    assert count == 0


@pytest.mark.quick(2)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("kind", "split"), [("qwen3_moe", True), *FUSED])
def test_panels_are_filled_from_checkpoints_with_rows(
    kind: str, split: bool, load_format: str, tiny_model: TinyModel, load_panels: Load
) -> None:
    folder = tiny_model(kind, split_experts=split, **SIZES)
    options = {"load_format": load_format}
    expect_panels(6, load_panels(folder, **options), load_rows(folder, **options))


@pytest.mark.quick(2)
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
@pytest.mark.parametrize(("kind", "split"), [("qwen2_moe", True), *FUSED])
def test_ranks_have_panels_of_their_own_experts(
    kind: str, split: bool, load_format: str, tiny_model: TinyModel, load_panels: Load
) -> None:
    folder = tiny_model(kind, split_experts=split, **SIZES)
    for rank in range(2):
        options = {"parallel": TensorParallel(rank, 2), "load_format": load_format}
        expect_panels(6, load_panels(folder, **options), load_rows(folder, **options))


def test_experts_of_a_head_are_in_panels(tmp_path: Path, load_panels: Load) -> None:
    folder = TheirHead("deepseek_v3", **SIZES).save(tmp_path, split_experts=True)
    ours, in_rows = (load(folder, heads=("mtp",)).heads["mtp"] for load in (load_panels, load_rows))
    expect_panels(2, ours, in_rows)


@pytest.mark.thorough
@pytest.mark.parametrize("load_format", ["auto", "dummy"])
def test_rounding_to_fp8_while_loading(
    load_format: str, tiny_model: TinyModel, load_panels: Load
) -> None:
    """Panels of FP8 are twice as wide as those of the rounded weights without units for it."""
    for hidden, inner, native, count in (
        (64, 128, False, 6),
        (64, 128, True, 3),
        (128, 128, True, 6),
        (128, 192, True, 3),  # with a scale for each row of gate and up
    ):
        folder = tiny_model("qwen3_moe", hidden_size=hidden, moe_intermediate_size=inner)
        options = {"load_format": load_format, "quantization": "fp8", "native_fp8": native}
        expect_panels(count, load_panels(folder, **options), load_rows(folder, **options))


@pytest.mark.parametrize(
    ("split", "which", "shape"),
    [(True, "3.down_proj.weight", (128, 64)), (False, "down_proj", (-1, 32, 256))],
)
def test_a_tensor_of_another_shape_is_refused(
    split: bool,
    which: str,
    shape: tuple[int, ...],
    tiny_model: TinyModel,
    tmp_path: Path,
    load_panels: Load,
) -> None:
    """Even of as many values, and the message has the shapes of checkpoints."""
    source = tiny_model("qwen3_moe", split_experts=split, **SIZES)
    folder = shutil.copytree(source, tmp_path / "model")
    tensors = load_file(folder / "model.safetensors")
    tensors[f"{EXPERTS}.{which}"] = tensors[f"{EXPERTS}.{which}"].reshape(shape).clone()
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(
        ValueError, match=rf"{shape[-2]}, {shape[-1]}\], the configuration says \[.*64, 128\]"
    ):
        load_panels(folder)


def test_sizes_that_do_not_fit_stay_in_rows(tiny_model: TinyModel, load_panels: Load) -> None:
    folder = tiny_model("qwen3_moe")
    assert json.loads((folder / "config.json").read_text())["moe_intermediate_size"] % 64
    expect_panels(0, load_panels(folder), load_rows(folder))


@pytest.mark.gpu
@pytest.mark.parametrize("split", [True, False])
def test_a_gpu_keeps_panels(split: bool, tiny_model: TinyModel) -> None:
    folder = tiny_model("qwen3_moe", split_experts=split, **SIZES)
    expect_panels(6, load_model(folder, device=GPU, dtype=torch.bfloat16), load_rows(folder))


def first_experts(model: CausalLM) -> Experts:
    return next(module for module in model.modules() if isinstance(module, Experts))


def tokens_and_choices(tokens: int) -> tuple[Tensor, Tensor, Tensor]:
    """Random tokens [T, 128], and two of 8 experts for each with their weights."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((tokens, 128), generator=generator).bfloat16()
    ids = torch.rand((tokens, 8), generator=generator).topk(2).indices.int()
    return x, ids, torch.rand((tokens, 2), generator=generator)


@pytest.mark.thorough
@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_the_kernels_read_them(
    quantization: str | None, tiny_model: TinyModel, load_panels: Load
) -> None:
    folder = tiny_model("qwen3_moe", hidden_size=128, **SIZES)
    options = {"quantization": quantization, "native_fp8": True}
    x, ids, weights = tokens_and_choices(9)
    found: list[Tensor] = []
    for load in (load_panels, load_rows):
        experts = first_experts(load(folder, **options))
        gate_up, down = experts.gate_up_proj, experts.down_proj
        with torch.inference_mode():
            if experts.gate_up_scales is None or experts.down_scales is None:
                assert quantization is None
                own = PlainExperts(gate_up, down)
                found.append(grouped_parts_triton(x, own, ids, weights))
            else:
                wide = FP8Weight(gate_up, experts.gate_up_scales)
                narrow = FP8Weight(down, experts.down_scales)
                found.append(grouped_parts_triton(x, FP8Experts(wide, narrow), ids, weights))
    torch.testing.assert_close(*found, rtol=0.02, atol=0.01)


@pytest.mark.gpu
@pytest.mark.parametrize("quantization", [None, "fp8"])
@pytest.mark.parametrize("tokens", [1, 30, 400])
def test_a_gpu_computes_what_a_cpu_does(
    quantization: str | None, tokens: int, tiny_model: TinyModel
) -> None:
    """In panels what that does in rows."""
    folder = tiny_model("qwen3_moe", hidden_size=128, **SIZES)
    options: dict[str, Any] = {"quantization": quantization, "native_fp8": True}
    inputs, results = tokens_and_choices(tokens), list[Tensor]()
    for device in (CPU, GPU):
        experts = first_experts(load_model(folder, device=device, dtype=torch.bfloat16, **options))
        assert experts.gate_up_proj.ndim == experts.down_proj.ndim == (3 if device == CPU else 4)
        with torch.inference_mode():
            results.append(experts(*(part.to(device) for part in inputs)).float().cpu())
    expected, found = results
    assert float((found - expected).norm() / expected.norm()) < 2**-5
