"""Weights in FP8 that are divided between ranks: each has its part of the values and scales."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from batchgen.engine.layers.feed_forward.mlp import GatedMLP
from batchgen.engine.layers.feed_forward.moe import SparseMoE
from batchgen.engine.loading.loader import load_model
from batchgen.engine.models.causal_lm import CausalLM
from batchgen.engine.models.moe_model import ROUTED_EXPERTS
from batchgen.engine.parallel.tensor_parallel import ALONE, TensorParallel
from batchgen.kernels.fp8.fp8_weight import FP8, FP8Weight
from tests.engine.parallel.test_divided_engines import compare, rows
from tests.support.engine.fp8_checkpoints import write_fp8
from tests.support.engine.ranked_engines import Case

TinyModel = Callable[..., Path]
CPU = torch.device("cpu")
WIDE: dict[str, Any] = {"hidden_size": 256, "head_dim": 64, "intermediate_size": 512}
"""Two ranks get multiples of 128 columns, and of rows, which share scales."""
NARROW = WIDE | {"num_attention_heads": 8, "head_dim": 32, "hidden_size": 144}
"""Key heads of 32 rows: scales are of rows. The last block of the hidden size has 16 columns."""
MOE = WIDE | {"moe_intermediate_size": 128}


def load(folder: Path, parallel: TensorParallel = ALONE, **options: Any) -> CausalLM:
    return load_model(folder, device=CPU, native_fp8=True, parallel=parallel, **options)


def dequantised(model: CausalLM) -> dict[str, Tensor]:
    """The parameters of a model, those in FP8 with their scales applied."""
    found: dict[str, Tensor] = dict(model.named_parameters())
    for name in [name for name, p in found.items() if p.dtype == FP8]:
        scales = name.removesuffix("proj") + "scales" if "experts" in name else ""
        at = scales or name.removesuffix("weight") + "scales"
        found[name] = FP8Weight(found[name], found.pop(at)).dequantise()
    return found


@pytest.mark.quick(1, thorough=6)
@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("qwen3", WIDE),
        ("qwen3", NARROW),
        ("qwen3_moe", MOE),
        ("qwen3_moe", MOE | {"split_experts": False}),
        ("glm4_moe", MOE | {"n_shared_experts": 2}),
        ("minimax_m2", WIDE | {"intermediate_size": 32}),
    ],
)
@pytest.mark.parametrize("source", ["checkpoint", "rounded", "dummy"])
def test_the_ranks_hold_every_value_once(
    kind: str, sizes: dict[str, Any], source: str, tiny_model: TinyModel, tmp_path: Path
) -> None:
    """The sums of squares of the ranks' values, with their scales, are those of the whole."""
    folder = tiny_model(kind, **sizes)
    options: dict[str, Any] = {}
    if source == "checkpoint":
        folder, _ = write_fp8(folder, tmp_path)
    elif source == "rounded":
        options["quantization"] = "fp8"
    else:
        options |= {"quantization": "fp8", "load_format": "dummy"}
    whole = dequantised(load(folder, **options))
    ranks = [dequantised(load(folder, TensorParallel(rank, 2), **options)) for rank in range(2)]
    divided = 0
    for name, values in whole.items():
        own = [rank[name] for rank in ranks]
        squares = [float(part.double().square().sum()) for part in own]
        is_divided = own[0].numel() < values.numel()
        expected = float(values.double().square().sum())
        assert sum(squares[: 1 + is_divided]) == pytest.approx(expected, rel=1e-6), name
        divided += is_divided
    assert divided >= 10


def test_a_row_parallel_weight_has_the_columns_of_its_rank(
    tiny_model: TinyModel, tmp_path: Path
) -> None:
    folder, _ = write_fp8(tiny_model("qwen3", **NARROW), tmp_path)
    name = "model.layers.1.mlp.down_proj.weight"
    whole = dequantised(load(folder))[name]
    parts = [dequantised(load(folder, TensorParallel(rank, 2)))[name] for rank in range(2)]
    assert whole.shape == (144, 512)
    assert torch.equal(torch.cat(parts, 1), whole)


@pytest.mark.parametrize("quantization", [None, "fp8"])
def test_widths_that_blocks_do_not_divide(
    tiny_model: TinyModel, tmp_path: Path, quantization: Any
) -> None:
    """They are refused by name where products are in FP8, and dequantised elsewhere."""
    folder = tiny_model("qwen3", **WIDE | {"intermediate_size": 384})
    if quantization is None:
        folder, _ = write_fp8(folder, tmp_path)
    with pytest.raises(ValueError, match=r"192 of the 384 columns of model.layers.0.mlp.down_proj"):
        load(folder, TensorParallel(0, 2), quantization=quantization)
    load_model(folder, device=CPU, parallel=TensorParallel(0, 2), quantization=quantization)


def test_parts_in_fp8_add_up(tiny_model: TinyModel) -> None:
    """Ranks round the same activations in the same groups, so their parts make the whole sum."""
    folder = tiny_model("glm4_moe", **MOE | {"n_shared_experts": 2})
    options: dict[str, Any] = {"quantization": "fp8"}
    models = [load(folder, **options)]
    models += [load(folder, TensorParallel(rank, 2), **options) for rank in range(2)]
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((7, 256), generator=generator)
    ids = torch.stack([torch.randperm(8, generator=generator)[:3] for _ in range(7)]).int()
    weights = torch.rand((7, 3), generator=generator)
    for part in ("dense", "shared", "experts"):
        found = []
        for model in models:
            mlp = model.layers[0 if part == "dense" else 1].mlp
            with torch.inference_mode():
                if isinstance(mlp, GatedMLP):
                    found.append(mlp.compute(x))
                    continue
                assert isinstance(mlp, SparseMoE) and mlp.shared_expert is not None
                assert mlp.experts.computes_in_fp8
                shared = part == "shared"
                found.append(
                    mlp.shared_expert.compute(x) if shared else mlp.experts(x, ids, weights)
                )
        whole, one, two = found
        assert one.abs().max() > 0 and two.abs().max() > 0
        torch.testing.assert_close(one + two, whole, rtol=0, atol=1e-5 * float(whole.abs().max()))


@pytest.mark.thorough
def test_two_ranks_say_what_one_says(tiny_model: TinyModel, tmp_path: Path) -> None:
    """In FP8 a difference in a sum's last bits can round an activation to another value, so the
    model that computes so is shallow."""
    cases = []
    for kind, sizes in (("qwen3", NARROW), ("glm4_moe", MOE), ("minimax_m2", WIDE)):
        columns = () if kind == "qwen3" else (ROUTED_EXPERTS,)
        (tmp_path / kind).mkdir()
        folder, _ = write_fp8(tiny_model(kind, **sizes), tmp_path / kind)
        cases.append(Case(folder, rows(5), columns=columns))
    shallow = tiny_model("qwen3", **NARROW | {"num_hidden_layers": 1})
    cases.append(Case(shallow, rows(5, tokens=2), native_fp8=True, tolerance=0.05))
    compare(cases, 2)
